"""The manager for threads, against real servers that are killed and restarted."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    ManagerClosed,
    TokenCredentials,
)
from moored.testing import FaultProxy

from .handlers import ECHO, FAIL, PID, eventually, loss_noticed
from .servers import EchoServer

LIMIT = 30.0


class Client:
    """A client object, for `client=`."""


@pytest.fixture
def manager() -> Iterator[ConnectionManager]:
    with ConnectionManager(linger=1.0) as made:
        yield made


def config(server: EchoServer, **options: object) -> ConnectionConfig:
    return ConnectionConfig.from_uri(server.uri, **options)  # type: ignore[arg-type]


def call(channel: grpc.Channel, timeout: float = LIMIT) -> bytes:
    answer: bytes = channel.unary_unary(ECHO)(b"hello", timeout=timeout)
    return answer


def line(manager: ConnectionManager) -> dict[str, object]:
    (only,) = manager.get_stats()["connections"]
    return dict(only)


# -- sharing ---------------------------------------------------------------------------------------


def test_get_instance_returns_one_manager_per_process() -> None:
    assert ConnectionManager.get_instance() is ConnectionManager.get_instance()
    ConnectionManager.get_instance().close()
    assert not ConnectionManager.get_instance()._closed


def test_equal_endpoint_and_identity_share_a_channel(
    manager: ConnectionManager, echo: EchoServer
) -> None:
    one = manager.get_or_create(config(echo))
    assert manager.get_or_create(ConnectionConfig.from_uri(f"{echo.uri}/other")) is one
    assert manager.get_or_create(config(echo, token="else")) is not one
    assert call(one) == b"hello"
    stats = manager.get_stats()
    assert (stats["total_connections"], stats["shared_connections"]) == (2, 2)


def test_concurrent_threads_open_one_channel(manager: ConnectionManager, echo: EchoServer) -> None:
    found: list[grpc.Channel] = []
    threads = [
        threading.Thread(target=lambda: found.append(manager.get_or_create(config(echo))))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert line(manager)["generation"] == 1


def test_dedicated_channel_is_not_shared(manager: ConnectionManager, echo: EchoServer) -> None:
    shared, own = manager.get_or_create(config(echo)), manager.get_or_create(config(echo), True)
    assert own is not shared
    assert manager.get_stats()["dedicated_connections"] == 1
    manager.release(own)
    assert manager.get_stats()["dedicated_connections"] == 0
    with pytest.raises(ManagerClosed):
        call(own)
    assert call(shared) == b"hello"


def test_release_by_one_client_leaves_the_others_connected(
    manager: ConnectionManager, echo: EchoServer
) -> None:
    first, second = Client(), Client()
    channel = manager.get_or_create(config(echo), client=first)
    manager.get_or_create(config(echo), client=second)
    manager.release(channel, client=first)
    manager.release(channel, client=first)
    assert line(manager)["client_count"] == 1
    channel.close()  # a surplus close of a shared channel
    assert call(channel) == b"hello"
    del second
    gc.collect()
    eventually(lambda: manager.get_stats()["total_connections"] == 0)


@pytest.mark.parametrize("mark", ["\n", "\r", "\x00", "\x7f"])
def test_token_with_control_characters_is_refused(mark: str) -> None:
    """For example, one that was read from a file with its line end."""
    token = f"hunter2{mark}"
    makers: list[Callable[[], object]] = [
        lambda: ConnectionConfig.from_uri("http://host", token=token),
        lambda: ConnectionConfig.from_uri(f"http://{quote(token)}@host"),
        lambda: ConnectionConfig.from_uri("unix:///tmp/socket", token=token),
        lambda: TokenCredentials(token),
        lambda: TokenCredentials("fine").replace(token),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match=r"token .*line end") as caught:
            make()
        assert "hunter2" not in str(caught.value)


def test_encode_allows_any_characters_in_a_token() -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        TokenCredentials("gänse")
    encoded = TokenCredentials("gänse", encode=lambda token: token.encode().hex())
    assert encoded.metadata() == (("authorization", "gänse".encode().hex()),)


def test_closed_manager_refuses_channels_and_calls(echo: EchoServer) -> None:
    manager = ConnectionManager()
    channel = manager.get_or_create(config(echo))
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.get_or_create(config(echo))
    with pytest.raises(ManagerClosed):
        call(channel)


# -- recovery --------------------------------------------------------------------------------------


def test_calls_during_an_outage_wait_for_the_server(manager: ConnectionManager) -> None:
    with EchoServer() as server:
        channel = manager.get_or_create(config(server))
        pid = channel.unary_unary(PID)(b"")
        server.kill()
        with pytest.raises(grpc.RpcError):
            call(channel, 5.0)
        loss_noticed(channel)
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: answers.append(call(channel))) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        assert not answers
        server.start()
        for thread in threads:
            thread.join(LIMIT)
        assert answers == [b"hello"] * 20
        assert line(manager)["generation"] == 2, "more than one connection was made"
        assert channel.unary_unary(PID)(b"", timeout=LIMIT) != pid


def test_error_of_an_old_generation_changes_nothing(manager: ConnectionManager) -> None:
    with EchoServer() as server:
        channel = manager.get_or_create(config(server))
        server.kill()
        with pytest.raises(grpc.RpcError) as caught:
            call(channel, 5.0)
        loss_noticed(channel)
        server.start()
        assert manager.handle_error(channel, caught.value, timeout=LIMIT)
        assert line(manager)["generation"] == 2
        for _ in range(3):
            assert manager.handle_error(channel, caught.value)
        assert line(manager)["generation"] == 2


def test_error_that_no_reconnect_can_fix_is_not_handled(
    manager: ConnectionManager, echo: EchoServer
) -> None:
    channel = manager.get_or_create(config(echo))
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(FAIL)(b"INVALID_ARGUMENT", timeout=LIMIT)
    assert not manager.handle_error(channel, caught.value)
    assert line(manager)["generation"] == 1


def test_refused_connection_fails_with_the_address(manager: ConnectionManager) -> None:
    server = EchoServer()
    began = time.monotonic()
    with pytest.raises(ConnectFailed, match=server.address):
        manager.get_or_create(config(server), timeout=1.0)
    assert time.monotonic() - began < 5.0
    eventually(lambda: manager.get_stats()["total_connections"] == 0)


def test_hung_endpoint_does_not_block_other_endpoints(
    manager: ConnectionManager, echo: EchoServer
) -> None:
    channel = manager.get_or_create(config(echo))
    with FaultProxy("127.0.0.1", echo.port).in_thread() as proxy:
        proxy.black_hole()
        dark = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(manager.get_or_create, dark, timeout=LIMIT)
            began = time.monotonic()
            for _ in range(1000):
                assert manager.get_or_create(config(echo)) is channel
            assert time.monotonic() - began < LIMIT / 2, "a checkout waited for the other endpoint"
            assert not waiting.done()
            proxy.resume()
            assert waiting.result() is not channel


# -- health ----------------------------------------------------------------------------------------


def test_healthy_idle_connection_is_kept(echo: EchoServer) -> None:
    with ConnectionManager(idle=0.2) as manager:
        channel = manager.get_or_create(config(echo))
        time.sleep(0.3)
        assert manager.get_or_create(config(echo)) is channel
        assert line(manager)["generation"] == 1


def test_idle_connection_to_a_restarted_server_recovers() -> None:
    with EchoServer() as server, ConnectionManager(idle=0.2) as manager:
        channel = manager.get_or_create(config(server))
        server.kill()
        server.start()
        time.sleep(0.3)
        assert manager.get_or_create(config(server), timeout=LIMIT) is channel
        assert call(channel) == b"hello"


def test_channel_is_renewed_before_max_age(echo: EchoServer) -> None:
    with ConnectionManager(max_age=0.5) as manager:
        channel = manager.get_or_create(config(echo))
        ends = time.monotonic() + LIMIT
        while int(str(line(manager)["generation"])) < 3:
            assert time.monotonic() < ends
            assert call(channel) == b"hello"
            time.sleep(0.005)
