"""Mistakes that are easily made by who uses it first: each is told, and what to do instead."""

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
    ("options", "told"),
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
def test_an_option_that_is_wrong_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ConnectionManager(**options)


@both
async def test_an_option_that_does_not_exist_is_named(kind: Kind) -> None:
    with pytest.raises(TypeError, match=r"'conect_timeout' is not known: there are .*connect_"):
        kind(conect_timeout=3)


@both
async def test_a_uri_is_no_configuration(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        for wrong, dedicated in ((echo.uri, False), (echo.uri, True), (None, False)):
            with pytest.raises(ConfigError, match=r"not \w+: make one with .*from_uri"):
                await side.get(wrong, dedicated=dedicated)  # type: ignore[arg-type]


def test_bytes_are_no_uri() -> None:
    with pytest.raises(ConfigError, match="the URI must be a str, not bytes"):
        ConnectionConfig.from_uri(b"http://localhost")  # type: ignore[arg-type]


@both
async def test_what_was_made_of_a_channel_is_not_given_back(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        patient: Any
        if kind is Threads:
            patient = grpc.intercept_channel(channel, RetryInterceptor(channel))
        else:
            patient = intercept_aio_channel(channel, AsyncRetryInterceptor(channel))
        for wrong in (patient, None):
            with pytest.raises(ConfigError, match="is not what get_or_create has returned"):
                await side.run(side.manager.release, wrong)
            with pytest.raises(ConfigError, match="is not what get_or_create has returned"):
                await side.run(side.manager.handle_error, wrong, grpc.RpcError())


@both
async def test_channels_and_managers_are_not_copied(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        for thing in (channel, side.manager):
            for act in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="pass the ConnectionConfig"):
                    act(thing)


def test_what_makes_credentials_does_not_use_the_manager(echo: EchoServer) -> None:
    config = config_of(echo)

    def credentials(asked: ConnectionConfig) -> None:
        if asked is not config:
            manager.get_or_create(config, timeout=LIMIT)

    with ConnectionManager(credentials=credentials) as manager:
        with pytest.raises(ConfigError, match="in the middle of a change of its own manager"):
            manager.get_or_create(ConnectionConfig.from_uri(echo.uri, token="secret"))
        assert manager.get_stats()["total_connections"] == 0


@both
async def test_what_cannot_be_asked_for_the_topology_is_told(kind: Kind, echo: EchoServer) -> None:
    async with kind(fetch_topology=["127.0.0.1:1"]) as side:
        with pytest.raises(ConfigError, match=r"fetch_topology must be a function .*not list"):
            await side.get(config_of(echo), timeout=LIMIT)


async def test_an_error_without_a_code_is_raised_as_it_is() -> None:
    @retry_on_rpc_failure
    def call() -> None:
        raise grpc.RpcError("of somebody's own")

    @retry_on_rpc_failure
    async def call_async() -> None:
        raise grpc.RpcError("of somebody's own")

    with pytest.raises(grpc.RpcError, match="of somebody's own"):
        call()
    with pytest.raises(grpc.RpcError, match="of somebody's own"):
        await call_async()


@both
async def test_a_factory_that_forgets_to_return_is_told(kind: Kind, echo: EchoServer) -> None:
    async with kind(handler_factory=lambda config: None) as side:
        with pytest.raises(ConfigError, match=r"needs a grpc\.(aio\.)?Channel, and .* is None"):
            await side.get(config_of(echo), timeout=LIMIT)


@both
async def test_channels_for_the_other_manager_are_told(kind: Kind, echo: EchoServer) -> None:
    options: dict[str, Any] = {"handler_factory": lambda config: make_channel(config, 1)}
    if kind is Threads:
        options = {"strategy": lambda config: AsyncRegularStrategy()}
    async with kind(**options) as side:
        with pytest.raises(ConfigError, match="is for the other kind of manager"):
            await side.get(config_of(echo), timeout=LIMIT)


@both
async def test_a_timeout_of_the_factory_is_not_the_servers(kind: Kind, echo: EchoServer) -> None:
    def factory(config: ConnectionConfig) -> Any:
        raise TimeoutError("the vault does not answer")

    async with kind(handler_factory=factory) as side:
        with pytest.raises(ConnectFailed, match="the vault does not answer"):
            await side.get(config_of(echo), timeout=1.0)
