"""The I/O methods of a simulated loop: TCP on the simulated network; all others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ._errors import Unsimulated

if TYPE_CHECKING:
    from ._network import Network
    from ._server import SimSocket

__all__ = ["LoopIO"]

_THREADS = "threads are not deterministic; replace the call in simulated code"
_PROCESSES = "a simulation starts no processes; use a simulated host, sim.host(name, main)"
_SOCKETS = "a simulation has no real sockets; use create_connection and create_server, or streams"
_DATAGRAMS = "the simulated network carries TCP only"
_TLS = "TLS uses random numbers of its own; simulate a connection without it"
_TASKS = "the seed decides the order of tasks, so the loop makes them itself"
_SIGNALS = "a simulation receives no signals; call the handler with sim.at(time, handler)"

# With any of these, two runs of a seed could differ.
_REFUSED = {
    _THREADS: "run_in_executor set_default_executor",
    _PROCESSES: "subprocess_exec subprocess_shell connect_read_pipe connect_write_pipe",
    _SOCKETS: (
        "create_unix_connection create_unix_server connect_accepted_socket add_reader "
        "remove_reader add_writer remove_writer sock_accept sock_connect sock_recv "
        "sock_recv_into sock_sendall sock_sendfile sendfile"
    ),
    _DATAGRAMS: "create_datagram_endpoint",
    _TLS: "start_tls",
    _TASKS: "set_task_factory",
    _SIGNALS: "add_signal_handler remove_signal_handler",
}
_REASONS = {name: reason for reason, names in _REFUSED.items() for name in names.split()} | {
    "call_soon_threadsafe from another thread": _THREADS,
    "sock=": _SOCKETS,
    "ssl=": _TLS,
}


class LoopIO:
    """The I/O methods of an event loop."""

    network: Network

    @staticmethod
    def refusal(what: str) -> Unsimulated:
        """Return the error for a method or option that cannot be simulated."""
        return Unsimulated(f"{what} cannot be simulated: {_REASONS[what]}")

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        """Resolve the name of a simulated host."""
        return self.network.addresses(host, port)

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
        """Return the name of a simulated host."""
        return self.network.resolve(sockaddr[0]).name, str(sockaddr[1])

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """Connect over the simulated network."""
        self._refuse_options(options)
        return await self.network.connect(protocol_factory, host, int(port or 0))

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """Listen on the simulated network."""
        self._refuse_options(options)
        server = self.network.listen(protocol_factory, host, int(port or 0))
        if options.get("start_serving", True):
            await server.start_serving()
        return server

    def _start_serving(self, *args: Any, **options: Any) -> None:
        """Do nothing: the network asks the server whether it serves."""

    def _stop_serving(self, sock: SimSocket) -> None:
        self.network.unlisten(sock.getsockname())

    def _refuse_options(self, options: dict[str, Any]) -> None:
        for name in ("ssl", "sock"):
            if options.get(name):
                raise self.refusal(f"{name}=")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(self: LoopIO, *args: Any, **options: Any) -> NoReturn:
        raise self.refusal(name)

    refuse.__name__ = name
    refuse.__doc__ = f"Refused: {_REASONS[name]}."
    return refuse


for _name in _REASONS:
    if _name.isidentifier():
        setattr(LoopIO, _name, _refuse(_name))
