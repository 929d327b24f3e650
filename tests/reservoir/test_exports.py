"""The public names of the package, and what its import loads."""

from __future__ import annotations

import subprocess
import sys

import psycopg
import pytest

import moored.reservoir
from moored.kernel import MooredError
from moored.reservoir import asyncpg, aws, prometheus, psycopg_pool


def test_the_public_names() -> None:
    assert moored.reservoir.__all__ == [
        *("AsyncConnectionPool", "AsyncNullConnectionPool", "ConnectionPool", "NullConnectionPool"),
        *("Reservoir", "ReservoirConfig", "BUCKETS", "Statistics", "retry_transaction"),
        *("CachedTokens", "Token", "TokenProvider"),
        *("PoolClosed", "PoolOverloaded", "PoolTimeout", "ReservoirEmpty", "ReservoirError"),
        *("ServerUnreachable", "TokenError", "TooManyRequests"),
    ]
    for name in moored.reservoir.__all__:
        assert hasattr(moored.reservoir, name)


def test_the_public_names_for_aws() -> None:
    assert aws.__all__ == ["DsqlTokens", "RdsTokens"]


def test_the_public_names_for_asyncpg() -> None:
    assert asyncpg.__all__ == ["AsyncpgPool", "create_pool"]


def test_the_public_names_for_psycopg_pool() -> None:
    assert psycopg_pool.__all__ == ["install"]


def test_the_public_names_for_prometheus() -> None:
    assert prometheus.__all__ == ["ReservoirCollector"]


@pytest.mark.parametrize(
    "name",
    [
        "PoolClosed",
        "PoolOverloaded",
        "PoolTimeout",
        "ReservoirEmpty",
        "ReservoirError",
        "TokenError",
    ],
)
def test_every_error_is_an_operational_error_of_psycopg(name: str) -> None:
    error = getattr(moored.reservoir, name)
    assert issubclass(error, moored.reservoir.ReservoirError)
    assert issubclass(error, MooredError)
    assert issubclass(error, psycopg.OperationalError)


def test_a_timeout_is_a_timeout() -> None:
    assert issubclass(moored.reservoir.PoolTimeout, TimeoutError)


PROGRAM = """
import sys
import moored.reservoir
print(sorted(name for name in sys.modules if "." not in name))
"""


def test_optional_packages_are_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60.0, check=True
    )
    loaded = set(eval(done.stdout))
    optional = {"asyncpg", "botocore", "boto3", "aiobotocore", "prometheus_client", "redis"}
    assert not loaded & {*optional, "sqlalchemy", "pg8000", "psycopg_pool", "starlette"}
