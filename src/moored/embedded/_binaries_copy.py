"""A copy of the binaries for a server's user who may not enter their directory.

It is needed only by root: the server runs as another user, and the virtual environment may be below
a directory such as /root. The binaries are then copied, once per content, to a directory that every
user may read and only root may write.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ._account import Account
from ._binaries import Binaries
from ._errors import BinariesNotFound

__all__ = ["accessible_binaries"]

#: The directory for copies: only root can create it.
CACHE = Path("/var/cache/moored")

_NEEDED = ("bin", "lib", "share")
_USELESS = shutil.ignore_patterns("*.a", "pkgconfig", "pgxs", "include")


def accessible_binaries(
    binaries: Binaries, account: Account, notify: Callable[[str], None] = lambda text: None
) -> Binaries:
    """Return the binaries, or a copy of them, in a directory that `account` may enter."""
    if account.may_enter(binaries.bin_dir):
        return binaries
    copy = CACHE / f"postgres-{binaries.version}-{_digest(binaries)}"
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        CACHE.chmod(0o755)
        if not copy.exists():
            notify(f"copying {binaries} to {CACHE}: {account} may not enter {binaries.prefix}")
            _copy(binaries, copy)
    except OSError as error:
        raise BinariesNotFound(
            f"the server's user {account} may not enter {binaries.bin_dir}, which cannot be copied "
            f"to {CACHE} ({error}): install Moored where every user may read it"
        ) from error
    return replace(binaries, bin_dir=copy / _shape(binaries) / "bin", moved=True)


def _shape(binaries: Binaries) -> Path:
    # The programs find their libraries by relative paths, so the copy keeps the directory names.
    return Path(binaries.prefix.parent.name, binaries.prefix.name)


def _parts(binaries: Binaries) -> Iterator[tuple[Path, Path]]:
    for name in _NEEDED:
        if (binaries.prefix / name).is_dir():
            yield binaries.prefix / name, _shape(binaries) / name
    beside = binaries.prefix.parent.with_name(binaries.prefix.parent.name + ".libs")
    if beside.is_dir():
        yield beside, Path(beside.name)


def _digest(binaries: Binaries) -> str:
    digest = hashlib.sha256(binaries.program("postgres").read_bytes())
    for source, _ in _parts(binaries):
        for path in sorted(source.rglob("*")):
            digest.update(f"{path.relative_to(source)}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:16]


def _copy(binaries: Binaries, copy: Path) -> None:
    making = Path(tempfile.mkdtemp(prefix=f"{copy.name}.new-", dir=copy.parent))
    try:
        for source, target in _parts(binaries):
            shutil.copytree(source, making / target, ignore=_USELESS)
        _open_to_all(making)
        try:
            making.rename(copy)
        except OSError:
            if not copy.exists():
                raise  # otherwise another process has made the same copy
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _open_to_all(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        runs = path.stat().st_mode & stat.S_IXUSR
        path.chmod(0o755 if runs else 0o644)
