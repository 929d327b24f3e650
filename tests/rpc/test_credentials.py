"""Credentials that a real server refuses: refreshed once, and not retried endlessly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import Backoff, Clock
from moored.rpc import (
    AsyncRetryInterceptor,
    ConnectionConfig,
    RetryInterceptor,
    TokenCredentials,
    intercept_aio_channel,
    retry_on_rpc_failure,
)
from moored.rpc._refusals import Refusals
from moored.rpc._secrets import safe_text, secrets_of

from .handlers import ACCEPT, ECHO, FAIL, METADATA
from .servers import EchoServer
from .sides import LIMIT, SIDES, Aio, Threads

both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]
Side = Threads | Aio


class Provider:
    """Credentials with one given token per refresh; the last one is repeated."""

    def __init__(self, token: str, *others: str) -> None:
        self.token = token
        self.others = list(others)
        self.refreshes = 0
        self.error: Exception | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", self.token),)

    def refresh(self) -> Any:
        self.refreshes += 1
        if self.error is not None:
            raise self.error
        if self.others:
            self.token = self.others.pop(0)


class AsyncProvider(Provider):
    """The same with an async refresh."""

    async def refresh(self) -> None:
        await asyncio.sleep(0.01)
        super().refresh()


class Fixed:
    """Credentials without a refresh."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", "old-token"),)


@pytest.fixture(scope="module")
def guarded() -> Iterator[EchoServer]:
    with EchoServer(token="new-token") as server:
        yield server


def config(server: EchoServer) -> ConnectionConfig:
    return ConnectionConfig.from_uri(server.uri)


async def refused(side: Side, channel: Any, request: bytes = b"UNAUTHENTICATED") -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        await side.call(channel, FAIL, request)
    return caught.value


def repeated(side: Side, channel: Any) -> Callable[..., Any]:
    """A call that is repeated by the decorator."""
    method = channel.unary_unary(ECHO)
    if isinstance(side, Threads):
        return retry_on_rpc_failure(handler=channel)(
            lambda *, timeout: method(b"hello", timeout=timeout)
        )

    async def call(*, timeout: float) -> bytes:
        answer: bytes = await method(b"hello", timeout=timeout)
        return answer

    return retry_on_rpc_failure(handler=channel)(call)


def intercepted(side: Side, channel: Any) -> Callable[..., Any]:
    """A call that is repeated by an interceptor."""
    if isinstance(side, Threads):
        above = grpc.intercept_channel(channel, RetryInterceptor(channel))
        return lambda *, timeout: above.unary_unary(ECHO)(b"hello", timeout=timeout)
    above = intercept_aio_channel(channel, AsyncRetryInterceptor(channel))

    async def call(*, timeout: float) -> bytes:
        answer: bytes = await above.unary_unary(ECHO)(b"hello", timeout=timeout)
        return answer

    return call


def counters(side: Side) -> dict[str, int]:
    found: dict[str, int] = side.manager.get_stats()["counters"]
    return found


# -- refreshed -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("make", [repeated, intercepted])
@pytest.mark.parametrize("provider", [Provider, AsyncProvider])
async def test_many_refused_callers_cause_one_refresh(
    kind: Kind, guarded: EchoServer, make: Any, provider: type[Provider]
) -> None:
    credentials = provider("old-token", "new-token")
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(config(guarded))
        call = make(side, channel)
        answers = await asyncio.gather(*(side.run(call, timeout=LIMIT) for _ in range(20)))
        assert answers == [b"hello"] * 20
        assert credentials.refreshes == 1
        assert channel.generation == 1, "the connection was replaced"
        now = counters(side)
        assert (now["credential_refreshes"], now["connects"], now["recoveries"]) == (1, 1, 0)


@both
async def test_refused_call_is_raised_and_the_next_one_has_the_new_token(
    kind: Kind, guarded: EchoServer
) -> None:
    credentials = Provider("old-token", "new-token")
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(config(guarded))
        with pytest.raises(grpc.RpcError) as caught:
            await side.call(channel, ECHO, b"hello")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await side.handle_error(channel, caught.value)
        assert await side.call(channel, ECHO, b"hello") == b"hello"
        assert credentials.refreshes == 1


