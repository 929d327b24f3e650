"""Clients that release their channel in `__del__`: the garbage collector may run it anywhere.

The clock is the trap: a manager reads it in the middle of its state changes, and a read there runs
the garbage collector, which frees unreferenced clients.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import Clock, IllegalMove, LoopThread
from moored.rpc import (
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    Handler,
    retry_on_rpc_failure,
)
from moored.rpc._manager import ChangeQueue
from moored.testing import mutant, scaled

from .handlers import ECHO, ENDLESS, FAIL, eventually
from .servers import EchoServer

LIMIT = 30.0
#: Limit for operations that must not block.
SOON = 9.0
#: At how many clock reads of a change the collector runs.
PLACES = 4


class Refused(Exception):
    """An application's error that asks for a new connection."""


class Client:
    """A client in a reference cycle that calls `on_collect` when it is collected."""

    def __init__(self, on_collect: Callable[[Client], object]) -> None:
        self.me = self
        self.on_collect = on_collect

    def __del__(self) -> None:
        self.on_collect(self)


class CollectingClock:
    """The system's clock; runs the garbage collector inside a state change."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.forgotten: list[Client] = []
        self.within: Callable[[], bool] = lambda: False
        #: How many reads inside a change to let pass first.
        self.patience = 0
        self.sprung = 0

    def set(self, client: Client, patience: int) -> None:
        self.forgotten, self.patience = [client], patience

    def __call__(self) -> float:
        if self.forgotten and self.within():
            self.patience -= 1
            if self.patience < 0:
                self.forgotten.clear()
                self.sprung += 1
                gc.collect()
        return time.monotonic() + self.ahead


class TrappedManager:
    """A manager with such a clock."""

    def __init__(self, server: EchoServer, **options: Any) -> None:
        self.trap = CollectingClock()
        self.config = ConnectionConfig.from_uri(server.uri)
        self.manager = ConnectionManager(
            clock=Clock(self.trap), classify=lambda error: isinstance(error, Refused), **options
        )
        self.channel = self.manager.get_or_create(self.config, timeout=LIMIT)
        # The loop thread makes all changes.
        self.trap.within = lambda: LoopThread.shared().is_current

    def line(self) -> dict[str, Any]:
        (only,) = (
            each for each in self.manager.get_stats()["connections"] if not each["dedicated"]
        )
        return dict(only)


@pytest.fixture
def trapped(echo: EchoServer) -> Iterator[TrappedManager]:
    gc.collect()
    gc.freeze()  # makes the many collections fast
    gc.disable()  # collect only inside of state changes
    made = TrappedManager(echo)
    try:
        yield made
    finally:
        gc.enable()
        made.manager.close()


@pytest.fixture
def finalizer_errors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Exceptions raised by finalizers."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


def within(limit: float, act: Callable[[], object]) -> None:
    """Run it in a daemon thread, because it may deadlock."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    assert not thread.is_alive(), "deadlock"
    if failures:
        raise failures[0]


# -- finalizers inside of a state change ----------------------------------------------------------


def take_named(trapped: TrappedManager) -> Client:
    client = Client(lambda me: trapped.manager.release(trapped.channel, client=me))
    trapped.manager.get_or_create(trapped.config, client=client, timeout=LIMIT)
    return client


def take_unnamed(trapped: TrappedManager) -> Client:
    channel = trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
    return Client(lambda me: channel.close())


def take_dedicated(trapped: TrappedManager) -> Client:
    channel = trapped.manager.get_or_create(trapped.config, dedicated=True, timeout=LIMIT)
    return Client(lambda me: channel.close())


def call_at_the_end(trapped: TrappedManager) -> Client:
    def finalize(me: Client) -> None:
        trapped.channel.unary_unary(ECHO)(b"bye", timeout=LIMIT)

    return Client(finalize)


def look(trapped: TrappedManager) -> None:
    trapped.manager.get_stats()


