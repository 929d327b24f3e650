"""Where a simulated loop meets the outside: its own network, and refusals for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ._errors import Unsimulated

if TYPE_CHECKING:
    from ._network import Network

__all__ = ["Borders"]

_THREADS = "threads run when the machine likes; keep the call out of simulated code, or pass it in"
_PROCESSES = "a simulation starts no processes; put another host there with sim.host(name, main)"
_SOCKETS = "there are no real sockets; use create_connection and create_server, or streams"
_DATAGRAMS = "the simulated network carries TCP only"
_TLS = "TLS draws chance of its own; simulate the plain connection"
_SIGNALS = "a simulation gets no signals; call the handler with sim.at(time, handler)"

# Each of these would make a seed mean something else every time.
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
    _SIGNALS: "add_signal_handler remove_signal_handler",
}
_REASONS = {name: reason for reason, names in _REFUSED.items() for name in names.split()} | {
    "call_soon_threadsafe from another thread": _THREADS,
    "sock=": _SOCKETS,
    "ssl=": _TLS,
}


class Borders:
    """The methods of an event loop that would leave the simulation."""

    network: Network

    @staticmethod
    def refusal(what: str) -> Unsimulated:
        """The error for something that cannot be simulated."""
        return Unsimulated(f"{what} cannot be simulated: {_REASONS[what]}")

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        """Look a simulated host up."""
        return self.network.addresses(host, port)

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
        """The name of a simulated host."""
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

    def _refuse_options(self, options: dict[str, Any]) -> None:
        for name in ("ssl", "sock"):
            if options.get(name):
                raise self.refusal(f"{name}=")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Borders, *args: Any, **options: Any) -> NoReturn:
        raise self.refusal(name)

    refuse.__name__ = name
    refuse.__doc__ = f"Refused: {_REASONS[name]}."
    return refuse


for _name in _REASONS:
    if _name.isidentifier():
        setattr(Borders, _name, _refuse(_name))
