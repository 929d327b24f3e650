"""PyMilvus's clients over the channels of a manager, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pymilvus  # type: ignore[import-untyped]
from pymilvus import MilvusException
from pymilvus.client.async_grpc_handler import AsyncGrpcHandler  # type: ignore[import-untyped]
from pymilvus.client.grpc_handler import GrpcHandler  # type: ignore[import-untyped]
from pymilvus.client.types import Status  # type: ignore[import-untyped]

from moored.kernel import LoopThread

from .._errors import ConfigError, ConnectFailed
from .._handler import AsyncHandler, Handler
from .._manager import ConnectionManager
from .._manager_async import AsyncConnectionManager
from ..calls._unsent import AsyncCallUnsent, CallUnsent
from ._config import URI, MilvusConfigError, milvus_config
from ._wire import (
    may_be_repeated,
    milvus_credentials,
    milvus_probe,
    milvus_unavailable,
    open_aio_channel,
    open_channel,
    refusal,
    refused_write,
)


class MilvusUnreachable(ConnectFailed, MilvusException):  # type: ignore[misc]
    """There was no connection in time: an error of both packages."""

    def __init__(self, message: str = "") -> None:
        MilvusException.__init__(self, Status.CONNECT_FAILED, message)


class MilvusRefused(ConfigError, MilvusException):  # type: ignore[misc]
    """The server refused the credentials: an error of both packages."""

    def __init__(self, message: str = "") -> None:
        MilvusException.__init__(self, Status.CONNECT_FAILED, message)


class _MilvusManager:
    """The common part of both Milvus managers."""

    _grpc_handler: ClassVar[Callable[..., Any]]

    def __init__(self, opener: Any, given: dict[str, Any]) -> None:
        credentials = given.get("credentials") or milvus_credentials
        own = {
            "handler_factory": partial(opener, credentials=credentials),
            "probe": milvus_probe,
            "classify": milvus_unavailable,
        }
        super().__init__(**{**own, **given, "credentials": credentials})
        self._pymilvus: dict[Any, Any] = {}

    def grpc_handler(self, channel: Any) -> Any:
        """Return PyMilvus's handler over a channel of this manager; clients share it."""
        found = self._pymilvus.get(channel)
        if found is None:
            known = self._pymilvus.items()
            alive = {each: made for each, made in known if not each.endpoint.closed}
            found = self._grpc_handler(self, channel)
            self._pymilvus = {**alive, channel: found}
        return found


@contextmanager
def _as_milvus_errors() -> Iterator[None]:
    try:
        yield
    except ConnectFailed as error:
        raise MilvusUnreachable(str(error)) from error
    except ConfigError as error:
        raise MilvusConfigError(str(error)) from error


class _SharedHandler:
    """What both of PyMilvus's handlers do over a channel that belongs to a manager."""

    def __init__(self, manager: Any, channel: Any) -> None:
        super().__init__(channel=channel, address=channel.address)  # type: ignore[call-arg]
        self._manager = manager
        self._shared = channel

    @property
    def server_address(self) -> str:
        """The address of the current connection."""
        return str(self._shared.address)

    async def _may_repeat(self, error: Exception, reason: str) -> bool:
        """Return True if the primary that refused a write has moved; otherwise raise."""
        if await may_be_repeated(self._shared.endpoint, reason):
            return True
        raise MilvusException(message=reason) from error


def _refusal_of(error: Exception) -> str:
    """Return why a server refused a write, or ""; raise if the call was not sent."""
    if isinstance(error, (CallUnsent, AsyncCallUnsent)):
        raise MilvusUnreachable(str(error.details())) from error
    return refused_write(error)


# -- threads ---------------------------------------------------------------------------------------


class _GrpcHandler(_SharedHandler, GrpcHandler):  # type: ignore[misc]
    def close(self) -> None:
        """Do nothing: the channel belongs to the manager."""

    def _on_rpc_error(self, error: Exception) -> bool:
        """Return whether PyMilvus may retry a call."""
        if reason := _refusal_of(error):
            return LoopThread.shared().run(self._may_repeat(error, reason))
        # The channel has reported errors of gRPC already, with their generation.
        return isinstance(error, MilvusException) and self._manager.handle_error(
            self._shared, error
        )


class MilvusManager(_MilvusManager, ConnectionManager):
    """A `ConnectionManager` for Milvus, with the same options."""

    _grpc_handler = _GrpcHandler
    _instance: ClassVar[Any] = None

    def __init__(self, **options: Any) -> None:
        super().__init__(open_channel, options)


