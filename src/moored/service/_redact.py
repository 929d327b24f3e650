"""What may be shown of a secret: that there is one."""

from __future__ import annotations

import re

__all__ = ["HIDDEN", "place_of", "redact_url"]

HIDDEN = "********"

_SECRETS = r"(?:password|sslpassword)"
# Up to the last "@", because a password that was not escaped may hold any other mark.
_IN_AUTHORITY = re.compile(r"^(\w+://[^:@/]*:).*@", re.DOTALL)
_IN_QUERY = re.compile(rf"([?&]{_SECRETS}=)[^&]*", re.IGNORECASE)
_IN_WORDS = re.compile(rf"(\b{_SECRETS}\s*=\s*)('(?:\\.|[^'\\])*'|\S+)", re.IGNORECASE)


def redact_url(url: str) -> str:
    """A connection string with its password hidden, in both of libpq's forms."""
    if "://" in url:
        return _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _IN_AUTHORITY.sub(rf"\g<1>{HIDDEN}@", url))
    return _IN_WORDS.sub(rf"\g<1>{HIDDEN}", url)


def place_of(url: str) -> str:
    """Where a connection string leads, in short and without secrets: "db:5432/orders"."""
    from psycopg.conninfo import conninfo_to_dict

    words = conninfo_to_dict(url)
    hosts = str(words.get("host") or words.get("hostaddr") or "localhost").split(",")
    ports = str(words.get("port") or "5432").split(",")
    places = (f"{host}:{ports[min(n, len(ports) - 1)]}" for n, host in enumerate(hosts))
    return f"{','.join(places)}/{words.get('dbname') or words.get('user') or ''}".rstrip("/")
