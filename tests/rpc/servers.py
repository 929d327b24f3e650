"""Real gRPC servers for tests, each in its own process that can be killed and restarted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import Program
from tests.servers import free_port

__all__ = ["EchoServer", "make_authority", "make_certificate", "make_stubs"]

PROTO = """
syntax = "proto3";
package test;
message Name { string name = 1; }
message Greeting { string text = 1; }
service Greeter {
  rpc Greet (Name) returns (Greeting);
  rpc GreetMany (Name) returns (stream Greeting);
}
"""


class EchoServer:
    """The server of `echo_program.py`; a restart uses the same port."""

    def __init__(
        self,
        *,
        tls: Path | None = None,
        mutual: bool = False,
        stubs: Path | None = None,
        token: str = "",
        strict: bool = False,
        streams: int | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.host = host
        self.port = port or free_port()
        given = {
            "host": host,
            "tls": tls,
            "stubs": stubs,
            "token": token or None,
            "streams": streams,
        }
        self._more = [
            text
            for name, value in given.items()
            if value is not None
            for text in (f"--{name}", str(value))
        ]
        self._more += ["--strict"] if strict else []
        self._more += ["--mutual"] if mutual else []
        self._process: Program | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def uri(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it serves."""
        assert self._process is None
        self._process = Program("tests.rpc.echo_program", "--port", str(self.port), *self._more)
        if self._process.stdout.readline() != "ready\n":
            self.kill()
            raise AssertionError(f"the server has not started on {self.address}")

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:
            process.kill()

    def __enter__(self) -> EchoServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def make_authority(folder: Path) -> Path:
    """A test authority (`ca.pem`), and a key and a certificate for `server.test`."""
    _openssl(folder, *_NEW, "/CN=test CA", "-x509", *_DAYS, "-keyout", "ca.key", "-out", "ca.pem")
    make_certificate(folder, "server")
    return folder


def make_certificate(authority: Path, name: str) -> tuple[Path, Path]:
    """A certificate of the authority for `{name}.test`, and its key."""
    certificate, key = authority / f"{name}.pem", authority / f"{name}.key"
    (authority / f"{name}.txt").write_text(f"subjectAltName=DNS:{name}.test\n")
    wanted = (*_NEW, f"/CN={name}.test", "-keyout", key.name, "-out", f"{name}.csr")
    _openssl(authority, *wanted)
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", *_DAYS)
    more = ("-extfile", f"{name}.txt", "-out", certificate.name)
    _openssl(authority, "x509", "-req", "-in", f"{name}.csr", *signed, *more)
    return certificate, key


_NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj")
_DAYS = ("-days", "2")


def _openssl(folder: Path, *arguments: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        reason = "openssl is not installed (as root: apt-get install openssl)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)


def make_stubs(folder: Path) -> Path:
    """Compile the service `Greeter` into a folder, as a user would."""
    (folder / "greeter.proto").write_text(PROTO)
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
            *("--python_out=.", "--grpc_python_out=.", "greeter.proto"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder
