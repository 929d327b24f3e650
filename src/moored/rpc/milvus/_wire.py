"""Milvus's protocol: credentials, the `Connect` call, and the meaning of its errors.

A connection to Milvus begins with the call `Connect`: the server returns an identifier, by which it
lists its clients, and which each later call carries as metadata. So each generation makes this call
before it is used. If the server refuses the token, the channel counts as connected: calls over it
fail, and no reconnect is tried.

A server that is no longer the primary answers a write with an error status inside a successful
response. This is turned into UNAVAILABLE, with the address of the server. The topology is then
fetched: if there is another primary, the call is retried there; if not, it fails.
"""

from __future__ import annotations

import base64
import socket
import weakref
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from pymilvus import MilvusException  # type: ignore[import-untyped]
from pymilvus.client.prepare import Prepare  # type: ignore[import-untyped]
from pymilvus.client.utils import check_status, is_successful  # type: ignore[import-untyped]
from pymilvus.grpc_gen import milvus_pb2  # type: ignore[import-untyped]

from moored.kernel import awaited, run_callback

from .._channel_pool import lanes_of
from .._config import ConnectionConfig
from .._dial import (
    PROBE_TIMEOUT,
    CredentialProvider,
    Metadata,
    TokenCredentials,
    close_channel,
    ended_call,
    make_aio_channel,
    make_channel,
    unavailable,
)
from .._fork import inside
from .._grpc_internals import is_connected
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

#: Part of the answer of a member that is not, or no longer, the primary.
NOT_PRIMARY = "STREAMING_CODE_REPLICATE_VIOLATION"
_ANSWERED_BY = ", answered by "

_SERVICE = "/milvus.proto.milvus.MilvusService"
#: Codes of a server that refuses this client: another connection would not help.
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
#: Codes with which a healthy server may answer a probe, which has no token.
_WELL = (*_REFUSED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)

Credentials = Callable[[ConnectionConfig], CredentialProvider | None]

_refusals: weakref.WeakKeyDictionary[Any, grpc.RpcError] = weakref.WeakKeyDictionary()


# -- credentials -----------------------------------------------------------------------------------


def milvus_credentials(config: ConnectionConfig) -> CredentialProvider | None:
    """Return credentials that send the configuration's token in base64, as Milvus expects it."""
    return TokenCredentials(config.token, encode=_encoded) if config.token else None


def _encoded(token: str) -> str:
    return base64.b64encode(token.encode()).decode()


# -- errors ----------------------------------------------------------------------------------------


def milvus_unavailable(error: BaseException) -> bool:
    """Whether a new connection may help: the server is unreachable, or not the primary."""
    if isinstance(error, MilvusException):
        return NOT_PRIMARY in str(error.message)
    return unavailable(error)


