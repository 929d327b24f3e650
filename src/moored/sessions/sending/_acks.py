"""The sends of a session without an outcome yet, each settled exactly once. No I/O, no clock.

A send is registered ("parked") before any step runs, is marked when it is written to a link, and is
settled once: by a confirmation, a refusal, the loss of the link, the crash of its sender, its
timeout, or the end of the session. Later reports about it change nothing.

Invariants:

- a parked send is settled exactly once;
- a send that was never written is never `Unknown`, and one that was written is never `NotSent`;
- a confirmation counts only if it came over the link that the send was last written to;
- a settled send is kept at most until the next clean-up of the deadlines (SLACK).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from moored.kernel import duration

from .._errors import LinkLost, SenderCrashed, SessionError
from .._protocol import Outgoing
from ._outcomes import Acked, NotSent, Outcome, Rejected, Unknown

__all__ = ["AckTable", "Parked"]

#: The stage of a send before its first step.
QUEUED = "queue"
#: The number of settled sends that the heap of deadlines may hold before it is cleaned up.
SLACK = 64

_numbers = count()


@dataclass(slots=True, eq=False, repr=False)
class Parked:
    """One send without an outcome yet."""

    outgoing: Outgoing
    timeout: float
    deadline: float
    #: The future of the caller, which gets the outcome.
    future: object = None
    #: Whether it may be written once more if it is unknown whether it arrived.
    idempotent: bool = False
    #: Whether it waits for a link, until its timeout, instead of failing without one.
    hold: bool = False
    #: The name of the current step.
    stage: str = QUEUED
    #: The generation of the link that it was written to; 0 if it has not left the process.
    written_in: int = 0
    #: Whether that link is lost, and the next link may report or repeat the send.
    orphan: bool = False
    repeated: bool = False
    outcome: Outcome | None = None

    @property
    def id(self) -> str:
        """The id of the send."""
        return self.outgoing.id


@dataclass(slots=True, eq=False, repr=False)
class AckTable:
    """The sends of one session without an outcome yet."""

    # Called once for each send, with its outcome.
    _settle: Callable[[Parked, Outcome], None]
    _by_id: dict[str, Parked] = field(default_factory=dict)
    # A heap: the deadline, a number that no other entry has, and the send, perhaps settled.
    _deadlines: list[tuple[float, int, Parked]] = field(default_factory=list)
    # The ids in the order in which they were written to the link, if a count confirms them.
    _line: deque[str] | None = None
    #: Confirmations and refusals that were late, duplicate, or from an old link.
    late: int = 0

    # -- sending -------------------------------------------------------------------------------

    def park(self, parked: Parked) -> None:
        """Register a send, which will be settled once from now on."""
        id = parked.outgoing.id
        if id in self._by_id:
            raise SessionError(
                f"a send with the id {id!r} is in progress: wait for its outcome, or use another id"
            )
        self._by_id[id] = parked
        self.next_deadline()  # drops settled sends
        if len(self._deadlines) > 2 * len(self._by_id) + SLACK:
            # Many settled sends are behind one that is not.
            self._deadlines = [each for each in self._deadlines if each[2].outcome is None]
            heapify(self._deadlines)
        heappush(self._deadlines, (parked.deadline, next(_numbers), parked))

    def written(self, parked: Parked, generation: int) -> None:
        """Mark a send as written to the link of this generation."""
        parked.written_in = generation
        parked.orphan = False
        if self._line is not None:
            self._line.append(parked.outgoing.id)

    # -- answers of the server -----------------------------------------------------------------

    def confirmed(self, id: str, extra: object, generation: int) -> bool:
        """Settle a send as `Acked`; return False if the confirmation is late or of an old link."""
        parked = self._of(id, generation)
        if parked is None:
            return False
        if extra is None and parked.outgoing.notes:
            extra = parked.outgoing.notes.get("extra")
        self._end(parked, Acked(id, extra))
        return True

    def confirmed_up_to(self, count: int, generation: int) -> list[str]:
        """Settle the next `count` sends of the link, in the order written; return their ids."""
        line = self._line or deque()
        ids = [line.popleft() for _ in range(min(count, len(line)))]
        for id in ids:
            self.confirmed(id, None, generation)
        return ids

    def refused(self, id: str, code: object, reason: str, generation: int) -> bool:
        """Settle a send as `Rejected`; return False if the refusal is late or of an old link."""
        parked = self._of(id, generation)
        if parked is None:
            return False
        self._end(parked, Rejected(id, code, reason))
        return True

    def _of(self, id: str, generation: int) -> Parked | None:
        parked = self._by_id.get(id)
        if parked is None or parked.orphan or not parked.written_in == generation != 0:
            self.late += 1
            return None
        return parked

    # -- other ends of a send ------------------------------------------------------------------

    def failed(self, parked: Parked, reason: BaseException | str) -> None:
        """Settle one send as `NotSent` or `Unknown`, unless it is settled."""
        if parked.outcome is None:
            self._fail(parked, reason)

    def crashed(self, recipient: str, reason: BaseException) -> int:
        """Fail all sends to a recipient, whose sender has crashed; return how many."""
        found = [each for each in self if each.outgoing.recipient == recipient]
        for parked in found:
            self._fail(parked, SenderCrashed(reason))
        return len(found)

    def expired(self, now: float) -> int:
        """Settle the sends whose timeout has expired; return how many."""
        count = 0
        while (due := self.next_deadline()) is not None and due <= now:
            parked = heappop(self._deadlines)[2]
            count += 1
            self._fail(parked, self._overdue(parked))
        return count

    @staticmethod
    def _overdue(parked: Parked) -> TimeoutError:
        waited = duration(parked.timeout)
        if parked.orphan:
            return TimeoutError(f"the link was lost, and no new one was ready within {waited}")
        if parked.written_in:
            return TimeoutError(f"no confirmation within {waited}")
        return TimeoutError(f"not written within {waited}")

    def next_deadline(self) -> float | None:
        """When the next timeout expires; None if there is no send."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].outcome is not None:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    # -- links ---------------------------------------------------------------------------------

    def linked(self, *, cumulative: bool) -> None:
        """Begin a new link."""
        self._line = deque() if cumulative else None

    def lost(self, reason: BaseException | str, *, resumes: bool) -> None:
        """Settle the sends of a lost link, or keep them for the next one to report or repeat."""
        for parked in list(self._by_id.values()):
            if not parked.written_in:
                if not parked.hold:
                    self._fail(parked, _lost(reason))
            elif resumes or self._may_repeat(parked):
                parked.orphan = True
            else:
                self._fail(parked, _lost(reason))

    def resumed(self, ids: Iterable[str], generation: int) -> None:
        """Mark the sends of the old link that were written again over the resumed one."""
        for id in ids:
            if (parked := self._by_id.get(id)) is not None and parked.orphan:
                self.written(parked, generation)

    def give_up(self, id: str, why: str) -> None:
        """Settle a send that is not written again, because it seems to end each link."""
        if (parked := self._by_id.get(id)) is not None:
            text = f"every link ended after it was written, so it is not sent again: {why}"
            self._fail(parked, LinkLost(text))

    def repeated(self, id: str) -> None:
        """Note that a send was written once more at a peer's request: the server counts both."""
        if self._line is not None:
            self._line.append(id)

    def forgotten(self, reason: BaseException | str) -> list[Parked]:
        """Settle the sends whose fate the server cannot report; return those to write again."""
        repeat = []
        for parked in list(self._by_id.values()):
            if not parked.orphan:
                continue
            if self._may_repeat(parked):
                parked.repeated = True
                repeat.append(parked)
            else:
                self._fail(parked, _lost(reason))
        return repeat

    def over(self, reason: BaseException | str) -> None:
        """Settle every send: the session has ended or crashed."""
        for parked in list(self._by_id.values()):
            self._fail(parked, reason)

    @staticmethod
    def _may_repeat(parked: Parked) -> bool:
        return parked.idempotent and not parked.repeated

    # -- settling ------------------------------------------------------------------------------

    def _fail(self, parked: Parked, reason: BaseException | str) -> None:
        id = parked.outgoing.id
        if parked.written_in:
            self._end(parked, Unknown(id, reason))
        else:
            self._end(parked, NotSent(id, parked.stage, reason))

    def _end(self, parked: Parked, outcome: Outcome) -> None:
        parked.outcome = outcome
        del self._by_id[parked.outgoing.id]
        if not self._by_id:
            # Most sessions are idle: free the memory of the empty dict, and of the settled sends.
            self._by_id.clear()
            self._deadlines.clear()
        self._settle(parked, outcome)

    # -- inspection ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: object) -> bool:
        return id in self._by_id

    def __iter__(self) -> Iterator[Parked]:
        return iter(list(self._by_id.values()))


def _lost(reason: BaseException | str) -> BaseException:
    return reason if isinstance(reason, LinkLost) else LinkLost(f"the link was lost: {reason}")
