"""A program that forks while its threads call a gRPC server; run by `test_fork.py`.

It prints the outcomes of its children as JSON. A child that does not end in time prints where it
hangs, and is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

from moored.rpc import (
    AsyncConnectionManager,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    Handler,
    ManagerClosed,
    Member,
    Topology,
    _fork,
)

from .handlers import COUNT, new_live

warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested

#: How long a child may take.
LIMIT = 10.0
#: How long a call may take, in children and in the parent.
TIMEOUT = 5.0
ECHO = "/test.Echo/Echo"
SLEEP = "/test.Echo/Sleep"
ENDLESS = "/test.Echo/Endless"


def call(channel: grpc.Channel, request: bytes = b"hello") -> None:
    answer = channel.unary_unary(ECHO)(request, timeout=TIMEOUT)
    assert answer == request, answer


@contextlib.contextmanager
def fork_patience(seconds: float) -> Iterator[None]:
    """Set how long a fork waits for calls."""
    before, _fork.PATIENCE = _fork.PATIENCE, seconds
    try:
        yield
    finally:
        _fork.PATIENCE = before


#: The default; here, a fork may wait longer, because calls take long on a busy machine.
_PATIENCE, _fork.PATIENCE = _fork.PATIENCE, 5.0


def call_later(delay: float, channel: grpc.Channel) -> None:
    threading.Event().wait(delay)
    call(channel)


class Children:
    """Forks children, and counts their outcomes."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self.ends: Counter[str] = Counter()
        #: The durations of the forks. On a busy machine, one of several may take long.
        self.longest_fork, self.quickest_fork = 0.0, float("inf")

    def make(self, work: Callable[[], object], *, gently: bool = False) -> None:
        """Fork a child that does this, and ends with `os._exit` or, gently, as a normal program."""
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            faulthandler.register(signal.SIGUSR1)
            try:
                work()
            except BaseException as error:
                sys.stderr.write(f"child: {type(error).__name__}: {error}\n")
                os._exit(1)
            if gently:
                sys.exit(0)
            os._exit(0)
        took = time.monotonic() - began
        self.longest_fork = max(self.longest_fork, took)
        self.quickest_fork = min(self.quickest_fork, took)
        self.ends[self._end_of(pid)] += 1

    def _end_of(self, pid: int) -> str:
        over, pause = time.monotonic() + self._limit, threading.Event()
        while time.monotonic() < over:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                return "ok" if code == 0 else f"exit {code}" if code > 0 else f"signal {-code}"
            pause.wait(0.002)
        os.kill(pid, signal.SIGUSR1)  # it says where it is
        pause.wait(0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hung"


class Callers:
    """Threads that call continuously, and count failures."""

    def __init__(self, channel: grpc.Channel, threads: int = 3, timeout: float = TIMEOUT) -> None:
        self.calls = 0
        self._timeout = timeout
        self.errors: Counter[str] = Counter()
        self._channel = channel
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def _run(self, number: int) -> None:
        method = self._channel.unary_unary(ECHO)
        while not self._over.is_set():
            try:
                if number == 0:  # one of them with threads of gRPC's own
                    method.future(b"a", timeout=self._timeout).result()
                else:
                    method(b"a", timeout=self._timeout)
                self.calls += 1
            except Exception as error:
                self.errors[f"{type(error).__name__}: {error}"[:300]] += 1

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


class Server:
    """A server that the program can stop and kill."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        program = Path(__file__).with_name("echo_program.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), "--port", self.address.rpartition(":")[2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        """Stop it with SIGSTOP: it accepts connections, and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


# -- scenarios -------------------------------------------------------------------------------------


def calling(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """Three threads call continuously, and each child calls too."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        bound = channel.unary_unary(ECHO)  # a generated stub keeps such methods
        assert bound(b"a", timeout=TIMEOUT) == b"a"

        def work() -> None:
            assert bound(b"mine", timeout=TIMEOUT) == b"mine"
            call(channel)
            assert manager.get_or_create(config, timeout=TIMEOUT) is channel
            other = manager.get_or_create(config, dedicated=True, timeout=TIMEOUT)
            call(other)
            manager.release(other)
            call(ConnectionManager.get_instance().get_or_create(config, timeout=TIMEOUT))
            assert bound.future(b"b", timeout=TIMEOUT).result() == b"b"
            expect_deadline(channel)

        with Callers(channel) as callers:
            for number in range(forks):
                children.make(work, gently=number % 2 == 0)
        (line,) = manager.get_stats()["connections"]
    return report(children, callers, generation=line["generation"])


def expect_deadline(channel: grpc.Channel) -> None:
    """Check that timers work in a child."""
    failed = error_of(lambda: channel.unary_unary(SLEEP)(b"3", timeout=0.1))
    assert isinstance(failed, grpc.RpcError), failed
    assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED, failed


def error_of(use: Callable[[], object]) -> Exception:
    try:
        use()
    except Exception as error:
        return error
    raise AssertionError("it has not failed")


def silent(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """Children that never call, and end in both ways."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        with Callers(channel) as callers:
            for number in range(forks):
                children.make(lambda: None, gently=number % 2 == 0)
        (line,) = manager.get_stats()["connections"]
    return report(children, callers, generation=line["generation"])


def careless(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """A defect: the fork does not wait, while a call is in flight."""
    _fork._drain = lambda ends: True
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        with Callers(channel, 0) as callers:
            for _ in range(forks):
                slow = channel.unary_unary(SLEEP).future(b"1", timeout=TIMEOUT)
                time.sleep(0.1)
                children.make(lambda: None)
                assert slow.result() == b"1"
    return report(children, callers)


def watching(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """The state of the connection is watched, for which gRPC has a thread."""
    children = Children()
    states: list[grpc.ChannelConnectivity] = []
    with ConnectionManager(channels=2) as manager:
        channel = manager.get_or_create(config)
        channel.subscribe(states.append)
        with Callers(channel) as callers:
            for number in range(forks):
                states.clear()
                children.make(lambda: call(channel), gently=number % 2 == 0)
                while not states:  # again after each fork
                    time.sleep(0.01)
        assert states[-1] is grpc.ChannelConnectivity.READY, states
    return report(children, callers)


def watching_many(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """Many managers whose connections are watched: a fork waits for all at once."""
    children = Children()
    with contextlib.ExitStack() as stack:
        managers = [stack.enter_context(ConnectionManager()) for _ in range(12)]
        channels = [manager.get_or_create(config) for manager in managers]
        states: list[grpc.ChannelConnectivity] = []
        for channel in channels:
            channel.subscribe(states.append)
        while len(states) < len(channels):
            time.sleep(0.01)
        with Callers(channels[0], 1) as callers, fork_patience(_PATIENCE):
            for _ in range(forks):
                children.make(lambda: None)
    return report(children, callers)


def grandchildren(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """A child that calls from its own threads can fork, too."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)

        def work() -> None:
            own = Children(LIMIT / 3)
            with Callers(channel) as callers:
                for _ in range(3):
                    own.make(lambda: call(channel))
            assert own.ends == {"ok": 3}, own.ends
            assert not callers.errors, callers.errors
            call(channel)

        with Callers(channel) as callers:
            for _ in range(forks):
                children.make(work)
    return report(children, callers)


def several_forking(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """More than one thread forks."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)

        def fork() -> None:
            for _ in range(forks):
                children.make(lambda: call(channel))

        with Callers(channel, 1) as callers:
            threads = [threading.Thread(target=fork) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    return report(children, callers)


def recovering(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """Fork while a dead server is dialled repeatedly; it restarts, and all calls succeed."""
    children = Children()
    server = Server(config.address)
    server.start()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        call(channel)
        server.kill()
        with Callers(channel, timeout=30.0) as callers:
            while not callers.errors:  # until a caller has noticed
                time.sleep(0.01)
            for number in range(forks):
                children.make(lambda: expect_nobody(channel), gently=number % 2 == 0)
            noticed = sum(callers.errors.values())
            server.start()
            call(channel)
            for _ in range(forks):
                children.make(lambda: call(channel))
            errors = sum(callers.errors.values()) - noticed
        (line,) = manager.get_stats()["connections"]
    server.kill()
    # Each thread may notice the outage by one failed call; afterwards they wait.
    callers.errors.clear()
    return report(children, callers, generation=line["generation"], noticed=noticed, later=errors)


def expect_nobody(channel: grpc.Channel) -> None:
    began = time.monotonic()
    failed = error_of(lambda: channel.unary_unary(ECHO)(b"a", timeout=0.3))
    assert isinstance(failed, grpc.RpcError), failed
    assert time.monotonic() - began < LIMIT


def dark(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """Fork during connects and probes that never end: they must not delay it."""
    children = Children()
    with socket.create_server(("127.0.0.1", 0)) as hole, ConnectionManager(idle=0.2) as manager:
        nobody = ConnectionConfig.from_uri(f"http://127.0.0.1:{hole.getsockname()[1]}")
        channel = manager.get_or_create(config)
        stopped = Server(f"127.0.0.1:{free_port()}")
        stopped.start()
        probed = ConnectionConfig.from_uri(f"http://{stopped.address}")
        manager.get_or_create(probed)
        stopped.stop()
        time.sleep(0.3)
        over = threading.Event()

        def wait(config: ConnectionConfig) -> None:
            while not over.is_set():
                try:
                    manager.get_or_create(config, timeout=1.0)
                except ConnectFailed:
                    pass

        threads = [threading.Thread(target=wait, args=(each,)) for each in (nobody, probed)]
        for thread in threads:
            thread.start()
        with Callers(channel) as callers:
            for number in range(forks):
                children.make(lambda: call(channel), gently=number % 2 == 0)
        over.set()
        for thread in threads:
            thread.join(30)
        stopped.kill()
    return report(children, callers)


def refused(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """gRPC's fork support is disabled."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        with Callers(channel) as callers:
            for number in range(forks):
                work = functools.partial(expect_refusal, manager, channel, config)
                children.make(work, gently=number % 2 == 0)
    return report(children, callers)


def expect_refusal(
    manager: ConnectionManager, channel: grpc.Channel, config: ConnectionConfig
) -> None:
    """Check that a child's calls are refused instead of hanging, also with its own manager."""
    for use in (
        *[lambda: call(channel)] * 2,
        lambda: manager.get_or_create(config),
        lambda: ConnectionManager().get_or_create(config),
        lambda: grpc.channel_ready_future(channel).result(TIMEOUT),
        # A connect caused by one of these would have happened by now.
        *[lambda: call_later(0.05, channel)] * 4,
    ):
        failed = error_of(use)
        assert isinstance(failed, ManagerClosed), failed
        assert "was forked while" in str(failed), failed


def streaming(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """An endless stream: the child's calls are refused, and the parent continues."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        stream = channel.unary_stream(ENDLESS)(b"0.01")
        next(stream)

        work = functools.partial(expect_refusal, manager, channel, config)
        with Callers(channel) as callers, fork_patience(_PATIENCE):
            for number in range(forks):
                children.make(work, gently=number % 2 == 0)
                next(stream)
        stream.cancel()
        while channel.calls:
            time.sleep(0.001)
        children.make(lambda: call(channel))
    return report(children, callers)


def pooled(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """`multiprocessing` with its fork method."""
    children = Children()
    with ConnectionManager() as manager:
        _shared.append(manager.get_or_create(config))
        with Callers(_shared[0]) as callers:
            fork = multiprocessing.get_context("fork")
            with fork.Pool(3) as pool:
                answers = pool.map_async(_pooled, range(forks)).get(60)
            assert answers == list(range(forks)), answers
            for _ in range(3):
                process = fork.Process(target=_pooled, args=(1,))
                process.start()
                process.join(LIMIT)
                children.ends["ok" if process.exitcode == 0 else str(process.exitcode)] += 1
        _shared.clear()
    return report(children, callers)


_shared: list[grpc.Channel] = []


def _pooled(number: int) -> int:
    call(_shared[0], str(number).encode())
    return number


def moving(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """A child follows the topology by itself, also if the parent forks during a fetch."""
    children = Children()
    version = itertools.count(1)
    asked = threading.Event()

    def fetch() -> Topology:
        asked.set()
        if os.getpid() == parent:
            time.sleep(0.05)
        return Topology(next(version), (Member("one", config.address, 3),))

    parent = os.getpid()
    with ConnectionManager(fetch_topology=fetch) as manager:
        channel = manager.get_or_create(config)

        def work() -> None:
            call(channel)
            (managed,) = manager._table
            before = managed.strategy.topology.version
            asked.clear()
            managed.strategy._refresher.trigger()
            assert asked.wait(LIMIT / 2)
            while managed.strategy.topology.version == before:
                time.sleep(0.01)
            call(channel)

        with Callers(channel) as callers:
            for _ in range(forks):
                (managed,) = manager._table
                managed.strategy._refresher.trigger()
                children.make(work)
    return report(children, callers)


def with_asyncio(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """While an asyncio channel is open, a child is refused; afterwards, it makes its own."""
    children = Children()
    calls = 0

    async def own() -> None:
        async with AsyncConnectionManager() as manager:
            channel = await manager.get_or_create(config, timeout=TIMEOUT)
            assert await channel.unary_unary(ECHO)(b"a", timeout=TIMEOUT) == b"a"

    async def refused() -> None:
        for manager in (inherited[0], AsyncConnectionManager()):
            try:
                await manager.get_or_create(config, dedicated=True, timeout=TIMEOUT)
            except ManagerClosed as error:
                if "a grpc.aio channel was open" in str(error):
                    continue
            raise AssertionError("it was not refused")

    inherited: list[AsyncConnectionManager] = []

    async def main() -> None:
        nonlocal calls
        async with AsyncConnectionManager() as manager:
            inherited.append(manager)
            channel = await manager.get_or_create(config)
            for _ in range(forks):
                await channel.unary_unary(ECHO)(b"a", timeout=TIMEOUT)
                children.make(lambda: asyncio.run(refused()))
                await channel.unary_unary(ECHO)(b"a", timeout=TIMEOUT)
                calls += 1
            inherited.clear()

    for _ in range(2):
        asyncio.run(main())
        gc.collect()
        for thread in threading.enumerate():
            if "_poll_wrapper" in thread.name:  # gRPC's, which ends after the last channel
                thread.join(LIMIT)
        for number in range(forks):
            children.make(lambda: asyncio.run(own()), gently=number % 2 == 0)
    return {"ends": children.ends, "longest_fork": children.longest_fork, "calls": calls}


def waiting(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """Futures that wait for a connection: they end in a child, and continue in the parent."""
    children, handler = Children(), Handler(address=config.address)
    future = handler.unary_unary(ECHO).future(b"a", timeout=60.0)
    stream = handler.unary_stream(COUNT)(b"1", timeout=60.0)

    def read() -> None:
        for each in (future.result, stream.__next__):
            failed = error_of(each)
            assert isinstance(failed, ConnectFailed), failed
            assert "forked" in str(failed), failed
        assert future.code() is grpc.StatusCode.CANCELLED

    for _ in range(forks):
        children.make(read)
    handler._swap(new_live(f"http://{config.address}"))
    assert future.result() == b"a"
    handler._shut(0.0)
    return {"ends": children.ends, "calls": 1}


class Client:
    """A client object, for `client=`."""


def unused(config: ConnectionConfig, forks: int) -> dict[str, Any]:
    """A child drops the last client of an inherited connection, which is then closed."""
    children, client = Children(), Client()

    def use() -> None:
        nonlocal client
        call(channel)
        del client
        while manager.get_stats()["total_connections"]:
            time.sleep(0.01)

    with ConnectionManager(linger=0.2) as manager:
        channel = manager.get_or_create(config, client=client)
        with Callers(channel, 1) as callers:
            for _ in range(forks):
                children.make(use)
        (line,) = manager.get_stats()["connections"]
    return report(children, callers, generation=line["generation"])


def report(children: Children, callers: Callers, **more: Any) -> dict[str, Any]:
    return {
        "ends": children.ends,
        "longest_fork": children.longest_fork,
        "quickest_fork": children.quickest_fork,
        "calls": callers.calls,
        "errors": callers.errors,
        **more,
    }


SCENARIOS: dict[str, Callable[[ConnectionConfig, int], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        *(
            calling,
            silent,
            watching,
            watching_many,
            grandchildren,
            several_forking,
            recovering,
            dark,
        ),
        *(careless, refused, streaming, pooled, moving, with_asyncio, waiting, unused),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--uri", required=True)
    parser.add_argument("--forks", type=int, default=1)
    options = parser.parse_args()
    config = ConnectionConfig.from_uri(options.uri)
    outcome = SCENARIOS[options.scenario](config, options.forks)
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
