"""A client for servers of tests."""

from __future__ import annotations

from typing import Any

import httpx

__all__ = ["ONE_REQUEST", "http_client"]

#: Far more than an answer takes on a busy machine, in seconds.
LIMIT = 90.0
#: A server may close an idle connection at the moment at which the next request is sent on it.
ONE_REQUEST = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def http_client(base_url: str = "", **options: Any) -> httpx.AsyncClient:
    """Return a client that uses a connection for one request."""
    # Without `verify=False`, it would read the authorities for 50 ms.
    given = {"timeout": LIMIT, "trust_env": False, "verify": False, **options}
    return httpx.AsyncClient(base_url=base_url, limits=ONE_REQUEST, **given)
