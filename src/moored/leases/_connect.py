"""Make a store from its URL; an adapter is imported only when its scheme is used."""

from __future__ import annotations

import importlib
from typing import cast

from moored.kernel import Clock, MissingExtra

from ._errors import StoreMisconfigured
from ._store import Store
from ._url import parse

__all__ = ["open_store"]


_ADAPTERS = {
    "memory": "_memory",
    "postgres": "postgres",
    "postgresql": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "dynamodb": "dynamodb",
}


def open_store(url: str, *, clock: Clock) -> Store:
    """Return the store of a URL, not yet connected; raises `StoreMisconfigured`."""
    parsed = parse(url)
    adapter = _ADAPTERS.get(parsed.scheme)
    if adapter is None:
        raise StoreMisconfigured(
            f"{parsed.text}: unknown scheme {parsed.scheme}://; use one of "
            + ", ".join(f"{scheme}://" for scheme in _ADAPTERS)
        )
    try:
        module = importlib.import_module(f".{adapter}", __package__)
    except MissingExtra as error:
        raise StoreMisconfigured(str(error)) from error
    return cast(Store, module.open_store(url, clock=clock))
