"""Requests to DynamoDB, with timeouts, retries and translated errors. Each response's date goes to
`ServerTime`. Only this module calls the driver."""

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
from ._errors import is_conflict, may_be_retried, translate, unavailable
from ._time import ServerTime

__all__ = ["DynamoLink", "Reply"]

Reply = Mapping[str, Any]

# The driver's description of DynamoDB is read once, at import, and not in an event loop.
_DESCRIPTIONS = get_session().get_component("data_loader")
_DESCRIPTIONS.load_data("endpoints")
_DESCRIPTIONS.load_service_model("dynamodb", "service-2")

#: Attempts of one request; after them the table counts as unavailable.
_ATTEMPTS = 6


class DynamoLink:
    """Sends requests to the server of one table.

    The timeout of a request includes its retries. It is retried after a lost connection,
    throttling or a transaction conflict, so every write must tolerate being executed twice.
    """

    def __init__(
        self, config: DynamoConfig, *, clock: Clock, time: ServerTime | None = None
    ) -> None:
        self.config = config
        self.clock = clock
        #: The server's clock, from the dates of all responses so far.
        self.time = time or ServerTime(clock, skew=config.skew)
        #: Requests sent, by operation, including retries.
        self.requests: Counter[str] = Counter()
        #: Retries.
        self.retries = 0
        self._resources = AsyncExitStack()
        self._client: Any = None
        self._connecting = asyncio.Lock()

    async def call(self, operation: str, **arguments: Any) -> Reply:
        """Send a request for the table, and return the response."""
        return await self.send(operation, TableName=self.config.table, **arguments)

    async def send(self, operation: str, **arguments: Any) -> Reply:
        """Send a request, and return the response; the driver's errors are translated."""
        failures: list[BaseException] = []
        try:
            async with asyncio.timeout(self.config.timeout):
                return await self._retry(operation, arguments, failures)
        except TimeoutError as error:
            what = f"no answer to {operation} within {self.config.timeout:g} s"
            if failures:
                what += f", after {len(failures)} failed attempts, the last: {failures[-1]}"
            raise unavailable(self.config, what) from error

    async def close(self) -> None:
        """Close the connections."""
        self._client = None
        await self._resources.aclose()

    async def _retry(
        self, operation: str, arguments: Mapping[str, Any], failures: list[BaseException]
    ) -> Reply:
        backoff = Backoff(0.025, 1.0, jitter="full", clock=self.clock)
        while True:
            try:
                return await self._attempt(operation, arguments)
            except Exception as error:
                failures.append(error)
                # A conflict means that other transactions succeed: retry until the timeout.
                enough = len(failures) >= _ATTEMPTS and not is_conflict(error)
                if enough or not may_be_retried(error):
                    wall_error = self.time.wall_error()
                    translated = translate(error, self.config, wall_error=wall_error)
                    if translated is error:
                        raise
                    raise translated from error
            self.retries += 1
            await asyncio.sleep(backoff.fail())

    async def _attempt(self, operation: str, arguments: Mapping[str, Any]) -> Reply:
        client = await self._connected()
        method: Callable[..., Awaitable[Reply]] = getattr(client, operation)
        self.requests[operation] += 1
        sent = self.clock.monotonic()
        try:
            reply = await method(**arguments)
        except Exception as error:
            if response := getattr(error, "response", None):
                self._observe(response, sent)
            raise
        self._observe(reply, sent)
        return reply

    def _observe(self, reply: Reply, sent: float) -> None:
        date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        self.time.observe(date, sent=sent, received=self.clock.monotonic())

    async def _connected(self) -> Any:
        if self._client is None:
            async with self._connecting:
                if self._client is None:
                    client = self._new_client()
                    self._client = await self._resources.enter_async_context(client)
        return self._client

    def _new_client(self) -> Any:
        """Return a client of the driver that does not retry: `_retry` does."""
        options: dict[str, Any] = {}
        if self.config.local and "AWS_ACCESS_KEY_ID" not in os.environ:
            # A local server needs any credentials; without these, the driver would search the
            # network for real ones.
            options = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        session = get_session()
        session.register_component("data_loader", _DESCRIPTIONS)
        return session.create_client(
            "dynamodb",
            region_name=self.config.region,
            endpoint_url=self.config.endpoint_url,
            config=AioConfig(
                # Half of the timeout, so that after a dead connection a new one can be tried.
                connect_timeout=self.config.timeout / 2,
                read_timeout=self.config.timeout / 2,
                max_pool_connections=self.config.connections,
                retries={"total_max_attempts": 1, "mode": "standard"},
                # None takes the proxy from the environment, which is not meant for a local server.
                proxies={} if self.config.local else None,
                # The server validates the parameters, too.
                parameter_validation=False,
                tcp_keepalive=True,
                user_agent_extra="moored",
            ),
            **options,
        )
