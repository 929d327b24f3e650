"""The DynamoDB table: checked before its first use, and created where that is allowed."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from .._errors import StoreMisconfigured
from ._config import DynamoConfig
from ._errors import ConditionFailed, code_of, misconfigured, unavailable
from ._items import Item, assigned, expression
from ._link import DynamoLink, Reply
from ._setup_help import create_command, key_attributes

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
        self._ready = False
        self._checking = asyncio.Lock()

    async def ready(self) -> None:
        """Check the table, once; create it if it is missing and `create` allows it."""
        if self._ready:
            return
        async with self._checking:
            if not self._ready:
                await self._check(await self._described())
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

    async def update(self, key: Item, values: Item, condition: str, **compared: Any) -> Item | None:
        """Set attributes of an item, and return all of them; None if the condition does not hold.

        The condition may refer to `values` and to `compared` by their names.
        """
        wanted = expression({**values, **compared}, Update=assigned(values), Condition=condition)
        try:
            reply = await self.call("update_item", Key=key, ReturnValues="ALL_NEW", **wanted)
        except ConditionFailed:
            return None
        item: Item = reply["Attributes"]
        return item

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
        wanted = [name for name, _, _ in key_attributes(self.config)]
        for _ in range(round(_CREATED_WITHIN / _POLL_EVERY)):
            state = table["Table"]
            keys = [each.get("AttributeName") for each in state.get("KeySchema", [])]
            if keys != wanted:
                raise misconfigured(
                    self.config,
                    f"its key is {keys}, and layout={self.config.layout} needs {wanted}",
                    f"use another table: {create_command(self.config)}",
                )
            if state.get("TableStatus") in ("ACTIVE", "UPDATING"):
                return
            await asyncio.sleep(_POLL_EVERY)
            table = await self.link.call("describe_table")
        status = table["Table"].get("TableStatus")
        raise unavailable(self.config, f"it is still {status} after {_CREATED_WITHIN:g} s")


def _is_missing(error: StoreMisconfigured) -> bool:
    return code_of(error.__cause__ or error) == "ResourceNotFoundException"


def _schema(config: DynamoConfig) -> dict[str, Any]:
    keys = key_attributes(config)
    return {
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": [{"AttributeName": name, "KeyType": kind} for name, _, kind in keys],
        "AttributeDefinitions": [
            {"AttributeName": name, "AttributeType": of} for name, of, _ in keys
        ],
    }
