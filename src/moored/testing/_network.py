"""The simulated network: names, connections, and faults that are switched while a scenario runs.

refuse      refuse new connections to a host, as if no server listened
blackhole   drop packets; connections that lose bytes stay half-open for ever
pause       hold packets back; nothing is lost, and delivery continues after `heal`
slow        set the latency of packets
reset       reset the open connections, on both sides (once)
heal        end all of these faults
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ._dial import Dial
from ._errors import HostKilled, SimulationError
from ._hosts import CURRENT, Host, Process
from ._paths import Direction, NetworkFault, Path, Range
from ._pipe import RST, Pipe
from ._server import SimServer, SimSocket
from ._transport import SimTransport

if TYPE_CHECKING:
    from ._loop import SimLoop

__all__ = ["Network"]

_LOCAL = frozenset({None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
_FIRST_PORT = 40_000
_MOST_PIECES = 4
# Each seed chooses one of each: the latency range, and the probabilities of split and coalesce.
_SPREADS = (0.001, 0.001, 0.005, 0.05)
_SPLITS = (0.0, 0.1, 0.5)
_COALESCES = (0.0, 0.3, 0.8)


class Network:
    """Connects simulated hosts by name, and injects faults into their connections.

    A fault that names one host affects everything between it and all others; a fault that names
    two hosts affects everything between these two. `direction` limits a fault to packets that
    come "in" to the first host or go "out" of it.
    """

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        #: Minimum and maximum latency of a packet, in seconds, on paths without `slow`.
        self.latency: Range = (0.0002, 0.0002 + rng.choice(_SPREADS))
        #: The probability that a write arrives in pieces.
        self.split = rng.choice(_SPLITS)
        #: The probability that a piece arrives together with the previous one.
        self.coalesce = rng.choice(_COALESCES)
        #: Bytes that may be in flight, or unread at the receiver, before a sender buffers.
        self.window = 64 * 1024
        #: Seconds from the loss of bytes to the timeout of the sender's connection.
        self.retransmit_for = 924.6
        self._paths: dict[tuple[str, str], Path] = {}
        self._faults: list[NetworkFault] = []
        self._pipes: dict[Pipe, None] = {}
        self._hosts: dict[str, Host] = {}
        self._listeners: dict[tuple[str, int], SimServer] = {}
        self._next_port = _FIRST_PORT
        self._main = self.host("main")

    # Random decisions

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def delay(self, path: Path) -> float:
        """Return the latency of the next packet, in seconds."""
        low, high = path.latency or self.latency
        return low + (high - low) * self.rng.random()

    def pieces(self, data: bytes) -> Iterable[bytes]:
        """Split a write at random."""
        if len(data) < 2 or not self.chance(self.split):
            return (data,)
        count = min(self.rng.randint(1, _MOST_PIECES - 1), len(data) - 1)
        cuts = sorted(self.rng.sample(range(1, len(data)), count))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    # Names

    def host(self, name: str | None) -> Host:
        """Return the host with this name or address, created on first use."""
        known = self._find(name)
        if known is None:
            assert name is not None
            known = self._hosts[name] = Host(self.loop, name, _address(len(self._hosts) + 1))
        return known

    def _find(self, name: str | None) -> Host | None:
        if name in _LOCAL:
            return self._process().host
        return next((host for host in self._hosts.values() if name in (host.name, host.ip)), None)

    def hosts(self) -> list[Host]:
        """Return all hosts, in the order of their creation."""
        return list(self._hosts.values())

    def resolve(self, name: str | None) -> Host:
        """Look up a host by name or address; raise `gaierror` for an unknown one."""
        known = self._find(name)
        if known is None:
            names = ", ".join(self._hosts)
            raise socket.gaierror(
                socket.EAI_NONAME, f"no simulated host is called {name!r} (known hosts: {names})"
            )
        return known

    def addresses(self, name: Any, port: Any) -> list[Any]:
        """Return the result of `getaddrinfo`."""
        text = name.decode() if isinstance(name, bytes) else name
        address = (self.resolve(text).ip, int(port or 0))
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)]

    def _known(self, name: str, peer: str | None) -> tuple[str, str | None]:
        """Return the names of the hosts of a fault; a loopback name means a host and itself."""
        try:
            first = self.resolve(name).name
            second = None if peer is None else self.resolve(peer).name
        except socket.gaierror as error:
            raise SimulationError(f"{error.strerror}; create it with sim.host(name)") from None
        return first, first if name in _LOCAL else second

    def paused_names(self) -> Iterator[str]:
        """Return what is paused, for the message of a `Deadlock`."""
        yield from (f"host {host.name}" for host in self._hosts.values() if host.paused)
        paused = (fault.host for fault in self._faults if fault.kind == "pause")
        yield from (f"the network of {name}" for name in paused)

    def _process(self) -> Process:
        process = CURRENT.get(None)
        return self._main.process if process is None else process

    def port(self) -> int:
        """Return a free port."""
        self._next_port += 1
        return self._next_port

    # Faults

    def refuse(self, host: str, peer: str | None = None) -> None:
        """Refuse new connections to a host (from one peer, or from all)."""
        self._add(NetworkFault("refuse", *self._known(host, peer), direction="in"))

    def blackhole(
        self, host: str, peer: str | None = None, *, direction: Direction = "both"
    ) -> None:
        """Drop packets: writes succeed and nothing arrives, as when a cable is pulled.

        A connection that loses bytes stays half-open after `heal`, until one of its sides times
        out. An idle connection survives.
        """
        self._add(NetworkFault("blackhole", *self._known(host, peer), direction=direction))

    def pause(self, host: str, peer: str | None = None, *, direction: Direction = "both") -> None:
        """Hold packets back until `heal`; nothing is lost."""
        self._add(NetworkFault("pause", *self._known(host, peer), direction=direction))

    def slow(self, host: str, peer: str | None = None, *, latency: Range) -> None:
        """Set the minimum and maximum latency of packets, in seconds."""
        self._add(NetworkFault("slow", *self._known(host, peer), latency=latency))

    def heal(self, host: str | None = None, peer: str | None = None) -> None:
        """End the faults of a host, the faults between two hosts, or (by default) all faults."""
        self.loop.mark("network", f"heal {host or 'everything'} {peer or ''}", 6)
        if host is None:
            self._faults.clear()
        else:
            name, other = self._known(host, peer)
            self._faults = [each for each in self._faults if not each.is_about(name, other)]
        self._reroute()

    def reset(self, host: str, peer: str | None = None) -> None:
        """Reset the connections of a host, or between two hosts, as a restarting firewall does."""
        self.loop.mark("network", f"reset {host} {peer or ''}", 7)
        reset = NetworkFault("refuse", *self._known(host, peer))
        for pipe in list(self._pipes):
            if reset.touches(pipe.path.source, pipe.path.target):
                pipe.signal(RST)

    def path(self, source: str, target: str) -> Path:
        """Return the path from one host to another."""
        key = (source, target)
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = Path(*key)
            path.apply(self._faults)
        return path

    def _add(self, fault: NetworkFault) -> None:
        between = f" and {fault.peer}" if fault.peer else ""
        self.loop.mark("network", f"{fault.kind} {fault.host}{between} ({fault.direction})", 8)
        self._faults.append(fault)
        self._reroute()

    def _reroute(self) -> None:
        for path in self._paths.values():
            path.apply(self._faults)
        for pipe in self._pipes:
            if pipe.stalled and not pipe.path.paused:
                pipe.resume()

    # Connections

    def listen(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        name: str | Sequence[str] | None,
        port: int,
    ) -> SimServer:
        """Listen on a host; only the scenario may listen on a host that it does not run on."""
        names = [name] if name is None or isinstance(name, str) else list(name)
        hosts = list(dict.fromkeys(self.host(each) for each in names))
        here = self._process()
        if not here.alive:
            raise HostKilled(f"host {here.host.name!r} was killed")
        port = port or self.port()
        for host in hosts:
            if here.host.name != "main" and host is not here.host:
                raise OSError(errno.EADDRNOTAVAIL, f"{host.name!r} is not {here.host.name!r}")
            if (host.ip, port) in self._listeners:
                raise OSError(errno.EADDRINUSE, f"port {port} of {host.name!r} is in use")
        addresses = [(host.ip, port) for host in hosts]
        server = SimServer(self.loop, hosts[0].process, factory, addresses)
        self._listeners.update(dict.fromkeys(addresses, server))
        return server

    def unlisten(self, address: tuple[str, int]) -> None:
        """Free an address that a server listened on."""
        self._listeners.pop(address, None)

    def listener(self, host: Host, port: int) -> SimServer | None:
        """Return the server that accepts connections on this port, or None."""
        server = self._listeners.get((host.ip, port))
        return server if server is not None and server.is_serving() else None

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], name: str | None, port: int
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        """Connect from the running host to another host."""
        dial = Dial(self, self._process(), self.resolve(name), port)
        transport = await dial.answer()
        try:
            protocol = factory()
            transport.start(protocol)
            # The caller continues in the next turn, after the first callbacks of its protocol.
            await asyncio.sleep(0)
        except BaseException:
            transport.close()
            raise
        return transport, protocol

    def join(
        self, client: Process, context: Context, server: SimServer, target: Host, port: int
    ) -> SimTransport:
        """Create both ends of a connection, and return the client's."""
        here, there = (client.host.ip, self.port()), (target.ip, port)
        near = self._end(client, context, f"{client.host.name}:{here[1]}", here, there)
        far = self._end(
            server.process, server.connection_context(), f"{target.name}:{port}", there, here
        )
        near.outgoing = far.incoming = self._pipe(near, far)
        far.outgoing = near.incoming = self._pipe(far, near)
        server.accept(far)
        return near

    def _end(
        self,
        process: Process,
        context: Context,
        label: str,
        name: tuple[str, int],
        peer: tuple[str, int],
    ) -> SimTransport:
        extra = {"sockname": name, "peername": peer, "socket": SimSocket(name, peer)}
        return SimTransport(self.loop, process, context, label, extra)

    def _pipe(self, sender: SimTransport, receiver: SimTransport) -> Pipe:
        path = self.path(sender.process.host.name, receiver.process.host.name)
        pipe = Pipe(self, path, sender, receiver)
        self._pipes[pipe] = None
        return pipe

    def ended(self, transport: SimTransport) -> None:
        """Handle the close of one end; remove the connection when both are closed."""
        peer = transport.outgoing.receiver
        if transport.gone and peer.gone:
            self._pipes.pop(transport.outgoing, None)
            self._pipes.pop(transport.incoming, None)

    @property
    def busy(self) -> bool:
        """Whether any end of a connection is still open."""
        return any(not pipe.sender.gone for pipe in self._pipes)

    def shut_down(self) -> None:
        """Abort every open connection."""
        for pipe in list(self._pipes):
            pipe.sender.abort()

    def __repr__(self) -> str:
        faults = ", ".join(f"{fault.kind} {fault.host}" for fault in self._faults) or "no faults"
        return (
            f"<Network of {len(self._hosts)} hosts, {len(self._pipes) // 2} connections, {faults}>"
        )


def _address(number: int) -> str:
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
