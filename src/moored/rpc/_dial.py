"""Make a channel for a generation, and wait until it is connected.

gRPC channels with equal arguments share a connection, and with it the reconnect backoff: a new
channel to a server that is back up would wait for the backoff of the old one. So each generation
has its own subchannel pool and a unique argument, and Moored decides when to reconnect.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import HIDDEN, all_of, awaited, run_callback, start_thread

from ._channel_pool import lanes_of
from ._config import ConnectionConfig
from ._errors import ConfigError, ConnectFailed
from ._fork import enter, inside, leave
from ._tls_hints import unusable

__all__ = [
    "PROBE_TIMEOUT",
    "CredentialProvider",
    "Metadata",
    "TokenCredentials",
    "answers",
    "channel_options",
    "close_channel",
    "close_unused",
    "ended_call",
    "make_aio_channel",
    "make_channel",
    "ready",
    "refused",
    "reports_too_many_pings",
    "unavailable",
    "until_ready",
    "with_rarer_pings",
]

Metadata = Sequence[tuple[str, str | bytes]]

#: Default channel arguments; the user's options override them.
DEFAULTS: dict[str, int] = {
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    "grpc.enable_retries": 1,
    # Keepalive detects a vanished server while calls are in flight. By default, gRPC servers accept
    # one ping in 5 minutes, and none without calls; they close the connection of a client that
    # sends more. Unacknowledged requests are detected sooner, by TCP: with keepalive, gRPC sets
    # TCP_USER_TIMEOUT to the keepalive timeout.
    "grpc.keepalive_time_ms": 330_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # This overrides the keepalive timeout; its default is a minute.
    "grpc.http2.ping_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 0,
    # A call with `wait_for_ready` does not fail without a connection: it waits inside gRPC, by
    # default with a reconnect backoff that grows to two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
}

#: Errors for which reading a file again does not help.
_NO_FILE = {errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}

#: What the error of a server that received too many pings contains.
_TOO_MANY_PINGS = ("too_many_pings", "too many pings", "enhance_your_calm")

#: The timeout of a probe, in seconds.
PROBE_TIMEOUT = 5.0

_HEALTH = "/grpc.health.v1.Health/Check"
#: `grpc.health.v1.HealthCheckResponse` with the status SERVING.
_SERVING = b"\x08\x01"
#: Codes that gRPC itself returns when the server does not answer. Any other code is an answer of
#: the server, such as UNIMPLEMENTED or UNAUTHENTICATED.
_SILENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

#: Any method will do: the answer UNIMPLEMENTED shows that the server is reachable, too.
_ANY_METHOD = "/grpc.health.v1.Health/Check"
#: The codes of calls to an unreachable server, or over a closed channel.
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class CredentialProvider(Protocol):
    """Provides the credentials of each call; they may change, the identity must not.

    `metadata` is called for every call, so it should cache its result and renew it in time.

    A provider may also have a method `refresh()`, plain (it is called in a thread, so it may block)
    or async. It is called when the server refuses a call with UNAUTHENTICATED, once for all calls
    of a connection that were refused with the same credentials. The connection is kept. Calls that
    `retry_on_rpc_failure` or an interceptor retries use the new `metadata`; other calls fail.
    Credentials that are refused soon after a refresh are wrong: they are refreshed again only after
    a pause of 1 s, which grows to a minute. Without `refresh`, a refused call just fails.
    """

    def metadata(self) -> Metadata | Awaitable[Metadata]:
        """Return the pairs to add to a call's metadata; it may be async for asyncio only."""


class TokenCredentials:
    """Sends a token as `authorization` metadata; `replace` changes the token.

    :param fetch: returns a new token when the server refuses this one; plain or async.
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
        """Use another token, beginning with the next call."""
        sent = self._encode(token) if token else ""
        if not (sent.isascii() and sent.isprintable()):
            raise ConfigError(
                "the token cannot be sent as metadata: it has a character that is not printable "
                "ASCII (a line end, perhaps)"
            )
        self._metadata = (("authorization", sent),) if sent else ()
        self._token = token

    def stands_for(self, config: ConnectionConfig) -> bool:
        """Whether the configuration has no token, or the one that these credentials began with."""
        return config.token in ("", self._first)

    def token_for(self, config: ConnectionConfig) -> str:
        """Return the current token in place of the configuration's, if `stands_for` holds."""
        return self._token if self.stands_for(config) else config.token

    def metadata(self) -> Metadata:
        """Return the `authorization` pair, or nothing without a token."""
        return self._metadata

    def __repr__(self) -> str:
        return f"TokenCredentials({HIDDEN!r})" if self._metadata else "TokenCredentials('')"


def make_channel(config: ConnectionConfig, generation: int) -> grpc.Channel:
    """Return a new `grpc.Channel` that shares no connection with earlier generations."""
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
    """Return a new `grpc.aio.Channel` of the running loop; see `make_channel`."""
    options = channel_options(config, generation)
    secure = _tls(config)
    if secure is None:
        return grpc.aio.insecure_channel(config.address, options, interceptors=interceptors)
    return grpc.aio.secure_channel(config.address, secure, options, interceptors=interceptors)


def channel_options(config: ConnectionConfig, generation: int) -> list[tuple[str, Any]]:
    """Return the user's channel arguments, the defaults, and those that isolate a generation."""
    options: dict[str, Any] = {**DEFAULTS, **dict(config.options.get("channel_options") or ())}
    if config.options.get("server_name") and config.secure:
        options.setdefault("grpc.ssl_target_name_override", config.options["server_name"])
    if (policy := config.options.get("policy")) is not None:
        options["grpc.lb_policy_name"] = policy
    options["grpc.use_local_subchannel_pool"] = 1
    options["moored.generation"] = generation
    return list(options.items())


