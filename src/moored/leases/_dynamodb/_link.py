"""The way to DynamoDB: each request within its time, tried again where that helps, timed by the
server's date, with every error translated. Nothing else here touches the driver."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from aiobotocore.config import AioConfig  # type: ignore[import-untyped]
from aiobotocore.session import get_session  # type: ignore[import-untyped]

from moored.kernel import Backoff, Clock

from ._config import DynamoConfig
from ._errors import headers_of, is_conflict, is_worth_another_try, translate, unavailable
from ._time import ServerTime

__all__ = ["DynamoLink", "Reply"]

Reply = Mapping[str, Any]

# What the driver knows of DynamoDB is read here, once, and not by each client in its event loop.
_DESCRIPTIONS = get_session().get_component("data_loader")
_DESCRIPTIONS.load_data("endpoints")
_DESCRIPTIONS.load_service_model("dynamodb", "service-2")

#: Enough for a busy moment of the table; a longer one is an outage, and is told as such.
_ATTEMPTS = 6


class DynamoLink:
    """Requests to one table's server.

    A request takes at most the configured time, further attempts and waits included. It is tried
    again after a lost connection, throttling or a conflict with another transaction, so whoever
    writes must bear that a write happened twice.
    """

    def __init__(
        self, config: DynamoConfig, *, clock: Clock, time: ServerTime | None = None
    ) -> None:
        self.config = config
        self.clock = clock
        #: The server's time, from all responses so far.
        self.time = time or ServerTime(clock, skew=config.skew)
        #: How many requests were sent, by operation, further attempts included.
        self.requests: Counter[str] = Counter()
        #: How many requests were sent again.
        self.retries = 0
        self._resources = AsyncExitStack()
        self._client: Any = None
        self._dialing = asyncio.Lock()

    async def call(self, operation: str, **arguments: Any) -> Reply:
        """Send a request about the table, and return its answer."""
        return await self.send(operation, TableName=self.config.table, **arguments)

    async def send(self, operation: str, **arguments: Any) -> Reply:
        """Send a request, and return its answer; raises only what `translate` makes of errors."""
        trouble: list[BaseException] = []
        try:
            async with asyncio.timeout(self.config.timeout):
                return await self._persist(operation, arguments, trouble)
        except TimeoutError as error:
            what = f"{operation} was not answered within {self.config.timeout:g} s"
            if trouble:
                what += f", after {len(trouble)} failed attempts, the last: {trouble[-1]}"
            raise unavailable(self.config, what) from error

    async def close(self) -> None:
        """Let go of the connections."""
        self._client = None
        await self._resources.aclose()

    async def _persist(
        self, operation: str, arguments: Mapping[str, Any], trouble: list[BaseException]
    ) -> Reply:
        backoff = Backoff(0.025, 1.0, jitter="full", clock=self.clock)
        while True:
            try:
                return await self._attempt(operation, arguments)
            except Exception as error:
                trouble.append(error)
                # A conflict means that others get on: it ends when they are done, or with the time.
                enough = len(trouble) >= _ATTEMPTS and not is_conflict(error)
                if enough or not is_worth_another_try(error):
                    wall_error = self.time.wall_error()
                    ours = translate(error, self.config, wall_error=wall_error)
                    if ours is error:
                        raise
                    raise ours from error
            self.retries += 1
            await asyncio.sleep(backoff.fail())

    async def _attempt(self, operation: str, arguments: Mapping[str, Any]) -> Reply:
        client = await self._connected()
        method: Callable[..., Awaitable[Reply]] = getattr(client, operation)
        self.requests[operation] += 1
        sent = self.time.monotonic()
        try:
            reply = await method(**arguments)
        except Exception as error:
            if response := getattr(error, "response", None):
                self._observe(response, sent)
            raise
        self._observe(reply, sent)
        return reply

    def _observe(self, reply: Reply, sent: float) -> None:
        date = headers_of(reply).get("date")
        self.time.observe(date, sent=sent, received=self.time.monotonic())

    async def _connected(self) -> Any:
        if self._client is None:
            async with self._dialing:
                if self._client is None:
                    client = self._new_client()
                    self._client = await self._resources.enter_async_context(client)
        return self._client

    def _new_client(self) -> Any:
        """A client that tries once: trying again is decided here, where all attempts are timed."""
        options: dict[str, Any] = {}
        if self.config.local and "AWS_ACCESS_KEY_ID" not in os.environ:
            # A local server wants credentials and does not look at them; AWS's would be searched
            # for in the network first.
            options = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        session = get_session()
        session.register_component("data_loader", _DESCRIPTIONS)
        return session.create_client(
            "dynamodb",
            region_name=self.config.region,
            endpoint_url=self.config.endpoint_url,
            config=AioConfig(
                # Half, so that a connection that has gone dead leaves time for a new one.
                connect_timeout=self.config.timeout / 2,
                read_timeout=self.config.timeout / 2,
                max_pool_connections=self.config.connections,
                retries={"total_max_attempts": 1, "mode": "standard"},
                # None lets the environment decide; nobody means its proxy for this machine.
                proxies={} if self.config.local else None,
                # The server looks at the parameters too, and costs less doing it.
                parameter_validation=False,
                tcp_keepalive=True,
                user_agent_extra="moored",
            ),
            **options,
        )
