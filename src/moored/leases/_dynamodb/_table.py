"""The DynamoDB table: checked before its first use, and created where that is allowed."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from .._errors import StoreMisconfigured
from ._config import SLOTS, DynamoConfig
from ._errors import (
    BUSY_STATEMENT,
    StatementRefused,
    code_of,
    misconfigured,
    translate,
    unavailable,
)
from ._items import Item
from ._link import DynamoLink, Reply
from ._setup_help import create_command

__all__ = ["DynamoTable"]

log = logging.getLogger("moored.leases")

T = TypeVar("T")

#: Seconds to wait for a new table; AWS takes some 5 to 20 s.
_CREATED_WITHIN = 60.0
_POLL_EVERY = 0.2


class DynamoTable:
    """Requests to the table of a store, after a check of its keys.

    DynamoDB may be unavailable when a store is opened, so the first request that succeeds does the
    check.
    """

    def __init__(self, link: DynamoLink) -> None:
        self.link = link
        self.config = link.config
        #: Settings of the table that put leases at risk; set by the check.
        self.warnings: tuple[str, ...] = ()
        self._ready = False
        self._checking = asyncio.Lock()

    async def ready(self) -> None:
        """Check the table, once; create it if it is missing and `create` allows it."""
        if self._ready:
            return
        async with self._checking:
            if not self._ready:
                await self._check(await self._described())
                await self._check_ttl()
                self._ready = True

    async def call(self, operation: str, **arguments: Any) -> Reply:
        """Send a request for the table."""
        return await self._use(lambda: self.link.call(operation, **arguments))

    async def transact(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Run a transaction."""
        # With the token, a retry after a lost response is the same transaction.
        token = str(uuid.UUID(int=self.link.clock.random.getrandbits(128), version=4))
        arguments = {"TransactItems": actions, "ClientRequestToken": token}
        await self._use(lambda: self.link.send("transact_write_items", **arguments))

    async def execute(self, statements: Sequence[Mapping[str, Any]]) -> list[str]:
        """Run a batch of independent statements; returns "" for each that was executed, else its
        error code: a failed condition, or one of `BUSY_STATEMENT`."""

        async def send() -> list[str]:
            reply = await self.link.send("batch_execute_statement", Statements=statements)
            return [self._outcome(each.get("Error")) for each in reply["Responses"]]

        return await self._use(send)

    def _outcome(self, error: Mapping[str, str] | None) -> str:
        code = error.get("Code", "") if error else ""
        if code in ("", "ConditionalCheckFailed", *BUSY_STATEMENT):
            return code
        refused = StatementRefused(code, str(error and error.get("Message")))
        raise translate(refused, self.config, wall_error=self.link.time.wall_error()) from refused

    async def pages(self, operation: str, **arguments: Any) -> AsyncIterator[Reply]:
        """Yield the responses to a query or a scan, page by page."""
        while True:
            reply = await self.call(operation, **arguments)
            yield reply
            if not reply.get("LastEvaluatedKey"):
                return
            # A limit applies only to the first page, where most callers stop.
            arguments.pop("Limit", None)
            arguments["ExclusiveStartKey"] = reply["LastEvaluatedKey"]

    async def collect(self, operation: str, **arguments: Any) -> list[Item]:
        """Return all items of a query or a scan."""
        pages = [page async for page in self.pages(operation, **arguments)]
        return [item for page in pages for item in page.get("Items", [])]

    async def _use(self, send: Callable[[], Awaitable[T]]) -> T:
        await self.ready()
        try:
            return await send()
        except StoreMisconfigured as error:
            if not (self.config.create and _is_missing(error)):
                raise
        # A local server loses its tables when it is restarted.
        self._ready = False
        await self.ready()
        return await send()

    async def _described(self) -> Reply:
        try:
            return await self.link.call("describe_table")
        except StoreMisconfigured as error:
            if not (self.config.create and _is_missing(error)):
                raise
        await self._create()
        return await self.link.call("describe_table")

    async def _create(self) -> None:
        try:
            await self.link.call("create_table", **_schema(self.config))
            log.info("created DynamoDB table %s", self.config.place)
        except StoreMisconfigured as error:
            # Another process has created the table meanwhile.
            if code_of(error.__cause__ or error) != "ResourceInUseException":
                raise

    async def _check(self, table: Reply) -> None:
        wanted = _schema(self.config)
        for _ in range(round(_CREATED_WITHIN / _POLL_EVERY)):
            state = table["Table"]
            if not _same(state.get("KeySchema", []), wanted["KeySchema"]):
                raise self._wrong_keys(state)
            if state.get("TableStatus") in ("ACTIVE", "UPDATING"):
                return
            await asyncio.sleep(_POLL_EVERY)
            table = await self.link.call("describe_table")
        status = table["Table"].get("TableStatus")
        raise unavailable(self.config, f"it is still {status} after {_CREATED_WITHIN:g} s")

    def _wrong_keys(self, state: Reply) -> StoreMisconfigured:
        keys = [each.get("AttributeName") for each in state.get("KeySchema", [])]
        wanted = [each["AttributeName"] for each in _schema(self.config)["KeySchema"]]
        return misconfigured(
            self.config,
            f"its key is {keys}, and layout={self.config.layout} needs {wanted}",
            f"use another table: {create_command(self.config)}",
        )

    async def _check_ttl(self) -> None:
        reply = await self.link.call("describe_time_to_live")
        state = reply.get("TimeToLiveDescription", {})
        enabled = state.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
        attribute = state.get("AttributeName") if enabled else None
        self.warnings = tuple(_risks(self.config, attribute))
        for warning in self.warnings:
            log.warning("DynamoDB table %s: %s", self.config.place, warning)


def _is_missing(error: StoreMisconfigured) -> bool:
    return code_of(error.__cause__ or error) == "ResourceNotFoundException"


def _schema(config: DynamoConfig) -> dict[str, Any]:
    keys = [("pk", "S", "HASH")] + ([("slot", "N", "RANGE")] if config.layout == SLOTS else [])
    return {
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": [{"AttributeName": name, "KeyType": kind} for name, _, kind in keys],
        "AttributeDefinitions": [
            {"AttributeName": name, "AttributeType": of} for name, of, _ in keys
        ],
    }


def _same(found: list[dict[str, str]], wanted: list[dict[str, str]]) -> bool:
    return [(k["AttributeName"], k["KeyType"]) for k in found] == [
        (k["AttributeName"], k["KeyType"]) for k in wanted
    ]


def _risks(config: DynamoConfig, attribute: str | None) -> list[str]:
    if attribute is None:
        return []
    if attribute != "ttl_epoch":
        return [
            f"DynamoDB's TTL is enabled for the attribute {attribute!r}, which is not the store's; "
            "it deletes no leases"
        ]
    if config.layout == SLOTS:
        return []
    return [
        "DynamoDB's TTL deletes expired leases by ttl_epoch without decrementing the counter; the "
        "sweeper corrects the counter, but disable the TTL: it is not needed"
    ]
