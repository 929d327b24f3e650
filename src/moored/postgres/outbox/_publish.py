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


def publish(
    conn: Any, schema: str, channel: str, payload: Any, tenant: str | None, *, table: bool = True
) -> Any:
    """Publish an event within the transaction of `conn`; see `Outbox.publish`."""
    if not isinstance(channel, str) or not channel:
        raise ValueError(f"publish(): channel={channel!r} must be a str, and not empty")
    values = (channel, encoded(payload), tenant)
    # The server would refuse it as well, and abort the caller's transaction.
    if any("\0" in each for each in values if each is not None):
        raise ValueError("publish(): channel, payload and tenant must not contain NUL")
    if table:
        return run(conn, f"{schema}.outbox_publish({{}}, {{}}, {{}})", *values)
    content = encoded(dict(zip(("channel", "payload", "tenant"), values, strict=True)))
    message = f"pg_logical_emit_message(true, '{message_prefix(schema)}', cast({{}} as text))"
    return run(conn, message, content)


def message_prefix(schema: str) -> str:
    """Return the prefix of the messages of an outbox without a table."""
    return f"{schema}_events"


def encoded(payload: Any) -> str:
    """Return a str as it is, and any other value as JSON."""
    if isinstance(payload, str):
        return payload
    if isinstance(payload, (bytes, bytearray, memoryview)):
        raise TypeError("publish(): payload must be a str or a JSON value: encode bytes as base64")
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))


def run(conn: Any, call: str, *values: str | None) -> Any:
    """Call a function, with `{}` for each value; returns an awaitable if the driver does.

    Connections of asyncpg, and connections and sessions of SQLAlchemy, are recognized; all others
    (psycopg's connections and cursors, Django's cursors) have `execute(query, values)`.
    """
    packages = {each.__module__.partition(".")[0] for each in type(conn).__mro__}
    query, numbers = f"select {call}", range(1, len(values) + 1)
    if "asyncpg" in packages:
        return conn.execute(query.format(*(f"${n}" for n in numbers)), *values)
    if "sqlalchemy" in packages:
        from sqlalchemy import text

        named = {f"value{n}": value for n, value in zip(numbers, values, strict=True)}
        return conn.execute(text(query.format(*(f":{name}" for name in named))), named)
    return conn.execute(query.format(*(["%s"] * len(values))), values)
