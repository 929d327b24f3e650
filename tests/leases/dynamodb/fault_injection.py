"""Faults between a store and its server, and the items of a table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError  # type: ignore[import-untyped]

from moored.leases.dynamodb import CounterStore, SlotStore

__all__ = [
    "FaultyClient",
    "Outage",
    "cancelled",
    "inject",
    "items_of",
    "lost",
    "refusal",
    "times",
]

#: Returns the error to raise for a request, or None.
Fault = Callable[[str, Mapping[str, Any]], Exception | None]
AnyStore = SlotStore | CounterStore


class FaultyClient:
    """The driver's client, with faults before a request is sent, or after its response."""

    def __init__(self, client: Any, before: Fault, after: Fault) -> None:
        self._client = client
        self._before = before
        self._after = after
        #: The requests, in order.
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


async def inject(
    store: AnyStore, *, before: Fault = _nothing, after: Fault = _nothing
) -> FaultyClient:
    """Inject faults between an open store and its server."""
    client = FaultyClient(await store.link._connected(), before, after)
    store.link._client = client
    return client


def times(count: int, operation: str, error: Exception) -> Fault:
    """Raise this error for the first `count` requests of an operation."""
    left = count

    def trouble(asked: str, arguments: Mapping[str, Any]) -> Exception | None:
        nonlocal left
        if asked != operation or left == 0:
            return None
        left -= 1
        return error

    return trouble


class Outage:
    """An outage that begins when one request of an operation was executed, before its response."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.over = False
        self._begun = False

    def after(self, operation: str, arguments: Mapping[str, Any]) -> Exception | None:
        """Return the fault for a response."""
        self._begun = self._begun or operation == self._operation
        return lost() if self._begun and not self.over else None

    def before(self, operation: str, arguments: Mapping[str, Any]) -> Exception | None:
        """Return the fault for a request."""
        return lost() if self._begun and not self.over else None


def refusal(code: str, *, status: int = 400, message: str = "no", **more: Any) -> ClientError:
    """Return the driver's error for a refused request."""
    response = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}},
        **more,
    }
    return ClientError(response, "Operation")


def cancelled(*codes: str) -> ClientError:
    """Return the driver's error for a transaction that was cancelled for these reasons."""
    reasons: Sequence[Mapping[str, Any]] = [{"Code": code} for code in codes]
    return refusal("TransactionCanceledException", CancellationReasons=reasons)


def lost() -> Exception:
    """Return the driver's error for a connection that was closed before the response."""
    error: Exception = ConnectionClosedError(endpoint_url="http://server")
    return error


async def items_of(store: AnyStore) -> dict[str, dict[str, Any]]:
    """Return all items of a table by their key, with plain values."""
    found = await store._table.collect("scan", ConsistentRead=True)
    plain = [{name: _plain(value) for name, value in item.items()} for item in found]
    return {"/".join(str(item[k]) for k in ("pk", "slot") if k in item): item for item in plain}


def _plain(value: Mapping[str, str]) -> str | int:
    return int(value["N"]) if "N" in value else value["S"]
