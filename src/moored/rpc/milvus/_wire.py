"""How one speaks with Milvus: as whom, who greets whom, and what its errors mean.

A connection to Milvus begins with a greeting, the call `Connect`: the server answers with a number,
by which it lists its clients, and which each later call carries. So every generation greets anew,
before it is used. A server that does not know the token is connected all the same: whoever calls
is told so, and nobody reconnects for it.

A server that is no longer the primary answers a write with an error in the answer, which gRPC
takes for a success. Here it becomes UNAVAILABLE, and names who has answered. The topology is then
fetched: if there is another primary, the call is made again there; if not, its caller is told.
"""

from __future__ import annotations

import asyncio
import base64
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

from moored.kernel import awaited, run_callback

from .._channel_pool import lanes_of
from .._channels import PROBE_TIMEOUT
from .._config import ConnectionConfig
from .._dial import (
    AwaitableCall,
    CredentialProvider,
    Metadata,
    TokenCredentials,
    close_channel,
    make_aio_channel,
    make_channel,
)
from .._fork import inside
from .._grpc_internals import is_connected
from .._manager_options import unavailable
from .._strategies import _numbers
from .._tls_hints import unusable
from ..calls._retry import with_details
from ..topology._follower import Follower
from ._config import MilvusConfig

__all__ = [
    "Credentials",
    "may_be_repeated",
    "milvus_credentials",
    "milvus_probe",
    "milvus_unavailable",
    "open_aio_channel",
    "open_channel",
    "refusal",
    "refused_write",
]

#: In the answer of a member that is not, or no longer, the primary.
NOT_PRIMARY = "STREAMING_CODE_REPLICATE_VIOLATION"
_ANSWERED_BY = ", answered by "

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
    """Whether a new connection may help: the server is unreachable, or not the primary."""
    if isinstance(error, MilvusException):
        return NOT_PRIMARY in str(error.message)
    return unavailable(error)


class _NotPrimary(grpc.RpcError):  # type: ignore[misc]
    """The server is not the primary, or its connection was lost before the call was sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._reason = reason

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._reason


def _not_primary(answer: Any, address: str) -> str:
    """The reason in an answer of a server that is not the primary, with its address; or ""."""
    reason = getattr(getattr(answer, "status", answer), "reason", "")
    if not isinstance(reason, str) or NOT_PRIMARY not in reason:
        return ""
    return f"{reason}{_ANSWERED_BY}{address}"


def refused_write(error: BaseException) -> str:
    """What a server that is not the primary has said, if that is what the error is."""
    told = error.message if isinstance(error, MilvusException) else ""
    if isinstance(error, grpc.RpcError) and callable(getattr(error, "details", None)):
        told = error.details()
    return str(told) if NOT_PRIMARY in str(told) else ""


async def may_be_repeated(managed: Any, told: str) -> bool:
    """Whether a write that was refused so may be made again: there is another primary."""
    _, _, address = told.rpartition(_ANSWERED_BY)
    if _ANSWERED_BY in told and address != managed.address:
        return True  # an earlier one has answered
    return isinstance(managed.strategy, Follower) and await managed.strategy.has_left(
        managed.address
    )


# -- a channel for each generation -----------------------------------------------------------------


async def open_channel(config: ConnectionConfig, credentials: Credentials) -> grpc.Channel:
    """A channel for threads whose server was greeted."""
    with inside():
        channel = make_channel(config, next(_numbers))
    identity = _Identity(config.address)
    await _introduce(identity, channel, config, credentials(config))
    opened = grpc.intercept_channel(channel, identity)
    if identity.refusal is not None:
        _refusals[opened] = identity.refusal
    return opened


async def open_aio_channel(config: ConnectionConfig, credentials: Credentials) -> grpc.aio.Channel:
    """The same for asyncio."""
    identity = _AsyncIdentity(config.address)
    channel = make_aio_channel(config, next(_numbers), interceptors=[identity])
    await _introduce(identity, channel, config, credentials(config))
    if identity.refusal is not None:
        _refusals[channel] = identity.refusal
    return channel


def refusal(channel: Any) -> grpc.RpcError | None:
    """Why the server did not return our greeting, if it did not."""
    return next((_refusals[lane] for lane in lanes_of(channel) if lane in _refusals), None)


async def _introduce(
    identity: _IdentifierInterceptor,
    channel: Any,
    config: ConnectionConfig,
    credentials: CredentialProvider | None,
) -> None:
    info = config.client_info if isinstance(config, MilvusConfig) else {}
    request = Prepare.register_request(None, socket.gethostname(), **info)
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
        identity.greeted = weakref.ref(channel)


async def _known(channel: Any, request: Any, credentials: CredentialProvider | None) -> Any:
    """Greet; with credentials that were refused and know how to refresh, a second time."""
    try:
        return await _greet(channel, request, await _signed(credentials))
    except grpc.RpcError as error:
        refresh = getattr(credentials, "refresh", None)
        if refresh is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
    await run_callback(refresh)
    return await _greet(channel, request, await _signed(credentials))


async def _signed(credentials: CredentialProvider | None) -> Metadata:
    found = () if credentials is None else credentials.metadata()
    return await awaited(found)


async def _greet(channel: Any, request: Any, metadata: Metadata) -> Any:
    ask = channel.unary_unary(
        f"{_SERVICE}/Connect",
        request_serializer=milvus_pb2.ConnectRequest.SerializeToString,
        response_deserializer=milvus_pb2.ConnectResponse.FromString,
    )
    if isinstance(channel, grpc.aio.Channel):
        answer = await ask(request, metadata=metadata)
    else:
        call = AwaitableCall(_Greeting(ask, request, metadata))
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


class _IdentifierInterceptor:
    """What a channel adds to each call: the number that the server has given us."""

    added: Metadata = ()
    refusal: grpc.RpcError | None = None

    def __init__(self, address: str) -> None:
        self.address = address
        #: The channel that was greeted over, once it was; weakly, as errors keep their frames.
        self.greeted: Callable[[], Any] = lambda: None

    def check_connected(self) -> None:
        """Raise if the connection was lost: gRPC would make another, which has not greeted."""
        if (channel := self.greeted()) is not None and not is_connected(channel):
            del channel
            raise self.lost(f"not sent: the connection to {self.address} was lost")

    def lost(self, reason: str) -> grpc.RpcError:
        return _NotPrimary(reason)


class _Identity(_IdentifierInterceptor, grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        self.check_connected()
        metadata = (*(client_call_details.metadata or ()), *self.added)
        details = with_details(client_call_details, metadata=metadata)
        outcome = continuation(details, request)
        # One that goes on (PyMilvus's `_async=True`) tells whoever asks for its result.
        over = outcome.done() and outcome.exception() is None
        if over and (reason := _not_primary(outcome.result(), self.address)):
            raise _NotPrimary(reason)
        return outcome


class _AsyncIdentity(_IdentifierInterceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def lost(self, reason: str) -> grpc.RpcError:
        nothing = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, reason)

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        self.check_connected()
        metadata = (*(client_call_details.metadata or ()), *self.added)
        call = await continuation(client_call_details._replace(metadata=metadata), request)
        try:
            if not (reason := _not_primary(await call, self.address)):
                return call
            error = self.lost(reason)
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
    """Request the version over a channel of either kind; return whether the server answers."""
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
