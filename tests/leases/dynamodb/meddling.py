"""Trouble between a store and its server, and a look at what is in a table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError  # type: ignore[import-untyped]

from moored.leases.dynamodb import CounterStore, SlotStore

__all__ = [
    "Meddling",
    "Outage",
    "cancelled",
    "items_of",
    "lost",
    "meddle",
    "refusal",
    "times",
]

#: Says what goes wrong with a request: nothing, or this error.
Trouble = Callable[[str, Mapping[str, Any]], Exception | None]
AnyStore = SlotStore | CounterStore


class Meddling:
    """The driver's client, with trouble before a request is sent, or with its answer."""

    def __init__(self, client: Any, before: Trouble, after: Trouble) -> None:
        self._client = client
        self._before = before
        self._after = after
        #: What was asked, in order.
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        async def call(**arguments: Any) -> Any:
            self.asked.append((operation, arguments))
            await asyncio.sleep(0)
            if error := self._before(operation, arguments):
                raise error
            reply = await getattr(self._client, operation)(**arguments)
            if error := self._after(operation, arguments):
                raise error
            return reply

        return call


def _nothing(operation: str, arguments: Mapping[str, Any]) -> None:
    return None


async def meddle(
    store: AnyStore, *, before: Trouble = _nothing, after: Trouble = _nothing
) -> Meddling:
    """Put trouble between an open store and its server."""
    client = Meddling(await store.link._connected(), before, after)
    store.link._client = client
    return client


def times(count: int, operation: str, error: Exception) -> Trouble:
    """This error, for the first so many requests of an operation."""
    left = count

    def trouble(asked: str, arguments: Mapping[str, Any]) -> Exception | None:
        nonlocal left
        if asked != operation or left == 0:
            return None
        left -= 1
        return error

    return trouble


class Outage:
    """The server does one request of an operation, and is gone before its answer is read."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.over = False
        self._begun = False

    def after(self, operation: str, arguments: Mapping[str, Any]) -> Exception | None:
        """Trouble with answers."""
        self._begun = self._begun or operation == self._operation
        return lost() if self._begun and not self.over else None

    def before(self, operation: str, arguments: Mapping[str, Any]) -> Exception | None:
        """Trouble with requests."""
        return lost() if self._begun and not self.over else None


def refusal(code: str, *, status: int = 400, message: str = "no", **more: Any) -> ClientError:
    """What the driver raises when DynamoDB says no."""
    response = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}},
        **more,
    }
    return ClientError(response, "Operation")


def cancelled(*codes: str) -> ClientError:
    """What the driver raises when a transaction was not made, for these reasons."""
    reasons: Sequence[Mapping[str, Any]] = [{"Code": code} for code in codes]
    return refusal("TransactionCanceledException", CancellationReasons=reasons)


def lost() -> Exception:
    """What the driver raises when the connection ended before the answer."""
    error: Exception = ConnectionClosedError(endpoint_url="http://server")
    return error


async def items_of(store: AnyStore) -> dict[str, dict[str, Any]]:
    """All items of a table, by their key; values without their types."""
    found = await store._table.collect("scan", ConsistentRead=True)
    plain = [{name: _plain(value) for name, value in item.items()} for item in found]
    return {"/".join(str(item[k]) for k in ("pk", "slot") if k in item): item for item in plain}


def _plain(value: Mapping[str, str]) -> str | int:
    return int(value["N"]) if "N" in value else value["S"]
