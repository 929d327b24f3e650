"""How one speaks with Milvus: as whom, who greets whom, and what its errors mean.

A connection to Milvus begins with a greeting, the call `Connect`: the server answers with a number,
by which it lists its clients, and which each later call carries. So every generation greets anew,
before it is used. A server that does not know the token is connected all the same: whoever calls
is told so, and nobody reconnects for it.

A server that is no longer the primary answers a write with an error in the answer, which gRPC
takes for a success. Here it becomes UNAVAILABLE, told by the generation that it came over, so that
it acts as any other outage does: once, and only on that generation.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import socket
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from pymilvus import MilvusException  # type: ignore[import-untyped]
from pymilvus.client.prepare import Prepare  # type: ignore[import-untyped]
from pymilvus.client.utils import check_status, is_successful  # type: ignore[import-untyped]
from pymilvus.grpc_gen import milvus_pb2  # type: ignore[import-untyped]

from ._channel_pool import lanes_of
from ._config import ConnectionConfig
from ._dial import (
    Asked,
    CredentialProvider,
    Metadata,
    TokenCredentials,
    close_channel,
    make_aio_channel,
    make_channel,
)
from ._fork import inside
from ._hints import unusable
from ._milvus_config import MilvusConfig
from ._policy import unavailable
from ._retry import _CallDetails
from ._running import run
from ._strategies import _numbers
from ._works import PROBE_TIMEOUT

__all__ = [
    "Credentials",
    "milvus_credentials",
    "milvus_probe",
    "milvus_unavailable",
    "open_aio_channel",
    "open_channel",
    "refusal",
]

#: In the answer of a member that is not, or no longer, the primary.
NOT_PRIMARY = "STREAMING_CODE_REPLICATE_VIOLATION"

_SERVICE = "/milvus.proto.milvus.MilvusService"
#: The server is there, but does not want this client: another connection would not help.
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
#: What it may say to a probe without a token and be well.
_WELL = (*_REFUSED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)

Credentials = Callable[[ConnectionConfig], CredentialProvider | None]

_refusals: weakref.WeakKeyDictionary[Any, grpc.RpcError] = weakref.WeakKeyDictionary()


# -- as whom ---------------------------------------------------------------------------------------


def milvus_credentials(config: ConnectionConfig) -> CredentialProvider | None:
    """The token of the configuration, as Milvus wants it: in base64."""
    return TokenCredentials(config.token, encode=_encoded) if config.token else None


def _encoded(token: str) -> str:
    return base64.b64encode(token.encode()).decode()


# -- what an error means ---------------------------------------------------------------------------


def milvus_unavailable(error: BaseException) -> bool:
    """Whether a new connection may help: nobody answers, or it is not the primary who does."""
    if isinstance(error, MilvusException):
        return NOT_PRIMARY in str(error.message)
    return unavailable(error)


class _NotPrimary(grpc.RpcError):  # type: ignore[misc]
    """The server has answered that it is not the primary."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._reason = reason

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._reason


def _not_primary(answer: Any) -> str:
    """What the server says of that in its answer, if it does."""
    reason = getattr(getattr(answer, "status", answer), "reason", "")
    return reason if isinstance(reason, str) and NOT_PRIMARY in reason else ""


# -- a channel for each generation -----------------------------------------------------------------


async def open_channel(config: ConnectionConfig, credentials: Credentials) -> grpc.Channel:
    """A channel for threads whose server was greeted."""
    with inside():
        channel = make_channel(config, next(_numbers))
    identity = _Identity()
    await _introduce(identity, channel, config, credentials(config))
    opened = grpc.intercept_channel(channel, identity)
    if identity.refusal is not None:
        _refusals[opened] = identity.refusal
    return opened


async def open_aio_channel(config: ConnectionConfig, credentials: Credentials) -> grpc.aio.Channel:
    """The same for asyncio."""
    identity = _AsyncIdentity()
    channel = make_aio_channel(config, next(_numbers), interceptors=[identity])
    await _introduce(identity, channel, config, credentials(config))
    if identity.refusal is not None:
        _refusals[channel] = identity.refusal
    return channel


def refusal(channel: Any) -> grpc.RpcError | None:
    """Why the server did not return our greeting, if it did not."""
    return next((_refusals[lane] for lane in lanes_of(channel) if lane in _refusals), None)


