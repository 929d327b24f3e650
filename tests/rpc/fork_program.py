"""A program that forks while it uses gRPC in some way; run by `test_fork.py`.

It prints the outcomes of its children as JSON. A child that does not end in time prints where it
hangs, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

from moored import rpc
from moored.kernel import LoopThread
from moored.rpc import (
    AsyncConnectionManager,
    ConnectionConfig,
    ConnectionManager,
    Handler,
    ManagerClosed,
    Member,
    Topology,
    _fork,
)

from .handlers import COUNT, ECHO, ENDLESS, SLEEP, eventually

warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested

#: How long a child may take.
LIMIT = 20
#: How long a call may take, in children and in the parent.
TIMEOUT = 5.0

Config = ConnectionConfig
Report = dict[str, Any]


class Children:
    """Forks children one after the other, and counts their outcomes."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        #: The durations of the forks. On a busy machine, one of several may take long.
        self.took: list[float] = []

    def make(self, work: Callable[[], object], number: int = 1) -> None:
        """Fork children that do this; they end in turn as programs do, and with `os._exit`."""
        for _ in range(number):
            gently = len(self.took) % 2 == 0 and can_exit()
            began = time.monotonic()
            pid = os.fork()
            if pid == 0:
                run_child(work, gently=gently)
            self.took.append(time.monotonic() - began)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.ends["ok" if code == 0 else str(code)] += 1


def can_exit() -> bool:
    """Whether `sys.exit` ends the program here: not in other threads, nor in a loop."""
    return (
        asyncio._get_running_loop() is None
        and threading.current_thread() is threading.main_thread()
    )


def run_child(work: Callable[[], object], *, gently: bool) -> None:
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(LIMIT)
    try:
        work()
    except SystemExit:  # of a grandchild
        raise
    except BaseException as error:
        sys.stderr.write(f"child: {type(error).__name__}: {error}\n")
        os._exit(1)
    if gently:
        sys.exit(0)
    os._exit(0)


