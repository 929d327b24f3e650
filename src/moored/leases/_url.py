"""Parsing the URL of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from moored.kernel import SECRETS, redacted, unescaped_password

from ._errors import StoreMisconfigured

__all__ = ["StoreUrl", "parse"]


@dataclass(frozen=True)
class StoreUrl:
    """A parsed URL."""

    #: The whole URL with its secrets hidden, for messages.
    text: str
    scheme: str
    #: The host; for some stores a name or a table.
    host: str
    port: int | None
    username: str | None
    password: str | None
    path: str
    parameters: Mapping[str, str]


def parse(url: str) -> StoreUrl:
    """Parse a URL; raises `StoreMisconfigured` if it is not valid."""
    SECRETS.add_from(url)
    shown = redacted(url)
    if unescaped_password(url):
        raise StoreMisconfigured(
            f"{shown}: the password has an unescaped @ or /; write %40 for @, %2F for / and "
            "%25 for %"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise StoreMisconfigured(f"{shown} is not a URL: {SECRETS.hide(str(error))}") from None
    if not parts.scheme:
        raise StoreMisconfigured(f"{shown!r} is not a URL: write SCHEME://…, as in redis://cache")
    return StoreUrl(
        text=shown,
        scheme=parts.scheme,
        # Not `parts.hostname`: it would convert the name of a table to lower case.
        host=unquote(_host(parts.netloc)),
        port=port,
        username=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        path=unquote(parts.path),
        parameters=dict(parse_qsl(parts.query, keep_blank_values=True)),
    )


def _host(netloc: str) -> str:
    place = netloc.rpartition("@")[2]
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0]
