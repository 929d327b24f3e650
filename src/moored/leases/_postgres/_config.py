"""The configuration of the Postgres store, from its URL."""

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

_OWN_PARAMETERS = ("schema", "timeout", "connections")


@dataclass(frozen=True)
class PostgresConfig:
    """The settings of a `postgresql://` URL; other parameters are passed to libpq."""

    #: The host and the database, for messages.
    place: str
    #: The schema that holds the tables.
    schema: str
    #: Timeout of one call in seconds, including the wait for a connection.
    timeout: float
    #: The largest number of connections; further calls wait for one, within their timeout.
    connections: int
    #: The connection string for libpq, which may contain a password.
    conninfo: str = field(repr=False)

    @classmethod
    def from_url(cls, url: str) -> PostgresConfig:
        """Parse a URL; raises one `StoreMisconfigured` that lists all mistakes."""
        parsed = parse(url)
        settings = UrlParameters(parsed)
        schema = settings.text("schema", "moored")
        timeout = settings.seconds("timeout", 5.0)
        connections = settings.count("connections", 2)
        settings.done(others=True)
        libpq = _libpq(url, parsed)
        return cls(
            place=f"{libpq.get('host') or 'localhost'}/{libpq.get('dbname') or ''}",
            schema=schema,
            timeout=timeout,
            connections=connections,
            conninfo=make_conninfo("", **{**_defaults(timeout), **libpq}),
        )


def _libpq(url: str, parsed: StoreUrl) -> dict[str, str | int | None]:
    """Return the parameters of the URL for libpq, without those of the store."""
    head, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    rest = [(name, value) for name, value in pairs if name not in _OWN_PARAMETERS]
    try:
        return dict(conninfo_to_dict(f"{head}?{urlencode(rest)}" if rest else head))
    except psycopg.Error as error:
        raise StoreMisconfigured(
            f"{parsed.text}: {SECRETS.hide(str(error).strip())}; the store's own parameters are "
            f"{', '.join(_OWN_PARAMETERS)}, the others must be libpq's"
        ) from None


def _defaults(timeout: float) -> dict[str, str | int | None]:
    """Return the libpq parameters that the URL may override.

    The timeout of a call detects a dead peer; the keepalives close idle connections to one, which
    would otherwise stay open for hours.
    """
    return {
        "application_name": "moored leases",
        "client_encoding": "utf8",
        # Half of the timeout, so that the second of two hosts is tried, too.
        "connect_timeout": max(2, math.ceil(timeout / 2)),
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": math.ceil(timeout * 1000),
    }
