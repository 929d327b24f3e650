"""Clients that give their channel back in `__del__`: the garbage collector may call that anywhere.

The clock is the trap: a manager asks it for the time in the middle of its changes, and whenever it
is asked there, clients that were forgotten are collected.
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
from moored.rpc._changes import ManagerChanges, Work
from moored.testing import mutant, scaled

from .handlers import ECHO, ENDLESS, FAIL, eventually
from .servers import EchoServer

LIMIT = 30.0
#: No more than this may pass where nobody waits for anything.
SOON = 9.0
#: In how many places of a change the trap is set.
PLACES = 4


class Refused(Exception):
    """Something that a service says, and that another connection may mend."""


class Client:
    """One that is collected, as it is part of a cycle, and gives back what it has."""

    def __init__(self, give_back: Callable[[Client], object]) -> None:
        self.me = self
        self.give_back = give_back

    def __del__(self) -> None:
        self.give_back(self)


class Trap:
    """The system's clock, as far as can be seen."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.forgotten: list[Client] = []
        self.within: Callable[[], bool] = lambda: False
        #: How often it is asked before it springs.
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


class Trapped:
    """A manager, and what is found in the end."""

    def __init__(self, server: EchoServer, **options: Any) -> None:
        self.trap = Trap()
        self.config = ConnectionConfig.from_uri(server.uri)
        self.manager = ConnectionManager(
            clock=Clock(self.trap), classify=lambda error: isinstance(error, Refused), **options
        )
        self.channel = self.manager.get_or_create(self.config, timeout=LIMIT)
        self.trap.within = lambda: self.manager._changes.under_way()

    def line(self) -> dict[str, Any]:
        (only,) = (
            each for each in self.manager.get_stats()["connections"] if not each["dedicated"]
        )
        return dict(only)


@pytest.fixture
def trapped(echo: EchoServer) -> Iterator[Trapped]:
    gc.collect()
    gc.freeze()  # the trap collects often: it need not look at everything that was there before
    gc.disable()  # only where the trap is
    made = Trapped(echo)
    try:
        yield made
    finally:
        gc.enable()
        made.manager.close()


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What finalizers have raised."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


