"""How the Postgres store is configured: by its URL."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from moored.kernel import SECRETS

from .._errors import StoreMisconfigured
from .._url import StoreUrl, parse
from .._url_parameters import UrlParameters

__all__ = ["PostgresConfig"]

_OURS = ("schema", "timeout", "connections")


@dataclass(frozen=True)
class PostgresConfig:
    """What a `postgresql://` URL says; parameters that are not ours are libpq's."""

    #: The server and the database, as people name them.
    place: str
    #: The schema that holds the tables.
    schema: str
    #: How long one call may take in all, in seconds; then the store counts as unavailable.
    timeout: float
    #: How many connections there may be; further calls wait for one, within their time.
    connections: int
    #: What libpq needs to connect: a secret.
    conninfo: str = field(repr=False)

    @classmethod
    def from_url(cls, url: str) -> PostgresConfig:
        """Read a URL; raises one `StoreMisconfigured` that names all its mistakes."""
        parsed = parse(url)
        settings = UrlParameters(parsed)
        schema = settings.text("schema", "moored")
        timeout = settings.seconds("timeout", 5.0)
        connections = settings.count("connections", 2)
        settings.done()
        theirs = _libpq(url, parsed)
        return cls(
            place=f"{theirs.get('host') or 'localhost'}/{theirs.get('dbname') or ''}",
            schema=schema,
            timeout=timeout,
            connections=connections,
            conninfo=make_conninfo("", **{**_defaults(timeout), **theirs}),
        )


def _libpq(url: str, parsed: StoreUrl) -> dict[str, str | int | None]:
    """The URL without our parameters, as libpq reads it."""
    head, _, query = url.partition("?")
    rest = [(n, v) for n, v in parse_qsl(query, keep_blank_values=True) if n not in _OURS]
    try:
        return dict(conninfo_to_dict(f"{head}?{urlencode(rest)}" if rest else head))
    except psycopg.Error as error:
        said = SECRETS.hide(str(error).strip())
        raise StoreMisconfigured(
            f"{parsed.text}: {said}; ours are {', '.join(_OURS)}, the others are libpq's"
        ) from None


def _defaults(timeout: float) -> dict[str, str | int | None]:
    """What libpq should do unless the URL says otherwise.

    A dead peer is noticed by the call's own time limit; these let the kernel notice it too, so that
    an idle connection to a machine that is gone does not stay for hours.
    """
    return {
        "application_name": "moored leases",
        "client_encoding": "utf8",
        # Half of the whole, so that the second of two hosts has its turn.
        "connect_timeout": max(2, math.ceil(timeout / 2)),
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": math.ceil(timeout * 1000),
    }
