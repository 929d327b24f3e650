"""Channels: how one is made for a generation, and when it is connected.

Two channels with equal arguments share a connection, and with it the pause after a failure: a new
channel to a server that has just come back would wait out what the old one has earned. So each
generation has a pool of its own and an argument that no other has. Pauses between attempts are
then ours to choose.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import HIDDEN, run_callback, start_thread

from ._config import ConnectionConfig
from ._errors import ConfigError, ConnectFailed
from ._fork import GrpcVisit, inside
from ._tls_hints import unusable

__all__ = [
    "AwaitableCall",
    "CredentialProvider",
    "Metadata",
    "TokenCredentials",
    "channel_options",
    "close_channel",
    "close_unused",
    "make_aio_channel",
    "make_channel",
    "ready",
    "reports_too_many_pings",
    "with_rarer_pings",
]

Metadata = Sequence[tuple[str, str | bytes]]

#: What we ask of each channel; the user's own options go before these.
DEFAULTS: dict[str, int] = {
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    "grpc.enable_retries": 1,
    # A server that has vanished is noticed while a call is under way. By default, gRPC's servers
    # accept one ping in 5 minutes, and none without calls; they end the connection of a client that
    # sends more. Requests that nobody acknowledges are noticed sooner, by TCP itself: with
    # keepalive, gRPC sets TCP_USER_TIMEOUT to its timeout.
    "grpc.keepalive_time_ms": 330_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # It has the last word on how long an answer may take: by default, a minute.
    "grpc.http2.ping_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 0,
    # A call with `wait_for_ready` does not tell that there is no connection: it waits inside its
    # channel, and by default with pauses that grow to two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
}

#: A file that cannot be read for one of these will not be readable later; for others, it may.
_NO_FILE = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}

#: What a server says that has received too many pings.
_TOO_MANY_PINGS = ("too_many_pings", "too many pings", "enhance_your_calm")

#: Any method will do to be answered: with "there is no such method", if need be.
_ANY_METHOD = "/grpc.health.v1.Health/Check"
#: What gRPC says of a server that it cannot reach, or of a channel that is closed.
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class CredentialProvider(Protocol):
    """Says for each call as whom it is made: what it returns may change, the identity does not.

    It is asked at every call, so it keeps what it knows, and renews that in good time.

    It may have a method `refresh()` as well, plain (it is called in a thread, so it may block) or
    async: called when the server has refused a call (UNAUTHENTICATED), once for all calls of a
    connection that were refused with the same credentials. The connection is kept. Calls that
    `retry_on_rpc_failure` or an interceptor repeats are made again with what `metadata` says then;
    others are raised. What is refused soon after a refresh is wrong: it is not refreshed again
    before a pause of 1 s, which grows to a minute. Without `refresh`, a refused call is raised and
    nothing more.
    """

    def metadata(self) -> Metadata | Awaitable[Metadata]:
        """What is added to the call's own metadata; only asyncio can wait for it."""


class TokenCredentials:
    """A token as `authorization`; `replace` gives it a new one.

    :param fetch: brings a new token when the server refuses this one, plain or async.
    """

    def __init__(
        self,
        token: str,
        *,
        encode: Callable[[str], str] = str,
        fetch: Callable[[], str | Awaitable[str]] | None = None,
    ) -> None:
        self._encode = encode
        self._metadata: Metadata = ()
        self._fetch = fetch
        self._first = token
        self.replace(token)

    @property
    def refresh(self) -> Callable[[], Awaitable[None]] | None:
        """The coroutine function that fetches a new token; None without `fetch`."""
        return None if self._fetch is None else self._refresh

    async def _refresh(self) -> None:
        fetch = self._fetch
        assert fetch is not None
        self.replace(await run_callback(fetch))

    def replace(self, token: str) -> None:
        """Use another token from the next call on."""
        sent = self._encode(token) if token else ""
        if not (sent.isascii() and sent.isprintable()):
            raise ConfigError(
                "the token cannot be sent as metadata: it has a mark in it that is not printable "
                "ASCII (a line end, perhaps)"
            )
        self._metadata = (("authorization", sent),) if sent else ()
        self._token = token

    def stands_for(self, config: ConnectionConfig) -> bool:
        """Whether the configuration's token is this one, or was when it began, or there is none."""
        return config.token in ("", self._first)

    def token_for(self, config: ConnectionConfig) -> str:
        """What the configuration's token is by now; one that was never this one stays as it is."""
        return self._token if self.stands_for(config) else config.token

    def metadata(self) -> Metadata:
        """The one pair, or nothing without a token."""
        return self._metadata

    def __repr__(self) -> str:
        return f"TokenCredentials({HIDDEN!r})" if self._metadata else "TokenCredentials('')"


def make_channel(config: ConnectionConfig, generation: int) -> grpc.Channel:
    """A channel for threads, not connected yet, that shares nothing with earlier generations."""
    options = channel_options(config, generation)
    secure = _tls(config)
    if secure is None:
        return grpc.insecure_channel(config.address, options)
    return grpc.secure_channel(config.address, secure, options)


