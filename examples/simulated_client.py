"""Two thousand simulated schedules of a small client, in a few seconds.

    python examples/simulated_client.py

The client requests numbers from a server. The server is killed at a time that the seed decides and
restarted a second later, and the network has faults. Every request must succeed all the same. At
the end a defect is planted, to show that the scenario catches it.

Expected output:

    2,000 schedules, 2,000 distinct, in … s (…/s, processes: …); digest …
    mutant 'a client without a timeout' caught by schedule … (seed …): Deadlock
"""

from __future__ import annotations

import asyncio

from moored.kernel import Backoff
from moored.testing import Sim, assert_caught, mutant, simulate


class Client:
    """Retries each request, over a new connection, until it succeeds."""

    #: Seconds to wait for a reply; on a half-open connection it never arrives.
    timeout: float | None = 5.0

    def __init__(self, host: str) -> None:
        self._host = host

    async def square(self, number: int) -> int:
        """Return the square of a number, computed by the server."""
        backoff = Backoff(start=0.1, max=2.0, jitter="full")
        while True:
            try:
                async with asyncio.timeout(self.timeout):
                    return int(await self._request(b"%d\n" % number))
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(backoff.fail())

    async def _request(self, line: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, 8000)
        try:
            writer.write(line)
            return await reader.readuntil(b"\n")
        finally:
            writer.close()


async def serve_squares(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reply to each line, a number, with its square."""
    while line := await reader.readline():
        writer.write(b"%d\n" % int(line) ** 2)
    writer.close()


async def scenario(sim: Sim) -> None:
    """Five requests at random times, while the server and the network fail."""
    server = await sim.serve(serve_squares)
    killed = sim.random(0, 10)
    sim.at(killed, server.kill)
    sim.at(killed + 1, server.restart)
    sim.storm("server", until=10.0)

    async def request(number: int) -> None:
        await asyncio.sleep(sim.random(0, 10))
        assert await Client("server").square(number) == number**2

    await asyncio.gather(*(request(number) for number in range(5)))
    assert sim.now < 30, "requests must succeed soon after the last fault"


def main() -> None:
    """Simulate the client, then the client with a defect."""
    print(simulate(scenario, seeds=2000))
    planted = mutant(Client, "timeout", None, name="a client without a timeout")
    print(assert_caught(scenario, planted, within=2000))


if __name__ == "__main__":
    main()