@both
async def test_token_that_expires_again_is_refreshed_again(kind: Kind) -> None:
    credentials = Provider("a-token", "b-token", "c-token")
    with EchoServer(token="b-token") as server:
        async with kind(credentials=lambda config: credentials) as side:
            channel = await side.get(config(server))
            call = repeated(side, channel)
            assert await side.run(call, timeout=LIMIT) == b"hello"
            # The pause after a refresh, which protects against tokens that are always wrong.
            await asyncio.sleep(1.3)
            await side.call(channel, ACCEPT, b"c-token")
            assert await side.run(call, timeout=LIMIT) == b"hello"
            assert (credentials.refreshes, channel.generation) == (2, 1)


@both
async def test_call_that_began_before_a_refresh_causes_no_second_one(
    kind: Kind, echo: EchoServer
) -> None:
    credentials = Provider("old-token", "new-token")
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(config(echo))
        slow = asyncio.create_task(refused(side, channel, b"UNAUTHENTICATED 1.0"))
        await asyncio.sleep(0.3)
        quick = await refused(side, channel)
        assert await side.handle_error(channel, quick)
        assert not slow.done(), "the slow call ended before the refresh"
        assert await side.handle_error(channel, await slow), (
            "the caller may retry with the new token"
        )
        assert credentials.refreshes == 1
        assert not channel.endpoint.refusals.refused


# -- no endless retries ------------------------------------------------------------


@both
@pytest.mark.parametrize("make", [repeated, intercepted])
async def test_wrong_token_is_not_retried_endlessly(
    kind: Kind, guarded: EchoServer, make: Any
) -> None:
    credentials = Provider("old-token", "another-wrong-one")
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(config(guarded))
        call = make(side, channel)
        outcomes = await asyncio.gather(
            *(side.run(call, timeout=LIMIT) for _ in range(10)), return_exceptions=True
        )
        for outcome in outcomes:
            assert isinstance(outcome, grpc.RpcError)
            assert outcome.code() is grpc.StatusCode.UNAUTHENTICATED
        assert credentials.refreshes == 1
        assert channel.generation == 1


@both
async def test_refused_refreshed_token_is_not_refreshed_again_immediately(
    kind: Kind, echo: EchoServer
) -> None:
    credentials = Provider("old-token", "another-wrong-one")
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(config(echo))
        assert await side.handle_error(channel, await refused(side, channel))
        assert not await side.handle_error(channel, await refused(side, channel))
        assert not await side.handle_error(channel, await refused(side, channel))
        assert credentials.refreshes == 1
        assert counters(side)["connects"] == 1


@both
async def test_credentials_without_a_refresh_are_not_retried(
    kind: Kind, guarded: EchoServer
) -> None:
    async with kind(credentials=lambda config: Fixed()) as side:
        channel = await side.get(config(guarded))
        for call in (repeated(side, channel), intercepted(side, channel)):
            with pytest.raises(grpc.RpcError) as caught:
                await side.run(call, timeout=LIMIT)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not await side.handle_error(channel, caught.value)
        assert counters(side)["credential_refreshes"] == 0


