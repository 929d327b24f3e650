"""Errors that no retry can fix are raised immediately in all waiting callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    HttpTopology,
    RetryInterceptor,
    TopologyError,
    intercept_aio_channel,
)
from moored.rpc._config import ConnectionConfig as Config
from moored.rpc._dial import make_aio_channel, make_channel
from moored.rpc._errors import TopologyRefused
from moored.rpc._verdicts import Verdict, judge, raised
from moored.rpc.calls._retry import AsyncRetryInterceptor
from moored.rpc.milvus._config import MilvusConfig

from .handlers import ECHO, loss_noticed_async
from .servers import EchoServer
from .sides import LIMIT, SIDES, Aio, Threads
from .topology_server import TopologyServer, body_of

both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]
#: How long callers would wait if the error were not raised.
PATIENT = 60.0
#: Much less than that, on any machine.
SOON = 10.0


class Factory:
    """Makes channels, or raises `error`."""

    def __init__(self, kind: Kind) -> None:
        self.make = make_channel if kind is Threads else make_aio_channel
        self.error: Exception | None = None
        self.tried = 0

    def __call__(self, config: ConnectionConfig) -> Any:
        self.tried += 1
        if self.error is not None:
            raise self.error
        return self.make(config, 5000 + self.tried)


def counters(side: Threads | Aio) -> dict[str, int]:
    found: dict[str, int] = side.manager.get_stats()["counters"]
    return found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "made", "verdict"),
    [
        (ConfigError("x"), False, Verdict.MISTAKE),
        (ConfigError("x"), True, Verdict.MISTAKE),
        (NameError("x"), False, Verdict.MISTAKE),
        (TypeError("x"), False, Verdict.MISTAKE),
        (ModuleNotFoundError("x"), False, Verdict.MISTAKE),
        # If the channel was made, the error may be transient.
        (TypeError("x"), True, Verdict.RETRY),
        (OSError("x"), False, Verdict.RETRY),
        (TimeoutError("x"), False, Verdict.RETRY),
        (ConnectFailed("x"), False, Verdict.RETRY),
        (TopologyError("x"), False, Verdict.RETRY),
        (grpc.RpcError("x"), False, Verdict.RETRY),
        (RuntimeError("x"), False, Verdict.RETRY),
        (KeyError("x"), False, Verdict.RETRY),
        (ValueError("x"), False, Verdict.RETRY),
    ],
)
def test_error_type_decides_whether_to_retry(
    error: Exception, made: bool, verdict: Verdict
) -> None:
    assert judge(error, made=made) is verdict


class WithoutSuchArguments(ConfigError):
    """An error that cannot be rebuilt from its args."""

    def __init__(self, part: str, why: str) -> None:
        super().__init__(f"{part}: {why}")


class RebuiltDifferently(ConfigError):
    """An error that would differ if rebuilt from its args."""

    def __init__(self, part: str, why: str = "wrong") -> None:
        super().__init__(f"{part}: {why}")


class WithAttributes(ConfigError):
    """An error with attributes beside its args."""

    part = ""


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (WithoutSuchArguments("vault", "closed"), ConfigError),
        (RebuiltDifferently("vault"), ConfigError),
        (WithAttributes("vault"), WithAttributes),
        (ConfigError("vault"), ConfigError),
        (TopologyRefused("vault"), TopologyRefused),
    ],
)
def test_each_waiting_caller_gets_its_own_copy_of_the_error(
    verdict: ConfigError, kind: type[Exception]
) -> None:
    verdict.__cause__ = OSError("why")
    if isinstance(verdict, WithAttributes):
        verdict.part = "lock"
    copy = raised(verdict, "host:1")
    assert copy is not verdict
    assert (type(copy), str(copy), copy.__cause__) == (kind, str(verdict), verdict.__cause__)
    assert getattr(copy, "part", "") == getattr(verdict, "part", "")


# -- at the first creation -------------------------------------------------------------------------


@both
async def test_unreadable_certificate_fails_all_waiting_callers(
    kind: Kind, echo: EchoServer, tmp_path: Path
) -> None:
    config = ConnectionConfig.from_uri(f"https://{echo.address}", ca=tmp_path / "nothing.pem")
    async with kind(connect_timeout=PATIENT) as side:
        begun = time.monotonic()
        outcomes = await asyncio.gather(
            *(side.get(config) for _ in range(5)), return_exceptions=True
        )
        assert time.monotonic() - begun < SOON
        assert [type(each) for each in outcomes] == [ConfigError] * 5
        assert "the option ca cannot be read" in str(outcomes[0])
        assert len({id(each) for each in outcomes}) == 5, "callers share one error object"
        with pytest.raises(ConfigError):
            await side.get(config, dedicated=True)
        await until(lambda: side.manager.get_stats()["total_connections"] == 0)


@both
async def test_invalid_certificate_fails_immediately(kind: Kind, echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(f"https://{echo.address}", ca=b"nothing of the kind")
    async with kind(connect_timeout=PATIENT) as side:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match="must be PEM"):
            await side.get(config)
        assert time.monotonic() - begun < SOON


@both
async def test_invalid_channel_options_fail_immediately(kind: Kind, echo: EchoServer) -> None:
    config = Config(echo.uri, echo.address, options={"channel_options": [("grpc.a", None)]})
    async with kind(connect_timeout=PATIENT) as side:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=r"no channel to .* can be made"):
            await side.get(config)
        assert time.monotonic() - begun < SOON


@both
async def test_defect_in_a_channel_factory_is_raised_and_the_next_caller_retries(
    kind: Kind, echo: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    factory = Factory(kind)
    factory.error = NameError("no such name")
    config = ConnectionConfig.from_uri(echo.uri)
    async with kind(connect_timeout=PATIENT, handler_factory=factory) as side:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match="no such name") as caught:
            await side.get(config)
        assert time.monotonic() - begun < SOON
        assert isinstance(caught.value.__cause__, NameError)
        assert (factory.tried, counters(side)["connect_failures"]) == (1, 1)
        assert "raise self.error" in caplog.text, "the log does not show the place"
        factory.error = None
        channel = await side.get(config)
        assert await side.call(channel, ECHO, b"hello") == b"hello"
        assert factory.tried == 2


@both
async def test_transient_error_is_retried(kind: Kind, echo: EchoServer) -> None:
    factory = Factory(kind)
    factory.error = OSError("not now")
    async with kind(connect_timeout=PATIENT, handler_factory=factory) as side:
        waiting = asyncio.create_task(side.get(ConnectionConfig.from_uri(echo.uri)))
        await until(lambda: factory.tried >= 3)
        factory.error = None
        assert await side.call(await waiting, ECHO, b"hello") == b"hello"


# -- later -----------------------------------------------------------------------------------------


def repeated(side: Threads | Aio, channel: Any) -> Any:
    """Return a channel whose calls are retried until their timeout."""
    if isinstance(side, Threads):
        return grpc.intercept_channel(channel, RetryInterceptor(channel))
    return intercept_aio_channel(channel, AsyncRetryInterceptor(channel))


@both
async def test_permanent_error_during_a_recovery_fails_all_waiting_callers(kind: Kind) -> None:
    factory = Factory(kind)
    with EchoServer() as server:
        config = ConnectionConfig.from_uri(server.uri)
        async with kind(connect_timeout=PATIENT, handler_factory=factory) as side:
            channel = await side.get(config)
            server.kill()
            factory.error = ConfigError("the certificate was taken away")
            with pytest.raises(grpc.RpcError) as caught:
                await side.call(channel, ECHO, b"", PATIENT)
            await loss_noticed_async(channel)
            begun = time.monotonic()
            handled = asyncio.create_task(side.handle_error(channel, caught.value))
            getting = asyncio.create_task(side.get(config))
            calls = [
                asyncio.create_task(side.call(each, ECHO, b"", PATIENT))
                for each in (channel, repeated(side, channel))
            ]
            await asyncio.wait([handled, getting, *calls])
            assert time.monotonic() - begun < SOON
            assert handled.result() is False, "handle_error() promised a recovery"
            assert isinstance(getting.exception(), ConfigError)
            for call in calls:
                error: Any = call.exception()
                assert issubclass(type(error), ConnectFailed)
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "not sent" in error.details()
                assert "the certificate was taken away" in error.details()
            # The same channel works again when the error is fixed.
            factory.error = None
            server.start()
            assert await side.call(channel, ECHO, b"hello") == b"hello"
            assert await side.get(config) is channel


@both
async def test_failed_renewal_keeps_the_old_channel(kind: Kind, echo: EchoServer) -> None:
    factory = Factory(kind)
    async with kind(connect_timeout=PATIENT, handler_factory=factory, max_age=1.0) as side:
        channel = await side.get(ConnectionConfig.from_uri(echo.uri))
        factory.error = TypeError("a mistake")
        await until(lambda: factory.tried >= 3)
        assert await side.call(channel, ECHO, b"hello") == b"hello"
        assert channel.generation == 1
        factory.error = None
        await until(lambda: channel.generation == 2)


# -- a topology server that refuses the token -----------------------------------------------------


@both
async def test_refused_token_fails_immediately_and_is_sent_again_rarely(
    kind: Kind, echo: EchoServer
) -> None:
    with TopologyServer(body_of(1, ("one", echo.uri, 3))) as server:
        server.reply = server.status(401)
        config = MilvusConfig.from_uri(f"{server.url}/global-cluster", token="wrong")
        async with kind(connect_timeout=PATIENT) as side:
            asked, begun = 0, time.monotonic()
            while time.monotonic() - begun < 1.0:
                with pytest.raises(TopologyError, match=r"\(HTTP 401\): give a valid one"):
                    await side.get(config)
                asked += 1
            # Immediately, and after 0.25, 0.5 and 1 s, each with jitter.
            assert len(server.requests) <= 4
            assert asked > len(server.requests)
            assert counters(side)["topology_fetch_failures"] == len(server.requests)
            with pytest.raises(ConnectFailed, match="give a valid one"):
                await side.get(config, dedicated=True)
            server.reply = server.tell
            async with asyncio.timeout(LIMIT):
                while True:
                    try:
                        channel = await side.get(config)
                    except TopologyError:
                        await asyncio.sleep(0.1)
                    else:
                        break
            assert await side.call(channel, ECHO, b"hello") == b"hello"


@both
async def test_refused_token_that_occurs_in_the_url_is_hidden(kind: Kind, echo: EchoServer) -> None:
    with TopologyServer(body_of(1, ("one", echo.uri, 3))) as server:
        server.reply = server.status(401)
        config = MilvusConfig.from_uri(f"{server.url}/global-cluster", token="topology:wrong")
        async with kind(connect_timeout=PATIENT) as side:
            begun = time.monotonic()
            with pytest.raises(TopologyRefused, match=r"\*\*\* does not accept the token"):
                await side.get(config)
            assert time.monotonic() - begun < SOON
            assert len(server.requests) == 1


@both
async def test_token_refused_later_keeps_the_known_topology(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    with EchoServer() as primary, TopologyServer(body_of(1, ("one", primary.uri, 3))) as server:
        config = MilvusConfig.from_uri(f"{server.url}/global-cluster", token="expired")
        async with kind(connect_timeout=PATIENT) as side:
            channel = await side.get(config)
            server.reply = server.status(401)
            primary.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO, b"", LIMIT)
            await loss_noticed_async(channel)
            with pytest.raises(ConnectFailed):
                await side.call(channel, ECHO, b"", 1.5)
            assert len(server.requests) == 2, "the refused token was sent repeatedly"
            assert caplog.text.count("does not accept the token (HTTP 401): give a valid one") == 1
            primary.start()
            assert await side.call(channel, ECHO, b"hello") == b"hello"


@both
async def test_unreadable_ca_of_a_topology_source_fails_immediately(
    kind: Kind, echo: EchoServer, tmp_path: Path
) -> None:
    source = HttpTopology("https://127.0.0.1:1", ca=tmp_path / "nothing.pem")
    async with kind(connect_timeout=PATIENT, fetch_topology=source) as side:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match="the option ca cannot be used"):
            await side.get(ConnectionConfig.from_uri(echo.uri))
        assert time.monotonic() - begun < SOON


@both
async def test_timeout_error_contains_the_reason_of_failed_topology_fetches(kind: Kind) -> None:
    """The caller or the attempt times out before the next fetch."""
    with TopologyServer() as server:
        server.reply = server.status(500)
        config = MilvusConfig.from_uri(f"{server.url}/global-cluster")
        async with kind(connect_timeout=1.0) as side:
            both = (side.get(config, timeout=1.0), side.get(config, timeout=2.0))
            for error in await asyncio.gather(*both, return_exceptions=True):
                assert isinstance(error, ConnectFailed)
                assert "in time: the topology could not be fetched so far: HTTP 500" in str(error)
