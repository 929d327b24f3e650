"""Packages that only some users need: each comes with an extra, and a missing one names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._errors import MooredError

__all__ = ["MissingExtra", "extra"]


class MissingExtra(MooredError, ModuleNotFoundError):
    """A package that an extra of Moored brings is not installed; `name` is that package's."""


@contextmanager
def extra(name: str, needed_by: str) -> Iterator[None]:
    """Import in this block what the extra `name` brings; raises `MissingExtra` if it is missing.

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
            raise  # a defect of ours
        raise MissingExtra(
            f"{needed_by} needs {missing}, which is not installed: pip install 'moored[{name}]'",
            name=missing,
        ) from None
