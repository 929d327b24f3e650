"""The simulated network: names and connections; what can go wrong is in `Faults`."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from ._dial import Dial
from ._errors import HostKilled, SimulationError
from ._faults import Faults
from ._hosts import CURRENT, Host, Process
from ._paths import Path, Range
from ._pipe import Pipe
from ._server import SimServer, SimSocket
from ._transport import SimTransport

if TYPE_CHECKING:
    from ._loop import SimLoop

__all__ = ["Network"]

_LOCAL = frozenset({None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
_FIRST_PORT = 40_000
_MOST_PIECES = 4
# How lively the network is differs from seed to seed: some know only calm days.
_SPREADS = (0.001, 0.001, 0.005, 0.05)
_SPLITS = (0.0, 0.1, 0.5)
_COALESCES = (0.0, 0.3, 0.8)


class Network(Faults):
    """Connects simulated hosts by name, and breaks what connects them."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        super().__init__(loop)
        self.rng = rng
        #: Seconds that a packet takes, from and to, where no `slow` says otherwise.
        self.latency: Range = (0.0002, 0.0002 + rng.choice(_SPREADS))
        #: How likely it is that a write arrives in pieces.
        self.split = rng.choice(_SPLITS)
        #: How likely it is that a piece arrives together with the one before it.
        self.coalesce = rng.choice(_COALESCES)
        #: Bytes that may be on the way, or wait unread at the receiver, before a sender buffers.
        self.window = 64 * 1024
        #: Seconds for which lost bytes are repeated before the sender's connection times out.
        self.retransmit_for = 924.6
        self._hosts: dict[str, Host] = {}
        self._listeners: dict[tuple[str, int], SimServer] = {}
        self._next_port = _FIRST_PORT
        self._main = self.host("main")

    # Chance

    def chance(self, probability: float) -> bool:
        """Let the seed decide."""
        return self.rng.random() < probability

    def delay(self, path: Path) -> float:
        """How long the next packet takes."""
        low, high = path.latency or self.latency
        return low + (high - low) * self.rng.random()

    def pieces(self, data: bytes) -> Iterable[bytes]:
        """Cut a write where the seed likes."""
        if len(data) < 2 or not self.chance(self.split):
            return (data,)
        count = min(self.rng.randint(1, _MOST_PIECES - 1), len(data) - 1)
        cuts = sorted(self.rng.sample(range(1, len(data)), count))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    # Names

    def host(self, name: str | None) -> Host:
        """The host with this name or address, made when it is new; "localhost" is this one."""
        if name in _LOCAL:
            return self._process().host
        assert name is not None
        known = self._hosts.get(name) or next(
            (host for host in self._hosts.values() if host.ip == name), None
        )
        if known is None:
            known = Host(self.loop, name, _address(len(self._hosts) + 1))
            self._hosts[name] = known
        return known

    def hosts(self) -> list[Host]:
        """All hosts, in the order in which they came up."""
        return list(self._hosts.values())

    def resolve(self, name: str | None) -> Host:
        """Look a name up; one that nobody has is an error, as it would be."""
        known = name in _LOCAL or name in self._hosts
        if not known and all(host.ip != name for host in self._hosts.values()):
            names = ", ".join(self._hosts)
            raise socket.gaierror(
                socket.EAI_NONAME, f"no simulated host is called {name!r} (there are: {names})"
            )
        return self.host(name)

    def addresses(self, name: Any, port: Any) -> list[Any]:
        """What `getaddrinfo` returns."""
        text = name.decode() if isinstance(name, bytes) else name
        address = (self.resolve(text).ip, int(port or 0))
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)]

    def known(self, name: str, peer: str | None) -> tuple[str, str | None]:
        """The hosts that a fault means; the loopback is what lies between a host and itself."""
        try:
            first = self.resolve(name).name
            second = None if peer is None else self.resolve(peer).name
        except socket.gaierror as error:
            raise SimulationError(f"{error.strerror}; name it first with sim.host(name)") from None
        return first, first if name in _LOCAL else second

    def paused_names(self) -> Iterator[str]:
        """What is paused, for people who wonder why nothing moves."""
        yield from (f"host {host.name}" for host in self._hosts.values() if host.paused)
        yield from (f"the network of {name}" for name in self.paused())

    def _process(self) -> Process:
        process = CURRENT.get(None)
        return self._main.process if process is None else process

    def port(self) -> int:
        """A port that nobody uses yet."""
        self._next_port += 1
        return self._next_port

    # Connections

    def listen(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        name: str | Sequence[str] | None,
        port: int,
    ) -> SimServer:
        """Listen on a host; only the scenario itself may do so for another than its own."""
        names = [name] if name is None or isinstance(name, str) else list(name)
        hosts = list(dict.fromkeys(self.host(each) for each in names))
        here = self._process()
        if not here.alive:
            raise HostKilled(f"host {here.host.name!r} was killed")
        port = port or self.port()
        for host in hosts:
            if here.host.name != "main" and host is not here.host:
                raise OSError(errno.EADDRNOTAVAIL, f"{host.name!r} is not {here.host.name!r}")
            if (host.name, port) in self._listeners:
                raise OSError(errno.EADDRINUSE, f"port {port} of {host.name!r} is in use")
        process = hosts[0].process
        context = copy_context()
        context.run(CURRENT.set, process)
        server = SimServer(self.loop, process, context, factory, [(h.ip, port) for h in hosts])
        for host in hosts:
            self._listeners[host.name, port] = server
        return server

    def unlisten(self, server: SimServer) -> None:
        """Nothing listens there any more."""
        self._listeners = {key: kept for key, kept in self._listeners.items() if kept is not server}

    def listener(self, host: Host, port: int) -> SimServer | None:
        """Who takes connections there now."""
        server = self._listeners.get((host.name, port))
        return server if server is not None and server.is_serving() else None

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], name: str | None, port: int
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        """Connect from the running host to another."""
        dial = Dial(self, self._process(), self.resolve(name), port)
        transport = await dial.answer()
        try:
            protocol = factory()
            transport.start(protocol)
            # A task that connected goes on in the next turn, after what its protocol was told.
            await asyncio.sleep(0)
        except BaseException:
            transport.close()
            raise
        return transport, protocol

    def join(
        self, client: Process, context: Context, server: SimServer, target: Host, port: int
    ) -> SimTransport:
        """Make both ends of a connection."""
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
        """One end is closed; when both are and nothing flies, the connection is forgotten."""
        peer = transport.outgoing.receiver
        if transport.gone and peer.gone:
            self._pipes.pop(transport.outgoing, None)
            self._pipes.pop(transport.incoming, None)

    @property
    def busy(self) -> bool:
        """Whether any end of a connection is still open."""
        return any(not pipe.sender.gone for pipe in self._pipes)

    def forget_graves(self) -> None:
        """Let go of what killed hosts left behind."""
        for host in self._hosts.values():
            host.forget_graves()

    def shut_down(self) -> None:
        """Abort whatever the scenario left open."""
        for pipe in list(self._pipes):
            pipe.sender.abort()

    def __repr__(self) -> str:
        faults = ", ".join(f"{fault.kind} {fault.host}" for fault in self._faults) or "no faults"
        return (
            f"<Network of {len(self._hosts)} hosts, {len(self._pipes) // 2} connections, {faults}>"
        )


def _address(number: int) -> str:
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
