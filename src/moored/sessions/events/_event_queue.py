"""The queue of events that no consumer has taken yet. Plain data: no tasks, no I/O.

A message that must be acknowledged belongs to its link: its token is not valid over another one. So
when a link ends, its queued messages are set apart until the next link is ready:

- if the server sends them again, they are dropped: otherwise each would be handled once per link;
- if the server has not kept them, there is no other copy: they are delivered, and not acknowledged.

A message that a consumer has taken is not affected. If the consumer gives it back, it is treated
like the queued ones. If it is handled after its link has ended, the copy that the server sends is
acknowledged: otherwise a handler that takes longer than a link lasts would never complete one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .._content import Incoming

__all__ = ["Done", "EventQueue", "QueuedEvent"]

#: Acknowledges a message (True) or skips it (False); returns False if its link has ended.
Done: TypeAlias = Callable[[bool], bool | None]
#: The most handled messages whose copies are still expected. (Usually one or two: those that were
#: being handled when a link ended.)
MOST_LATE = 8


class QueuedEvent(NamedTuple):
    """An event, and how to acknowledge it."""

    event: Incoming
    done: Done | None = None
    #: Equal for the copies of one message, and for no other message.
    key: object = None
    #: Whether it may be a copy of an earlier message.
    again: bool = False
    #: Whether the inbound steps have not run yet.
    raw: bool = False


@dataclass(slots=True, eq=False, repr=False)
class EventQueue:
    """The events of one session that no consumer has taken yet."""

    profile: str
    #: The most events in the queue; and as many messages that must be acknowledged.
    limit: int = 1000
    #: Whether the server may send unacknowledged messages again.
    returns: bool = False
    #: Whether it also sends them to the next session of the profile.
    outlives: bool = False
    #: Events dropped because the queue was full.
    dropped: int = 0
    #: Messages dropped because the server sends them again.
    returned: int = 0
    # How many dropped events were reported to the consumer.
    _reported: int = 0
    # The queue: the older events, the oldest last, and the newer ones, in order. (Two lists: most
    # sessions have an event or two in the queue, and a deque takes 600 bytes.)
    _earlier: list[QueuedEvent] = field(default_factory=list)
    _buffer: list[QueuedEvent] = field(default_factory=list)
    #: The number of queued messages that must be acknowledged, over the current link.
    owed: int = 0
    # The queued messages of the last link, in order, until the next link is ready.
    _aside: list[QueuedEvent] | None = None
    #: The number of links that have ended.
    era: int = 0
    # Its value when a link was last ready, and when the server had last not kept the session.
    _since: int = 0
    _forgotten: int = 0
    #: Whether messages that the server will send to the next session are dropped.
    refuses: bool = False
    _keeps: bool = True
    # The keys of messages that were handled after their link had ended, the oldest first.
    _late: list[object] | None = None
    # The results of the inbound steps for unacknowledged messages, by key, for their copies.
    _known: dict[object, Incoming] | None = None

    def add(self, item: QueuedEvent) -> bool:
        """Append an event; return False if the queue is full."""
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
        """Remove and return the next event, or None."""
        if not self:
            return None
        if self.dropped > self._reported:
            lost, self._reported = self.dropped - self._reported, self.dropped
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
        """Keep the result of the inbound steps, so that they do not run again for a copy."""
        if taken.key is not None:
            self._known = self._known or {}
            self._known[taken.key] = event
            if len(self._known) > self.limit:
                del self._known[next(iter(self._known))]
        return taken._replace(event=event, raw=False)

    def handled(self, taken: QueuedEvent, *, current: bool = True) -> None:
        """Acknowledge a message, over its own link or with its copy over another one.

        :param current: whether its consumer is still attached. Otherwise the next consumer may have
            handled the copy, and an equal message can be a new one.
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
        """Return a message to the queue that was taken in this era, and not handled."""
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
        """Set the queued messages apart: they cannot be acknowledged over another link."""
        if not self.returns:
            return
        owed = self._take_out()
        self.era += 1
        if self._aside is None:
            self._aside = owed
        else:
            # That link was never ready, so the earlier ones still wait for a decision.
            room = max(0, self.limit - len(self._aside))
            self._aside += owed[:room]
            self.returned += len(owed[room:])

    def link_ready(self, *, again: bool, keeps: bool = True) -> None:
        """Drop or deliver the messages of the last link: a new link is ready.

        :param again: whether the server sends them again.
        :param keeps: whether the server keeps the state of this link, also for the next session.
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
        """Drop the messages that the server will send to the next session, from now on."""
        if self.returns and self.outlives and self._keeps:
            self.refuses = True
            aside, self._aside = self._aside or [], None
            self.returned += len(aside) + len(self._take_out())
        elif self._aside is not None:
            # The next session will not get the messages of the last link: deliver them.
            self.link_ready(again=False, keeps=self._keeps)

    def _take_out(self) -> list[QueuedEvent]:
        """Remove and return the messages that must be acknowledged, in order."""
        if not self.owed:
            return []
        everything = [*reversed(self._earlier), *self._buffer]
        self._earlier, self.owed = [], 0
        self._buffer = [each for each in everything if each.done is None]
        return [each for each in everything if each.done is not None]

    def __len__(self) -> int:
        """The number of queued events."""
        return len(self._earlier) + len(self._buffer)
