"""The state of one endpoint: its link, its channels, its callers, its clients and its credentials.

It does no I/O and has no clock: each method receives an event and the time, and returns what is to
be done, which `Background` carries out. No lock guards it: one loop alone calls these methods. Only
`hand_out` and `taken`, which note a client, may be called in any thread: each of their steps is one
of the interpreter's. Otherwise, threads only read single attributes.

::

    off/resting ──▶ connecting ──▶ up ──▶ connecting …     each arrival at up is a new generation
                       ▲  │         │
                       │  ▼         ▼
                    down/waiting ◀──┘                      off/stopped: it is closed

Invariants:

- at most one attempt to connect is in progress, however many callers wait for it;
- an error of a generation acts at most once, and only while that generation is current;
- a live connection is kept when its server answers UNAVAILABLE; after several such answers without
  a success, the next generation is made beside it, and the calls of the old one go on;
- the wait before the next attempt is short while a caller waits, and grows while none does;
- an error that no further attempt can fix fails all waiting callers at once;
- a replaced channel is closed after its last call. Its calls are cut after `grace` seconds, unless
  its connection is alive and leads to a server that is still wanted;
- an endpoint that no one uses rests without a connection, until a caller waits for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from moored.kernel import Backoff, Clock, Dial, Machine, Pauses, Reconnect, Recorder, link_chart

from ._clients import Clients
from ._config import ConnectionConfig
from ._counters import Counters
from ._dial import reports_too_many_pings
from ._refusals import Refusals
from ._verdicts import Verdict

__all__ = ["CHART", "Act", "Endpoint", "Live", "Order", "Orders"]

#: So many UNAVAILABLE answers of a live connection, without a success, ask for a new one.
TOO_MANY = 5
#: Seconds in which calls in flight may still end when their endpoint is closed.
CLOSING = 5.0
#: A failed renewal of an old channel is retried after a tenth of `max_age`, or after this many
#: seconds if that is less.
RENEW_AGAIN = 30.0
#: The largest factor by which pings become rarer for a server that complains of too many pings.
MAX_PING_FACTOR = 1024

CHART = link_chart(up=("serving", "probing", "renewing"))
#: The loss of a connection that has proven to work is followed by an attempt at once.
PAUSES = Pauses(proven=5.0, at_once=True)
#: States in which a checkout and a call need not wait.
_USABLE = (CHART.find("up/serving"), CHART.find("up/renewing"))


class Act(Enum):
    """What is to be done."""

    DIAL = "open a channel, as this attempt"
    PROBE = "check with a call whether the server answers over this channel"
    CHECK = "check whether the connection of this channel is alive"
    PUT = "let calls begin over the current channel, or wait if there is none"
    RETIRE = "watch for the last call of this channel, which was replaced"
    REVIEW = "check whether the calls of this replaced channel may go on"
    CLOSE = "close this channel"
    WAKE = "wake the waiting callers"
    FAIL = "fail the waiting callers with the verdict"
    REFRESH = "refresh the credentials, which the server has refused"
    REST = "give up the attempt and the strategy, until a caller waits"
    STOP = "give up the attempt, the strategy and the handler, for good"


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Live:
    """A connected channel of one generation, and the number of its calls in flight.

    Calls are counted without a lock: appending to a list and popping from it are atomic. The loop
    replaces the current channel first and reads the count afterwards; a caller counts its call
    first, and checks afterwards that the channel is still the current one. So one of the two always
    sees the other, and a channel is never closed under a call that has begun.
    """

    number: int
    #: The inner channel: of grpc, or of grpc.aio.
    channel: Any
    address: str
    #: Its length is the number of calls in flight.
    calls: list[None] = field(default_factory=list)
    #: Its length is the number of UNAVAILABLE answers since the last successful call.
    unavailable: list[None] = field(default_factory=list)
    #: When it is looked at again, after it was replaced; None while it is the current one.
    until: float | None = None
    #: Whether the channel is closed, or is being closed.
    closed: bool = False
    #: Called after each call that ends, once the channel was replaced.
    watcher: Callable[[Live], object] | None = None

    def leave(self) -> None:
        """Count a call that has ended."""
        self.calls.pop()
        self.tell_watcher()

    def tell_watcher(self) -> None:
        """Report to the watcher that a call has ended."""
        if self.watcher is not None:
            self.watcher(self)

    def retire(self, until: float) -> None:
        """Note that no new call begins over it, and until when its calls may go on."""
        self.until = until

    def watch(self, watcher: Callable[[Live], object]) -> None:
        """Call a function after each call that ends."""
        self.watcher = watcher

    def shut(self) -> None:
        """Note that the channel is being closed."""
        self.closed = True

    def __repr__(self) -> str:
        state = "closed" if self.closed else "current" if self.until is None else "retired"
        return f"<Live {self.number} to {self.address}: {state}, {len(self.calls)} calls>"


class Order(NamedTuple):
    """One act, with its attempt or its channel."""

    act: Act
    attempt: int = 0
    live: Live | None = None


Orders = list[Order]


class _Link(Reconnect):
    """A link that can be replaced while it is up: the attempt has a number of its own."""

    def renew(self, why: BaseException | str) -> int:
        """Begin to replace the link; return the number of the attempt."""
        self.machine.move("up/renewing", cause=why)
        self.dials += 1
        return self.dials

    def renewed(self, now: float, why: str) -> None:
        """The attempt has succeeded: the link is the new one."""
        self.number, self.proven_at = self.dials, now + self.pauses.proven
        self.machine.move("up/serving", cause=why)

    def lost_early(self, why: BaseException | str, now: float) -> None:
        """The link was lost before it was replaced: the attempt goes on."""
        if now >= self.proven_at:
            self.backoff.succeed()
        self.number, self.is_up, self.proven_at = self.dials, False, math.inf
        self.machine.move("connecting/dialing", cause=why)

    def sooner(self, at: float) -> None:
        """Bring the next attempt forward."""
        if self.next_dial_at is not None:
            self.next_dial_at = min(self.next_dial_at, at)


class Endpoint:
    """The connection of a manager to one endpoint; clients share it, or one owns it.

    The handler stays the same for its whole life; the channel below it is replaced.

    :param limit: the timeout of an attempt to connect, in seconds.
    :param refreshable: whether refused credentials can be refreshed.
    :param idle: see `ManagerOptions`, as for `grace` and `max_age`.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        clock: Clock,
        recorder: Recorder,
        *,
        key: str = "",
        dedicated: bool = False,
        limit: float = 10.0,
        counters: Counters | None = None,
        refreshable: bool = False,
        idle: float = 30.0,
        grace: float = 30.0,
        max_age: float | None = None,
    ) -> None:
        self.config = config
        #: The key in the table of the manager; that of a dedicated connection has a number in it.
        self.key = key or config.key
        self.dedicated = dedicated
        self.connect_timeout = limit
        self.counters = counters or Counters()
        self.created_at = self.last_used_at = clock.monotonic()
        #: What users hold, and what makes channels while it does not rest; opaque here.
        self.handler: Any = None
        self.strategy: Any = None
        #: The address of the current channel, or of the last one.
        self.address = config.address
        #: The number of the current channel, or of the last one.
        self.generation = 0
        #: The clients that were named with `client=`, held weakly, and the number of the others.
        self.clients: Clients[object] = Clients()
        self.anonymous = 0
        #: Whether someone may hold its channel, so that it is kept without waiting callers.
        self.lasting = False
        #: The error that fails all waiting callers, because waiting longer would not help, and how
        #: many times it did.
        self.verdict: BaseException | None = None
        self.verdicts = 0
        #: Whether it is closed for good.
        self.closed = False
        #: Multiplies the interval between pings after the server has received too many.
        self.ping_factor = 1
        self._idle, self._grace, self._max_age = idle, grace, max_age
        self._clock, self._recorder = clock, recorder
        wrong = Backoff(1.0, 60.0, jitter=0.25, clock=clock)
        self.refusals = Refusals(wrong) if refreshable else None
        #: The number of the current credentials: it grows with each refresh.
        self.credential = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Begin without a connection, also in the child of a fork: what it had is the parent's."""
        clock = self._clock
        name = f"rpc.{self.config.address}"
        self.machine = Machine(name, CHART, clock=clock, recorder=self._recorder)
        #: The current channel; None while there is no connection.
        self.live: Live | None = None
        #: Replaced channels whose calls go on.
        self.old: list[Live] = []
        #: The number of callers that wait for a connection.
        self.waiting = 0
        #: The last failure since there was a connection.
        self.last_error: BaseException | None = None
        # The pauses between attempts while no caller waits, and while callers do.
        self.link = _Link(self.machine, PAUSES, Backoff(0.25, 30.0, jitter=0.25, clock=clock))
        self._eager = Backoff(0.02, 0.2, jitter=0.25, clock=clock)
        self._tried_at = self._renewed_at = float("-inf")
        self._age_at: float | None = None
        #: Whether a caller must not bring the next attempt forward: the server has refused us.
        self._held = False
        #: The generation whose connection is being checked, and the error that led to the check.
        self._suspected = 0
        self.suspicion: BaseException | str = ""
        #: Whether the connection was lost, and not only needed for the first time or again.
        self.recovering = False
        #: Whether the renewal in progress replaces a channel whose server fails.
        self._failing = False
        self._unused_since: float | None = None
        self._unsent_in = -1

    # -- what it is ----------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it can be handed out, and called, without waiting."""
        return self.machine.state in _USABLE

    @property
    def resting(self) -> bool:
        """Whether it has no connection because no one needs one."""
        return self.machine.at("resting")

    @property
    def is_being_replaced(self) -> bool:
        """Whether a channel whose server fails is being replaced."""
        return self._failing and self.machine.at("renewing")

    @property
    def refreshes(self) -> bool:
        """Whether a refresh of the credentials is in progress."""
        return self.refusals is not None and self.refusals.refreshing

    @property
    def mended(self) -> bool:
        """Whether a refused call may be retried, with newer credentials."""
        return self.refusals is not None and self.refusals.mended

    @property
    def next_at(self) -> float | None:
        """When `due` is to be called; None for never."""
        # A connection that no client ever got is only retried for a caller.
        at = self.link.next_dial_at if self.lasting or self.waiting else None
        if self._age_at is not None and (at is None or self._age_at < at):
            at = self._age_at
        for live in self.old:
            if not live.closed and live.until is not None and (at is None or live.until < at):
                at = live.until
        return at

    # -- clients -------------------------------------------------------------------------------

    def hand_out(self, client: object | None, now: float) -> bool:
        """Hand it out, if it is connected and was used recently; return whether.

        Nearly every checkout takes this path, so it is written out. Any thread may call it, without
        a lock: if it is closed meanwhile, a call opens it again; and with a GIL, which gRPC needs,
        an increment is one step.
        """
        if self.machine.state not in _USABLE or now - self.last_used_at > self._idle:
            return False
        if client is None:
            self.anonymous += 1
        else:
            self.clients.add(client)
        self.last_used_at = now
        self._unused_since = None
        return True

    def taken(self, client: object | None) -> None:
        """Add a client."""
        self._unused_since = None
        self.lasting = True
        if client is None:
            self.anonymous += 1
        else:
            self.clients.add(client)

    def given_back(self, client: object | None, now: float) -> Orders:
        """Remove a client; a surplus call is harmless.

        A dedicated one without clients is closed, and calls that wait for a connection fail.
        """
        if client is not None:
            self.clients.discard(client)
        elif self.anonymous:
            self.anonymous -= 1
        if self.dedicated and not (self.anonymous or self.clients):
            return self.close("it was released", now)
        return []

    def is_last(self, client: object | None) -> bool:
        """Whether it is dedicated, and is closed when this client releases it."""
        others = any(each is not client for each in self.clients)
        return self.dedicated and not others and self.anonymous <= (client is None)

    def swept(self, calls: int, called_at: float, linger: float, now: float) -> Orders:
        """Rest if there was no client, call or waiter for `linger` seconds.

        Surplus releases never affect other holders: a channel that is used stays open. An unnamed
        client of a dedicated connection may have dropped it without a release.
        """
        self.last_used_at = max(self.last_used_at, called_at)
        used = self.clients or (self.anonymous and not self.dedicated)
        if used or calls or self.waiting or self.machine.at("off"):
            self._unused_since = None
        elif self._unused_since is None:
            self._unused_since = now
        elif now - max(self._unused_since, called_at) >= self._patience(linger):
            return self._rest("no client uses it", now)
        return []

    # -- callers -------------------------------------------------------------------------------

    def requested(self, called_at: float, now: float) -> Orders:
        """A caller requests the connection, and must wait unless `usable` holds afterwards."""
        self.last_used_at = max(self.last_used_at, called_at)
        if self.machine.at("serving") and now - self.last_used_at > self._idle:
            self.machine.move("up/probing", cause="it was idle for too long")
            return [Order(Act.PROBE, live=self.live)]
        self.last_used_at = now
        return []

    def connect(self, now: float) -> Orders:
        """Connect if it rests; otherwise bring the next attempt forward."""
        if self.resting:
            self._eager.succeed()
            self.link.want(now, "a caller needs it")
        self._hurry(now)
        return self._dial(now)

    def waits(self, now: float) -> Orders:
        """Count a caller that begins to wait, and connect or bring the next attempt forward."""
        self.waiting += 1
        if self.closed:
            return [Order(Act.WAKE)]
        if self.machine.at("resting"):
            return self.connect(now)
        at = self.link.next_dial_at
        if self._held and at is not None and now < at and self.verdict is not None:
            return self._fail(self.verdict)  # as those before it
        self._hurry(now)
        return []

    def leaves(self, now: float) -> Orders:
        """Count a caller that stops waiting; close a connection that no client ever got."""
        self.waiting -= 1
        # While a refusal holds the next attempt back, it stays, for the callers that follow.
        if not (self.waiting or self.lasting or self._held or self.closed):
            return self.close("no caller waits for it any longer", now)
        return []

    def call_waits(self, now: float) -> Orders:
        """Count a call that begins to wait: `waits`."""
        self.counters.calls_waited += 1
        return self.waits(now)

    def unsent(self, error: BaseException, now: float) -> Orders:
        """Count a call that was not sent; record the first one of an outage."""
        self.counters.calls_unsent += 1
        if self._unsent_in != self.generation:
            self._unsent_in = self.generation
            self._recorder.record(
                self.machine.name,
                "calls are not sent: no connection within their timeout",
                kind="failure",
                cause=error,
            )
        return []

    # -- failures of calls ---------------------------------------------------------------------

    def probed(self, live: Live, healthy: bool, now: float) -> Orders:
        """The probe of a channel has ended."""
        if live is not self.live or not self.machine.at("probing"):
            return []
        if not healthy:
            self.counters.probes_unhealthy += 1
            return self._lost("the server did not answer the probe", now)
        self.counters.probes_healthy += 1
        self.machine.move("up/serving", cause="the server answers")
        self.last_used_at = now
        return self._arrived()

    def broken(
        self,
        generation: int,
        cause: BaseException | str,
        now: float,
        *,
        connected: bool = False,
        keep: bool = False,
        renew: bool = False,
        follows: bool = False,
    ) -> Orders:
        """A call over this generation failed with an error that a new connection may fix.

        :param connected: whether the connection still seems alive, so that the error may be the
            server's own answer. gRPC ends the calls of a lost connection a few milliseconds before
            it reports the loss, so the connection is checked again before it is replaced.
        :param keep: whether the strategy may decide to keep the channel.
        :param renew: whether a live connection is to be replaced as well.
        :param follows: whether a topology decides where it leads: it is fetched again, instead of
            another connection to a server that answers UNAVAILABLE.
        """
        if generation != self.generation or not self.machine.at("up"):
            self.counters.stale_errors += generation < self.generation
            return []
        if not connected:
            return self._lost(cause, now, keep=keep)
        orders: Orders = []
        if self._suspected != generation:
            self._suspected, self.suspicion = generation, cause
            orders = [Order(Act.CHECK, live=self.live)]
        too_many = self.live is not None and len(self.live.unavailable) >= TOO_MANY
        if renew or (too_many and not follows):
            orders += self.renew(self.suspicion, now)
        return orders

    def checked(self, live: Live, connected: bool, now: float, *, keep: bool = False) -> Orders:
        """The check that `broken` asked for has ended: the connection is alive or not."""
        if live.number != self._suspected:
            return []
        cause, self._suspected, self.suspicion = self.suspicion, 0, ""
        if not connected:
            return self.broken(live.number, cause, now, keep=keep)
        self.counters.unavailable_answers += 1
        return []

    def heeds(self, generation: int, connected: bool) -> bool:
        """Whether `broken` would keep the cause of this error: of many, the first."""
        current = generation == self.generation and self.machine.at("up")
        return current and not (connected and self._suspected == generation)

    def blamed(self, now: float) -> int:
        """Return the generation to which an error without a generation is attributed.

        It is the current one if that is the first, or has proven healthy; otherwise it is the one
        before, of which late errors are to be expected.
        """
        fresh = self.generation > 1 and self.link.is_up and now < self.link.proven_at
        return self.generation - fresh

    def renew(self, cause: BaseException | str, now: float) -> Orders:
        """Make the next generation beside the current one, whose calls go on.

        It does nothing while there is no connection, or soon after the last renewal: a server that
        is overloaded, and answers UNAVAILABLE to all, must not get a storm of connections.
        """
        if not self.machine.at("serving") or now - self._renewed_at < PAUSES.proven:
            return []
        self._renewed_at, self._failing = now, True
        return self._replace(cause, now)

    # -- attempts to connect -------------------------------------------------------------------

    def shown_as(self, handler: Any) -> None:
        """Take the handler that users hold."""
        self.handler = handler

    def uses(self, strategy: Any) -> None:
        """Take the strategy that makes its channels from now on."""
        self.strategy = strategy

    def dropped(self, now: float) -> Orders:
        """The strategy does not keep the channel that was lost."""
        return [] if self.machine.at("up") else self._drop(now)

    def dialed(self, attempt: int, channel: Any, address: str, now: float) -> Orders | None:
        """The attempt has succeeded; None if it was abandoned: its channel must be closed."""
        if not self._is_current(attempt):
            return None
        old, self.generation = self.live, self.generation + 1
        self.live = Live(self.generation, channel, address)
        self.counters.connects += 1
        self.counters.renewals += self.machine.at("renewing")
        if self.generation > 1 and self.address != address:
            self.counters.moves += 1
            why = f"it was connected to {self.address} before"
            self._recorder.record(self.machine.name, f"moved to {address}", cause=why)
        self.address = address
        self.last_error = None
        self.lasting, self.recovering = True, False
        self.last_used_at = now
        if self._max_age is not None:
            self._age(now)
        why = f"generation {self.generation} is connected"
        if self.machine.at("renewing"):
            self.link.renewed(now, why)
        else:
            self.link.up(attempt, now, why)
        orders = [Order(Act.PUT)]
        if old is not None:
            orders += self._retire(old, now)
        return [*orders, Order(Act.WAKE)] if self.waiting else orders

    def kept(self, attempt: int, now: float) -> Orders:
        """The strategy has decided to keep the channel."""
        if not self._is_current(attempt) or self.live is None:
            return []
        self.recovering = False
        self.link.up(attempt, now, "the strategy keeps the connection")
        return self._arrived()

    def failed(
        self, attempt: int, error: BaseException, now: float, verdict: Verdict = Verdict.RETRY
    ) -> Orders:
        """The attempt has failed; the verdict tells whether others may succeed.

        MISTAKE: all waiting callers fail. A connection that no client ever got is closed;
        otherwise a new caller starts another attempt, and without callers attempts are rare.

        REFUSED: all waiting callers fail, and so do new ones before the next attempt. Attempts are
        rare from now on, also while callers wait.
        """
        if not self._is_current(attempt):
            return []
        self.last_error = error
        self.counters.connect_failures += 1
        if self.machine.at("renewing"):
            self.machine.move("up/serving", cause=error)
            return self._arrived()
        if verdict is Verdict.RETRY:
            self._pause(attempt, error, now)
            return []
        if verdict is Verdict.REFUSED and self.dedicated and not self.generation:
            verdict = Verdict.MISTAKE  # no other caller can wait for it
        if verdict is Verdict.MISTAKE and not self.lasting:
            return [*self._stop(error, now), *self._fail(error)]
        self._held = verdict is Verdict.REFUSED
        self.link.lost(attempt, error, now)
        return self._fail(error)

    def unable(self, error: BaseException, now: float) -> Orders:
        """There is no strategy, so that it cannot even be tried: rest until the next caller."""
        self.last_error = error
        return [*self._rest("it has no strategy", now), *self._fail(error)]

    def due(self, now: float) -> Orders:
        """Do what the time has come for; a timer may fire early."""
        orders: Orders = []
        if self.lasting or self.waiting:
            orders += self._dial(now)
        if self._age_at is not None and now >= self._age_at:
            self._age(now, again=True)  # until there is a new channel
            if self.machine.at("serving"):
                self._failing = False
                orders += self._replace("the channel is old", now)
        for live in self.old:
            if not live.closed and live.until is not None and now >= live.until:
                orders += self._shut(live) if self.closed else [Order(Act.REVIEW, live=live)]
        return orders

    # -- replaced channels ---------------------------------------------------------------------

    def ended(self, live: Live, now: float) -> Orders:
        """A call of a replaced channel may have been its last one."""
        return self._shut(live) if live in self.old and not live.calls else []

    def reviewed(self, live: Live, stays: bool, now: float) -> Orders:
        """The calls of a replaced channel may go on, or not."""
        if not stays or self.closed:
            return self._shut(live)
        live.retire(now + self._grace)
        return []

    def gone(self, live: Live) -> None:
        """A replaced channel is closed."""
        if live in self.old:
            self.old.remove(live)

    # -- credentials ---------------------------------------------------------------------------

    def refused(self, credential: int, now: float) -> Orders:
        """A call with these credentials was refused."""
        if self.refusals is not None and self.refusals.refuse(credential, now):
            return [Order(Act.REFRESH)]
        return []

    def refreshed(self, error: BaseException | None, now: float) -> Orders:
        """A refresh has ended."""
        assert self.refusals is not None
        self.refusals.refreshed(error, now)
        self.credential = self.refusals.number
        self.counters.credential_refreshes += error is None
        self.counters.credential_refresh_failures += error is not None
        return [Order(Act.PUT)]

    # -- the end -------------------------------------------------------------------------------

    def close(self, cause: BaseException | str, now: float) -> Orders:
        """Close it for good: new calls are refused, and those in flight may end soon."""
        return [] if self.closed else [*self._stop(cause, now), Order(Act.WAKE)]

    def forked(self) -> None:
        """Rest in the child of a fork: its connection and its strategy belong to the parent."""
        self.strategy = None
        if self.refusals is not None:
            self.refusals.forked()
        self._begin_anew()
        if self.closed:
            self.link.stop("it was closed before the fork")

    # -- for users -----------------------------------------------------------------------------

    def statistics(self, called_at: float, now: float) -> dict[str, Any]:
        """Return its entry in `get_stats()`."""
        return {
            "key": self.key,
            "address": self.address,
            "age": max(0.0, now - self.created_at),
            "idle_time": max(0.0, now - max(self.last_used_at, called_at)),
            "client_count": len(self.clients) + self.anonymous,
            "dedicated": self.dedicated,
            "generation": self.generation,
            "state": str(self.machine.state),
        }

    def __repr__(self) -> str:
        users = len(self.clients) + self.anonymous
        return (
            f"<Endpoint {self.address}: {self.machine.state}, generation {self.generation}, "
            f"{users} clients{', dedicated' if self.dedicated else ''}>"
        )

    # -- steps ---------------------------------------------------------------------------------

    def _is_current(self, attempt: int) -> bool:
        connecting = self.machine.at("connecting") and self.link.is_current(attempt)
        return connecting or (self.machine.at("renewing") and attempt == self.link.dials)

    def _dial(self, now: float) -> Orders:
        """Dial, if it is time."""
        due = self.link.due(now)
        return self._begin(due.number, now) if isinstance(due, Dial) else []

    def _hurry(self, now: float) -> None:
        """Bring the next attempt forward: its pause was chosen while no caller waited."""
        if not self._held:
            self.link.sooner(max(now, self._tried_at + self._eager.max))

    def _patience(self, linger: float) -> float:
        # `channel_ready()` waits for an attempt without being counted as a caller.
        return max(linger, self.connect_timeout) if self.machine.at("connecting") else linger

    def _replace(self, cause: BaseException | str, now: float) -> Orders:
        return self._begin(self.link.renew(cause), now)

    def _begin(self, attempt: int, now: float) -> Orders:
        self._held = False
        self._tried_at = now
        return [Order(Act.DIAL, attempt)]

    def _lost(self, cause: BaseException | str, now: float, *, keep: bool = False) -> Orders:
        """Replace the current channel: at once, or after a pause if it did not live for long."""
        self.counters.recoveries += 1
        self.recovering = True
        self.last_error = cause if isinstance(cause, BaseException) else None
        if reports_too_many_pings(self.last_error):
            self.ping_factor = min(2 * self.ping_factor, MAX_PING_FACTOR)
        orders = [] if keep else self._drop(now)
        if now >= self.link.proven_at:
            self._eager.succeed()
        if self.machine.at("renewing"):
            self.link.lost_early(cause, now)
        else:
            self._pause(self.link.number, cause, now)
        return [*orders, *self._dial(now)]

    def _pause(self, number: int, cause: BaseException | str, now: float) -> None:
        """Plan the next attempt; the pause is short while callers wait."""
        eager = self.waiting and now < self.link.proven_at
        self.link.lost(number, cause, now, pause=self._eager.fail() if eager else None)

    def _arrived(self) -> Orders:
        return [Order(Act.WAKE)] if self.waiting else []

    def _fail(self, error: BaseException) -> Orders:
        self.verdict, self.verdicts = error, self.verdicts + 1
        return [Order(Act.FAIL)]

    def _age(self, now: float, *, again: bool = False) -> None:
        """Choose when the channel is renewed, with a jitter: others are as old as this one."""
        if (age := self._max_age) is not None:
            delay = min(age / 10, RENEW_AGAIN) if again else age
            self._age_at = now + delay * (0.9 + 0.1 * self._clock.random.random())

    def _drop(self, now: float) -> Orders:
        old, self.live = self.live, None
        return [] if old is None else [Order(Act.PUT), *self._retire(old, now)]

    def _retire(self, live: Live, now: float) -> Orders:
        live.retire(now + self._grace)
        self.old.append(live)
        return [Order(Act.RETIRE, live=live)]

    def _shut(self, live: Live) -> Orders:
        if live.closed or live not in self.old:
            return []
        live.shut()
        return [Order(Act.CLOSE, live=live)]

    def _rest(self, cause: str, now: float) -> Orders:
        self.link.rest(cause)
        self._unused_since = None
        return [*self._leave(now), Order(Act.REST)]

    def _stop(self, cause: BaseException | str, now: float) -> Orders:
        self.link.stop(cause)
        self.closed = True
        orders = self._leave(now)
        for live in self.old:
            live.retire(now + CLOSING)
        return [*orders, Order(Act.STOP)]

    def _leave(self, now: float) -> Orders:
        """Give up the link; calls in flight go on."""
        self._age_at = None
        self._held = self.recovering = False
        return self._drop(now)
