"""Call a function of the outbox on the caller's own connection, whatever its driver."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def check_schema(schema: str) -> str:
    """Return the name of a schema that needs no quotes in any driver; raise for other names."""
    if not _PLAIN.fullmatch(schema):
        raise ValueError(
            f"schema={schema!r} must consist of lower-case letters, digits and underscores, and "
            "have at most 40 characters"
        )
    return schema


def publish(conn: Any, schema: str, channel: str, payload: Any, tenant: str | None) -> Any:
    """Publish an event within the transaction of `conn`; see `Outbox.publish`."""
    if not isinstance(channel, str) or not channel:
        raise ValueError(f"publish(): channel={channel!r} must be a str, and not empty")
    values = (channel, encoded(payload), tenant)
    # The server would refuse it as well, and abort the caller's transaction.
    if any("\0" in each for each in values if each is not None):
        raise ValueError("publish(): channel, payload and tenant must not contain NUL")
    return run(conn, f"{schema}.outbox_publish", *values)


def encoded(payload: Any) -> str:
    """Return a str as it is, and any other value as JSON."""
    if isinstance(payload, str):
        return payload
    if isinstance(payload, (bytes, bytearray, memoryview)):
        raise TypeError("publish(): payload must be a str or a JSON value: encode bytes as base64")
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))


def run(conn: Any, function: str, *values: str | None) -> Any:
    """Call a function with three arguments; returns an awaitable if the driver does.

    PsycopgPool of asyncpg, and connections and sessions of SQLAlchemy, are recognized; all others
    (psycopg's connections and cursors, Django's cursors) have `execute(query, values)`.
    """
    packages = {each.__module__.partition(".")[0] for each in type(conn).__mro__}
    if "asyncpg" in packages:
        return conn.execute(f"select {function}($1, $2, $3)", *values)
    if "sqlalchemy" in packages:
        from sqlalchemy import text

        return conn.execute(
            text(f"select {function}(:a, :b, :c)"), dict(zip("abc", values, strict=True))
        )
    return conn.execute(f"select {function}(%s, %s, %s)", values)
