"""The simulated network: TCP semantics, and faults."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from moored.testing import Deadlock, Sim, SimulationError, Unretrieved, run_one, scaled, simulate

T = TypeVar("T")
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


async def echo(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()
    writer.close()


async def silent(reader: Reader, writer: Writer) -> None:
    await reader.read()
    writer.close()


def run(scenario: Callable[[Sim], Awaitable[T]], seeds: int = scaled(20, least=5)) -> list[T]:
    return [run_one(scenario, seed).result() for seed in range(seeds)]


class Log(asyncio.Protocol):
    """A protocol that records its callbacks."""

    def __init__(self, *, keep_open: bool = False) -> None:
        self.events: list[Any] = []
        self.transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()
        self._keep_open = keep_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.events.append(data)

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self._keep_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(exc)
        self.ended.set()

    @property
    def data(self) -> bytes:
        return b"".join(event for event in self.events if isinstance(event, bytes))


def test_streams_run_unchanged() -> None:
    async def scenario(sim: Sim) -> None:
        async with await asyncio.start_server(echo, "server", 80):
            reader, writer = await asyncio.open_connection("server", 80)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    run(scenario)


def test_bytes_arrive_in_order_however_they_are_split() -> None:
    async def scenario(sim: Sim) -> list[int]:
        payload = bytes(range(256)) * 20
        sizes: list[int] = []

        async def collect(reader: Reader, writer: Writer) -> None:
            received = b""
            while data := await reader.read(100_000):
                sizes.append(len(data))
                received += data
            assert received == payload
            writer.close()
            done.set()

        done = asyncio.Event()
        await sim.serve(collect)
        _, writer = await asyncio.open_connection("server", 8000)
        position = 0
        while position < len(payload):
            step = sim.rng.randint(1, 500)
            writer.write(payload[position : position + step])
            position += step
            if sim.rng.random() < 0.5:
                await asyncio.sleep(sim.random(0, 0.01))
        writer.close()
        await done.wait()
        return sizes

    cuts = run(scenario, 50)
    assert len({tuple(sizes) for sizes in cuts}) > 40
    assert min(len(sizes) for sizes in cuts) < 15 < max(len(sizes) for sizes in cuts)


def test_an_unknown_host_is_a_gaierror() -> None:
    async def scenario(sim: Sim) -> None:
        with pytest.raises(socket.gaierror, match="no simulated host is called 'nowhere'"):
            await asyncio.open_connection("nowhere", 80)
        sim.host("db")
        infos = await sim.loop.getaddrinfo("db", 5432)
        assert infos[0][4] == ("10.0.0.2", 5432)
        assert await sim.loop.getnameinfo(("10.0.0.2", 5432)) == ("db", "5432")

    run(scenario, 1)


def test_a_port_without_a_listener_refuses() -> None:
    async def scenario(sim: Sim) -> float:
        sim.host("server")
        with pytest.raises(ConnectionRefusedError) as caught:
            await asyncio.open_connection("server", 80)
        assert caught.value.errno == errno.ECONNREFUSED
        return sim.now

    assert all(0 < seconds < 0.2 for seconds in run(scenario))


def test_refuse_and_heal() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(echo)
        sim.network.refuse("server")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("server", 8000)
        sim.network.heal("server")
        _, writer = await asyncio.open_connection("server", 8000)
        writer.close()

    run(scenario)


def test_a_fault_of_an_unknown_host_is_a_simulation_error() -> None:
    async def scenario(sim: Sim) -> None:
        with pytest.raises(SimulationError, match="no simulated host is called 'servre'"):
            sim.network.refuse("servre")

    run(scenario, 1)


def test_reset_ends_a_connection_on_both_sides() -> None:
    async def scenario(sim: Sim) -> None:
        near, far = Log(), Log()
        await sim.serve(lambda: far)
        await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        sim.network.reset("server")
        await near.ended.wait()
        await far.ended.wait()
        for log in (near, far):
            assert log.events[0] == "made"
            assert isinstance(log.events[-1], ConnectionResetError)
            assert len(log.events) == 2

    run(scenario)


def test_a_half_open_connection_drops_bytes_until_the_sender_times_out() -> None:
    async def scenario(sim: Sim) -> float:
        near, far = Log(), Log()
        await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        sim.network.blackhole("server")
        transport.write(b"lost")
        sim.at(10.0, sim.network.heal, "server")
        sim.at(20.0, transport.write, b"after")
        await near.ended.wait()
        assert far.events == ["made"]
        assert isinstance(near.events[-1], TimeoutError)
        return sim.now

    assert all(925 < seconds < 926 for seconds in run(scenario))


def test_a_reader_of_a_half_open_connection_waits_for_ever() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(silent)
        reader, writer = await asyncio.open_connection("server", 8000)
        sim.network.blackhole("server")
        assert await reader.read() == b""
        writer.close()

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, Deadlock)
    assert "StreamReader" in str(outcome.error)


def test_an_idle_connection_survives_a_black_hole() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(echo)
        reader, writer = await asyncio.open_connection("server", 8000)
        await asyncio.sleep(1)
        sim.network.blackhole("server")
        await asyncio.sleep(10)
        sim.network.heal()
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"still here"
        writer.close()

    run(scenario)


def test_a_black_hole_can_affect_one_direction() -> None:
    async def scenario(sim: Sim) -> None:
        near, far = Log(), Log()
        await sim.serve(lambda: far)
        await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        sim.network.blackhole("server", direction="out")
        assert near.transport is not None
        assert far.transport is not None
        near.transport.write(b"in")
        far.transport.write(b"out")
        await asyncio.sleep(1)
        assert (near.data, far.data) == (b"", b"in")

    run(scenario)


def test_a_fault_between_two_hosts_leaves_a_third_alone() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(echo)
        a, b = sim.host("a"), sim.host("b")

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("server", 8000)
            try:
                writer.write(b"?")
                return await reader.readexactly(1)
            finally:
                writer.close()

        sim.network.refuse("server", "a")
        with pytest.raises(ConnectionRefusedError):
            await a.run(ask())
        assert await b.run(ask()) == b"?"
        assert await ask() == b"?"
        sim.network.heal("server", "b")
        with pytest.raises(ConnectionRefusedError):
            await a.run(ask())
        sim.network.heal("server", "a")
        assert await a.run(ask()) == b"?"

    run(scenario)


def test_a_pause_delays_and_loses_nothing() -> None:
    async def scenario(sim: Sim) -> None:
        near, far = Log(), Log()
        await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        sim.network.pause("server")
        for number in range(20):
            transport.write(b"%d " % number)
            await asyncio.sleep(0.1)
        assert far.data == b""
        sim.network.heal("server")
        await asyncio.sleep(1)
        assert far.data == b"".join(b"%d " % number for number in range(20))

    run(scenario)


def test_slow_sets_the_latency() -> None:
    async def scenario(sim: Sim) -> float:
        await sim.serve(echo)
        sim.network.slow("server", latency=(2.0, 2.0))
        _, writer = await asyncio.open_connection("server", 8000)
        writer.close()
        return sim.now

    # There and back; the server itself started at once.
    assert run(scenario, 5) == [4.0] * 5


def test_connecting_into_a_black_hole_times_out_as_it_does_on_linux() -> None:
    async def scenario(sim: Sim) -> float:
        await sim.serve(echo)
        sim.network.blackhole("server")
        with pytest.raises(TimeoutError):
            await asyncio.open_connection("server", 8000)
        return sim.now

    assert run(scenario, 3) == [127.0] * 3


def test_a_connect_succeeds_when_the_network_heals() -> None:
    async def scenario(sim: Sim) -> float:
        await sim.serve(echo)
        sim.network.blackhole("server")
        sim.at(5.0, sim.network.heal)
        _, writer = await asyncio.open_connection("server", 8000)
        writer.close()
        return sim.now

    # SYN packets are repeated after 1, 3 and 7 seconds, as in Linux.
    assert all(7.0 < seconds < 7.2 for seconds in run(scenario))


def test_a_lost_reply_to_a_connect_is_repeated() -> None:
    async def scenario(sim: Sim) -> float:
        await sim.serve(echo)
        sim.network.blackhole("server", direction="out")
        sim.at(0.5, sim.network.heal)
        reader, writer = await asyncio.open_connection("server", 8000)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.close()
        return sim.now

    assert all(1.0 < seconds < 1.3 for seconds in run(scenario))


def test_a_cancelled_connect_leaves_nothing_open() -> None:
    async def scenario(sim: Sim) -> None:
        opened = 0

        async def count(reader: Reader, writer: Writer) -> None:
            nonlocal opened
            opened += 1
            await silent(reader, writer)
            opened -= 1

        await sim.serve(count)
        sim.network.latency = (0.1, 0.1)
        for _ in range(10):
            task = asyncio.create_task(asyncio.open_connection("server", 8000))
            await asyncio.sleep(sim.random(0, 0.3))
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()[1].close()
            await asyncio.sleep(1)
            assert opened == 0

    run(scenario)


def test_a_half_closed_connection_still_receives() -> None:
    async def scenario(sim: Sim) -> None:
        far = Log(keep_open=True)
        await sim.serve(lambda: far)
        near = Log()
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        transport.write(b"question")
        assert transport.can_write_eof()
        transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            transport.write(b"more")
        await asyncio.sleep(1)
        assert far.events[-1] == "eof"
        assert far.transport is not None
        far.transport.write(b"answer")
        far.transport.close()
        await near.ended.wait()
        assert (far.data, near.data) == (b"question", b"answer")
        assert near.events[-2:] == ["eof", None]

    run(scenario)


def test_close_sends_what_is_buffered_and_abort_does_not() -> None:
    async def scenario(sim: Sim) -> tuple[int, int]:
        sim.network.window = 1000
        sizes = []
        for method in ("close", "abort"):
            far = Log()
            await sim.serve(lambda far=far: far, host=method)
            near = Log()
            transport, _ = await sim.loop.create_connection(lambda near=near: near, method, 8000)
            transport.write(b"x" * 5000)
            assert transport.get_write_buffer_size() == 4000
            getattr(transport, method)()
            assert transport.is_closing()
            await far.ended.wait()
            await near.ended.wait()
            assert near.events == ["made", None]
            sizes.append(len(far.data))
        return sizes[0], sizes[1]

    assert set(run(scenario)) == {(5000, 1000)}


def test_writing_to_a_peer_that_has_closed_ends_in_a_reset() -> None:
    async def scenario(sim: Sim) -> None:
        far, near = Log(), Log(keep_open=True)
        await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        assert far.transport is not None
        far.transport.close()
        await asyncio.sleep(1)
        assert near.events == ["made", "eof"]
        assert not transport.is_closing()
        transport.write(b"anybody?")
        await asyncio.sleep(1)
        # A socket that does not read notices the reset at its next write.
        transport.write(b"hello?")
        await near.ended.wait()
        assert isinstance(near.events[-1], BrokenPipeError)

    run(scenario)


def test_a_slow_reader_holds_the_writer_back() -> None:
    async def scenario(sim: Sim) -> None:
        far, near = Log(), Log()
        await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        assert far.transport is not None
        far.transport.pause_reading()
        assert not far.transport.is_reading()
        transport.set_write_buffer_limits(high=1000)
        assert transport.get_write_buffer_limits() == (250, 1000)
        transport.write(b"x" * 64 * 1024)
        assert near.events == ["made"], "the window takes that much"
        transport.write(b"y" * 1001)
        assert near.events == ["made", "pause"]
        await asyncio.sleep(100)
        assert far.data == b""
        far.transport.resume_reading()
        await asyncio.sleep(1)
        assert near.events == ["made", "pause", "resume"]
        assert len(far.data) == 64 * 1024 + 1001

    run(scenario)


def test_drain_on_a_half_open_connection_blocks_when_the_window_is_full() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(silent)
        _, writer = await asyncio.open_connection("server", 8000)
        sim.network.blackhole("server")
        writer.write(b"x" * 200_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 60)
        writer.transport.abort()

    run(scenario)


def test_addresses_are_those_of_the_hosts() -> None:
    async def scenario(sim: Sim) -> None:
        far = Log()
        await sim.serve(lambda: far, host="db", port=5432)
        transport, _ = await sim.loop.create_connection(asyncio.Protocol, "db", 5432)
        await asyncio.sleep(1)
        assert transport.get_extra_info("peername") == ("10.0.0.2", 5432)
        assert far.transport is not None
        assert far.transport.get_extra_info("peername") == transport.get_extra_info("sockname")
        near_socket = transport.get_extra_info("socket")
        near_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert near_socket.getpeername() == ("10.0.0.2", 5432)
        assert "main:" in repr(transport)

    run(scenario, 1)


def test_a_port_has_one_listener_at_a_time() -> None:
    async def scenario(sim: Sim) -> None:
        first = await asyncio.start_server(echo, "localhost", 80)
        with pytest.raises(OSError, match="in use") as caught:
            await asyncio.start_server(echo, "127.0.0.1", 80)
        assert caught.value.errno == errno.EADDRINUSE
        first.close()
        await first.wait_closed()
        second = await asyncio.start_server(echo, None, 80)
        assert second.sockets[0].getsockname() == ("10.0.0.1", 80)
        other = await asyncio.start_server(echo, "localhost", 0)
        assert other.sockets[0].getsockname()[1] > 40_000

    run(scenario, 1)


def test_only_faults_of_localhost_affect_the_loopback() -> None:
    async def scenario(sim: Sim) -> None:
        await asyncio.start_server(echo, "localhost", 80)
        sim.network.refuse("main")
        _, writer = await asyncio.open_connection("localhost", 80)
        writer.close()
        sim.network.refuse("localhost")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("localhost", 80)

    run(scenario, 1)


def test_a_closed_server_refuses_connections() -> None:
    async def scenario(sim: Sim) -> None:
        server = await asyncio.start_server(echo, "server", 80)
        serving = asyncio.create_task(server.serve_forever())
        reader, writer = await asyncio.open_connection("server", 80)
        assert server.is_serving()
        serving.cancel()
        await asyncio.sleep(1)
        assert not server.is_serving()
        assert server.sockets == ()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("server", 80)
        writer.write(b"still")
        assert await reader.readexactly(5) == b"still"
        writer.close()

    run(scenario)


def test_serve_forever_allows_one_task_and_ends_at_close() -> None:
    async def scenario(sim: Sim) -> None:
        server = await asyncio.start_server(echo, "server", 80)
        with pytest.raises(OSError, match="not connected") as caught:
            server.sockets[0].getpeername()
        assert caught.value.errno == errno.ENOTCONN
        serving = asyncio.create_task(server.serve_forever())
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="already being awaited"):
            await server.serve_forever()
        server.close()
        with pytest.raises(asyncio.CancelledError):
            await serving

    run(scenario)


def test_a_connection_that_loses_its_fin_times_out() -> None:
    async def scenario(sim: Sim) -> float:
        near, far = Log(), Log()
        await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        await asyncio.sleep(1)
        sim.network.blackhole("server")
        transport.write_eof()
        await near.ended.wait()
        assert far.events == ["made"]
        assert isinstance(near.events[-1], TimeoutError)
        return sim.now

    assert all(925 < seconds < 926 for seconds in run(scenario))


def test_a_buffered_protocol_receives_bytes() -> None:
    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.received = b""
            self._space = bytearray(7)

        def get_buffer(self, sizehint: int) -> bytearray:
            return self._space

        def buffer_updated(self, nbytes: int) -> None:
            self.received += self._space[:nbytes]

    async def scenario(sim: Sim) -> None:
        far = Buffered()
        await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(asyncio.Protocol, "server", 8000)
        transport.write(b"more than seven bytes")
        await asyncio.sleep(1)
        assert far.received == b"more than seven bytes"

    run(scenario)


def test_a_protocol_that_raises_loses_its_connection_and_fails_the_seed() -> None:
    class Broken(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            raise LookupError("cannot parse")

    async def scenario(sim: Sim) -> None:
        await sim.serve(Broken)
        reader, writer = await asyncio.open_connection("server", 8000)
        writer.write(b"x")
        await reader.read()
        writer.close()

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, Unretrieved)
    assert "protocol.data_received() failed" in str(outcome.error)


def test_real_sockets_are_refused() -> None:
    async def scenario(sim: Sim) -> None:
        with socket.socket() as real, pytest.raises(NotImplementedError, match="no real sockets"):
            await sim.loop.create_connection(asyncio.Protocol, sock=real)

    run(scenario, 1)


def test_the_same_seed_gives_the_same_bytes_at_the_same_times() -> None:
    async def scenario(sim: Sim) -> list[tuple[float, int]]:
        await sim.serve(echo)
        reader, writer = await asyncio.open_connection("server", 8000)
        seen = []
        for _ in range(20):
            writer.write(b"x" * sim.rng.randint(1, 100))
            seen.append((sim.now, len(await reader.read(1000))))
        writer.close()
        return seen

    assert run(scenario) == run(scenario)


def test_streams_keep_their_order_under_all_faults() -> None:
    """The received bytes are a prefix of the sent ones, and each end is reported once."""

    async def scenario(sim: Sim) -> None:
        far, near = Log(), Log()
        server = await sim.serve(lambda: far)
        transport, _ = await sim.loop.create_connection(lambda: near, "server", 8000)
        faults: list[Callable[[], None]] = [
            lambda: sim.network.reset("server"),
            lambda: sim.network.blackhole("server"),
            lambda: sim.network.pause("server"),
            sim.network.heal,
            server.pause,
            server.resume,
            transport.close,
            transport.abort,
        ]
        for _ in range(3):
            sim.at(sim.random(0.2, 3), sim.rng.choice(faults))
        sent = b""
        for number in range(30):
            if not transport.is_closing():
                sent += b"%d " % number
                transport.write(b"%d " % number)
            await asyncio.sleep(0.1)
        server.resume()
        sim.network.heal()
        await asyncio.sleep(1)
        assert sent.startswith(far.data)
        for log in (near, far):
            ends = [event for event in log.events if event is None or isinstance(event, OSError)]
            assert len(ends) <= 1

    simulate(scenario, scaled(100, least=25))


def test_healing_a_host_ends_faults_between_it_and_another() -> None:
    async def scenario(sim: Sim) -> None:
        await sim.serve(echo)
        sim.host("a")
        for host, peer in (("server", None), ("main", None), ("server", "main")):
            sim.network.blackhole("server", "main")
            sim.network.blackhole("server", "a")
            assert "blackhole server, blackhole server" in repr(sim.network)
            sim.network.heal(host, peer)
            _, writer = await asyncio.open_connection("server", 8000)
            writer.close()
            sim.network.heal()

    run(scenario, 3)


def test_a_storm_breaks_connections_and_ends() -> None:
    async def scenario(sim: Sim) -> int:
        await sim.serve(echo)
        sim.storm("server", until=60.0)
        troubles = 0
        while sim.now < 60:
            try:
                async with asyncio.timeout(2):
                    reader, writer = await asyncio.open_connection("server", 8000)
                    try:
                        writer.write(b"?")
                        assert await reader.read(1) in (b"?", b"")
                        await asyncio.sleep(1)
                        assert await asyncio.wait_for(reader.read(1), 0.5) == b""
                    finally:
                        writer.transport.abort()
            except OSError:
                troubles += 1
        reader, writer = await asyncio.open_connection("server", 8000)
        writer.write(b"calm")
        assert await reader.readexactly(4) == b"calm"
        writer.close()
        return troubles

    assert min(run(scenario, scaled(20, least=4))) > 5