@both
async def test_failed_refresh_is_logged_without_the_token(
    kind: Kind, guarded: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    credentials = Provider("old-token")
    credentials.error = OSError("the office is closed for old-token")
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(config(guarded))
        with pytest.raises(grpc.RpcError):
            await side.run(repeated(side, channel), timeout=LIMIT)
        assert counters(side)["credential_refresh_failures"] == 1
        (event,) = [each for each in side.manager.recorder.events() if "not refreshed" in each.text]
        assert event.because == ("the office is closed for *** (OSError)",)
        assert "old-token" not in caplog.text
        assert "the office is closed" in caplog.text


@both
async def test_hung_refresh_is_abandoned(kind: Kind, guarded: EchoServer) -> None:
    class Slow(Provider):
        async def refresh(self) -> None:
            await asyncio.Event().wait()

    async with kind(credentials=lambda config: Slow("old-token"), connect_timeout=1.0) as side:
        channel = await side.get(config(guarded))
        with pytest.raises(grpc.RpcError):
            await side.run(repeated(side, channel), timeout=LIMIT)
        assert counters(side)["credential_refresh_failures"] == 1


@both
async def test_caller_waits_for_a_refresh_until_its_timeout(
    kind: Kind, guarded: EchoServer
) -> None:
    may_end = asyncio.Event()

    class Slow(Provider):
        async def refresh(self) -> None:
            while not may_end.is_set():  # noqa: ASYNC110 - set on another loop
                await asyncio.sleep(0.01)

    async with kind(credentials=lambda config: Slow("old-token")) as side:
        channel = await side.get(config(guarded))
        began = asyncio.get_running_loop().time()
        with pytest.raises(grpc.RpcError) as caught:
            await side.run(repeated(side, channel), timeout=1.0)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert asyncio.get_running_loop().time() - began < 10.0
        may_end.set()


# -- tokens ----------------------------------------------------------------------------------------


@both
async def test_token_is_fetched_when_it_is_refused(kind: Kind, guarded: EchoServer) -> None:
    async def fetch() -> str:
        return "new-token"

    for bring in (lambda: "new-token", fetch):
        credentials = TokenCredentials("old-token", fetch=bring)
        async with kind(credentials=lambda config, made=credentials: made) as side:
            channel = await side.get(config(guarded))
            assert await side.run(repeated(side, channel), timeout=LIMIT) == b"hello"
            assert b"new-token" in await side.call(channel, METADATA)


def test_token_without_a_fetch_function_has_no_refresh() -> None:
    assert TokenCredentials("a").refresh is None


async def test_async_credentials_are_refreshed(guarded: EchoServer) -> None:
    class Later(AsyncProvider):
        async def metadata(self) -> Any:  # type: ignore[override]
            return super().metadata()

    credentials = Later("old-token", "new-token")
    async with Aio(credentials=lambda config: credentials) as side:
        channel = await side.get(config(guarded))
        assert await side.run(repeated(side, channel), timeout=LIMIT) == b"hello"
        assert credentials.refreshes == 1
        assert counters(side)["calls_waited"] == 0


# -- the decisions, without I/O ------------------------------------------------------------


def refusals() -> Refusals:
    return Refusals(Backoff(1.0, 4.0, jitter=0.0, clock=Clock.system()))


def test_pause_grows_while_refreshes_do_not_help() -> None:
    core, now = refusals(), 0.0
    pauses = []
    assert core.refuse(core.number, now)
    for _ in range(5):
        core.refreshed(None, now)
        began = now
        while not core.refuse(core.number, now):
            now += 0.25
        pauses.append(now - began)
    assert pauses[0] == 1.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == 4.0


def test_token_that_worked_gets_the_short_pause_again() -> None:
    core = refusals()
    for now in (0.0, 10.0, 20.0):
        assert core.refuse(core.number, now)
        core.refreshed(None, now)
        assert core.mended
        assert not core.refuse(core.number - 1, now + 0.5), "a refusal of an old token was accepted"
        assert core.mended
    assert core.refuse(core.number, 21.0)


def test_only_one_of_many_refusals_starts_a_refresh() -> None:
    core = refusals()
    assert not core.mended
    assert core.refuse(0, 0.0)
    assert not any(core.refuse(0, 0.0) for _ in range(10))
    core.refreshed(OSError(), 1.0)
    assert not core.mended
    assert core.number == 0


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((("authorization", "Bearer secret"),), "no *** for *** of *** (OSError)"),
        ((("authorization-bin", b"secret"),), "no *** for *** of *** (OSError)"),
    ],
)
def test_text_of_an_error_hides_secrets(known: Any, expected: str) -> None:
    error = OSError("no secret for root of password")
    assert safe_text(error, secrets_of("root:password", known)) == expected