def make_aio_channel(
    config: ConnectionConfig,
    generation: int,
    *,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
) -> grpc.aio.Channel:
    """The same for asyncio; it belongs to the running loop, and must be made on it."""
    options = channel_options(config, generation)
    secure = _tls(config)
    if secure is None:
        return grpc.aio.insecure_channel(config.address, options, interceptors=interceptors)
    return grpc.aio.secure_channel(config.address, secure, options, interceptors=interceptors)


def channel_options(config: ConnectionConfig, generation: int) -> list[tuple[str, Any]]:
    """The user's own first, then ours, then what makes this generation a stranger to the others."""
    given = config.options.get("channel_options") or ()
    options = dict(given.items() if isinstance(given, Mapping) else given)
    options = {**options, **{name: DEFAULTS[name] for name in DEFAULTS if name not in options}}
    if config.options.get("server_name") and config.secure:
        options.setdefault("grpc.ssl_target_name_override", config.options["server_name"])
    options["grpc.use_local_subchannel_pool"] = 1
    options["moored.generation"] = generation
    return list(options.items())


def reports_too_many_pings(error: BaseException | None) -> bool:
    """Whether the server has ended the connection because it received too many pings."""
    details = getattr(error, "details", None)
    told = str(details() if callable(details) else error or "").lower()
    return any(words in told for words in _TOO_MANY_PINGS)


def with_rarer_pings(config: ConnectionConfig, factor: int) -> ConnectionConfig:
    """The configuration with pings this many times rarer than configured."""
    if factor == 1:
        return config
    options = dict(channel_options(config, 0))
    given = config.options.get("channel_options") or ()
    slower = {"grpc.keepalive_time_ms": options["grpc.keepalive_time_ms"] * factor}
    return replace(config, options={**config.options, "channel_options": {**dict(given), **slower}})


def _tls(config: ConnectionConfig) -> grpc.ChannelCredentials | None:
    if not config.secure:
        return None
    if (given := config.options.get("channel_credentials")) is not None:
        return given
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(config, "ca"),
        private_key=_pem(config, "private_key"),
        certificate_chain=_pem(config, "certificate"),
    )


def _pem(config: ConnectionConfig, name: str) -> bytes | None:
    value = config.options.get(name)
    if value is None:
        return None
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.lstrip().startswith("-----BEGIN"):
        return value.encode()
    try:
        return Path(value).read_bytes()
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise ConfigError(f"the option {name} cannot be read: {error}") from error


# -- is it connected? ------------------------------------------------------------------------------


async def ready(channel: Any, address: str = "") -> None:
    """Wait until the server has answered over it; a first failure is the end: make another channel.

    It takes both kinds of channels, on any running loop, and has no limit of its own. It asks how
    the server is; whatever that says to it, it is there. To watch the channel's state instead
    would not tell why it fails. And gRPC does it, for threads, with one that stays in its core for
    up to 0.2 s longer: a close waits for it, and a fork in that time may break the child.
    """
    ask = channel.unary_unary(_ANY_METHOD)
    call = ask(b"") if _is_aio(channel) else AwaitableCall(ask)
    try:
        code = await call.code()
    except asyncio.CancelledError:
        call.cancel()
        raise
    if code in _NOT_THERE:
        why = await call.details() or code.name
        if (mistake := unusable(why)) is not None:
            raise mistake
        raise ConnectFailed(f"cannot connect to {address or 'the server'}: {why}")


async def close_channel(channel: Any) -> None:
    """Close a channel of either kind, without holding up the loop."""
    if _is_aio(channel):
        await channel.close()
    else:
        await asyncio.to_thread(_close, channel)


def _close(channel: grpc.Channel) -> None:
    with inside():
        channel.close()


def close_unused(channel: Any) -> None:
    """Close a channel that no caller wants any more, in a thread: closing may block."""
    if isinstance(channel, grpc.Channel):
        start_thread(partial(_close, channel), name="moored-rpc-close")


def _is_aio(channel: Any) -> bool:
    return isinstance(channel, grpc.aio.Channel)


class AwaitableCall:
    """A call of threads that is awaited; a fork of the process interrupts it, and it begins anew.

    It must be made on the loop, and `code` awaited.
    """

    def __init__(self, ask: Any, timeout: float | None = None) -> None:
        self._ask = ask
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._begin()

    def _begin(self) -> None:
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._visit = visit = GrpcVisit()
        try:
            self._call = self._ask.future(b"", timeout=self._timeout)
        except BaseException:
            visit.end()
            raise
        visit.on_interrupt(self._call.cancel)
        self._call.add_done_callback(partial(self._tell_loop, visit, self._over))

    def _tell_loop(self, visit: GrpcVisit, over: asyncio.Future[None], call: Any) -> None:
        # In a thread of gRPC's, which does not go back into it.
        visit.end()
        try:
            self._loop.call_soon_threadsafe(_tell, over)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    async def code(self) -> grpc.StatusCode:
        """Wait for the end of the call; return its status code."""
        await self._over
        while self._visit.interrupted:
            self._begin()
            await self._over
        return self._call.code()

    async def details(self) -> Any:
        """The details of the status."""
        return self._call.details()

    def answer(self) -> Any:
        """The answer of a call that has ended."""
        return self._call.result()

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()


def _tell(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
