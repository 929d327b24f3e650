"""Simulated hosts: kill, restart, pause, and wall clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from moored.kernel._clock import Clock
from moored.testing import Host, HostKilled, Sim, SimulationError, run_one, scaled
from moored.testing._loop import EPOCH

pytestmark = pytest.mark.pure

T = TypeVar("T")
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def run(scenario: Callable[[Sim], Awaitable[T]], seeds: int = scaled(20, least=5)) -> list[T]:
    return [run_one(scenario, seed).result() for seed in range(seeds)]


async def echo(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


def test_a_killed_host_runs_no_more_code() -> None:
    async def scenario(sim: Sim) -> None:
        did: list[str] = []

        async def work() -> None:
            sim.loop.call_later(2, did.append, "timer")
            try:
                await asyncio.sleep(2)
                did.append("step")
            finally:
                did.append("finally")

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(work())

        host = sim.host("a", main)
        await asyncio.sleep(1)
        host.kill()
        assert not host.alive
        await asyncio.sleep(10)
        assert did == []

    run(scenario)


def test_a_killed_host_sends_nothing_more() -> None:
    async def scenario(sim: Sim) -> None:
        received: list[bytes] = []

        async def collect(reader: Reader, writer: Writer) -> None:
            while data := await reader.read(1000):
                received.append(data)
            writer.close()

        await sim.serve(collect)
        host = sim.host("a")

        async def client() -> None:
            _, writer = await asyncio.open_connection("server", 8000)
            writer.write(b"before")
            await asyncio.sleep(1)
            host.kill()  # the next writes of the same step are dropped
            writer.write(b"after")
            await asyncio.open_connection("server", 8000)
            writer.write(b"long after")

        host.start(client())
        await asyncio.sleep(10)
        assert b"".join(received) in (b"before", b"")

    run(scenario)


def test_peers_of_a_killed_host_see_a_reset_or_the_end_and_then_a_refusal() -> None:
    async def scenario(sim: Sim) -> str:
        server = await sim.serve(echo)
        reader, writer = await asyncio.open_connection("server", 8000)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        sim.at(1.0, server.kill)
        try:
            assert await reader.read() == b""
            seen = "end"
        except ConnectionResetError:
            seen = "reset"
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("server", 8000)
        return seen

    assert set(run(scenario)) == {"end", "reset"}


def test_a_restarted_server_serves_again() -> None:
    async def scenario(sim: Sim) -> None:
        server = await sim.serve(echo)
        for life in range(3):
            reader, writer = await asyncio.open_connection("server", 8000)
            writer.write(b"%d" % life)
            assert await reader.readexactly(1) == b"%d" % life
            writer.close()
            server.restart()
            await asyncio.sleep(1)
        assert server.alive

    run(scenario)


def test_a_protocol_class_can_be_served() -> None:
    class EchoServer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def scenario(sim: Sim) -> None:
        await sim.serve(EchoServer)
        reader, writer = await asyncio.open_connection("server", 8000)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()

    run(scenario)


def test_serve_raises_the_error_of_a_server_that_cannot_listen() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(echo)
        with pytest.raises(OSError, match="port 8000 of 'server' is in use"):
            await sim.serve(echo)

    run(scenario)


def test_one_host_may_run_several_servers_and_restarts_them_all() -> None:
    async def scenario(sim: Sim) -> None:
        host = await sim.serve(echo, host="both", port=1)
        assert await sim.serve(echo, host="both", port=2) is host
        host.restart()
        await asyncio.sleep(1)
        for port in (1, 2):
            _, writer = await asyncio.open_connection("both", port)
            writer.close()

    run(scenario)


def test_serve_refuses_a_function_that_is_not_a_server() -> None:
    async def scenario(sim: Sim) -> None:
        with pytest.raises(SimulationError, match="is not a server"):
            await sim.serve(lambda one: None)

    run(scenario, 1)


def test_a_paused_host_continues_in_order_after_resume() -> None:
    async def scenario(sim: Sim) -> None:
        times: list[float] = []
        received = b""

        async def clock() -> None:
            while True:
                await asyncio.sleep(1)
                times.append(sim.now)

        async def collect(reader: Reader, writer: Writer) -> None:
            nonlocal received
            while data := await reader.read(1000):
                received += data
            writer.close()

        server = await sim.serve(collect)
        server.start(clock())
        _, writer = await asyncio.open_connection("server", 8000)
        await asyncio.sleep(2.5 - sim.now)
        server.pause()
        assert server.paused
        for number in range(10):
            writer.write(b"%d" % number)
            await asyncio.sleep(0.5)
        # The network stack of a paused host still accepts connections.
        _, other = await asyncio.open_connection("server", 8000)
        assert times[-1] < 2.5
        assert received == b""
        server.resume()
        await asyncio.sleep(1)
        assert received == b"0123456789"
        assert 7.5 <= times[2] < 8
        writer.close()
        other.close()

    run(scenario)


def test_callbacks_that_ran_while_another_host_was_paused_run_once() -> None:
    async def scenario(sim: Sim) -> None:
        called: list[int] = []
        host, other = sim.host("a"), sim.host("b")

        async def plan() -> None:
            for number in range(3):
                sim.loop.call_later(number + 1, called.append, number)

        other.pause()
        await host.run(plan())
        await asyncio.sleep(5)
        host.pause()
        host.resume()
        await asyncio.sleep(5)
        assert called == [0, 1, 2]

    run(scenario)


def test_callbacks_of_a_paused_host_keep_their_order() -> None:
    async def scenario(sim: Sim) -> None:
        called: list[int] = []
        host = sim.host("a")

        async def plan(number: int) -> None:
            sim.loop.call_at(1.0, called.append, number)

        await host.run(plan(1))
        sim.at(1.0, host.resume)
        await host.run(plan(2))
        host.pause()
        await asyncio.sleep(2)
        assert called == [1, 2]

    run(scenario)


def test_sim_at_runs_although_the_host_that_called_it_was_killed() -> None:
    async def scenario(sim: Sim) -> None:
        happened = asyncio.Event()
        host = sim.host("a")

        async def plan() -> None:
            sim.at(2.0, happened.set)

        await host.run(plan())
        host.kill()
        await happened.wait()

    run(scenario)


def test_a_host_killed_while_it_connects_never_connects() -> None:
    async def scenario(sim: Sim) -> None:
        connected = 0

        async def count(reader: Reader, writer: Writer) -> None:
            nonlocal connected
            connected += 1
            await echo(reader, writer)

        await sim.serve(count)
        sim.network.latency = (1.0, 1.0)
        host = sim.host("a")
        host.start(asyncio.open_connection("server", 8000))
        await asyncio.sleep(0.5)
        host.kill()
        await asyncio.sleep(10)
        assert connected == 0

    run(scenario)


def test_resume_does_not_revive_a_killed_host() -> None:
    async def scenario(sim: Sim) -> None:
        did: list[str] = []

        async def main() -> None:
            await asyncio.sleep(1)
            did.append("ran")

        host = sim.host("a", main)
        host.pause()
        await asyncio.sleep(2)
        host.kill()
        host.resume()
        await asyncio.sleep(2)
        assert did == []
        host.restart()
        await asyncio.sleep(2)
        assert did == ["ran"]

    run(scenario)


def test_run_returns_the_result_or_raises_the_error_or_host_killed() -> None:
    async def scenario(sim: Sim) -> None:
        host = sim.host("a")

        async def succeed() -> str:
            await asyncio.sleep(1)
            return "done"

        async def fail() -> None:
            raise LookupError

        assert await host.run(succeed()) == "done"
        with pytest.raises(LookupError):
            await host.run(fail())
        sim.at(2.0, host.kill)
        with pytest.raises(HostKilled, match="host 'a' was killed"):
            await host.run(asyncio.sleep(10))
        assert sim.now == 2.0
        with pytest.raises(HostKilled, match="restart"):
            await host.run(succeed())

    run(scenario)


def test_cancelling_run_cancels_the_coroutine() -> None:
    async def scenario(sim: Sim) -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(10)
            finally:
                ended.set()

        task = asyncio.create_task(sim.host("a").run(work()))
        await asyncio.sleep(1)
        task.cancel()
        await ended.wait()

    run(scenario)


def test_a_main_that_fails_fails_the_seed() -> None:
    async def scenario(sim: Sim) -> None:
        async def main() -> None:
            raise LookupError("at start")

        sim.host("a", main)
        await asyncio.sleep(1)

    assert "the main of host 'a' failed" in str(run_one(scenario, 1, check=False).error)


def test_a_main_that_is_cancelled_does_not_fail_the_seed() -> None:
    async def scenario(sim: Sim) -> None:
        async def main() -> None:
            raise asyncio.CancelledError

        sim.host("a", main)
        await asyncio.sleep(1)

    run(scenario)


def test_host_main_cannot_be_killed_or_paused() -> None:
    async def scenario(sim: Sim) -> None:
        main = sim.host("main")
        for action in (main.kill, main.pause):
            with pytest.raises(SimulationError, match="the scenario itself runs on host 'main'"):
                action()
        with pytest.raises(SimulationError, match="has no main"):
            sim.host("a").restart()

    run(scenario, 1)


def test_a_host_cannot_listen_on_another_host() -> None:
    async def scenario(sim: Sim) -> None:
        sim.host("b")
        with pytest.raises(OSError, match="'b' is not 'a'"):
            await sim.host("a").run(asyncio.start_server(echo, "b", 80))

    run(scenario, 1)


def test_wall_clocks_can_be_stepped_together_or_for_one_host() -> None:
    async def scenario(sim: Sim) -> None:
        host = sim.host("a")

        async def wall() -> float:
            return Clock.current().wall()

        await asyncio.sleep(10)
        sim.wall_step(-3600)
        host.wall_step(5)
        assert Clock.current().wall() == EPOCH + 10 - 3600
        assert await host.run(wall()) == EPOCH + 10 - 3600 + 5
        assert Clock.current().monotonic() == 10

    run(scenario, 1)


def test_sim_at_runs_at_its_time_and_its_errors_fail_the_seed() -> None:
    async def scenario(sim: Sim) -> None:
        seen: list[float] = []

        async def later() -> None:
            await asyncio.sleep(1)
            seen.append(sim.now)

        sim.at(2.0, later)
        sim.after(2.5, lambda: seen.append(sim.now))
        await asyncio.sleep(5)
        assert seen == [2.5, 3.0]
        with pytest.raises(SimulationError, match="in the past"):
            sim.at(4.0, later)

        async def fail() -> None:
            raise LookupError("planned")

        sim.at(6.0, fail)
        await asyncio.sleep(5)

    error = str(run_one(scenario, 1, check=False).error)
    assert "name='planned at 6 s'" in error
    assert "LookupError: planned" in error


def test_the_repr_of_a_host_names_its_state() -> None:
    async def scenario(sim: Sim) -> None:
        host = sim.host("db")
        assert repr(host) == "<Host db (10.0.0.2) running, 0 connections>"
        host.pause()
        assert repr(host) == "<Host db (10.0.0.2) paused, 0 connections>"
        host.kill()
        assert repr(host) == "<Host db (10.0.0.2) killed, 0 connections>"
        assert isinstance(sim.host("db"), Host)
        assert sim.host("db") is host

    run(scenario, 1)
