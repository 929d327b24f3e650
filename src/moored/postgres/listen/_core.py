"""The decisions of a listener: what to LISTEN to, and who gets what; no I/O.

When to dial is decided by `Reconnect`. Attempts come in series of five: at once, and after 0.5, 1,
2 and 4 s; the next series begins after 8 s. Each delay has a jitter of up to half of it. A
connection that was up for a second begins a new series when it is lost. Invariants:

- unless the link is off, an attempt or a connection is under way, or the next attempt is due;
- a notification is delivered only if its generation is the current one, and LISTEN was confirmed
  for its channel;
- a subscription that was subscribed while a connection was lost gets a `Gap` before the first
  notification of the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moored.kernel import Backoff, Clock, Machine, Pauses, Reconnect, duration, link_chart

from ._events import Gap, Notification

if TYPE_CHECKING:
    from ._subscription import Subscription

__all__ = ["CHART", "ChannelChange", "ListenerCore", "new_backoff"]

#: A connection that is up for a second has proven to work: its loss begins a new series, at once.
PAUSES = Pauses(proven=1.0, at_once=True, series=8.0)

CHART = link_chart(
    "probing",
    "listening",
    words={
        "waiting": "waiting for the next attempt",
        "dialing": "connecting to the server",
        "probing": "checking that notifications arrive",
        "listening": "listening to the channels",
        "up": "up",
        "resting": "not open",
        "refused": "off: an operator must change something",
        "stopped": "off",
    },
)


class ChannelChange(NamedTuple):
    """The channels to LISTEN and to UNLISTEN now."""

    listen: tuple[str, ...]
    unlisten: tuple[str, ...]


def new_backoff(clock: Clock) -> Backoff:
    """Return the delays of one series of attempts."""
    return Backoff(0.5, 4.0, jitter="half", max_attempts=5, clock=clock)


class ListenerCore:
    """The state of a listener; a token is the number of a connection.

    :param always: channels to listen to besides those of the subscribers.
    """

    def __init__(self, machine: Machine, clock: Clock, always: tuple[str, ...] = ()) -> None:
        self.link = Reconnect(machine, PAUSES, new_backoff(clock))
        #: Whether a connection was ever up.
        self.was_up = False
        #: Connections that were up, failed attempts, and series of five that failed.
        self.connects = self.failures = self.failed_series = 0
        #: Notifications and gaps delivered; notifications ignored as stale or not listened to.
        self.delivered = self.gaps = self.ignored = 0
        self._dropped_before = 0
        #: When the server was last heard, in seconds since 1970.
        self.heard_at = clock.wall()
        #: The same in monotonic seconds; None if it never was.
        self.last_heard: float | None = None
        self._clock = clock
        self._always = frozenset(always)
        self._listened: set[str] = set()
        self._subscribers: dict[str, dict[Subscription, None]] = {}
        self._all: dict[Subscription, None] = {}

    # -- the connection ------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """The last failure; None while the listener is up, and if nothing has failed."""
        return None if self.link.is_up else self.link.why or None

    def connected(self, token: int) -> None:
        """The server has accepted the connection."""
        self.link.step(token, "probing", "the server has accepted the connection")
        self.heard(token)

    def probed(self, token: int) -> None:
        """The connection is suitable for LISTEN."""
        self.link.step(token, "listening", "the connection is suitable for LISTEN")

    def went_up(self, token: int) -> None:
        """Every channel is listened to."""
        if self.link.up(token, self._clock.monotonic(), "every channel is listened to"):
            self.connects += 1
            self.was_up = True

    def heard(self, token: int) -> None:
        """Bytes of the server have arrived."""
        if self.link.is_current(token):
            self.heard_at, self.last_heard = self._clock.wall(), self._clock.monotonic()

    def lost(self, token: int, reason: str) -> bool:
        """The attempt or the connection has failed; return whether a series of attempts ended."""
        loss = self.link.lost(token, reason, self._clock.monotonic())
        if loss is None:
            return False
        self.failures += not loss.was_up
        self.failed_series += loss.exhausted
        self._listened.clear()
        for each in self._all:
            each.gap = each.gap or Gap(self.heard_at, reason)
        return loss.exhausted

    # -- channels ------------------------------------------------------------------------------

    def add(self, subscriber: Subscription) -> None:
        """Add a subscriber; while the listener is not up, its stream begins with a `Gap`."""
        self._all[subscriber] = None
        self._index(subscriber, subscriber.channels)
        if not self.link.is_up and not self.listens_to(subscriber.channels):
            reason = self.failure or "the listener was not connected yet"
            subscriber.gap = Gap(self._clock.wall(), reason)

    def remove(self, subscriber: Subscription) -> None:
        """Remove a subscriber; harmless if it was removed before."""
        if self._all.pop(subscriber, self) is None:
            self._dropped_before += subscriber.dropped
            self._unindex(subscriber, subscriber.channels)

    def change(self, subscriber: Subscription, channels: frozenset[str]) -> None:
        """Replace the channels of a subscriber."""
        before, subscriber.channels = subscriber.channels, channels
        if subscriber in self._all:
            self._index(subscriber, channels - before)
            self._unindex(subscriber, before - channels)
            self._report_gaps()

    def _index(self, subscriber: Subscription, channels: frozenset[str]) -> None:
        for channel in sorted(channels):
            self._subscribers.setdefault(channel, {})[subscriber] = None

    def _unindex(self, subscriber: Subscription, channels: frozenset[str]) -> None:
        for channel in channels:
            del self._subscribers[channel][subscriber]
            if not self._subscribers[channel]:
                del self._subscribers[channel]

    @property
    def channels(self) -> list[str]:
        """The channels of the subscribers, in order."""
        return sorted(self._subscribers)

    @property
    def subscribers(self) -> list[Subscription]:
        """The subscribers, the oldest first."""
        return list(self._all)

    @property
    def dropped(self) -> int:
        """Notifications that were dropped because a subscriber was slow."""
        return self._dropped_before + sum(each.dropped for each in self._all)

    def listens_to(self, channels: frozenset[str]) -> bool:
        """Whether all these channels are listened to."""
        return channels <= self._listened

    def next_change(self) -> ChannelChange | None:
        """Return what to LISTEN and UNLISTEN now; None if nothing has to change.

        A channel to UNLISTEN no longer counts as listened to, also if it is subscribed again.
        """
        wanted = self._always | self._subscribers.keys()
        change = ChannelChange(
            tuple(sorted(wanted - self._listened)), tuple(sorted(self._listened - wanted))
        )
        self._listened -= set(change.unlisten)
        return change if any(change) else None

    def listened(self, token: int, channels: tuple[str, ...]) -> None:
        """The server has confirmed LISTEN for these channels: report the gaps that have ended."""
        if not self.link.is_current(token):
            return
        self._listened.update(channels)
        self._report_gaps()

    def _report_gaps(self) -> None:
        for each in self._all:
            if each.gap is not None and each.channels <= self._listened:
                gap, each.gap = each.gap, None
                self.gaps += 1
                each.offer(gap, self._clock)

    def deliver(self, token: int, notification: Notification) -> None:
        """Pass a notification to its subscribers, unless a `Gap` is due to them first."""
        channel = notification.channel
        if not self.link.is_current(token) or channel not in self._listened:
            self.ignored += 1
            return
        for each in self._subscribers.get(channel, ()):
            if each.gap is None:
                self.delivered += 1
                each.offer(notification, self._clock)

    def __repr__(self) -> str:
        link, due = self.link, ""
        if link.next_dial_at is not None:
            due = f", next attempt in {duration(link.next_dial_at - self._clock.monotonic())}"
        return f"<ListenerCore {link.machine.state}, generation {link.dials}{due}>"
