"""The sends that are under way: who is told what, and that everybody is told exactly once.

It does no I/O and has no clock of its own. A send is parked before anything is done for it, is
marked when it has been written, and is settled once: by a confirmation, a refusal, the loss of the
link, the crash of its sender, its own time, or the end of the session. Whatever comes for a send
after that changes nothing.

Invariants:

- a send that is parked is settled exactly once;
- what was never written is never `Unknown`, and what was written is never `NotSent`;
- a confirmation counts only if it came over the link that the send was last written to;
- nothing is kept for a recipient, a time or a send that is settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from moored.kernel import duration

from .._errors import LinkLost, SenderCrashed, SessionError
from .._protocol import Outgoing
from ._outcomes import Acked, NotSent, Outcome, Rejected, Unknown

__all__ = ["AckTable", "Parked"]

#: The stage of a send that no step has had yet.
QUEUED = "queue"
#: How many settled sends may wait, at least, to be taken out of a queue of deadlines.
SLACK = 64


class Parked:
    """One send that is under way."""

    __slots__ = (
        "deadline",
        "future",
        "hold",
        "idempotent",
        "orphan",
        "outcome",
        "outgoing",
        "repeated",
        "stage",
        "timeout",
        "written_in",
    )

    def __init__(
        self,
        outgoing: Outgoing,
        timeout: float,
        deadline: float,
        *,
        future: object = None,
        idempotent: bool = False,
        hold: bool = False,
    ) -> None:
        self.outgoing = outgoing
        self.timeout = timeout
        self.deadline = deadline
        #: Whatever the shell tells the outcome to.
        self.future = future
        #: Whether it may be written again, once, when it is not known whether it arrived.
        self.idempotent = idempotent
        #: Whether it waits for a link, within its time, instead of failing without one.
        self.hold = hold
        #: Which step has it.
        self.stage = QUEUED
        #: The generation of the link that it was written to; 0 if it has not left the process.
        self.written_in = 0
        #: Whether the link that it was written to is gone, and the next one may tell.
        self.orphan = False
        self.repeated = False
        self.outcome: Outcome | None = None

    @property
    def id(self) -> str:
        """Its id."""
        return self.outgoing.id

    def __repr__(self) -> str:
        where = f"written to link {self.written_in}" if self.written_in else f"at {self.stage}"
        return f"<Parked {self.id}: {self.outcome or where}>"


class AckTable:
    """The sends of one session that are under way.

    :param settle: called once for each send, when its outcome is known.
    """

    __slots__ = ("_by_id", "_by_recipient", "_line", "_queues", "_settle", "late")

    def __init__(self, settle: Callable[[Parked, Outcome], None]) -> None:
        self._settle = settle
        self._by_id: dict[str, Parked] = {}
        self._by_recipient: dict[str, dict[str, Parked]] = {}
        # In the order of their deadlines, because all in one queue have the same time.
        self._queues: dict[float, deque[Parked]] = {}
        # The order in which sends were written to the current link; for cumulative confirmations.
        self._line: deque[str] | None = None
        #: Confirmations and refusals that came too late, twice, or over an old link.
        self.late = 0

    # -- on the way out ------------------------------------------------------------------------

    def park(self, parked: Parked) -> None:
        """From now on it will be settled."""
        id = parked.outgoing.id
        if id in self._by_id:
            raise SessionError(
                f"the id {id!r} is under way already: wait for its outcome, or use another"
            )
        self._by_id[id] = parked
        recipient = parked.outgoing.recipient
        found = self._by_recipient.get(recipient)
        if found is None:
            self._by_recipient[recipient] = {id: parked}
        else:
            found[id] = parked
        queue = self._queues.get(parked.timeout)
        if queue is None:
            if len(self._queues) > 2 * len(self._by_id) + SLACK:
                # Whoever has another timeout each time leaves many that nobody waits in.
                self._queues = {
                    timeout: each
                    for timeout, each in self._queues.items()
                    if any(one.outcome is None for one in each)
                }
            self._queues[parked.timeout] = deque((parked,))
            return
        while queue and queue[0].outcome is not None:
            queue.popleft()
        queue.append(parked)
        if len(queue) > 2 * len(self._by_id) + SLACK:
            # Behind one that waits, many are settled.
            self._queues[parked.timeout] = deque(each for each in queue if each.outcome is None)

    def written(self, parked: Parked, generation: int) -> None:
        """It has left the process."""
        parked.written_in = generation
        parked.orphan = False
        if self._line is not None:
            self._line.append(parked.outgoing.id)

    # -- what the server says ------------------------------------------------------------------

    def confirmed(self, id: str, extra: object, generation: int) -> bool:
        """The server has it; says whether that was news."""
        parked = self._of(id, generation)
        if parked is None:
            return False
        if extra is None and parked.outgoing.notes:
            extra = parked.outgoing.notes.get("extra")
        self._end(parked, Acked(id, extra))
        return True

    def confirmed_up_to(self, count: int, generation: int) -> list[str]:
        """The server has so many more of the current link, in their order; returns their ids."""
        line = self._line or deque()
        ids = [line.popleft() for _ in range(min(count, len(line)))]
        for id in ids:
            self.confirmed(id, None, generation)
        return ids

    def refused(self, id: str, code: object, reason: str, generation: int) -> bool:
        """The server does not want it; says whether that was news."""
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

    # -- what else ends a send -----------------------------------------------------------------

    def failed(self, parked: Parked, reason: BaseException | str) -> None:
        """A step could not do its work for this one."""
        if parked.outcome is None:
            self._fail(parked, reason)

    def crashed(self, recipient: str, reason: BaseException) -> int:
        """The sender of a recipient has crashed, with all that it had; returns how many."""
        found = list(self._by_recipient.get(recipient, {}).values())
        for parked in found:
            self._fail(parked, SenderCrashed(reason))
        return len(found)

    def expired(self, now: float) -> int:
        """Settle those whose time is over; returns how many."""
        count = 0
        for timeout, queue in list(self._queues.items()):
            while queue and (queue[0].outcome is not None or queue[0].deadline <= now):
                parked = queue.popleft()
                if parked.outcome is None:
                    count += 1
                    self._fail(parked, self._overdue(parked))
            if not queue:
                self._queues.pop(timeout, None)
        return count

    @staticmethod
    def _overdue(parked: Parked) -> TimeoutError:
        waited = duration(parked.timeout)
        if parked.orphan:
            return TimeoutError(f"the link was lost and has not come back within {waited}")
        if parked.written_in:
            return TimeoutError(f"no confirmation within {waited}")
        return TimeoutError(f"it was not written within {waited}")

    def next_deadline(self) -> float | None:
        """When `expired` has something to do next; None for never."""
        heads = []
        for queue in self._queues.values():
            while queue and queue[0].outcome is not None:
                queue.popleft()
            if queue:
                heads.append(queue[0].deadline)
        return min(heads, default=None)

    # -- links ---------------------------------------------------------------------------------

    def linked(self, *, cumulative: bool) -> None:
        """A new link is there."""
        self._line = deque() if cumulative else None

    def lost(self, reason: BaseException | str, *, resumes: bool) -> None:
        """The link is gone: all that it had is settled now, or waits for the next one to tell."""
        for parked in list(self._by_id.values()):
            if not parked.written_in:
                if not parked.hold:
                    self._fail(parked, _lost(reason))
            elif resumes or self._may_repeat(parked):
                parked.orphan = True
            else:
                self._fail(parked, _lost(reason))

    def resumed(self, ids: Iterable[str], generation: int) -> None:
        """The server knows the old link: these were written again, and the others it has."""
        for id in ids:
            if (parked := self._by_id.get(id)) is not None and parked.orphan:
                self.written(parked, generation)

    def put_aside(self, id: str, why: str) -> None:
        """Each link that it was written to has ended: it is not written again."""
        if (parked := self._by_id.get(id)) is not None:
            text = f"each link that it was written to has ended, so it is not sent again: {why}"
            self._fail(parked, LinkLost(text))

    def repeated(self, id: str) -> None:
        """It was written once more, because somebody asked for it: the server counts it again."""
        if self._line is not None:
            self._line.append(id)

    def forgotten(self, reason: BaseException | str) -> list[Parked]:
        """What became of the old link's sends will never be told; returns those to write again."""
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
        """The session has ended or crashed: so has everything that it had."""
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
        outgoing = parked.outgoing
        parked.outcome = outcome
        del self._by_id[outgoing.id]
        found = self._by_recipient[outgoing.recipient]
        del found[outgoing.id]
        if not found:
            del self._by_recipient[outgoing.recipient]
        if not self._by_id:
            # Most sessions have nothing under way: give back the room that it took.
            self._by_id.clear()
            self._by_recipient.clear()
            self._queues.clear()
        self._settle(parked, outcome)

    # -- for people ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: object) -> bool:
        return id in self._by_id

    def __iter__(self) -> Iterator[Parked]:
        return iter(list(self._by_id.values()))

    @property
    def recipients(self) -> int:
        """How many recipients have something under way."""
        return len(self._by_recipient)

    def __repr__(self) -> str:
        return f"<AckTable: {len(self)} under way to {self.recipients} recipients>"


def _lost(reason: BaseException | str) -> BaseException:
    return reason if isinstance(reason, LinkLost) else LinkLost(f"the link was lost: {reason}")