def check_out(trapped: TrappedManager) -> None:
    trapped.trap.within = lambda: True  # the caller's thread makes it
    assert trapped.manager.get_or_create(trapped.config) is trapped.channel
    trapped.manager.release(trapped.channel)


def open_another(trapped: TrappedManager) -> None:
    own = trapped.manager.get_or_create(trapped.config, dedicated=True, timeout=LIMIT)
    trapped.manager.release(own)


def check_out_idle(trapped: TrappedManager) -> None:
    trapped.trap.ahead += 1000.0
    assert trapped.manager.get_or_create(trapped.config, timeout=LIMIT) is trapped.channel
    trapped.manager.release(trapped.channel)


def recover(trapped: TrappedManager) -> None:
    assert trapped.manager.handle_error(trapped.channel, Refused(), timeout=LIMIT)


TAKES = [take_named, take_unnamed, take_dedicated, call_at_the_end]
MOMENTS = [look, check_out, open_another, check_out_idle, recover]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("take", TAKES, ids=lambda take: take.__name__)
def test_release_in_a_finalizer_inside_a_state_change_works(
    trapped: TrappedManager,
    finalizer_errors: list[Any],
    take: Callable[[TrappedManager], Client],
    moment: Callable[[TrappedManager], None],
) -> None:
    for patience in range(PLACES):
        trapped.trap.set(take(trapped), patience)
        within(SOON, lambda: moment(trapped))
        trapped.trap.forgotten.clear()
        gc.collect()
        assert trapped.trap.sprung or patience, "the collector did not run there"
    eventually(lambda: trapped.manager.get_stats()["dedicated_connections"] == 0)
    eventually(lambda: trapped.line()["client_count"] == 1)
    assert trapped.channel.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"
    assert not finalizer_errors


def close_everything(trapped: TrappedManager, limit: float) -> None:
    """A finalizer closes everything, in the middle of the probe of an idle connection."""
    for patience in range(PLACES):
        trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
        (managed,) = trapped.manager._table
        trapped.trap.set(Client(lambda me: trapped.manager.close_all()), patience)
        trapped.trap.ahead += 1000.0
        trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
        eventually(lambda managed=managed: managed.machine.at("stopped"), limit)  # type: ignore[misc]
    assert trapped.trap.sprung == PLACES


def test_close_all_in_a_finalizer_inside_a_state_change_works(
    trapped: TrappedManager, finalizer_errors: list[Any]
) -> None:
    within(LIMIT, lambda: close_everything(trapped, SOON))
    channel = trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
    assert channel.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"
    assert not finalizer_errors


def _changes_within_a_change(self: ChangeQueue, change: Callable[[], object]) -> None:
    if LoopThread.shared().is_current:
        change()
    else:
        _post(self, change)


_post = ChangeQueue.post


@mutant(ChangeQueue, "post", _changes_within_a_change, name="state changes nest")
def test_mutant_with_nested_state_changes_is_caught(
    trapped: TrappedManager, finalizer_errors: list[Any]
) -> None:
    # A closed connection would wait for a probe, and stay alive unnoticed.
    with pytest.raises((AssertionError, ConnectFailed, IllegalMove)):
        within(3.0, lambda: close_everything(trapped, 1.0))