def _lost(reason: str) -> grpc.RpcError:
    """Return an error that counts as the loss of the connection."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, reason)


def _not_primary(answer: Any, address: str) -> str:
    """Return the reason and the address if a server answers that it is not the primary; or ""."""
    reason = getattr(getattr(answer, "status", answer), "reason", "")
    if not isinstance(reason, str) or NOT_PRIMARY not in reason:
        return ""
    return f"{reason}{_ANSWERED_BY}{address}"


def refused_write(error: BaseException) -> str:
    """Return the reason if the error comes from a server that is not the primary; or ""."""
    reason = error.message if isinstance(error, MilvusException) else ""
    if isinstance(error, grpc.RpcError) and callable(getattr(error, "details", None)):
        reason = error.details()
    return str(reason) if NOT_PRIMARY in str(reason) else ""


async def may_be_repeated(managed: Any, reason: str) -> bool:
    """Whether a write that was refused with this reason may be retried: the primary has moved."""
    _, _, address = reason.rpartition(_ANSWERED_BY)
    if _ANSWERED_BY in reason and address != managed.address:
        return True  # the connection has moved since
    return isinstance(managed.strategy, Follower) and await managed.strategy.has_left(
        managed.address
    )


# -- a channel for each generation -----------------------------------------------------------------


async def open_channel(config: ConnectionConfig, credentials: Credentials) -> grpc.Channel:
    """Return a `grpc.Channel` over which `Connect` was called."""
    with inside():
        channel = make_channel(config, next(_numbers))
    identity = _Identity(config.address)
    await _introduce(identity, channel, config, credentials(config))
    opened = grpc.intercept_channel(channel, identity)
    if identity.refusal is not None:
        _refusals[opened] = identity.refusal
    return opened


async def open_aio_channel(config: ConnectionConfig, credentials: Credentials) -> grpc.aio.Channel:
    """Return a `grpc.aio.Channel` over which `Connect` was called."""
    identity = _AsyncIdentity(config.address)
    channel = make_aio_channel(config, next(_numbers), interceptors=[identity])
    await _introduce(identity, channel, config, credentials(config))
    if identity.refusal is not None:
        _refusals[channel] = identity.refusal
    return channel


def refusal(channel: Any) -> grpc.RpcError | None:
    """Return the error with which the server refused `Connect`, or None."""
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
            identity.refused(error)
        elif error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            await close_channel(channel)
            if (mistake := unusable(error.details() or "")) is not None:
                raise mistake from None
            raise
    except BaseException:
        await close_channel(channel)
        raise
    else:
        identity.known(str(answer.identifier), channel)


async def _known(channel: Any, request: Any, credentials: CredentialProvider | None) -> Any:
    """Call `Connect`, and again if the credentials were refused and can be refreshed."""
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
    answer = await (await ended_call(channel, ask, request, metadata=metadata))
    check_status(answer.status)
    return answer


class _IdentifierInterceptor:
    """Adds the identifier from `Connect` to the metadata of each call."""

    added: Metadata = ()
    refusal: grpc.RpcError | None = None

    def __init__(self, address: str) -> None:
        self.address = address
        #: The channel over which `Connect` was called; weakly, because errors keep their frames.
        self.greeted: Callable[[], Any] = lambda: None

    def known(self, identifier: str, channel: Any) -> None:
        """Take the identifier that the server gave to a channel."""
        self.added = (("identifier", identifier),)
        self.greeted = weakref.ref(channel)

    def refused(self, error: grpc.RpcError) -> None:
        """Take the error of a server that refuses; without its frames, which have the channel."""
        self.refusal = error.with_traceback(None)

    def check_connected(self) -> None:
        """Raise if the connection was lost: gRPC would open another, without a `Connect` call."""
        if (channel := self.greeted()) is not None and not is_connected(channel):
            del channel
            raise _lost(f"not sent: the connection to {self.address} was lost")


class _Identity(_IdentifierInterceptor, grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        self.check_connected()
        metadata = (*(client_call_details.metadata or ()), *self.added)
        details = with_details(client_call_details, metadata=metadata)
        outcome = continuation(details, request)
        # The answer of a call in progress (PyMilvus's `_async=True`) is read by its caller.
        over = outcome.done() and outcome.exception() is None
        if over and (reason := _not_primary(outcome.result(), self.address)):
            raise _lost(reason)
        return outcome


class _AsyncIdentity(_IdentifierInterceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        self.check_connected()
        metadata = (*(client_call_details.metadata or ()), *self.added)
        call = await continuation(client_call_details._replace(metadata=metadata), request)
        try:
            if not (reason := _not_primary(await call, self.address)):
                return call
            error = _lost(reason)
        except grpc.aio.AioRpcError as failure:
            error = failure.with_traceback(None)
        # Drop the call: the error's frames would keep it, and a closed channel goes on connecting
        # while a call over it is referenced.
        del call
        raise error


# -- probes ----------------------------------------------------------------------------------------


async def milvus_probe(channel: Any) -> bool:
    """Request the version over a channel of either kind; return whether the server answers."""
    ask = channel.unary_unary(
        f"{_SERVICE}/GetVersion",
        request_serializer=milvus_pb2.GetVersionRequest.SerializeToString,
        response_deserializer=milvus_pb2.GetVersionResponse.FromString,
    )
    request = milvus_pb2.GetVersionRequest()
    try:
        answer = await (await ended_call(channel, ask, request, timeout=PROBE_TIMEOUT))
    except grpc.RpcError as error:
        return error.code() in _WELL
    return bool(is_successful(answer.status))
