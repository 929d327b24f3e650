"""Two thousand bad days of a small client, in a few seconds.

    python examples/simulated_client.py

The client asks a server for a number. The server is killed at a moment that the seed decides, and
comes back a second later; the network has troubles of its own. The client must get its answers all
the same. At the end a defect is planted, to show that the scenario would notice.

Expected output:

    2,000 schedules, 2,000 distinct, in … s (…/s, processes: …); digest …
    mutant 'a client that waits for ever' caught by schedule … (seed …): Deadlock
"""

from __future__ import annotations

import asyncio

from moored.kernel import Backoff
from moored.testing import Sim, assert_caught, mutant, simulate


class Client:
    """Asks again, over a new connection, until it has an answer."""

    #: Seconds after which a connection counts as dead, because a half-open one never says so.
    patience: float | None = 5.0

    def __init__(self, host: str) -> None:
        self._host = host

    async def square(self, number: int) -> int:
        """The square of a number, by courtesy of the server."""
        backoff = Backoff(start=0.1, max=2.0, jitter="full")
        while True:
            try:
                async with asyncio.timeout(self.patience):
                    return int(await self._ask(b"%d\n" % number))
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(backoff.fail())

    async def _ask(self, question: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, 8000)
        try:
            writer.write(question)
            return await reader.readuntil(b"\n")
        finally:
            writer.close()


async def serve_squares(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The server: one number a line."""
    while line := await reader.readline():
        writer.write(b"%d\n" % int(line) ** 2)
    writer.close()


async def scenario(sim: Sim) -> None:
    """One bad day."""
    server = await sim.serve(serve_squares)
    killed = sim.random(0, 10)
    sim.at(killed, server.kill)
    sim.at(killed + 1, server.restart)
    sim.storm("server", until=10.0)

    async def ask(number: int) -> None:
        await asyncio.sleep(sim.random(0, 10))
        assert await Client("server").square(number) == number**2

    await asyncio.gather(*(ask(number) for number in range(5)))
    assert sim.now < 30, "a calm network and a running server should not keep anybody waiting"


def main() -> None:
    """Run it, then break it."""
    print(simulate(scenario, seeds=2000))
    patient = mutant(Client, "patience", None, name="a client that waits for ever")
    print(assert_caught(scenario, patient, within=2000))


if __name__ == "__main__":
    main()
