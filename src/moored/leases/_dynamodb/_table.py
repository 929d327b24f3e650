"""The table: looked at once before its first use, and made where that is allowed."""

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

#: AWS makes a table in some 5 to 20 s.
_MADE_WITHIN = 60.0
_LOOK_EVERY = 0.2


class DynamoTable:
    """The table of a store, and requests to it once it is known to be the right one.

    A server may be away when a store is opened, so that each request looks whether the table has
    been looked at, and the first that gets through does it.
    """

    def __init__(self, link: DynamoLink) -> None:
        self.link = link
        self.config = link.config
        #: What about the table puts leases at risk; known once it answered.
        self.warnings: tuple[str, ...] = ()
        self._ready = False
        self._looking = asyncio.Lock()

    async def ready(self) -> None:
        """Look at the table, once; make it where it is missing and may be made."""
        if self._ready:
            return
        async with self._looking:
            if not self._ready:
                await self._check(await self._found())
                await self._see_ttl()
                self._ready = True

    async def call(self, operation: str, **arguments: Any) -> Reply:
        """Send a request about the table."""
        return await self._use(lambda: self.link.call(operation, **arguments))

    async def send(self, operation: str, **arguments: Any) -> Reply:
        """Send a request that names its tables itself."""
        return await self._use(lambda: self.link.send(operation, **arguments))

    async def transact(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Do all of several actions, or none."""
        # The token makes a further attempt after a lost answer the same transaction.
        token = str(uuid.UUID(int=self.link.clock.random.getrandbits(128), version=4))
        await self.send("transact_write_items", TransactItems=actions, ClientRequestToken=token)

    async def execute(self, statements: Sequence[Mapping[str, Any]]) -> list[str]:
        """Run statements that have nothing to do with each other; what became of each: nothing,
        or the code of why it was not done, for its item's sake or because the table is busy."""

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
        """The answers to a query or a scan, page by page."""
        while True:
            reply = await self.call(operation, **arguments)
            yield reply
            if not reply.get("LastEvaluatedKey"):
                return
            # A limit is for the first page, where a caller hopes to be done.
            arguments.pop("Limit", None)
            arguments["ExclusiveStartKey"] = reply["LastEvaluatedKey"]

    async def collect(self, operation: str, **arguments: Any) -> list[Item]:
        """All items that a query or a scan finds."""
        pages = [page async for page in self.pages(operation, **arguments)]
        return [item for page in pages for item in page.get("Items", [])]

    async def _use(self, send: Callable[[], Awaitable[T]]) -> T:
        await self.ready()
        try:
            return await send()
        except StoreMisconfigured as error:
            if not (self.config.create and _is_missing(error)):
                raise
        # A local server that was restarted has forgotten its tables.
        self._ready = False
        await self.ready()
        return await send()

    async def _found(self) -> Reply:
        try:
            return await self.link.call("describe_table")
        except StoreMisconfigured as error:
            if not (self.config.create and _is_missing(error)):
                raise
        await self._make()
        return await self.link.call("describe_table")

    async def _make(self) -> None:
        try:
            await self.link.call("create_table", **_schema(self.config))
            log.info("DynamoDB table %s was made", self.config.place)
        except StoreMisconfigured as error:
            # Another process was faster, and made the same one.
            if code_of(error.__cause__ or error) != "ResourceInUseException":
                raise

    async def _check(self, table: Reply) -> None:
        wanted = _schema(self.config)
        for _ in range(round(_MADE_WITHIN / _LOOK_EVERY)):
            state = table["Table"]
            if not _same(state.get("KeySchema", []), wanted["KeySchema"]):
                raise self._wrong_keys(state)
            if state.get("TableStatus") in ("ACTIVE", "UPDATING"):
                return
            await asyncio.sleep(_LOOK_EVERY)
            table = await self.link.call("describe_table")
        status = table["Table"].get("TableStatus")
        raise unavailable(self.config, f"it is still {status} after {_MADE_WITHIN:g} s")

    def _wrong_keys(self, state: Reply) -> StoreMisconfigured:
        keys = [each.get("AttributeName") for each in state.get("KeySchema", [])]
        wanted = [each["AttributeName"] for each in _schema(self.config)["KeySchema"]]
        return misconfigured(
            self.config,
            f"its key is {keys}, and layout={self.config.layout} needs {wanted}",
            f"use a table of its own: {create_command(self.config)}",
        )

    async def _see_ttl(self) -> None:
        reply = await self.link.call("describe_time_to_live")
        state = reply.get("TimeToLiveDescription", {})
        on = state.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
        # The attribute by which the server deletes items, None when it deletes none.
        attribute = state.get("AttributeName") if on else None
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
            f"the server deletes items by their attribute {attribute!r}, which is not the store's; "
            "leases without it are kept"
        ]
    if config.layout == SLOTS:
        return []
    return [
        "the server deletes ended leases by ttl_epoch, without counting them off; the sweeper "
        "corrects the counter afterwards, but turn it off: it is not needed"
    ]
