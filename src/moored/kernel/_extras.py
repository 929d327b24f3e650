"""Optional packages: the error about a missing one names the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._errors import MooredError

__all__ = ["MissingExtra", "extra"]


class MissingExtra(MooredError, ModuleNotFoundError):
    """An optional package, named in `name`, is not installed; an extra of Moored installs it."""


@contextmanager
def extra(name: str, needed_by: str) -> Iterator[None]:
    """Import packages of the extra `name` in this block; raises `MissingExtra` if one is missing.

    ::

        with extra("grpc", "moored.rpc"):
            import grpc
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "moored"):
            raise  # a defect in Moored
        raise MissingExtra(
            f"{needed_by} needs {missing}, which is not installed: pip install 'moored[{name}]'",
            name=missing,
        ) from None