def within(limit: float, act: Callable[[], object]) -> None:
    """Do it in a thread of its own, as it may never end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    assert not thread.is_alive(), "it waits for itself"
    if failures:
        raise failures[0]


# -- what is done in the middle of a change --------------------------------------------------------


def take_named(trapped: Trapped) -> Client:
    client = Client(lambda me: trapped.manager.release(trapped.channel, client=me))
    trapped.manager.get_or_create(trapped.config, client=client, timeout=LIMIT)
    return client


def take_unnamed(trapped: Trapped) -> Client:
    channel = trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
    return Client(lambda me: channel.close())


def take_dedicated(trapped: Trapped) -> Client:
    channel = trapped.manager.get_or_create(trapped.config, dedicated=True, timeout=LIMIT)
    return Client(lambda me: channel.close())


def call_at_the_end(trapped: Trapped) -> Client:
    def part(me: Client) -> None:
        trapped.channel.unary_unary(ECHO)(b"bye", timeout=LIMIT)

    return Client(part)


def look(trapped: Trapped) -> None:
    trapped.manager.get_stats()


def check_out(trapped: Trapped) -> None:
    assert trapped.manager.get_or_create(trapped.config) is trapped.channel
    trapped.manager.release(trapped.channel)


def open_another(trapped: Trapped) -> None:
    own = trapped.manager.get_or_create(trapped.config, dedicated=True, timeout=LIMIT)
    trapped.manager.release(own)


def check_out_idle(trapped: Trapped) -> None:
    trapped.trap.ahead += 1000.0
    assert trapped.manager.get_or_create(trapped.config, timeout=LIMIT) is trapped.channel
    trapped.manager.release(trapped.channel)


def recover(trapped: Trapped) -> None:
    assert trapped.manager.handle_error(trapped.channel, Refused(), timeout=LIMIT)


TAKES = [take_named, take_unnamed, take_dedicated, call_at_the_end]
MOMENTS = [look, check_out, open_another, check_out_idle, recover]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("take", TAKES, ids=lambda take: take.__name__)
def test_it_is_given_back_in_the_middle_of_a_change(
    trapped: Trapped,
    complaints: list[Any],
    take: Callable[[Trapped], Client],
    moment: Callable[[Trapped], None],
) -> None:
    for patience in range(PLACES):
        trapped.trap.set(take(trapped), patience)
        within(SOON, lambda: moment(trapped))
        trapped.trap.forgotten.clear()
        gc.collect()
        assert trapped.trap.sprung or patience, "nothing was collected there"
    eventually(lambda: trapped.manager.get_stats()["dedicated_connections"] == 0)
    eventually(lambda: trapped.line()["client_count"] == 1)
    assert trapped.channel.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"
    assert not complaints


def close_everything(trapped: Trapped, limit: float) -> None:
    """A client closes everything, in the middle of the look at an idle connection."""
    for patience in range(PLACES):
        trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
        (managed,) = trapped.manager._table
        trapped.trap.set(Client(lambda me: trapped.manager.close_all()), patience)
        trapped.trap.ahead += 1000.0
        trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
        eventually(lambda managed=managed: managed.core.closed, limit)  # type: ignore[misc]
    assert trapped.trap.sprung == PLACES


def test_everything_is_closed_in_the_middle_of_a_change(
    trapped: Trapped, complaints: list[Any]
) -> None:
    within(LIMIT, lambda: close_everything(trapped, SOON))
    channel = trapped.manager.get_or_create(trapped.config, timeout=LIMIT)
    assert channel.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"
    assert not complaints


def _changes_within_a_change(self: ManagerChanges, change: Callable[[], Work]) -> None:
    with self._lock:
        work = change()
    self._post(work)


@mutant(ManagerChanges, "make", _changes_within_a_change, name="changes within a change")
def test_changes_within_a_change_are_noticed(trapped: Trapped, complaints: list[Any]) -> None:
    # One that is closed is made to wait for a probe, and lives on unseen.
    with pytest.raises((AssertionError, ConnectFailed, IllegalMove)):
        within(SOON, lambda: close_everything(trapped, 1.0))


def test_a_call_in_the_middle_of_a_change_does_not_wait_for_its_end(
    trapped: Trapped, complaints: list[Any]
) -> None:
    """There is no connection, and none can come before the change has ended."""
    ended: list[grpc.RpcError] = []

    def part(me: Client) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            trapped.channel.unary_unary(ECHO)(b"bye", timeout=2 * SOON)
        ended.append(caught.value)

    trapped.channel._lose()
    trapped.trap.set(Client(part), 0)
    within(SOON, lambda: look(trapped))
    assert [error.code() for error in ended] == [grpc.StatusCode.FAILED_PRECONDITION]
    assert "by a finalizer in the middle of a change" in ended[0].details()
    assert not complaints


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "live"])
def test_nor_is_it_repeated_there(trapped: Trapped, complaints: list[Any], lost: bool) -> None:
    """Nobody else gets the lock while a finalizer waits for another try."""
    ended: list[Any] = []
    channel = trapped.channel

    @retry_on_rpc_failure(handler=channel)
    def bye() -> bytes:
        answer: bytes = channel.unary_unary(FAIL)(b"UNAVAILABLE")
        return answer

    def part(me: Client) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            bye()
        ended.append(caught.value.code())
        ended.append(trapped.manager.handle_error(channel, Refused(), timeout=2 * SOON))

    if lost:
        channel._lose()
    trapped.trap.set(Client(part), 0)
    within(SOON, lambda: look(trapped))
    codes = grpc.StatusCode
    assert ended == [codes.FAILED_PRECONDITION if lost else codes.UNAVAILABLE, False]
    assert not complaints


# -- locks of others -------------------------------------------------------------------------------


def test_it_is_given_back_by_one_who_has_a_lock_that_another_wants(echo: EchoServer) -> None:
    """The collector ran under the lock of a handler; the manager wants that under its own."""
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, timeout=LIMIT)
        both = threading.Barrier(2)

        def collect() -> None:
            with channel._changed:
                both.wait(LIMIT)
                channel.close()

        def swap() -> None:
            with manager._lock:
                both.wait(LIMIT)
                assert channel.calls == 0

        threads = [threading.Thread(target=act, daemon=True) for act in (collect, swap)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
        eventually(lambda: manager.get_stats()["connections"][0]["client_count"] == 0)


def test_it_is_given_back_in_the_middle_of_a_submit(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, dedicated=True, timeout=LIMIT)

        def collect() -> None:
            with LoopThread._sharing, LoopThread.shared()._lock:
                channel.close()

        within(SOON, collect)
        assert manager.get_stats()["total_connections"] == 0


def test_it_is_given_back_on_the_loop_thread(echo: EchoServer, complaints: list[Any]) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, dedicated=True, timeout=LIMIT)
        client = [Client(lambda me: channel.close()), Client(lambda me: manager.close_all())]

        async def collect() -> None:
            client.clear()
            gc.collect()

        LoopThread.shared().run(collect(), SOON)
        eventually(lambda: not manager._background._closings and not len(manager._table))
    assert not complaints


def test_to_give_it_back_is_not_to_wait(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does wait for calls to end is `close_all`."""
    monkeypatch.setattr("moored.rpc._background.CLOSING", LIMIT)
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config, dedicated=True, timeout=LIMIT)
        numbers = channel.unary_stream(ENDLESS)(b"0.01")
        assert next(numbers) == b"0"
        within(3.0, channel.close)
        assert next(numbers) == b"1", "it may go on"
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
    """In a process of its own, because this one must neither fork nor end."""
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