def unavailable(error: BaseException) -> bool:
    """Whether the error is UNAVAILABLE: a new connection may help.

    A live server may answer UNAVAILABLE, too.
    """
    code = getattr(error, "code", None)
    return callable(code) and code() is grpc.StatusCode.UNAVAILABLE


def refused(error: BaseException) -> bool:
    """Whether the error is UNAUTHENTICATED: the server refuses the credentials."""
    code = getattr(error, "code", None)
    return callable(code) and code() is grpc.StatusCode.UNAUTHENTICATED


def reports_too_many_pings(error: BaseException | None) -> bool:
    """Whether the server has ended the connection because it received too many pings."""
    details = getattr(error, "details", None)
    text = str(details() if callable(details) else error or "").lower()
    return any(words in text for words in _TOO_MANY_PINGS)


def with_rarer_pings(config: ConnectionConfig, factor: int) -> ConnectionConfig:
    """Return the configuration with the interval between pings multiplied by the factor."""
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


async def ready(channel: Any) -> None:
    """Wait until the server answers over a channel; raise `ConnectFailed` at the first failure.

    It takes both kinds of channels, on any loop, and has no timeout of its own. It makes a health
    check: any answer shows that the server is reachable. Watching the channel's state would not
    show why a connect fails; and for a `grpc.Channel`, gRPC watches with a thread that stays in its
    core for up to 0.2 s longer, which delays a close, and may break the child of a fork.
    """
    call = await ended_call(channel, channel.unary_unary(_ANY_METHOD))
    code = await call.code()
    if code in _NOT_THERE:
        why = await call.details() or code.name
        if (mistake := unusable(why)) is not None:
            raise mistake
        raise ConnectFailed(f"cannot connect to the server: {why}")


async def until_ready(kind: type, channel: Any) -> None:
    """Wait until the channel, or each channel of a pool, is connected.

    An object that is no gRPC channel and has no `channel_ready` counts as connected.

    :param kind: the kind of the manager's channels: `grpc.Channel` or `grpc.aio.Channel`.
    """
    await all_of(*(_until_ready(kind, lane) for lane in lanes_of(channel)))


async def _until_ready(kind: type, channel: Any) -> None:
    threads = kind is grpc.Channel
    if channel is None or isinstance(channel, grpc.aio.Channel if threads else grpc.Channel):
        raise ConfigError(
            f"handler_factory or the strategy must return a {'grpc' if threads else 'grpc.aio'}"
            ".Channel for this manager, "
            f"not {'None' if channel is None else 'a channel for the other kind of manager'}"
        )
    if isinstance(channel, kind):
        await ready(channel)
    elif (wait := getattr(channel, "channel_ready", None)) is not None:
        await wait()


async def answers(kind: type, channel: Any, probe: Callable[[Any], Any] | None) -> bool:
    """Whether the server answers over the channel, or over each channel of a pool.

    :param probe: checks one channel, plain or async; by default with `grpc.health.v1`.
    """
    return all(await all_of(*(_answers(kind, lane, probe) for lane in lanes_of(channel))))


async def _answers(kind: type, channel: Any, probe: Callable[[Any], Any] | None) -> bool:
    if probe is None:
        return await _is_serving(channel)
    if kind is grpc.aio.Channel:
        return bool(await awaited(probe(channel)))
    # A blocking call has a thread of its own.
    return bool(await run_callback(partial(_inside, probe, channel), name="moored-rpc-probe"))


def _inside(probe: Callable[[Any], Any], channel: grpc.Channel) -> Any:
    with inside():
        return probe(channel)


async def _is_serving(channel: Any) -> bool:
    call = await ended_call(channel, channel.unary_unary(_HEALTH), timeout=PROBE_TIMEOUT)
    code = await call.code()
    return bool(await call == _SERVING if code is grpc.StatusCode.OK else code not in _SILENT)


async def close_channel(channel: Any) -> None:
    """Close a channel of either kind, or a user's own object, without blocking the loop."""
    if isinstance(channel, grpc.Channel):
        await asyncio.to_thread(_close, channel)
    else:
        await awaited(channel.close())


def _close(channel: grpc.Channel) -> None:
    with inside():
        channel.close()


def close_unused(channel: Any) -> None:
    """Close the `grpc.Channel` of a cancelled attempt, in a thread: closing may block."""
    if isinstance(channel, grpc.Channel):
        start_thread(partial(_close, channel), name="moored-rpc-close")


async def ended_call(channel: Any, ask: Any, request: Any = b"", **options: Any) -> Any:
    """Make a unary call over a channel of either kind; return it when it has ended.

    Awaiting it again returns its response, or raises its error.
    """
    aio = isinstance(channel, grpc.aio.Channel)
    call = ask(request, **options) if aio else _AwaitableCall(ask, request, options)
    try:
        await call.code()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call


class _AwaitableCall:
    """A call over a `grpc.Channel` that can be awaited.

    Create it on the loop, and await `code` first.
    """

    def __init__(self, ask: Any, request: Any, options: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        enter()
        try:
            self._call = ask.future(request, **options)
        except BaseException:
            leave()
            raise
        self._call.add_done_callback(self._tell_loop)

    def _tell_loop(self, call: Any) -> None:
        # This runs in a thread of gRPC, which does not call back into gRPC's core.
        leave()
        try:
            self._loop.call_soon_threadsafe(_tell, self._over)
        except RuntimeError:  # the loop is closed: no task waits
            pass

    async def code(self) -> grpc.StatusCode:
        """Wait for the end of the call; return its status code."""
        await self._over
        return self._call.code()

    async def details(self) -> Any:
        """Return the details of the status."""
        return self._call.details()

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._call.result()

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()


def _tell(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