def test_call_in_a_finalizer_inside_a_state_change_fails_instead_of_waiting(
    trapped: TrappedManager, finalizer_errors: list[Any]
) -> None:
    """There is no connection, and none can be made before the change has ended."""
    ended: list[grpc.RpcError] = []

    def finalize(me: Client) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            trapped.channel.unary_unary(ECHO)(b"bye", timeout=2 * SOON)
        ended.append(caught.value)

    trapped.channel.gate.live = None
    trapped.trap.set(Client(finalize), 0)
    within(SOON, lambda: look(trapped))
    assert [error.code() for error in ended] == [grpc.StatusCode.FAILED_PRECONDITION]
    assert "a finalizer made the call" in ended[0].details()
    assert not finalizer_errors


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "live"])
def test_retry_in_a_finalizer_inside_a_state_change_is_refused(
    trapped: TrappedManager, finalizer_errors: list[Any], lost: bool
) -> None:
    """The loop thread, which would have to connect, runs the finalizer."""
    ended: list[Any] = []
    channel = trapped.channel

    @retry_on_rpc_failure(handler=channel)
    def bye() -> bytes:
        answer: bytes = channel.unary_unary(FAIL)(b"UNAVAILABLE")
        return answer

    def finalize(me: Client) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            bye()
        ended.append(caught.value.code())
        ended.append(trapped.manager.handle_error(channel, Refused(), timeout=2 * SOON))

    if lost:
        channel.gate.live = None
    trapped.trap.set(Client(finalize), 0)
    within(SOON, lambda: look(trapped))
    codes = grpc.StatusCode
    assert ended == [codes.FAILED_PRECONDITION if lost else codes.UNAVAILABLE, False]
    assert not finalizer_errors


# -- other locks ------------------------------------------------------------


def test_release_under_a_handlers_lock_does_not_deadlock(echo: EchoServer) -> None:
    """The collector runs under a handler's lock, for which the loop thread waits."""
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, timeout=LIMIT)
        both = threading.Barrier(2)

        def collect() -> None:
            with channel.gate.changed:
                both.wait(LIMIT)
                channel.close()

        async def read() -> None:
            both.wait(LIMIT)
            assert channel.calls == 0

        def swap() -> None:
            LoopThread.shared().run(read(), LIMIT)

        threads = [threading.Thread(target=act, daemon=True) for act in (collect, swap)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        eventually(lambda: manager.get_stats()["connections"][0]["client_count"] == 0)


def test_release_under_the_loop_threads_lock_does_not_deadlock(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, dedicated=True, timeout=LIMIT)

        def collect() -> None:
            with LoopThread._sharing, LoopThread.shared()._lock:
                channel.close()

        within(SOON, collect)
        assert manager.get_stats()["total_connections"] == 0


def test_release_on_the_loop_thread_works(echo: EchoServer, finalizer_errors: list[Any]) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, dedicated=True, timeout=LIMIT)
        client = [Client(lambda me: channel.close()), Client(lambda me: manager.close_all())]

        async def collect() -> None:
            client.clear()
            gc.collect()

        LoopThread.shared().run(collect(), SOON)
        eventually(lambda: not manager._background._closings and not len(manager._table))
    assert not finalizer_errors