class Callers:
    """Threads that call continuously, and count failures."""

    def __init__(self, channel: grpc.Channel, threads: int = 3, timeout: float = TIMEOUT) -> None:
        self.calls = 0
        self.errors: Counter[str] = Counter()
        self._channel = channel
        self._timeout = timeout
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
        eventually(lambda: self.calls > 0 or bool(self.errors))
        return self

    def __exit__(self, *args: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


class Server:
    """A server that the program starts and kills."""

    def __init__(self, address: str = "") -> None:
        if not address:
            with socket.create_server(("127.0.0.1", 0)) as found:
                address = f"127.0.0.1:{found.getsockname()[1]}"
        self.address = address
        self.config = ConnectionConfig.from_uri(f"http://{address}")
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()

    def start(self) -> None:
        program = Path(__file__).with_name("echo_program.py")
        command = [sys.executable, str(program), "--port", self.address.rpartition(":")[2]]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


# -- what children do ------------------------------------------------------------------------------


def call(channel: grpc.Channel, request: bytes = b"hello") -> None:
    answer = channel.unary_unary(ECHO)(request, timeout=TIMEOUT)
    assert answer == request, answer


def error_of(use: Callable[[], object]) -> Exception:
    try:
        use()
    except Exception as error:
        return error
    raise AssertionError("it has not failed")


def expect_refusal(channel: Handler, manager: ConnectionManager, config: Config) -> None:
    """Check that all calls are refused at once, also with a manager and a channel of the child."""
    call_again = partial(call, channel)
    uses: tuple[Callable[[], object], ...] = (
        *[call_again] * 2,
        lambda: channel.unary_unary(ECHO).future(b"a"),
        lambda: channel.unary_stream(COUNT)(b"1"),
        lambda: grpc.channel_ready_future(channel),
        lambda: manager.get_or_create(config),
        lambda: ConnectionManager().get_or_create(config),
        lambda: call(rpc.channel(config.address, token="own")),
        lambda: asyncio.run(call_async(rpc.aio.channel(config.address))),
        # A connect caused by one of these would have happened by now.
        lambda: [threading.Event().wait(0.05), call_again()],
    )
    began = time.monotonic()
    for use in uses:
        refused = error_of(use)
        assert isinstance(refused, ManagerClosed), repr(refused)
        assert f"process {os.getpid()} was forked while" in str(refused), refused
        assert "start processes with the method spawn" in str(refused), refused
    assert not manager.renew(channel)
    assert not manager.handle_error(channel, refused)
    assert time.monotonic() - began < TIMEOUT
    manager.close()


async def call_async(channel: Any) -> None:
    assert await channel.unary_unary(ECHO)(b"a", timeout=TIMEOUT) == b"a"


# -- scenarios: gRPC is quiet ----------------------------------------------------------------------


def quiet(config: Config, forks: int) -> Report:
    """The parent has an open connection, over which it calls between the forks."""
    children = Children()
    lazy = rpc.channel(config.address)
    lazy_async = rpc.aio.channel(config.address)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        bound = channel.unary_unary(ECHO)  # a generated stub keeps such methods
        closed = ConnectionManager()
        before = closed.get_or_create(config)
        closed.close()

        def work() -> None:
            assert channel.generation == 0
            assert bound(b"mine", timeout=TIMEOUT) == b"mine"
            call(lazy)
            assert manager.get_or_create(config, timeout=TIMEOUT) is channel
            other = manager.get_or_create(config, dedicated=True, timeout=TIMEOUT)
            call(other)
            manager.release(other)
            assert bound.future(b"b", timeout=TIMEOUT).result() == b"b"
            assert len(list(channel.unary_stream(COUNT)(b"3", timeout=TIMEOUT))) == 3
            late = error_of(lambda: channel.unary_unary(SLEEP)(b"3", timeout=0.1))
            assert isinstance(late, grpc.RpcError), late
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED, late
            assert isinstance(error_of(lambda: call(before)), ManagerClosed)
            asyncio.run(call_async(lazy_async))
            manager.close()

        for _ in range(forks // 2):
            children.make(work, 2)
            assert bound(b"a", timeout=TIMEOUT) == b"a"
        return report(children, generation=channel.generation)


def lazy(config: Config, forks: int) -> Report:
    """As gunicorn does: an imported module has a channel, and the workers call over it."""
    children = Children()
    channel = rpc.channel(config.address)
    bound = channel.unary_unary(ECHO)
    assert threading.active_count() == 1, "a channel that was never called has a thread"
    ready, workers = os.pipe(), []
    for number in range(forks):  # all at once
        if (pid := os.fork()) == 0:
            os.close(ready[1])
            os.read(ready[0], 1)
            run_child(lambda: bound(b"a", timeout=TIMEOUT), gently=number % 2 == 0)
        workers.append(pid)
    os.close(ready[1])
    for pid in workers:
        children.ends[str(os.waitpid(pid, 0)[1] or "ok")] += 1
    assert channel.generation == 0
    call(channel)  # the parent, at last
    return report(children, generation=channel.generation)


def grandchildren(config: Config, forks: int) -> Report:
    """A child can fork, too; it is then a parent like any other."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        refused = partial(expect_refusal, channel, manager, config)

        def work(depth: int) -> None:
            call(channel)
            own = Children()
            if depth:
                own.make(partial(work, depth - 1), 2)
            stream = channel.unary_stream(ENDLESS)(b"0.01")
            next(stream)
            own.make(refused)
            stream.cancel()
            assert set(own.ends) == {"ok"}, own.ends

        for _ in range(forks):
            children.make(partial(work, 1))
            call(channel)
        return report(children, generation=channel.generation)


def several_forking(config: Config, forks: int) -> Report:
    """More than one thread forks."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        work = partial(call, channel)
        threads = [threading.Thread(target=children.make, args=(work, forks)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        call(channel)
        return report(children, generation=channel.generation)


def pooled(config: Config, forks: int) -> Report:
    """`multiprocessing` with its fork method."""
    children = Children()
    with ConnectionManager() as manager:
        _shared.append(manager.get_or_create(config))
        fork = multiprocessing.get_context("fork")
        with fork.Pool(3) as pool:
            assert pool.map_async(_pooled, range(12)).get(60) == list(range(12))
        for _ in range(forks):
            process = fork.Process(target=_pooled, args=(1,))
            process.start()
            process.join(LIMIT)
            children.ends["ok" if process.exitcode == 0 else str(process.exitcode)] += 1
        call(_shared[0])
        return report(children, generation=_shared.pop().generation)


_shared: list[Handler] = []


def _pooled(number: int) -> int:
    call(_shared[0], str(number).encode())
    return number


def moving(config: Config, forks: int) -> Report:
    """A child follows the topology by itself, also if the parent forks during a fetch."""
    children = Children()
    version = itertools.count(1)
    fetching = threading.Event()

    def fetch() -> Topology:
        fetching.set()
        if os.getpid() == parent:
            time.sleep(0.05)
        return Topology(next(version), (Member("one", config.address, 3),))

    parent = os.getpid()
    with ConnectionManager(fetch_topology=fetch) as manager:
        channel = manager.get_or_create(config)

        def fetch_again() -> None:
            fetching.clear()
            channel.endpoint.strategy._refresher.trigger()
            assert fetching.wait(TIMEOUT)

        def work() -> None:
            call(channel)
            before = channel.endpoint.strategy.topology.version
            fetch_again()
            eventually(lambda: channel.endpoint.strategy.topology.version > before)
            call(channel)

        for _ in range(forks):
            fetch_again()
            children.make(work)
            call(channel)
        return report(children, generation=channel.generation)


class Client:
    """A client object, for `client=`."""


def unused(config: Config, forks: int) -> Report:
    """A child drops the last client of an inherited connection, which is then closed."""
    children, client = Children(), Client()

    def use() -> None:
        nonlocal client
        call(channel)
        del client
        eventually(lambda: manager.get_stats()["total_connections"] == 0)

    with ConnectionManager(linger=0.2) as manager:
        channel = manager.get_or_create(config, client=client)
        children.make(use, forks)
        call(channel)
        return report(children, generation=channel.generation)


def locked(config: Config, forks: int) -> Report:
    """Another thread holds each lock of the package at the fork."""
    children = Children()

    def make(work: Callable[[], object], *locks: Any) -> None:
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                over.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        children.make(work, forks)
        over.set()
        thread.join()

    make(lambda: call(rpc.channel(config.address)), ConnectionManager._making)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)

        def work() -> None:
            call(channel)
            call(manager.open_channel(config))
            call(ConnectionManager.get_instance().get_or_create(config))
            assert manager.get_stats()["total_connections"] == 1

        locks = (manager._table._lock, channel.gate.changed, LoopThread._sharing)
        make(work, ConnectionManager._making, *locks)
        call(channel)
        return report(children, generation=channel.generation)


# -- scenarios: gRPC is at work --------------------------------------------------------------------


def calling(config: Config, forks: int) -> Report:
    """Three threads call continuously: each child is refused, and no call of theirs is lost."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        with Callers(channel) as callers:
            children.make(partial(expect_refusal, channel, manager, config), forks)
        children.make(partial(call, channel))
        call(channel)
        return report(children, generation=channel.generation, **vars_of(callers))


def silent(config: Config, forks: int) -> Report:
    """Children that never call."""
    children = Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        with Callers(channel) as callers:
            children.make(lambda: None, forks)
        return report(children, generation=channel.generation, **vars_of(callers))


def vars_of(callers: Callers) -> Report:
    return {"calls": callers.calls, "errors": callers.errors}


@contextlib.contextmanager
def in_thread(use: Callable[[], object], begun: Callable[[], bool]) -> Iterator[None]:
    """Do this in another thread, until the block ends; its errors do not matter."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use)
        eventually(begun)
        yield


def is_inside() -> bool:
    return bool(_fork._inside)


@contextlib.contextmanager
def connecting(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        nobody = ConnectionConfig.from_uri(f"http://127.0.0.1:{hole.getsockname()[1]}")
        with in_thread(partial(manager.get_or_create, nobody, timeout=2.0), is_inside):
            yield


@contextlib.contextmanager
def probing(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    """The server accepts connections, and does not answer."""
    with Server() as server, ConnectionManager(idle=0.01) as own:
        own.get_or_create(server.config)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.02)
        with in_thread(partial(own.get_or_create, server.config, timeout=2.0), is_inside):
            yield
        server.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def closing(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    over = threading.Event()

    def factory(config: Config) -> grpc.Channel:
        made = grpc.insecure_channel(config.address)
        made.close = over.wait
        return made

    with ConnectionManager(handler_factory=factory) as own:
        own.get_or_create(channel.endpoint.config)
        with in_thread(own.close, is_inside):
            yield
            over.set()


@contextlib.contextmanager
def making(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    """An async factory of channels, which may talk to the server."""

    async def factory(config: Config) -> grpc.Channel:
        await asyncio.sleep(1.0)
        return grpc.insecure_channel(config.address)

    with (
        ConnectionManager(handler_factory=factory) as own,
        in_thread(partial(own.get_or_create, channel.endpoint.config), is_inside),
    ):
        yield


@contextlib.contextmanager
def streaming(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    stream = channel.unary_stream(ENDLESS)(b"0.01")
    next(stream)
    yield
    next(stream)  # the parent's goes on
    stream.cancel()


@contextlib.contextmanager
def dropping(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    """The garbage collector cancels the stream: a thread of gRPC has not noticed yet."""
    stream = channel.unary_stream(ENDLESS)(b"0.01")
    next(stream)
    del stream
    assert not channel.calls
    yield


@contextlib.contextmanager
def watching(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    """The state of the connection is watched, for which gRPC has a thread."""
    states: list[grpc.ChannelConnectivity] = []
    channel.subscribe(states.append)
    eventually(lambda: grpc.ChannelConnectivity.READY in states)
    yield
    channel.unsubscribe(states.append)


@contextlib.contextmanager
def watched(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    """The state was watched: gRPC's thread ends later."""
    grpc.channel_ready_future(channel).result(TIMEOUT)
    yield


@contextlib.contextmanager
def serving(channel: Handler, manager: ConnectionManager) -> Iterator[None]:
    """A server in this process: its threads are always inside gRPC."""
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield
    server.stop(0).wait()
    eventually(lambda: not _is_serving())


def _is_serving() -> bool:
    _fork._before()
    return _fork._served


WORK = {
    each.__name__: each
    for each in (
        *(connecting, probing, closing, making, streaming),
        *(dropping, watching, watched, serving),
    )
}


def at_work(kind: str, config: Config, forks: int) -> Report:
    """gRPC is at work in one way at the fork: each child is refused, and can call afterwards."""
    children, later = Children(), Children()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        for _ in range(forks):
            with WORK[kind](channel, manager):
                children.make(partial(expect_refusal, channel, manager, config))
                call(channel)
        time.sleep(_fork.LEAVING)
        later.make(partial(call, channel), 2)
        call(channel)
        return report(children, generation=channel.generation, later=later.ends)


def disabled(config: Config, forks: int) -> Report:
    """gRPC's fork support is disabled: that matters once gRPC was used."""
    children = Children()
    unused = rpc.channel(config.address, token="lazy")
    children.make(partial(call, unused), forks)
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config)
        children.make(partial(expect_refusal, channel, manager, config), forks)
        call(channel)
        return report(children, generation=channel.generation)


def with_asyncio(config: Config, forks: int) -> Report:
    """While an asyncio channel is open, a child is refused; afterwards, it makes its own."""
    children = Children()

    async def own() -> None:
        async with AsyncConnectionManager() as manager:
            await call_async(await manager.get_or_create(config, timeout=TIMEOUT))

    async def refused() -> None:
        for manager in (*inherited, AsyncConnectionManager()):
            try:
                await manager.get_or_create(config, dedicated=True, timeout=TIMEOUT)
            except ManagerClosed as error:
                assert "a grpc.aio channel was open" in str(error), error  # noqa: PT017
            else:
                raise AssertionError("it was not refused")

    def all_refused() -> None:
        asyncio.run(refused())
        with ConnectionManager() as threads:
            expect_refusal(threads.open_channel(config), threads, config)

    inherited: list[AsyncConnectionManager] = []

    async def main() -> None:
        async with AsyncConnectionManager() as manager:
            inherited.append(manager)
            channel = await manager.get_or_create(config)
            for _ in range(forks):
                await call_async(channel)
                children.make(all_refused)
            await call_async(channel)
            assert channel.generation == 1
            inherited.clear()

    for _ in range(2):
        asyncio.run(main())
        gc.collect()
        for thread in threading.enumerate():
            if "_poll_wrapper" in thread.name:  # gRPC's, which ends after the last channel
                thread.join(TIMEOUT)
        children.make(lambda: asyncio.run(own()), forks)
    return report(children)


class SlowCredentials:
    """Credentials whose metadata takes long, in the parent."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def metadata(self) -> list[tuple[str, str]]:
        self.asked.set()
        self.go_on.wait()
        return []


def waiting(config: Config, forks: int) -> Report:
    """Calls that wait for a connection: they end in a child, and continue in the parent.

    In between, a thread takes one of them to start it.
    """
    children, server, slow = Children(), Server(), SlowCredentials()
    with ConnectionManager(credentials=lambda config: slow) as manager:
        channel = manager.open_channel(server.config)
        future = channel.unary_unary(ECHO).future(b"a", timeout=60.0)
        stream = channel.unary_stream(COUNT)(b"1", timeout=60.0)

        def read() -> None:
            for each, use in ((future, future.result), (stream, stream.__next__)):
                failed = error_of(use)
                assert isinstance(failed, grpc.RpcError), failed
                assert "forked" in str(failed), failed
                assert each.code() is grpc.StatusCode.CANCELLED
                assert not each.cancel()

        children.make(read, forks)
        server.start()
        assert slow.asked.wait(30)
        assert len(channel.gate.pending) == 1
        children.make(read, forks)
        slow.go_on.set()
        assert future.result() == b"a"
        assert list(stream) == [b"0"]
        generation = channel.generation
    server.kill()
    return report(children, generation=generation)


def recovering(config: Config, forks: int) -> Report:
    """Fork while a dead server is dialled repeatedly; it restarts, and all calls succeed."""
    children, server = Children(), Server()
    server.start()
    with ConnectionManager() as manager:
        channel = manager.get_or_create(server.config)

        def try_in_vain() -> None:
            failed = error_of(lambda: channel.unary_unary(ECHO)(b"a", timeout=0.3))
            assert isinstance(failed, (grpc.RpcError, ManagerClosed)), failed

        call(channel)
        server.kill()
        with Callers(channel, timeout=30.0) as callers:
            eventually(lambda: callers.errors.total() > 0)  # until a caller has noticed
            children.make(try_in_vain, forks)
            noticed = callers.errors.total()
            server.start()
            call(channel)
        later = callers.errors.total() - noticed
        children.make(partial(call, channel), forks)
        assert channel.generation == 2
    server.kill()
    return report(children, noticed=noticed, later=later)


def report(children: Children, **more: Any) -> Report:
    took = sorted(children.took)
    return {"ends": children.ends, "forks": [took[0], took[-1]] if took else [], **more}


SCENARIOS: dict[str, Callable[[Config, int], Report]] = {
    **{
        scenario.__name__: scenario
        for scenario in (
            *(quiet, lazy, grandchildren, several_forking, pooled, moving, unused, locked),
            *(calling, silent, disabled, with_asyncio, waiting, recovering),
        )
    },
    **{kind: partial(at_work, kind) for kind in WORK},
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
