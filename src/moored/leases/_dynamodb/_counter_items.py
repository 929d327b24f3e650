"""The items of the counter layout: names and conditions, without a request.

=====================================  =======================================================
``dsqllease_counter#ENDPOINT``         ``active``, ``updated_ms``; ours: ``grants``, ``fence``
``dsqllease#ENDPOINT#LEASEID``         ``ttl_epoch``, ``service_name``, ``created_ms``; ours:
                                       ``expires_ms``, ``lease_key``, ``fence``, ``owner``,
                                       ``host``, ``pid``
=====================================  =======================================================

A lease's key is the endpoint, and that of a pool's connections is the host, as in the programs that
share the schema, with the port only if it is not the usual one (`endpoint_of`). Items that another
program wrote by the same schema, without what is ours, count too: they end by their `ttl_epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._store import Request
from ._items import Item, expression, holder_values, number, number_of, text, text_of

__all__ = [
    "COUNTER",
    "LEASE",
    "add_lease",
    "counter_of",
    "endpoint_of",
    "ends_ms",
    "id_of",
    "key_of",
    "lease_of",
    "remove_leases",
]

COUNTER = "dsqllease_counter#"
LEASE = "dsqllease#"
#: How a pool names the leases of its connections: with the address and the port.
_CONNECTIONS, _USUAL_PORT = "connections:", ":5432"

#: A lease that lives: it has not ended at :now, or :now_s where only `ttl_epoch` is known.
LIVE = (
    "attribute_exists(#pk) AND (#expires_ms >= :now OR "
    "(attribute_not_exists(#expires_ms) AND #ttl_epoch >= :now_s))"
)
#: A lease that has ended, and was not renewed since somebody looked.
ENDED = (
    "attribute_exists(#pk) AND (#expires_ms < :now OR "
    "(attribute_not_exists(#expires_ms) AND #ttl_epoch < :now_s))"
)


def endpoint_of(key: str) -> str:
    """The name under which all programs count a key: that of connections is the server's alone."""
    if not key.startswith(_CONNECTIONS):
        return key
    return key.removeprefix(_CONNECTIONS).removesuffix(_USUAL_PORT)


def counter_of(key: str) -> dict[str, Any]:
    """The key of a counter."""
    return {"pk": text(COUNTER + key)}


def lease_of(key: str, lease: str) -> dict[str, Any]:
    """The key of a lease; an id of ours holds nothing that would have to be masked."""
    return {"pk": text(f"{LEASE}{key}#{lease.replace('%', '%25').replace('#', '%23')}")}


def key_of(item: Item) -> str:
    """The key that a lease belongs to."""
    if "lease_key" in item:
        return text_of(item, "lease_key")
    return text_of(item, "pk").removeprefix(LEASE).rpartition("#")[0]


def id_of(item: Item) -> str:
    """The id of a lease."""
    masked = text_of(item, "pk").rpartition("#")[2]
    return masked.replace("%23", "#").replace("%25", "%")


def ends_ms(item: Item) -> int:
    """When a lease ends."""
    return number_of(item, "expires_ms", number_of(item, "ttl_epoch") * 1000)


def add_lease(
    table: str, request: Request, *, fence: int, ends: int, created: int
) -> list[dict[str, Any]]:
    """The actions that give a lease: one more is active, and the lease is there."""
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
        # Where it is what protects, the fence passes all before it. Elsewhere nobody needs that,
        # and clients that ask at the same time would only be in each other's way.
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
    """The actions that end leases: so many fewer are active, and each of them was there.

    Without the condition a lease that somebody else has ended already would be counted off twice.
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
    back = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
    return {kind: {"TableName": table, **arguments, **back}}
