"""Converting between DynamoDB's attribute values and leases."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from .._store import Held, Holder

Item = Mapping[str, Any]

#: Seconds for which unused slots and rate limits are kept, if the table's TTL is enabled.
KEPT = 7 * 24 * 3600

_NAME = re.compile(r"#(\w+)")


def text(value: str) -> dict[str, str]:
    """Return a string as an attribute value."""
    return {"S": value}


def number(value: int) -> dict[str, str]:
    """Return an integer as an attribute value."""
    return {"N": str(value)}


def text_of(item: Item, name: str) -> str:
    """Return a string attribute; empty if there is none."""
    return str(item.get(name, {}).get("S", ""))


def number_of(item: Item, name: str, default: int = 0) -> int:
    """Return an integer attribute, or the default if there is none."""
    value = item.get(name, {}).get("N")
    return default if value is None else int(float(value) if "." in value else value)


def millis(seconds: float) -> int:
    """Convert seconds to milliseconds, rounded up."""
    return math.ceil(seconds * 1000)


def expression(values: Mapping[str, Any] | None = None, **parts: str) -> dict[str, Any]:
    """Return the request arguments for expressions such as `Update` and `Condition`.

    Attributes are written as #name, because DynamoDB reserves hundreds of words.
    """
    names = sorted({name for part in parts.values() for name in _NAME.findall(part)})
    arguments: dict[str, Any] = {f"{part}Expression": wanted for part, wanted in parts.items()}
    arguments["ExpressionAttributeNames"] = {f"#{name}": name for name in names}
    if values:
        arguments["ExpressionAttributeValues"] = {f":{name}": v for name, v in values.items()}
    return arguments


def assigned(values: Iterable[str]) -> str:
    """Return the update expression that sets attributes to the values of the same names."""
    return "SET " + ", ".join(f"#{name} = :{name}" for name in values)


def holder_values(holder: Holder) -> dict[str, dict[str, str]]:
    """Return the attributes of a lease's holder."""
    values = asdict(holder).items()
    return {name: number(v) if isinstance(v, int) else text(v) for name, v in values}


def held(key: str, lease_id: str, item: Item, ends_ms: int, latest: float) -> Held:
    """Return the live lease of an item; it is at most `latest` now, in seconds."""
    holder = Holder(
        service_name=text_of(item, "service_name"),
        owner=text_of(item, "owner"),
        host=text_of(item, "host"),
        pid=number_of(item, "pid"),
    )
    created_at, left = number_of(item, "created_ms") / 1000, max(ends_ms / 1000 - latest, 0.0)
    return Held(key, lease_id, number_of(item, "fence"), holder, created_at, left)
