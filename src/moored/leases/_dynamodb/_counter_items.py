"""The items of the counter layout: keys, conditions and transactions, without I/O.

=====================================  =======================================================
``dsqllease_counter#ENDPOINT``         ``active``, ``updated_ms``; added by Moored: ``grants``,
                                       ``fence``
``dsqllease#ENDPOINT#LEASEID``         ``ttl_epoch``, ``service_name``, ``created_ms``; added by
                                       Moored: ``expires_ms``, ``lease_key``, ``fence``,
                                       ``owner``, ``host``, ``pid``
=====================================  =======================================================

The endpoint is the key of a lease. For a pool's connections it is the host, as in the other
programs that use the schema, with the port only if it is not 5432 (`endpoint_of`). Items of other
programs, without the attributes that Moored adds, count too: they expire at their `ttl_epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._store import Request
from ._items import Item, expression, holder_values, number, number_of, text, text_of

COUNTER = "dsqllease_counter#"
LEASE = "dsqllease#"
#: A pool's key for its connections is this prefix, the host and the port.
_CONNECTIONS, _DEFAULT_PORT = "connections:", ":5432"

#: The condition of a live lease, by :now in ms, or by :now_s where it has only `ttl_epoch`.
LIVE = (
    "attribute_exists(#pk) AND (#expires_ms >= :now OR "
    "(attribute_not_exists(#expires_ms) AND #ttl_epoch >= :now_s))"
)
#: The condition of an expired lease that was not renewed since it was read.
ENDED = (
    "attribute_exists(#pk) AND (#expires_ms < :now OR "
    "(attribute_not_exists(#expires_ms) AND #ttl_epoch < :now_s))"
)


def endpoint_of(key: str) -> str:
    """Return the endpoint of a key: the key itself, or the host for a pool's connections."""
    if not key.startswith(_CONNECTIONS):
        return key
    return key.removeprefix(_CONNECTIONS).removesuffix(_DEFAULT_PORT)


def counter_of(key: str) -> dict[str, Any]:
    """Return the item key of a counter."""
    return {"pk": text(COUNTER + key)}


def lease_of(key: str, lease: str) -> dict[str, Any]:
    """Return the item key of a lease, with "#" in its id escaped."""
    return {"pk": text(f"{LEASE}{key}#{lease.replace('%', '%25').replace('#', '%23')}")}


def key_of(item: Item) -> str:
    """Return the lease key of an item."""
    if "lease_key" in item:
        return text_of(item, "lease_key")
    return text_of(item, "pk").removeprefix(LEASE).rpartition("#")[0]


def id_of(item: Item) -> str:
    """Return the lease id of an item."""
    escaped = text_of(item, "pk").rpartition("#")[2]
    return escaped.replace("%23", "#").replace("%25", "%")


def ends_ms(item: Item) -> int:
    """Return the expiry of a lease, in ms."""
    return number_of(item, "expires_ms", number_of(item, "ttl_epoch") * 1000)


def add_lease(
    table: str, request: Request, *, fence: int, ends: int, created: int
) -> list[dict[str, Any]]:
    """Return the transaction that grants a lease: increment the counter, put the lease."""
    values = {
        "none": number(0),
        "one": number(1),
        "limit": number(request.limit),
        "now": number(created),
    }
    update = (
        "SET #active = if_not_exists(#active, :none) + :one, #updated_ms = :now, "
        "#grants = if_not_exists(#grants, :none) + :one"
    )
    condition = "(attribute_not_exists(#active) OR #active < :limit)"
    if request.limit == 1:
        # Only an exclusive lease needs a growing fence. With other limits the condition would
        # make concurrent acquires fail for nothing.
        values["fence"] = number(fence)
        update += ", #fence = :fence"
        condition += " AND (attribute_not_exists(#fence) OR #fence < :fence)"
    counter = expression(values, Update=update, Condition=condition)
    lease = {
        **lease_of(request.key, request.id),
        "ttl_epoch": number(math.ceil(ends / 1000)),
        "expires_ms": number(ends),
        "created_ms": number(created),
        "lease_key": text(request.key),
        "fence": number(fence),
        **holder_values(request.holder),
    }
    return [
        _action("Update", table, Key=counter_of(request.key), **counter),
        _action("Put", table, Item=lease, **expression(Condition="attribute_not_exists(#pk)")),
    ]


def remove_leases(
    table: str, key: str, leases: Sequence[str], *, condition: str, now_ms: int
) -> list[dict[str, Any]]:
    """Return the transaction that ends leases: decrement the counter, delete the leases.

    Without the condition, a lease that another client has ended would be subtracted twice.
    """
    counter = expression(
        {"ended": number(len(leases)), "now": number(now_ms)},
        Update="SET #active = #active - :ended, #updated_ms = :now",
        Condition="#active >= :ended",
    )
    wanted = expression(_times(now_ms), Condition=condition)
    return [
        _action("Update", table, Key=counter_of(key), **counter),
        *(_action("Delete", table, Key=lease_of(key, lease), **wanted) for lease in leases),
    ]


def _times(now_ms: int) -> dict[str, Any]:
    return {"now": number(now_ms), "now_s": number(now_ms // 1000)}


def _action(kind: str, table: str, **arguments: Any) -> dict[str, Mapping[str, Any]]:
    on_failure = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
    return {kind: {"TableName": table, **arguments, **on_failure}}
