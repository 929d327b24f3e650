"""Many sends over a link that is cut repeatedly, and the checks of their outcomes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.sessions.support import LIMIT, until

from moored.sessions import Acked, NotSent, Outcome, Rejected, Session, Unknown
from moored.testing import FaultProxy

__all__ = ["LinkFaults", "SendLoad"]

#: More than any of these tests takes: no send ends by this timeout.
TIMEOUT = 100.0

#: Returns the ids that have arrived at a recipient, in order, with repetitions.
Arrived = Callable[[str], Iterable[str]]


@dataclass(slots=True)
class Sent:
    """One send, and the outcome that its caller got."""

    id: str
    recipient: str
    outcome: Outcome | None = None


class LinkFaults:
    """Breaks the session's link, in each of the given ways in turn."""

    def __init__(
        self,
        proxy: FaultProxy,
        session: Session,
        load: SendLoad,
        rng: random.Random,
        kinds: Iterable[str] = ("reset", "cut", "hole"),
    ) -> None:
        self._proxy = proxy
        self._session = session
        self._load = load
        self._rng = rng
        self._kinds = list(kinds)
        self.done: Counter[str] = Counter()

    async def __call__(self) -> None:
        """Break the current link in the next way, and wait until the session has noticed."""
        await self._session.online(LIMIT)
        kind = self._kinds[self.done.total() % len(self._kinds)]
        generation = self._session.generation
        await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.004)))
        match kind:
            case "reset":
                self._proxy.reset()
            case "cut":
                # In the middle of a packet, in one of the two directions.
                direction, size = self._rng.choice((("up", 200), ("down", 18)))
                self._proxy.cut_after(self._rng.randrange(1, size), direction)  # type: ignore[arg-type]
            case "hole":
                self._proxy.black_hole()
        self.done[kind] += 1
        while kind == "cut" and not self._lost(generation):
            self._load.send()
            await asyncio.sleep(0.002)
        await until(lambda: self._lost(generation))
        self._proxy.cut_after(None)
        self._proxy.resume()

    def _lost(self, generation: int) -> bool:
        return self._session.generation != generation or self._session.state != "online"


class SendLoad:
    """Sends from one session to many recipients; records the outcome of each."""

    def __init__(
        self,
        session: Session,
        rng: random.Random,
        *,
        recipients: int = 50,
        prefix: str = "to/",
    ) -> None:
        self._session = session
        self._rng = rng
        self._recipients = [f"{prefix}{number}" for number in range(recipients)]
        self._tasks: list[asyncio.Task[None]] = []
        self.sent: list[Sent] = []

    async def run(self, total: int, faults: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Send `total` messages with the faults at random places, and wait for all outcomes."""
        waiting = list(faults)
        places = set(self._rng.sample(range(total // 20, total), len(waiting)))
        for number in range(total):
            self.send()
            if number in places:
                # Sends must be in flight before and during the fault.
                fault = asyncio.ensure_future(waiting.pop(0)())
                await asyncio.wait((fault,), timeout=0.002)
                for _ in range(5):
                    self.send()
                await fault
            elif self._rng.random() < 0.2:
                await asyncio.sleep(self._rng.uniform(0.0, 0.004))
        async with asyncio.timeout(2 * LIMIT):
            await asyncio.gather(*self._tasks)

    async def last(self, recipient: str = "to/last") -> str:
        """Send one more when the link is up, and return its id: it arrives after all others."""
        await self._session.online(LIMIT)
        sent = Sent(f"send-{len(self.sent)}", recipient)
        self._recipients.append(recipient)
        self.sent.append(sent)
        await self._wait_for(sent, {"hold": True})
        assert isinstance(sent.outcome, Acked)
        return sent.id

    def send(self) -> None:
        """Start a send to a random recipient, without waiting for its outcome."""
        sent = Sent(f"send-{len(self.sent)}", self._rng.choice(self._recipients))
        self.sent.append(sent)
        how = {"hold": self._rng.random() < 0.6, "idempotent": self._rng.random() < 0.3}
        task = asyncio.get_running_loop().create_task(self._wait_for(sent, how))
        self._tasks.append(task)

    async def _wait_for(self, sent: Sent, how: dict[str, Any]) -> None:
        outcome = await self._session.send(
            sent.recipient, sent.id.encode(), id=sent.id, timeout=TIMEOUT, outcome=True, **how
        )
        assert sent.outcome is None
        assert outcome.id == sent.id
        sent.outcome = outcome

    # -- what must hold afterwards -------------------------------------------------------------

    def counts(self) -> Counter[str]:
        """Return how many sends had each outcome."""
        return Counter(type(each.outcome).__name__ for each in self.sent)

    def check(self, arrived_at: Arrived, *, lossy: bool = False) -> tuple[int, int]:
        """Check all sends; return how many confirmed ones were lost, and how many came again.

        A `lossy` server may lose sends that it has confirmed; everything else is still checked.
        """
        self._check_outcomes()
        lost = again = 0
        for recipient in self._recipients:
            mine = [each for each in self.sent if each.recipient == recipient]
            arrived = list(arrived_at(recipient))
            first = list(dict.fromkeys(arrived))
            again += len(arrived) - len(first)
            known = {each.id: each for each in mine}
            assert set(first) <= set(known), "an id has arrived that was never sent"
            order = [each.id for each in mine]
            assert first == [id for id in order if id in set(first)], f"out of order: {recipient}"
            for each in mine:
                here = each.id in set(first)
                assert not (here and isinstance(each.outcome, NotSent)), (
                    f"reported as not sent, and has arrived: {each}"
                )
                if isinstance(each.outcome, Acked) and not here:
                    assert lossy, f"confirmed, and has not arrived: {each}"
                    lost += 1
        return lost, again

    def _check_outcomes(self) -> None:
        assert all(each.outcome is not None for each in self.sent)
        assert not [each for each in self.sent if isinstance(each.outcome, Rejected)]
        # The session's counters agree: no send was settled twice, and none is in flight.
        status, counts = self._session.status(), self.counts()
        expected = {name: counts[kind.__name__] for name, kind in _KINDS.items()}
        assert {name: status[name] for name in _KINDS} == expected
        assert (status["sending"], status["waiting"]) == (0, 0)
        assert status["crashes"] == 0


_KINDS = {"acked": Acked, "not_sent": NotSent, "unknown": Unknown, "rejected": Rejected}