async def _introduce(
    identity: _Number,
    channel: Any,
    config: ConnectionConfig,
    credentials: CredentialProvider | None,
) -> None:
    told = config.told if isinstance(config, MilvusConfig) else {}
    request = Prepare.register_request(None, socket.gethostname(), **told)
    try:
        answer = await _known(channel, request, credentials)
    except grpc.RpcError as error:
        if error.code() in _REFUSED:
            # Without its frames: they have the channel, and would keep it for ever.
            identity.refusal = error.with_traceback(None)
        elif error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            await close_channel(channel)
            if (mistake := unusable(error.details() or "")) is not None:
                raise mistake from None
            raise
    except BaseException:
        await close_channel(channel)
        raise
    else:
        identity.added = (("identifier", str(answer.identifier)),)


async def _known(channel: Any, request: Any, credentials: CredentialProvider | None) -> Any:
    """Greet; with credentials that were refused and know how to refresh, a second time."""
    try:
        return await _greet(channel, request, await _signed(credentials))
    except grpc.RpcError as error:
        refresh = getattr(credentials, "refresh", None)
        if refresh is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
    await run(refresh)
    return await _greet(channel, request, await _signed(credentials))


async def _signed(credentials: CredentialProvider | None) -> Metadata:
    found = () if credentials is None else credentials.metadata()
    return await found if inspect.isawaitable(found) else found


async def _greet(channel: Any, request: Any, metadata: Metadata) -> Any:
    ask = channel.unary_unary(
        f"{_SERVICE}/Connect",
        request_serializer=milvus_pb2.ConnectRequest.SerializeToString,
        response_deserializer=milvus_pb2.ConnectResponse.FromString,
    )
    if isinstance(channel, grpc.aio.Channel):
        answer = await ask(request, metadata=metadata)
    else:
        call = Asked(_Greeting(ask, request, metadata))
        try:
            await call.code()
        except asyncio.CancelledError:
            call.cancel()
            raise
        answer = call.answer()
    check_status(answer.status)
    return answer


class _Greeting(NamedTuple):
    """A call that is the same each time that it is made."""

    ask: Any
    request: Any
    metadata: Metadata

    def future(self, _: bytes, timeout: float | None) -> Any:
        return self.ask.future(self.request, timeout=timeout, metadata=self.metadata)


class _Number:
    """What a channel adds to each call: the number that the server has given us."""

    added: Metadata = ()
    refusal: grpc.RpcError | None = None


class _Identity(_Number, grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        given = client_call_details
        details = _CallDetails(
            given.method,
            given.timeout,
            (*(given.metadata or ()), *self.added),
            given.credentials,
            given.wait_for_ready,
            given.compression,
        )
        outcome = continuation(details, request)
        # One that goes on (PyMilvus's `_async=True`) tells whoever asks for its result.
        over = outcome.done() and outcome.exception() is None
        if over and (reason := _not_primary(outcome.result())):
            raise _NotPrimary(reason)
        return outcome


class _AsyncIdentity(_Number, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        metadata = (*(client_call_details.metadata or ()), *self.added)
        call = await continuation(client_call_details._replace(metadata=metadata), request)
        try:
            if not (reason := _not_primary(await call)):
                return call
            nothing = grpc.aio.Metadata()
            error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, reason)
        except grpc.aio.AioRpcError as failure:
            error = _without_call(failure)
        # Not the call: whoever kept the error would keep it with the frames, and a closed channel
        # goes on dialling as long as somebody has a call that was made over it.
        del call
        raise error


def _without_call(error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """The same error, that did not come through the frames of a call."""
    return grpc.aio.AioRpcError(
        error.code(),
        error.initial_metadata(),
        error.trailing_metadata(),
        error.details(),
        error.debug_error_string(),
    )


# -- is it well? -----------------------------------------------------------------------------------


def milvus_probe(channel: Any) -> bool | Awaitable[bool]:
    """Ask for the version, over a channel of either kind; whether the server answers."""
    ask = channel.unary_unary(
        f"{_SERVICE}/GetVersion",
        request_serializer=milvus_pb2.GetVersionRequest.SerializeToString,
        response_deserializer=milvus_pb2.GetVersionResponse.FromString,
    )
    if isinstance(channel, grpc.aio.Channel):
        return _is_well_async(ask)
    try:
        answer = ask(milvus_pb2.GetVersionRequest(), timeout=PROBE_TIMEOUT)
    except grpc.RpcError as error:
        return error.code() in _WELL
    return bool(is_successful(answer.status))


async def _is_well_async(ask: Any) -> bool:
    try:
        answer = await ask(milvus_pb2.GetVersionRequest(), timeout=PROBE_TIMEOUT)
    except grpc.RpcError as error:
        return error.code() in _WELL
    return bool(is_successful(answer.status))
