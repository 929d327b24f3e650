"""Run `initdb` once for each set of options, and copy the result for later servers.

A run of `initdb` takes most of a second of CPU time, a copy a tenth, and the tests start about a
hundred servers. The copies share one password and one system identifier, except a server that is
created again in the same directory by the same process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from moored.embedded import _cluster
from moored.embedded._cluster import Cluster

__all__ = ["initdb_once", "pytest_configure", "pytest_unconfigure"]

#: Copy the result of `initdb`; the first process runs it, while the others wait, and keeps a copy.
_COPY_OR_MAKE = """
kept=$1; data=$2; shift 2
exec 9>"$kept.lock" && flock 9 || exit
[ ! -e "$kept" ] || exec cp -a "$kept/." "$data"
"$@" && cp -a "$data/." "$kept.new" && mv -T "$kept.new" "$kept"
"""


#: The variable with the folder of the results, which all processes of the tests share.
_FOLDER = "INITDB_ONCE"


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder, before the first worker is started."""
    if not hasattr(config, "workerinput"):
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="moored-initdb-")
        Path(os.environ[_FOLDER]).chmod(0o711)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder, after the last worker has ended."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(_FOLDER), ignore_errors=True)


@contextmanager
def initdb_once() -> Iterator[None]:
    """Let the servers of this process use the results of the others; none outside of pytest."""
    if _FOLDER not in os.environ:
        yield
        return
    folder = Path(os.environ[_FOLDER])
    real = Cluster.initdb
    made: set[Path] = set()

    def quick(cluster: Cluster, data: Path) -> list[str]:
        command = real(cluster, data)
        if cluster.directory.path in made:
            return command
        made.add(cluster.directory.path)
        options = [option for option in command if not option.startswith(("--pgdata", "--pwfile"))]
        place = next(
            option.partition("=")[2] for option in command if option.startswith("--pgdata")
        )
        kind = repr((cluster.account.uid, cluster.options.password, *options))
        kind_folder = folder / hashlib.sha256(kind.encode()).hexdigest()[:16]
        kind_folder.mkdir(exist_ok=True)
        os.chown(kind_folder, cluster.account.uid, cluster.account.gid)
        kept = str(kind_folder / "data")
        return ["/bin/sh", "-c", _COPY_OR_MAKE, "sh", kept, place, *command]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "initdb", quick)
        one_password = SimpleNamespace(token_urlsafe=lambda nbytes: "initdb-once")
        patch.setattr(_cluster, "secrets", one_password)
        yield
