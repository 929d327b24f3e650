"""Run `initdb` once for each set of options, and copy the result for later servers.

A run of `initdb` takes most of a second of CPU time, a copy a tenth, and the tests start about a
hundred servers. The copies share one password and one system identifier, except a server that is
created again in the same directory.
"""

from __future__ import annotations

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

__all__ = ["initdb_once"]

#: Run `initdb`, and keep a copy of its result for later servers.
_KEEP = 'kept=$1; data=$2; shift 2; "$@" && cp -a "$data/." "$kept.new" && mv "$kept.new" "$kept"'


@contextmanager
def initdb_once() -> Iterator[None]:
    """Let the servers of this process share the results of `initdb`."""
    real = Cluster.initdb
    folder = Path(tempfile.mkdtemp(prefix="moored-initdb-"))
    folder.chmod(0o711)
    kinds: dict[tuple[object, ...], Path] = {}
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
        kind = (cluster.account.uid, cluster.options.password, *options)
        if kind not in kinds:
            kinds[kind] = folder / str(len(kinds))
            kinds[kind].mkdir()
            os.chown(kinds[kind], cluster.account.uid, cluster.account.gid)
        kept = kinds[kind] / "data"
        if kept.exists():
            return ["/bin/cp", "-a", f"{kept}/.", place]
        return ["/bin/sh", "-c", _KEEP, "sh", str(kept), place, *command]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "initdb", quick)
        one_password = SimpleNamespace(token_urlsafe=lambda nbytes: "initdb-once")
        patch.setattr(_cluster, "secrets", one_password)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