#: The same, with one who owns the manager.
EXIT_OF_ALL = EXIT.replace("self.channel.close()", "self.manager.close()").replace(
    "            manager = ConnectionManager.get_instance()",
    "            manager = self.manager = ConnectionManager()",
)


@pytest.mark.parametrize("script", [EXIT, EXIT_OF_ALL], ids=["channel", "manager"])
def test_it_is_given_back_while_the_interpreter_ends(echo: EchoServer, script: str) -> None:
    assert run_script(script, echo.uri) == ["finalizing: True"]


#: One who wants another connection then, and makes a call over what has lost its own.
EXIT_OF_ONE_WHO_WAITS = (
    EXIT.replace(
        "            self.channel.close()",
        """            for wait in self.waits:
                began = self.now()
                try:
                    wait()
                except Exception as error:
                    self.tell(f"{type(error).__name__}, at once: {self.now() - began < 3}\\n")""",
    )
    .replace(
        "            self.ending,",
        """            self.channel._lose()
            self.waits = (
                lambda: manager.get_or_create(config, dedicated=True),
                lambda: self.channel.unary_unary("/test/Echo")(b"bye"),
            )
            self.now = time.monotonic
            self.ending,""",
    )
    .replace("import sys", "import sys, time")
)


def test_nobody_waits_while_the_interpreter_ends(echo: EchoServer) -> None:
    """There are no threads any more that could open a connection."""
    assert run_script(EXIT_OF_ONE_WHO_WAITS, echo.uri) == [
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
    begin = manager._begin

    def collected():
        gc.collect()
        begin()

    manager._begin = collected

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


def test_it_is_given_back_in_a_child_that_has_just_begun(echo: EchoServer) -> None:
    assert run_script(FORK, echo.uri) == ["child: 2 0", "parent: 1"]


# -- wherever it happens ---------------------------------------------------------------------------


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(23, 3, 3)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def test_collected_anywhere(echo: EchoServer, eager_collector: None, complaints: list[Any]) -> None:
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
                    client.give_back = lambda me, own=own: own.close()  # type: ignore[misc]

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100.0)
        assert not any(thread.is_alive() for thread in threads), "they wait for themselves"

        def all_gone() -> bool:
            gc.collect()  # nothing, if another thread does so at the moment
            told = manager.get_stats()
            shared = [line for line in told["connections"] if not line["dedicated"]]
            return not told["dedicated_connections"] and shared[0]["client_count"] == 1

        eventually(all_gone)
        assert kept.generation == 1
    assert not complaints
