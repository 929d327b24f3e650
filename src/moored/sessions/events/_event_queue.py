"""Events that wait for somebody to take them. Plain data: no tasks, no I/O.

What has an acknowledgement belongs to the link that it came over: over another one the server would
not know what is meant. So when a link ends, what has not begun is put aside, and the next link says
what becomes of it:

- the server sends it again: it is let go of, or each message would be handled once for each link;
- the server has forgotten it: there is no other copy, so it is given out, with nobody to tell.

What has begun goes on. If it comes back unfinished, it goes the same way as the others. If it is
finished after its link has ended, its acknowledgement is given to the copy that the server sends:
otherwise a handler that takes longer than its links live would never be done with one message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from .._content import Incoming

__all__ = ["Done", "EventQueue", "QueuedEvent"]

#: Told whether it was handled; says whether the server can be told over this link.
Done: TypeAlias = Callable[[bool], bool | None]
#: So many messages may be finished whose copies have not come yet. (One or two, as a rule: what is
#: in hand when a link ends.)
MOST_LATE = 8


class QueuedEvent(NamedTuple):
    """An event, and whom to tell that it was handled."""

    event: Incoming
    done: Done | None = None
    #: What it has in common with its copies alone.
    key: object = None
    #: Whether it is such a copy.
    again: bool = False
    #: Whether the inbound steps have to be done for it.
    raw: bool = False


class EventQueue:
    """The events of one session that nobody has taken yet.

    :param limit: how many may wait; as many again of those that have an acknowledgement.
    :param returns: whether the server may send again what was not acknowledged.
    :param outlives: whether it may do so for the next session as well.
    """

    __slots__ = (
        "_aside",
        "_buffer",
        "_earlier",
        "_forgotten",
        "_keeps",
        "_known",
        "_late",
        "_since",
        "_told",
        "dropped",
        "era",
        "limit",
        "outlives",
        "owed",
        "profile",
        "refuses",
        "returned",
        "returns",
    )

    def __init__(
        self, profile: str, limit: int = 1000, *, returns: bool = False, outlives: bool = False
    ) -> None:
        self.profile = profile
        self.limit = limit
        self.returns = returns
        self.outlives = returns and outlives
        #: Events that there was no room for.
        self.dropped = 0
        #: Events that were let go of because the server still has them.
        self.returned = 0
        self._told = 0
        # What waits: the older ones, the oldest last, and the newer ones, in their order. (Two
        # lists: each session has an event or two that nobody takes, and a deque takes 600 bytes.)
        self._earlier: list[QueuedEvent] = []
        self._buffer: list[QueuedEvent] = []
        #: How many of those that wait have an acknowledgement, which is for the current link.
        self.owed = 0
        # Those of the last link, in their order, until the next one says what becomes of them.
        self._aside: list[QueuedEvent] | None = None
        #: How many links have ended; and how many had when there was one that was ready, and when
        #: the server had last forgotten one.
        self.era = 0
        self._since = 0
        self._forgotten = 0
        #: Whether everything that the server will send to the next session is let go of.
        self.refuses = False
        self._keeps = True
        # The keys of what was finished when its link was gone, the oldest first.
        self._late: list[object] | None = None
        # What the inbound steps made of messages that are not finished, by key: a copy needs none.
        self._known: dict[object, Incoming] | None = None

    def add(self, item: QueuedEvent) -> bool:
        """Append an event; says whether there was room for it."""
        done, key = item.done, item.key
        if self._late and key in self._late:
            self._late.remove(key)
            if item.again and done is not None:
                done(True)
                return True
        if done is not None and self.refuses:
            self.returned += 1
            return True
        waiting = len(self) - self.owed if done is None else self.owed
        if waiting >= self.limit:
            self.dropped += 1
            return False
        self.owed += done is not None
        self._buffer.append(item)
        return True

    def take(self) -> QueuedEvent | None:
        """The next one, if there is any."""
        if not self:
            return None
        if self.dropped > self._told:
            lost, self._told = self.dropped - self._told, self.dropped
            return QueuedEvent(Incoming("events_dropped", lost, self.profile))
        if not self._earlier:
            self._buffer.reverse()
            self._earlier, self._buffer = self._buffer, []
        taken = self._earlier.pop()
        self.owed -= taken.done is not None
        if taken.raw and taken.again and self._known and taken.key in self._known:
            return taken._replace(event=self._known[taken.key], raw=False)
        return taken

    def prepared(self, taken: QueuedEvent, event: Incoming) -> QueuedEvent:
        """The inbound steps are done: they are not done again for a copy of this message."""
        if taken.key is not None:
            self._known = self._known or {}
            self._known[taken.key] = event
            if len(self._known) > self.limit:
                del self._known[next(iter(self._known))]
        return taken._replace(event=event, raw=False)

    def handled(self, taken: QueuedEvent, *, current: bool = True) -> None:
        """It is finished: tell the server, over its own link or with the copy of another one.

        :param current: whether nobody has taken the place of whoever had it. Otherwise that one may
            have had the copy: what is like it now, or will be, can be another message.
        """
        if self._known:
            self._known.pop(taken.key, None)
        if taken.done is None or taken.done(True) or taken.key is None or not current:
            return
        for waiting in (self._earlier, self._buffer, self._aside or []):
            for place, copy in enumerate(waiting):
                if copy.again and copy.key == taken.key:
                    del waiting[place]
                    if copy.done is None:
                        return
                    if waiting is not self._aside:
                        self.owed -= 1
                    if copy.done(True):
                        return
                    break
        self._late = [*(self._late or ()), taken.key][-MOST_LATE:]

    def put_back(self, taken: QueuedEvent, era: int) -> None:
        """Whoever took it, in that era, is not done with it."""
        done = taken.done
        if done is not None and (self.refuses or era != self.era):
            if self._aside is not None and era >= self._since:
                self._aside.insert(0, taken)
                return
            if self.refuses or era >= self._forgotten:
                self.returned += 1
                return
            done = None
        self.owed += done is not None
        self._earlier.append(taken._replace(done=done))

    # -- links ---------------------------------------------------------------------------------

    def link_lost(self) -> None:
        """A link has ended: nothing that came over it can be acknowledged any more."""
        if not self.returns:
            return
        owed = self._take_out()
        self.era += 1
        if self._aside is None:
            self._aside = owed
        else:
            # That link was never ready, so nobody has said yet what becomes of the ones before.
            room = max(0, self.limit - len(self._aside))
            self._aside += owed[:room]
            self.returned += len(owed[room:])

    def link_ready(self, *, again: bool, keeps: bool = True) -> None:
        """There is a new link, over which what was put aside comes again, or does not.

        :param keeps: whether the server keeps what this link leaves, for the next session as well.
        """
        self._keeps = keeps
        self._since = self.era
        aside, self._aside = self._aside, None
        if aside is None:
            return
        if again:
            self.returned += len(aside)
        else:
            self._forgotten = self.era
            self._earlier += [each._replace(done=None) for each in reversed(aside)]

    def refuse(self) -> None:
        """From now on, let go of everything that the server will send to the next session."""
        if self.outlives and self._keeps:
            self.refuses = True
            aside, self._aside = self._aside or [], None
            self.returned += len(aside) + len(self._take_out())
        elif self._aside is not None:
            # There is no link, and the next session gets nothing of the last one: it is for ours.
            self.link_ready(again=False, keeps=self._keeps)

    def _take_out(self) -> list[QueuedEvent]:
        """Those with an acknowledgement, in their order; they do not wait here any more."""
        if not self.owed:
            return []
        everything = [*reversed(self._earlier), *self._buffer]
        self._earlier, self.owed = [], 0
        self._buffer = [each for each in everything if each.done is None]
        return [each for each in everything if each.done is not None]

    def __len__(self) -> int:
        """How many can be taken."""
        return len(self._earlier) + len(self._buffer)
