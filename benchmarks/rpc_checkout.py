"""What does a checkout of a shared gRPC channel cost, and what does a call over it cost?

The peer for checkouts is PyMilvus's connection manager, in the same run, against the same
milvus-lite, with the same client object; for calls it is a bare gRPC channel, through the same
generated stub to the same server. Each round runs a short burst of both sides, in alternating
order, and a figure against a peer is the median of the ratios of all rounds, with its quartiles:
our time divided by the peer's time, so less is better.

Each checkout must return the one shared channel, and each reply must equal the request. Before it
is timed, each side makes a real call over its channel.

- *warm*: the connection is open and was used recently.
- *while another hangs*: meanwhile another thread connects to an endpoint that never replies. A
  checkout every 5 ms until that times out, each after a sleep and so with cold caches: the median,
  and the slowest. (PyMilvus makes one or two checkouts in that time.)
- *loop stall*: the longest time between two turns of an event loop on which a connection is opened
  whose topology takes 2 s to fetch. Objects that exist before are frozen: a full garbage collection
  of PyMilvus's modules takes 50 ms, and could fall into the first opening.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from pymilvus.client import connection_manager as pymilvus  # type: ignore[import-untyped]

from _harness import Figure, Report, main, quartiles, spread
from _rpc_checkout_servers import Echo, echo_server, milvus_server, silent_server, slow_topology
from moored.rpc import AsyncConnectionManager, ConnectionConfig, ConnectionManager
from moored.rpc.milvus import milvus_config

#: Checkouts and calls in a burst: about 5 ms each.
CHECKOUTS, CALLS = 2000, 20
#: Timeout of the endpoint that hangs, and seconds between two warm checkouts meanwhile.
HANG, EVERY = 1.5, 0.005
#: Seconds that a fetch of the topology takes.
SLOW = 2.0
VERSION = "/milvus.proto.milvus.MilvusService/GetVersion"

Burst = Callable[[], float]


class Client:
    """The user of a connection, to which the manager holds a weak reference."""


def compare(ours: Burst, peer: Burst, rounds: int) -> tuple[Figure, float, float]:
    """Return the ratio of the times of both, and the median time of each."""
    found: list[tuple[float, float]] = []
    for turn in range(-5, rounds):  # the first rounds warm up
        if turn % 2:
            one, other = ours(), peer()
        else:
            other, one = peer(), ours()
        if turn >= 0:
            found.append((one, other))
    ratio = quartiles([one / other for one, other in found], "times")
    return ratio, statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


# -- checkouts -------------------------------------------------------------------------------------


def checkouts(manager: Any, config: Any, handler: Any) -> Burst:
    """Return a burst of checkouts by one client; it returns the seconds per checkout."""
    client = Client()

    def burst() -> float:
        take = manager.get_or_create
        begin = time.perf_counter()
        for _ in range(CHECKOUTS):
            found = take(config, client=client)
        spent = time.perf_counter() - begin
        check(manager, handler, found)
        return spent / CHECKOUTS

    return burst


def parsing_checkouts(manager: Any, made: Any, uri: str, handler: Any) -> Burst:
    """Return a burst of checkouts that parse the URI first, as a client's constructor does."""
    client = Client()

    def burst() -> float:
        take, parse = manager.get_or_create, made.from_uri
        begin = time.perf_counter()
        for _ in range(CHECKOUTS // 4):
            found = take(parse(uri), client=client)
        spent = time.perf_counter() - begin
        check(manager, handler, found)
        return spent / (CHECKOUTS // 4)

    return burst


def async_checkouts(run: asyncio.Runner, manager: Any, config: Any, handler: Any) -> Burst:
    """Return a burst of checkouts on an event loop."""
    client = Client()

    async def burst() -> float:
        take = manager.get_or_create
        begin = time.perf_counter()
        for _ in range(CHECKOUTS):
            found = await take(config, client=client)
        spent = time.perf_counter() - begin
        check(manager, handler, found)
        return spent / CHECKOUTS

    return lambda: run.run(burst())


def check(manager: Any, handler: Any, found: Any) -> None:
    """Check that a checkout returned the shared channel, and that its client is registered."""
    if found is not handler:
        raise AssertionError(f"{manager!r} returned {found!r} instead of {handler!r}")
    kept = manager._registry if hasattr(manager, "_registry") else manager._table.awake
    (managed,) = kept.values()
    if not managed.clients:
        raise AssertionError(f"{manager!r} has not registered its client")


def measure_warm(report: Report, uri: str, rounds: int) -> None:
    theirs = pymilvus.ConnectionManager()
    config = ConnectionConfig.from_uri(uri)
    their_config = pymilvus.ConnectionConfig.from_uri(uri)
    with ConnectionManager() as ours:
        first_client = Client()
        handler = ours.get_or_create(config, client=first_client)
        their_handler = theirs.get_or_create(their_config, client=first_client)
        if not handler.unary_unary(VERSION)(b"") or not their_handler.get_server_version():
            raise AssertionError("milvus-lite did not return its version")
        ratio, mine, their = compare(
            checkouts(ours, config, handler),
            checkouts(theirs, their_config, their_handler),
            rounds,
        )
        report.add("warm_vs_pymilvus", ratio)
        report.add("warm_us", Figure(mine * 1e6, "us"))
        report.add("pymilvus_warm_us", Figure(their * 1e6, "us"))
        ratio, mine, their = compare(
            parsing_checkouts(ours, ConnectionConfig, uri, handler),
            parsing_checkouts(theirs, pymilvus.ConnectionConfig, uri, their_handler),
            rounds // 2,
        )
        report.add("warm_from_uri_vs_pymilvus", ratio)
        report.add("warm_from_uri_us", Figure(mine * 1e6, "us"))
        measure_hang(report, ours, config, theirs, their_config)
        theirs.close_all()


def measure_async_warm(report: Report, uri: str, rounds: int) -> None:
    with asyncio.Runner(debug=False) as run:
        ours, config, handler, theirs, their_config, their_handler = run.run(_open_async(uri))
        ratio, mine, their = compare(
            async_checkouts(run, ours, config, handler),
            async_checkouts(run, theirs, their_config, their_handler),
            rounds,
        )
        report.add("async_warm_vs_pymilvus", ratio)
        report.add("async_warm_us", Figure(mine * 1e6, "us"))
        report.add("pymilvus_async_warm_us", Figure(their * 1e6, "us"))
        run.run(ours.close())
        run.run(theirs.close_all())


async def _open_async(uri: str) -> tuple[Any, ...]:
    ours, theirs = AsyncConnectionManager(), pymilvus.AsyncConnectionManager()
    config = ConnectionConfig.from_uri(uri)
    their_config = pymilvus.ConnectionConfig.from_uri(uri)
    first_client = Client()
    handler = await ours.get_or_create(config, client=first_client)
    their_handler = await theirs.get_or_create(their_config, client=first_client)
    if not await handler.unary_unary(VERSION)(b""):
        raise AssertionError("milvus-lite did not return its version")
    if not await their_handler.get_server_version():
        raise AssertionError("milvus-lite did not return its version")
    return ours, config, handler, theirs, their_config, their_handler


# -- an endpoint that hangs ------------------------------------------------------------------------


def measure_hang(
    report: Report, ours: ConnectionManager, config: Any, theirs: Any, their_config: Any
) -> None:
    found = while_hanging(ours, ConnectionConfig, config)
    report.add("warm_while_other_hangs_us", Figure(found[0] * 1e6, "us"))
    report.add("worst_warm_while_other_hangs_us", Figure(found[1] * 1e6, "us"))
    their_found = while_hanging(theirs, pymilvus.ConnectionConfig, their_config)
    report.add("pymilvus_warm_while_other_hangs_us", Figure(their_found[0] * 1e6, "us"))


def while_hanging(manager: Any, made: Any, config: Any) -> tuple[float, float]:
    """Return the median and the longest time of a checkout while another endpoint hangs."""
    timed_out = threading.Event()
    client, other = Client(), Client()

    def connect_until_timeout(uri: str) -> None:
        try:
            manager.get_or_create(made.from_uri(uri), client=other, timeout=HANG)
        except Exception:
            timed_out.set()
        else:
            raise AssertionError("the silent server replied")

    times: list[float] = []
    with silent_server() as uri:
        hanging = threading.Thread(target=connect_until_timeout, args=(uri,))
        hanging.start()
        time.sleep(0.1)  # until the thread connects
        while not timed_out.is_set():
            begin = time.perf_counter()
            manager.get_or_create(config, client=client)
            times.append(time.perf_counter() - begin)
            timed_out.wait(EVERY)
        hanging.join()
    return statistics.median(times), max(times)


# -- a slow topology -------------------------------------------------------------------------------


async def stall_of(opening: Awaitable[object]) -> float:
    """Return the longest time between two turns of the loop while a connection is opened."""
    task = asyncio.ensure_future(opening)
    longest, last, begin = 0.0, time.perf_counter(), time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await task
    if time.perf_counter() - begin < SLOW:
        raise AssertionError("the topology was not fetched")
    return longest


async def our_stall(uri: str) -> float:
    async with AsyncConnectionManager() as manager:
        return await stall_of(manager.get_or_create(milvus_config(uri)))


async def their_stall(uri: str) -> float:
    manager = pymilvus.AsyncConnectionManager()
    try:
        return await stall_of(
            manager.get_or_create(pymilvus.ConnectionConfig.from_uri(uri, token="t"))
        )
    finally:
        await manager.close_all()


def measure_stall(report: Report, uri: str, rounds: int) -> None:
    gc.collect()
    gc.freeze()
    with slow_topology(uri, SLOW) as topology:
        stalls = [asyncio.run(our_stall(topology)) * 1000 for _ in range(rounds)]
        theirs = asyncio.run(their_stall(topology)) * 1000
    gc.unfreeze()
    report.add("loop_stall_ms", spread(stalls, "ms"))
    report.add("pymilvus_loop_stall_ms", Figure(theirs, "ms"))


# -- calls -----------------------------------------------------------------------------------------


def calls(channel: Any, echo: Echo) -> Burst:
    """Return a burst of unary calls through a generated stub; it returns the seconds per call."""
    say, request = echo.stub(channel).Say, echo.text(text="hello")

    def burst() -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            if say(request, timeout=10.0).text != "hello":
                raise AssertionError("the echo is wrong")
        return (time.perf_counter() - begin) / CALLS

    return burst


def async_calls(run: asyncio.Runner, channel: Any, echo: Echo) -> Burst:
    """Return a burst of unary calls on an event loop."""
    say, request = echo.stub(channel).Say, echo.text(text="hello")

    async def burst() -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            if (await say(request, timeout=10.0)).text != "hello":
                raise AssertionError("the echo is wrong")
        return (time.perf_counter() - begin) / CALLS

    return lambda: run.run(burst())


def measure_calls(report: Report, echo: Echo, rounds: int) -> None:
    config = ConnectionConfig.from_uri(f"http://{echo.address}")
    with ConnectionManager() as manager, grpc.insecure_channel(echo.address) as bare:
        ours, peer = calls(manager.get_or_create(config), echo), calls(bare, echo)
        add_calls(report, "", *compare(ours, peer, rounds))
    with asyncio.Runner(debug=False) as run:
        aio_manager, aio_bare = run.run(_open_aio(echo))
        handler = run.run(aio_manager.get_or_create(config))
        ours, peer = async_calls(run, handler, echo), async_calls(run, aio_bare, echo)
        add_calls(report, "async_", *compare(ours, peer, rounds))
        run.run(aio_manager.close())
        run.run(aio_bare.close())


async def _open_aio(echo: Echo) -> tuple[AsyncConnectionManager, Any]:
    return AsyncConnectionManager(), grpc.aio.insecure_channel(echo.address)


def add_calls(report: Report, kind: str, ratio: Figure, ours: float, bare: float) -> None:
    report.add(f"{kind}call_overhead_vs_bare_channel", ratio)
    report.add(f"{kind}call_us", Figure(ours * 1e6, "us"))
    report.add(f"bare_{kind}call_us", Figure(bare * 1e6, "us"))


def measure(report: Report, quick: bool) -> None:
    logging.disable(logging.CRITICAL)  # PyMilvus logs errors of the endpoint that hangs
    rounds = 150 if quick else 600
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri = stack.enter_context(milvus_server(folder))
        measure_warm(report, uri, rounds)
        measure_async_warm(report, uri, rounds)
        measure_stall(report, uri, 2 if quick else 5)
        measure_calls(report, stack.enter_context(echo_server(folder)), rounds)
    report.notes.append(
        f"{rounds} rounds of {CHECKOUTS} checkouts, and of {CALLS} calls; in brackets the "
        "quartiles, of the stall the minimum and the maximum"
    )


if __name__ == "__main__":
    main("rpc_checkout", (__doc__ or "").splitlines()[0], measure)
