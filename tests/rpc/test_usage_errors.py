"""Common usage errors: each raises an error that says what to do instead."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncRegularStrategy,
    AsyncRetryInterceptor,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    RegularStrategy,
    RetryInterceptor,
    TokenCredentials,
    intercept_aio_channel,
    retry_on_rpc_failure,
)
from moored.rpc._dial import make_channel

from .servers import EchoServer
from .sides import LIMIT, Kind, Threads, both, config_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connect_timeout": "5"}, "connect_timeout='5' must be more than 0 seconds"),
        ({"linger": None}, "linger=None must be more than 0 seconds"),
        ({"channels": 1.5}, "channels=1.5 must be at least 1"),
        ({"channels": "2"}, "channels='2' must be at least 1"),
        ({"classify": 5}, "classify must be a function, not int"),
        (
            {"credentials": TokenCredentials("secret")},
            "credentials must be a function, not TokenCredentials",
        ),
        ({"strategy": RegularStrategy()}, "strategy must be a function, not RegularStrategy"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_invalid_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConnectionManager(**options)


@both
async def test_unknown_option_is_named(kind: Kind) -> None:
    with pytest.raises(TypeError, match=r"'conect_timeout' is not known: there are .*connect_"):
        kind(conect_timeout=3)


@both
async def test_uri_in_place_of_a_configuration_is_refused(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        for wrong, dedicated in ((echo.uri, False), (echo.uri, True), (None, False)):
            with pytest.raises(ConfigError, match=r"not \w+: make one with .*from_uri"):
                await side.get(wrong, dedicated=dedicated)  # type: ignore[arg-type]


def test_bytes_in_place_of_a_uri_are_refused() -> None:
    with pytest.raises(ConfigError, match="the URI must be a str, not bytes"):
        ConnectionConfig.from_uri(b"http://localhost")  # type: ignore[arg-type]


@both
async def test_intercepted_channel_cannot_be_released_or_blamed(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind() as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        intercepted: Any
        if kind is Threads:
            intercepted = grpc.intercept_channel(channel, RetryInterceptor(channel))
        else:
            intercepted = intercept_aio_channel(channel, AsyncRetryInterceptor(channel))
        for wrong in (intercepted, None):
            with pytest.raises(ConfigError, match="was not returned by get_or_create"):
                await side.run(side.manager.release, wrong)
            with pytest.raises(ConfigError, match="was not returned by get_or_create"):
                await side.run(side.manager.handle_error, wrong, grpc.RpcError())


@both
async def test_channels_and_managers_cannot_be_copied_or_pickled(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind() as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        for thing in (channel, side.manager):
            for act in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="pass the ConnectionConfig"):
                    act(thing)


def test_credentials_factory_cannot_use_its_own_manager(echo: EchoServer) -> None:
    config = config_of(echo)

    def credentials(asked: ConnectionConfig) -> None:
        if asked is not config:
            manager.get_or_create(config, timeout=LIMIT)

    with ConnectionManager(credentials=credentials) as manager:
        with pytest.raises(ConfigError, match="called again from a credentials"):
            manager.get_or_create(ConnectionConfig.from_uri(echo.uri, token="secret"))
        assert manager.get_stats()["total_connections"] == 0


@both
async def test_invalid_topology_source_is_refused(kind: Kind, echo: EchoServer) -> None:
    async with kind(fetch_topology=["127.0.0.1:1"]) as side:
        with pytest.raises(ConfigError, match=r"fetch_topology must be a function .*not list"):
            await side.get(config_of(echo), timeout=LIMIT)


async def test_rpc_error_without_a_code_is_raised_unchanged() -> None:
    @retry_on_rpc_failure
    def call() -> None:
        raise grpc.RpcError("a custom error")

    @retry_on_rpc_failure
    async def call_async() -> None:
        raise grpc.RpcError("a custom error")

    with pytest.raises(grpc.RpcError, match="a custom error"):
        call()
    with pytest.raises(grpc.RpcError, match="a custom error"):
        await call_async()


@both
async def test_channel_factory_that_returns_none_is_refused(kind: Kind, echo: EchoServer) -> None:
    async with kind(handler_factory=lambda config: None) as side:
        with pytest.raises(ConfigError, match=r"a grpc\.(aio\.)?Channel .*, not None"):
            await side.get(config_of(echo), timeout=LIMIT)


@both
async def test_channel_or_strategy_of_the_other_manager_is_refused(
    kind: Kind, echo: EchoServer
) -> None:
    options: dict[str, Any] = {"handler_factory": lambda config: make_channel(config, 1)}
    if kind is Threads:
        options = {"strategy": lambda config: AsyncRegularStrategy()}
    async with kind(**options) as side:
        with pytest.raises(ConfigError, match="not a channel for the other kind of manager"):
            await side.get(config_of(echo), timeout=LIMIT)


@both
async def test_timeout_error_of_the_channel_factory_is_reported_as_such(
    kind: Kind, echo: EchoServer
) -> None:
    def factory(config: ConnectionConfig) -> Any:
        raise TimeoutError("the vault does not answer")

    async with kind(handler_factory=factory) as side:
        with pytest.raises(ConnectFailed, match="the vault does not answer"):
            await side.get(config_of(echo), timeout=1.0)