def test_close_of_a_channel_does_not_wait_for_its_calls(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `close_all` waits for calls in flight."""
    monkeypatch.setattr("moored.rpc._endpoint.CLOSING", LIMIT)
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, dedicated=True, timeout=LIMIT)
        numbers = channel.unary_stream(ENDLESS)(b"0.01")
        assert next(numbers) == b"0"
        within(3.0, channel.close)
        assert next(numbers) == b"1", "the stream was cut"
        ended = threading.Event()

        def end() -> None:
            manager.close_all()
            ended.set()

        threading.Thread(target=end, daemon=True).start()
        assert not ended.wait(0.2)
        numbers.cancel()
        assert ended.wait(SOON)


# -- where threads end, and begin anew -------------------------------------------------------------


def run_script(script: str, uri: str) -> list[str]:
    """Run a script in its own process, because this one must neither fork nor end."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), uri],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EXIT = """
    import sys
    from moored.rpc import ConnectionConfig, ConnectionManager

    class Client:
        def __init__(self):
            manager = ConnectionManager.get_instance()
            config = ConnectionConfig.from_uri(sys.argv[1])
            self.channel = manager.get_or_create(config, dedicated=True)
            self.ending, self.tell = sys.is_finalizing, sys.stdout.write

        def __del__(self):
            self.tell(f"finalizing: {self.ending()}\\n")
            self.channel.close()

    client = Client()
"""

#: The same, for a client that owns the manager.
EXIT_OF_A_MANAGER = EXIT.replace("self.channel.close()", "self.manager.close()").replace(
    "            manager = ConnectionManager.get_instance()",
    "            manager = self.manager = ConnectionManager()",
)


@pytest.mark.parametrize("script", [EXIT, EXIT_OF_A_MANAGER], ids=["channel", "manager"])
def test_release_at_interpreter_exit_does_not_hang(echo: EchoServer, script: str) -> None:
    assert run_script(script, echo.uri) == ["finalizing: True"]


#: A client that opens a connection at exit, and calls over a channel without one.
EXIT_WITH_WAITING_CALLS = (
    EXIT.replace(
        "            self.channel.close()",
        """            for wait in self.waits:
                began = self.now()
                try:
                    wait()
                except Exception as error:
                    self.tell(f"{type(error).__name__}, at once: {self.now() - began < 10}\\n")""",
    )
    .replace(
        "            self.ending,",
        """            self.channel.gate.live = None
            self.waits = (
                lambda: manager.get_or_create(config, dedicated=True),
                lambda: self.channel.unary_unary("/test/Echo")(b"bye"),
            )
            self.now = time.monotonic
            self.ending,""",
    )
    .replace("import sys", "import sys, time")
)


def test_waiting_calls_fail_at_interpreter_exit(echo: EchoServer) -> None:
    """No thread is left that could open a connection."""
    assert run_script(EXIT_WITH_WAITING_CALLS, echo.uri) == [
        "finalizing: True",
        "ManagerClosed, at once: True",
        "CallUnsent, at once: True",
    ]


FORK = """
    import gc, os, sys
    from moored.kernel import LoopThread
    from moored.rpc import ConnectionConfig, ConnectionManager

    class Client:
        def __init__(self, channel):
            self.me, self.channel = self, channel

        def __del__(self):
            self.channel.close()

    gc.disable()
    manager, config = ConnectionManager(), ConnectionConfig.from_uri(sys.argv[1])
    channel = manager.get_or_create(config)
    own = manager.get_or_create(config, dedicated=True)
    Client(own)
    begin = manager._new_background

    def collected():
        gc.collect()
        return begin()

    manager._new_background = collected

    async def nothing():
        pass

    child = os.fork()
    if child == 0:
        try:
            LoopThread.shared().run(nothing(), 5)
            assert manager.get_or_create(config, timeout=5) is channel
            dedicated = manager.get_stats()["dedicated_connections"]
            print("child:", channel.generation, dedicated, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    print("parent:", channel.generation, flush=True)
    manager.close()
"""


def test_release_in_a_child_right_after_the_fork_works(echo: EchoServer) -> None:
    assert run_script(FORK, echo.uri) == ["child: 2 0", "parent: 1"]


# -- an eager garbage collector ------------------------------------------------------------


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(23, 3, 3)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def test_release_in_finalizers_at_random_places_works(
    echo: EchoServer, eager_collector: None, finalizer_errors: list[Any]
) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        kept: Handler = manager.get_or_create(config, timeout=LIMIT)

        def named(me: Client) -> None:
            manager.release(kept, client=me)

        def work() -> None:
            for number in range(scaled(6000, least=400)):
                client = Client(named)
                assert manager.get_or_create(config, client=client) is kept
                manager.get_or_create(config)
                Client(lambda me: kept.close())
                if number % 3 == 0:
                    manager.get_stats()
                if number % 100 == 0:
                    own = manager.get_or_create(config, dedicated=True, timeout=LIMIT)
                    assert own.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"
                    client.on_collect = lambda me, own=own: own.close()  # type: ignore[misc]

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100.0)
        assert not any(thread.is_alive() for thread in threads), "deadlock"

        def all_gone() -> bool:
            gc.collect()  # no effect while another thread collects
            stats = manager.get_stats()
            shared = [line for line in stats["connections"] if not line["dedicated"]]
            return not stats["dedicated_connections"] and shared[0]["client_count"] == 1

        eventually(all_gone)
        assert kept.generation == 1
    assert not finalizer_errors
