"""Who gets an event, and the buffers of the subscribers. No I/O.

Invariants:

- an event reaches only subscribers of its tenant and its channel, without a look at any other;
- of these, an event for one user reaches only subscribers of that user;
- a buffer never exceeds its bounds, except by one event that alone is larger;
- a subscriber gets events in the order of their positions, each at most once;
- an event that is dropped is reported: by the end of the stream, by a reset, or by a number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal

from ._events import LiveEvent, Skipped, StreamComment, StreamReset

__all__ = ["Audience", "SlowPolicy", "StreamBuffer"]

#: What happens to a subscriber whose buffer is full.
SlowPolicy = Literal["disconnect", "drop", "latest"]
Item = LiveEvent | StreamReset | Skipped | StreamComment


class StreamBuffer:
    """The buffer of one subscriber.

    It is *replaying* until it has read the history after its last event. Meanwhile live events are
    buffered; if there are too many, they are forgotten, because the history has them as well.
    """

    __slots__ = (
        "_bytes",
        "_items",
        "_limits",
        "_skipped",
        "channels",
        "comment_due",
        "end_reason",
        "floor",
        "high_water",
        "on_ready",
        "overrun",
        "replaying",
        "tenant",
        "user",
    )

    def __init__(
        self,
        tenant: str,
        channels: frozenset[str] | None,
        limits: tuple[int, int, SlowPolicy],
        *,
        replaying: bool = False,
        user: str | None = None,
    ) -> None:
        self.tenant = tenant
        #: The user of the tenant; None for a subscriber that gets no events for one user.
        self.user = user
        #: The channels that it gets; None for all.
        self.channels = channels
        self.replaying = replaying
        #: Whether the stream shall send a comment before the next page of the history.
        self.comment_due = False
        #: Whether live events were forgotten while the history was read.
        self.overrun = False
        #: The position of the last event of the history: events up to it are not repeated.
        self.floor: Any = None
        #: Why the stream has ended; empty while it is open.
        self.end_reason = ""
        #: Called once when there is something to take.
        self.on_ready: Callable[[], object] | None = None
        #: The most events that were buffered at a time.
        self.high_water = 0
        self._limits = limits
        self._items: deque[LiveEvent | StreamReset | StreamComment] = deque()
        self._bytes = 0
        self._skipped = 0

    def gets(self, channel: str) -> bool:
        """Return whether it gets the events of a channel."""
        return self.channels is None or channel in self.channels

    def may_have(self, event: LiveEvent) -> bool:
        """Return whether an event of its tenant and channels is for its user, or for all."""
        return not event.user or event.user == self.user

    def push(self, event: LiveEvent) -> str:
        """Buffer an event; return why an event was dropped instead, or an empty string."""
        if self.end_reason or (self.floor is not None and event.position <= self.floor):
            return ""
        events, size, policy = self._limits
        dropped = ""
        if self._items and (len(self._items) >= events or self._bytes + event.size > size):
            dropped = self._overflow(policy)
            if policy != "latest" or self.replaying:
                return dropped
        self._items.append(event)
        self._bytes += event.size
        if len(self._items) > self.high_water:
            self.high_water = len(self._items)
        self._notify()
        return dropped

    def reset(self, reason: str, id: str) -> None:
        """Drop what is buffered, and report that events may be missing.

        A history that is being read is of no use then, and positions may begin anew.
        """
        self._clear()
        self._skipped = 0
        self.replaying = self.overrun = False
        self.floor = None
        self._items.append(StreamReset(reason, id))
        self._notify()

    def keepalive(self, id: str, position: Any) -> None:
        """Let the stream send something, if it has nothing to send, or waits for its history.

        The client then resumes after `id`, so the id is left out if the client may have an event
        after it: one of the history that this broker has not reached yet.
        """
        if self.replaying:
            self.comment_due = True
            self._wake()
        elif not (self._items or self.end_reason):
            known = self.floor is None or (position is not None and position >= self.floor)
            self._items.append(StreamComment(id if known else ""))
            self._notify()

    def end(self, reason: str) -> None:
        """End the stream."""
        if not self.end_reason:
            self.end_reason = reason
            self._notify()

    def take(self) -> list[Item]:
        """Empty the buffer."""
        found: list[Item] = list(self._items)
        self._items.clear()
        self._bytes = 0
        if self._skipped:
            # The newest event is kept with "latest", after a reset; the oldest ones otherwise.
            latest = int(bool(found) and isinstance(found[0], StreamReset))
            at = latest if self._limits[2] == "latest" else len(found)
            found.insert(at, Skipped(self._skipped))
            self._skipped = 0
        return found

    def caught_up(self, floor: Any) -> bool:
        """Go live after the history was read up to a position; False to read on from there."""
        self.floor = floor
        if self.overrun:
            self.overrun = False
            return False
        kept = [
            item
            for item in self._items
            if not isinstance(item, LiveEvent) or floor is None or item.position > floor
        ]
        self._clear()
        self._items.extend(kept)
        self._bytes = sum(item.size for item in kept if isinstance(item, LiveEvent))
        self.replaying = False
        return True

    def _overflow(self, policy: SlowPolicy) -> str:
        if self.replaying:
            self._clear()
            self.overrun = True
            return ""
        if policy == "disconnect":
            self._clear()
            self.end("slow")
        elif policy == "drop":
            self._skipped += 1
        else:
            # A reset is always the first item, and is not dropped.
            reset = self._items[0] if isinstance(self._items[0], StreamReset) else None
            self._skipped += len(self._items) - (reset is not None)
            self._clear()
            if reset is not None:
                self._items.append(reset)
        return "slow"

    def _clear(self) -> None:
        self._items.clear()
        self._bytes = 0

    def _notify(self) -> None:
        if self.end_reason or not self.replaying:
            self._wake()

    def _wake(self) -> None:
        if (call := self.on_ready) is not None:
            self.on_ready = None
            call()

    @property
    def ready(self) -> bool:
        """Whether there is something to take, or the stream has ended."""
        return bool(self._items or self.end_reason or self._skipped)

    def __len__(self) -> int:
        return len(self._items)


class Audience:
    """All subscribers, by tenant and channel."""

    def __init__(self) -> None:
        self._index: dict[str, dict[str, dict[StreamBuffer, None]]] = {}
        self._all: dict[StreamBuffer, None] = {}
        self.of_tenant: Counter[str] = Counter()

    def add(self, subscriber: StreamBuffer) -> None:
        """Add a subscriber: it gets every event from now on."""
        self._all[subscriber] = None
        self.of_tenant[subscriber.tenant] += 1
        channels = self._index.setdefault(subscriber.tenant, {})
        for channel in _keys(subscriber):
            channels.setdefault(channel, {})[subscriber] = None

    def remove(self, subscriber: StreamBuffer) -> None:
        """Remove a subscriber."""
        if self._all.pop(subscriber, self) is self:
            return
        tenant = subscriber.tenant
        self.of_tenant[tenant] -= 1
        if not self.of_tenant[tenant]:
            del self.of_tenant[tenant], self._index[tenant]
            return
        self.mute(subscriber)

    def mute(self, subscriber: StreamBuffer) -> None:
        """Send no more events to a subscriber, which still counts until it is removed."""
        channels = self._index[subscriber.tenant]
        for channel in _keys(subscriber):
            hearers = channels.get(channel, {})
            hearers.pop(subscriber, None)
            if not hearers:
                channels.pop(channel, None)

    def hearers(self, tenant: str, channel: str) -> Iterator[StreamBuffer]:
        """Return the subscribers of a tenant and a channel."""
        channels = self._index.get(tenant, _NONE)
        return chain(channels.get(channel, _NOBODY), channels.get(_ALL, _NOBODY))

    def __iter__(self) -> Iterator[StreamBuffer]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _keys(subscriber: StreamBuffer) -> Iterable[str]:
    return (_ALL,) if subscriber.channels is None else subscriber.channels


#: The key of the subscribers of all channels; it is not the name of one.
_ALL = ""
_NONE: dict[str, dict[StreamBuffer, None]] = {}
_NOBODY: dict[StreamBuffer, None] = {}