class MilvusClient(pymilvus.MilvusClient):  # type: ignore[misc]
    """PyMilvus's `MilvusClient` over a shared channel.

    :param uri: as for `milvus_config`; so are `user`, `password`, `db_name`, `token` and `options`.
    :param timeout: how long to wait for the connection, in seconds.
    :param manager: the manager of the channel; by default that of this process.
    :param dedicated: use a channel that is not shared.
    """

    def __init__(
        self,
        uri: str = URI,
        user: str = "",
        password: str = "",
        db_name: str = "",
        token: str = "",
        timeout: float | None = None,
        *,
        manager: MilvusManager | None = None,
        dedicated: bool = False,
        **options: Any,
    ) -> None:
        # PyMilvus's constructor is not called: it would connect with PyMilvus's own manager.
        self._handler: GrpcHandler | None = None
        config = milvus_config(
            uri, user=user, password=password, db_name=db_name, token=token, **options
        )
        # PyMilvus reads and changes the database of a client here.
        self._config = SimpleNamespace(db_name=config.db_name)
        self._manager = manager or MilvusManager.get_instance()
        with _as_milvus_errors():
            channel = self._manager.get_or_create(config, dedicated, self, timeout)
        self._channel = channel
        if (why := _refused(channel)) is not None:
            self._manager.release(channel, client=self)
            raise why
        self._handler = self._manager.grpc_handler(channel)
        self._using = f"moored-{id(channel)}"
        self.is_self_hosted = self.get_server_type() == "milvus"

    def close(self) -> None:
        """Release the channel; other clients are not affected."""
        if self._handler is not None:
            self._handler = None
            self._manager.release(self._channel, client=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._handler is None else repr(self._channel)
        return f"<MilvusClient: {state}>"


# -- asyncio ---------------------------------------------------------------------------------------


class _AsyncGrpcHandler(_SharedHandler, AsyncGrpcHandler):  # type: ignore[misc]
    async def close(self) -> None:
        """Do nothing: the channel belongs to the manager."""

    async def _on_rpc_error(self, error: Exception) -> bool:
        """Return whether PyMilvus may retry a call."""
        if reason := _refusal_of(error):
            return await self._may_repeat(error, reason)
        return isinstance(error, MilvusException) and await self._manager.handle_error(
            self._shared, error
        )


class AsyncMilvusManager(_MilvusManager, AsyncConnectionManager):
    """An `AsyncConnectionManager` for Milvus, with the same options."""

    _grpc_handler = _AsyncGrpcHandler
    _instances: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

    def __init__(self, **options: Any) -> None:
        super().__init__(open_aio_channel, options)


class AsyncMilvusClient(pymilvus.AsyncMilvusClient):  # type: ignore[misc]
    """PyMilvus's `AsyncMilvusClient` over a shared channel; it connects at its first use.

    Its parameters are those of `MilvusClient`; the default manager is that of the running loop.
    """

    def __init__(
        self,
        uri: str = URI,
        user: str = "",
        password: str = "",
        db_name: str = "",
        token: str = "",
        timeout: float | None = None,
        *,
        manager: AsyncMilvusManager | None = None,
        dedicated: bool = False,
        **options: Any,
    ) -> None:
        self._given = milvus_config(
            uri, user=user, password=password, db_name=db_name, token=token, **options
        )
        self._config = SimpleNamespace(db_name=self._given.db_name)
        self._timeout = timeout
        self._dedicated = dedicated
        self._manager: AsyncMilvusManager | None = manager
        self._channel: AsyncHandler | None = None
        self._handler: AsyncGrpcHandler | None = None
        self._connecting = asyncio.Lock()
        self._using: str | None = None
        self.is_self_hosted: bool | None = None
        self._closed = False

    async def _connect(self) -> None:
        async with self._connecting:
            if self._handler is not None:
                return
            if self._manager is None:
                self._manager = AsyncMilvusManager.get_instance()
            with _as_milvus_errors():
                channel = await self._manager.get_or_create(
                    self._given, self._dedicated, self, self._timeout
                )
            if (why := _refused(channel)) is not None:
                await self._manager.release(channel, client=self)
                raise why
            self._channel = channel
            self._handler = self._manager.grpc_handler(channel)
            self._using = f"moored-{id(channel)}"
            self.is_self_hosted = self.get_server_type() == "milvus"

    async def close(self) -> None:
        """Release the channel; other clients are not affected."""
        self._closed = True
        if self._handler is not None and self._manager is not None:
            assert self._channel is not None
            self._handler = None
            await self._manager.release(self._channel, client=self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._channel or "not connected yet")
        return f"<AsyncMilvusClient: {state}>"


# -- both ------------------------------------------------------------------------------------------


def _refused(channel: Handler | AsyncHandler) -> MilvusRefused | None:
    live = channel.endpoint.live
    why = None if live is None else refusal(live.channel)
    if why is None:
        return None
    text = f"{why.code().name}: {why.details()}"
    error = MilvusRefused(f"{channel.address} refuses this client: {text}")
    error.__cause__ = why
    return error
