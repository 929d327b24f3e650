"""From a URL to a store: the adapter is imported only when its scheme is asked for."""

from __future__ import annotations

import importlib
from typing import NamedTuple, cast

from moored.kernel import Clock

from ._errors import StoreMisconfigured
from ._store import Store
from ._url import parse

__all__ = ["open_store", "schemes"]


class _Adapter(NamedTuple):
    module: str
    #: The extra that brings what the adapter imports, and what that is.
    extra: str | None = None
    needs: tuple[str, ...] = ()


_ADAPTERS = {
    "memory": _Adapter("_memory"),
    "postgres": _Adapter("postgres"),
    "postgresql": _Adapter("postgres"),
    "redis": _Adapter("redis", "redis", ("redis",)),
    "rediss": _Adapter("redis", "redis", ("redis",)),
    "unix": _Adapter("redis", "redis", ("redis",)),
    "dynamodb": _Adapter("dynamodb", "dynamodb", ("aiobotocore", "botocore")),
}


def schemes() -> tuple[str, ...]:
    """The schemes that a store's URL may have."""
    return tuple(_ADAPTERS)


def open_store(url: str, *, clock: Clock) -> Store:
    """The store that a URL names, not yet connected; raises `StoreMisconfigured`."""
    parsed = parse(url)
    adapter = _ADAPTERS.get(parsed.scheme)
    if adapter is None:
        raise StoreMisconfigured(
            f"{parsed.text}: there is no store for {parsed.scheme}://; there is "
            + ", ".join(f"{scheme}://" for scheme in _ADAPTERS)
        )
    try:
        module = importlib.import_module(f".{adapter.module}", __package__)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in adapter.needs:
            raise
        raise StoreMisconfigured(
            f"{parsed.scheme}:// needs {missing}, which is not installed: "
            f"pip install 'moored[{adapter.extra}]'"
        ) from error
    return cast(Store, module.open_store(url, clock=clock))
