"""Random schedules of one endpoint, without I/O: servers die, hang and refuse while callers call.

The shell here carries out the orders over scripted channels in virtual time. The oracle keeps a
model of its own (what is connected, who waits, when the next attempt is due, what the counters
must be), and compares after every event. The planted defects are edits of one line.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import tests.mutants
from tests.mutants import planted_defects
from tests.reached import assert_reached

from moored.kernel import Clock, Recorder
from moored.rpc import ConnectionConfig
from moored.rpc._counters import Counters
from moored.rpc._endpoint import CLOSING, PAUSES, TOO_MANY, Act, Endpoint, Live, Orders, _Link
from moored.rpc._verdicts import Verdict
from moored.testing import Mutant, Sim, assert_caught, scaled, simulate

pytestmark = pytest.mark.pure

CONFIG = ConnectionConfig.from_uri("http://north:1")
NORTH, SOUTH = "north:1", "south:1"
EVENTS = 120
UNABLE = 0.02
IDLE, GRACE, LINGER, LIMIT, PROBE = 2.0, 12.0, 5.0, 3.0, 3.0
#: Seconds in which a caller gets a connection when all servers are well: a probe and an attempt
#: that began before may have to end first.
PATIENCE = PROBE + LIMIT + 2.0
#: The counters that an error of an old generation does not change.
COUNTED = [each.name for each in fields(Counters) if each.name != "stale_errors"]
#: For comparisons of sums of times.
TINY = 1e-6


class Client:
    """A client object, for `client=`."""


class Lost(Exception):
    """What a call, an attempt or a probe fails with."""


@dataclass(eq=False)
class Channel:
    """A scripted channel."""

    address: str
    alive: bool = True
    closed: int = 0
    #: Until when its calls may go on at least, after it was replaced.
    grace_ends: float = math.inf
    #: Whether a review has ended its calls.
    condemned: bool = False
    #: The parent's, in the child of a fork.
    inherited: bool = False


@dataclass(eq=False)
class Call:
    """A call in flight."""

    live: Live
    credential: int
    over: bool = False


@dataclass(eq=False)
class Waiter:
    """A checkout, or a call, that waits."""

    began: float
    deadline: float
    client: Client | None = None
    is_call: bool = False
    verdicts: int = 0
    waits: bool = True


@dataclass
class Model:
    """What must be so."""

    up: bool = False
    probing: bool = False
    off: bool = True
    closed: bool = False
    closed_at: float = math.inf
    generation: int = 0
    proven_at: float = math.inf
    #: The attempt in progress, whether it replaces a live connection, and that of the strategy.
    attempt: int | None = None
    renews: bool = False
    tried_at: float = -math.inf
    #: When the next attempt is due.
    planned: float | None = None
    held: bool = False
    eager: int = 0
    patient: int = 0
    suspected: int = 0
    renewed_at: float = -math.inf
    aged_at: float | None = None
    waiting: int = 0
    verdicts: int = 0
    used_at: float = 0.0
    unused_since: float | None = None
    refreshing: bool = False
    credential: int = 0
    no_refresh_before: float = -math.inf
    counters: Counters = field(default_factory=Counters)


class Life:
    """An endpoint, its shell, and all that happens to it."""

    def __init__(self, sim: Sim) -> None:
        self.rng = rng = sim.rng
        self.now = 100.0
        self.timers: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self.count = 0
        self.reached: Counter[str] = Counter()
        self.dedicated = rng.random() < 0.15
        self.max_age = rng.choice([None, 8.0])
        self.follows, self.keeps = rng.random() < 0.3, rng.random() < 0.3
        clock = Clock(lambda: self.now, lambda: self.now, rng)
        self.endpoint = Endpoint(
            CONFIG,
            clock,
            Recorder(clock=clock),
            dedicated=self.dedicated,
            limit=LIMIT,
            refreshable=True,
            idle=IDLE,
            grace=GRACE,
            max_age=self.max_age,
        )
        self.model = Model()
        self.servers = {NORTH: "well", SOUTH: "well"}
        self.primary = NORTH
        self.verdict = Verdict.RETRY
        self.clients: list[Client | None] = []
        self.waiters: list[Waiter] = []
        self.calls: list[Call] = []
        self.channels: list[Channel] = []
        self.lives: list[Live] = []
        #: What the gate lets calls begin over.
        self.gate: Live | None = None
        self.called_at = 0.0
        self.calm = False
        #: Grows with each fork: what the parent began never reports in the child.
        self.process = 0
        self.lasting = False

    # -- time ----------------------------------------------------------------------------------

    def after(self, delay: float, act: Callable[..., Any], *given: Any) -> None:
        self.count += 1
        heapq.heappush(self.timers, (self.now + delay, self.count, act, given))

    def mine(self, delay: float, act: Callable[..., Any], *given: Any) -> None:
        """Call a function later, unless the process forks."""
        process = self.process
        self.after(delay, lambda: act(*given) if process == self.process else None)

    def run_until(self, end: float) -> None:
        turns = 0
        while True:
            due = self.endpoint.next_at
            at = self.timers[0][0] if self.timers else math.inf
            if due is not None and due <= min(at, end):
                turns = turns + 1 if due <= self.now else 0
                assert turns < 10, "`due` makes no progress"
                self.now = max(self.now, due)
                self.tick()
            elif at <= end:
                self.now, turns = max(self.now, at), 0
                _, _, act, given = heapq.heappop(self.timers)
                act(*given)
            else:
                self.now = end
                return
            self.check()

    def live(self) -> None:
        """Let random events happen, then all servers be well, and then the end."""
        events: dict[Callable[[], None], float] = {
            self.check_out: 10,
            self.call: 12,
            self.change_server: 6,
            self.release: 4,
            self.sweep: 4,
            self.report_old: 3,
            self.end_old_attempt: 3,
            self.end_old_probe: 3,
            self.report_undated: 1,
            self.report_own_error: 1,
            self.ask_for_renewal: 2,
            self.move: 2,
            self.connect: 1,
            self.tick_early: 2,
            self.cancel: 1,
            self.refuse_credentials: 1,
            self.change_verdict: 2,
            self.open_lazily: 0.3,
            self.fork: 0.2,
            self.close: 0.1,
        }
        if self.rng.random() < 0.3:
            self.open_lazily()
        gaps = self.rng.choices([0.0, 0.01, 0.1, 0.5, 3.0, 12.0], [20, 30, 30, 20, 4, 1], k=EVENTS)
        for event, gap in zip(
            self.rng.choices([*events], [*events.values()], k=EVENTS), gaps, strict=True
        ):
            event()
            self.check()
            self.run_until(self.now + gap * self.rng.random())
        self.settle()

    def settle(self) -> None:
        """All servers are well: each caller is served. Then the endpoint is closed."""
        self.calm, self.verdict = True, Verdict.RETRY
        self.servers = {NORTH: "well", SOUTH: "well"}
        self.run_until(self.now + 40.0)  # a pause after a refusal
        served = self.reached["served"]
        for waiter in self.waiters:
            assert not waiter.waits, "a caller still waits"
        for _ in range(3):
            self.check_out(PATIENCE)
            self.run_until(self.now + PATIENCE / 2)
        self.run_until(self.now + PATIENCE)
        assert self.model.closed or self.reached["served"] >= served + 3
        self.run_until(self.now + 80.0)  # the longest call
        if not self.model.closed:
            assert all(each.closed for each in self.endpoint.old), "a replaced channel is open"
        if self.gate is not None:
            self.start_call(self.gate, 60.0)
            self.ask_for_renewal()
            self.run_until(self.now + 0.5)
        self.close()
        self.run_until(self.now + CLOSING + 1.0)
        assert not self.endpoint.old
        assert self.model.waiting == 0
        for channel in self.channels:
            assert channel.closed == (not channel.inherited), "a channel was left open"

    # -- the shell -----------------------------------------------------------------------------

    def carry_out(self, orders: Orders) -> None:
        for act, attempt, live in orders:
            self.reached[act.name] += 1
            match act:
                case Act.DIAL:
                    self.begin_attempt(attempt)
                case Act.PUT:
                    self.gate = self.endpoint.live
                    self.notify()
                case Act.WAKE:
                    self.wake(failed=False)
                case Act.FAIL:
                    self.model.verdicts += 1
                    self.wake(failed=True)
                    self.notify()
                case Act.REFRESH:
                    self.begin_refresh()
                case Act.REST | Act.STOP:
                    self.ended(act)
                case Act.PROBE:
                    assert live is not None
                    assert live is self.gate
                    self.begin_probe(live)
                case Act.CHECK:
                    assert live is not None
                    assert live is self.gate
                    self.mine(self.rng.choice([0.0, 0.1, 1.0]), self.end_check, live)
                case Act.RETIRE:
                    assert live is not None
                    assert live is not self.endpoint.live
                    live.channel.grace_ends = self.now + (CLOSING if self.model.closed else GRACE)
                    live.watch(self.call_ended)
                    self.carry_out(self.endpoint.ended(live, self.now))
                case Act.REVIEW:
                    assert live is not None
                    assert self.now >= live.channel.grace_ends - TINY, "reviewed in its grace"
                    stays = live.channel.alive and self.rng.random() < 0.7
                    live.channel.condemned = not stays
                    live.channel.grace_ends = self.now + GRACE
                    self.reached["calls may go on" if stays else "calls are cut"] += 1
                    ending = self.endpoint.reviewed(live, stays, self.now)
                    assert acts(ending) == [Act.CLOSE] * (not stays)
                    self.carry_out(ending)
                case Act.CLOSE:
                    assert live is not None
                    self.close_channel(live)

    def notify(self) -> None:
        """Let each waiting call look at the endpoint."""
        for waiter in [each for each in self.waiters if each.is_call]:
            if self.endpoint.closed or waiter.verdicts != self.endpoint.verdicts:
                assert self.model.closed or self.endpoint.verdict is not None
                self.stop_waiting(waiter)
                if not self.endpoint.closed:
                    self.unsent()
            elif self.gate is not None:
                self.stop_waiting(waiter)
                self.served(waiter)
                self.start_call(self.gate)

    def wake(self, *, failed: bool) -> None:
        for waiter in [each for each in self.waiters if not each.is_call]:
            self.stop_waiting(waiter)
            if not failed:
                self.mine(0.0, self.look_again, waiter)

    def stop_waiting(self, waiter: Waiter) -> None:
        waiter.waits = False
        self.waiters.remove(waiter)
        # A caller, or its thread, leaves soon.
        self.mine(self.rng.choice([0.0, 0.001]), self.leave)

    def leave(self) -> None:
        model = self.model
        model.waiting -= 1
        orders = self.endpoint.leaves(self.now)
        abandoned = not (model.waiting or self.lasting or model.held or model.closed)
        assert (Act.STOP in acts(orders)) == abandoned
        if abandoned:
            self.reached["abandoned"] += 1
            self.closing()
        self.carry_out(orders)

    def give_up(self, waiter: Waiter) -> None:
        """The timeout of a caller has expired."""
        if waiter.waits:
            assert not self.calm or waiter.deadline - waiter.began < PATIENCE, "not served"
            self.reached["timed out"] += 1
            self.stop_waiting(waiter)
            if waiter.is_call:
                self.unsent()

    def unsent(self) -> None:
        self.endpoint.unsent(Lost(), self.now)
        self.model.counters.calls_unsent += 1

    def served(self, waiter: Waiter) -> None:
        self.reached["served"] += 1
        self.reached["served call"] += waiter.is_call

    def begin_attempt(self, attempt: int) -> None:
        """Order DIAL: the conditions of its time are checked where it was decided."""
        model = self.model
        assert model.attempt is None, "two attempts at once"
        assert not model.closed
        assert attempt == self.endpoint.link.dials
        model.attempt, model.tried_at, model.planned = attempt, self.now, None
        model.off = model.held = False
        if self.rng.random() < UNABLE and not self.calm and not model.up:
            self.lose_strategy()
            return
        self.mine(self.rng.choice([0.0, 0.005]), self.ask_strategy, attempt)

    def lose_strategy(self) -> None:
        """There is no strategy: the endpoint rests."""
        model = self.model
        model.attempt = None
        orders = self.endpoint.unable(Lost(), self.now)
        assert orders[-1].act is Act.FAIL
        self.reached["unable"] += 1
        self.carry_out(orders)

    def ask_strategy(self, attempt: int) -> None:
        endpoint, model = self.endpoint, self.model
        if model.attempt != attempt:
            self.end_late(attempt)
            return
        if endpoint.recovering:
            assert not model.up
            if self.keeps and endpoint.live is not None and self.rng.random() < 0.5:
                self.keep(attempt)
                return
        elif not model.up:
            assert endpoint.live is None
        live = endpoint.live
        orders = endpoint.dropped(self.now)
        assert (Act.RETIRE in acts(orders)) == (live is not None and not model.up)
        self.carry_out(orders)
        address = self.primary if self.follows else NORTH
        match self.servers[address]:
            case "down":
                delay = self.rng.choice([0.001, 0.1])
            case "hung":
                delay = LIMIT
            case _:
                delay = self.rng.uniform(0.001, 0.2)
        self.mine(delay, self.end_attempt, attempt, address)

    def end_late(self, attempt: int) -> None:
        """An attempt that was abandoned ends, and changes nothing."""
        if attempt == self.endpoint.link.dials and self.model.attempt is not None:
            return  # numbers begin anew after a fork
        before = self.everything()
        assert self.endpoint.dialed(attempt, Channel(NORTH), NORTH, self.now) is None
        verdict = self.rng.choice([*Verdict])
        assert self.endpoint.failed(attempt, Lost(), self.now, verdict) == []
        assert self.endpoint.kept(attempt, self.now) == []
        assert self.everything() == before, "an abandoned attempt has changed something"
        self.reached["abandoned attempt ends"] += 1

    def end_attempt(self, attempt: int, address: str) -> None:
        model = self.model
        if model.attempt != attempt:
            self.end_late(attempt)
        elif self.verdict is not Verdict.RETRY and self.rng.random() < 0.7:
            self.fail_attempt(attempt, self.verdict)
        elif self.servers[address] in ("down", "hung"):
            self.fail_attempt(attempt, Verdict.RETRY)
        else:
            self.arrive(attempt, address)

    def arrive(self, attempt: int, address: str) -> None:
        endpoint, model, old = self.endpoint, self.model, self.endpoint.live
        before = endpoint.address
        channel = Channel(address)
        self.channels.append(channel)
        orders = endpoint.dialed(attempt, channel, address, self.now)
        assert orders is not None, "the current attempt was taken for an abandoned one"
        model.counters.connects += 1
        model.counters.renewals += model.renews
        model.generation += 1
        model.counters.moves += model.generation > 1 and before != address
        assert endpoint.live is not None
        self.lives.append(endpoint.live)
        assert not model.up or model.renews
        self.reached["renewed" if model.renews else "connected"] += 1
        self.is_up()
        self.lasting = True
        model.used_at = self.now
        self.ages(1.0)
        assert (Act.RETIRE in acts(orders)) == (old is not None)
        assert not model.waiting or Act.WAKE in acts(orders), "waiting callers are not woken"
        self.carry_out(orders)
        if self.follows and address != self.primary:
            self.report(model.generation, connected=False)

    def ages(self, part: float) -> None:
        """The next renewal is planned after this part of `max_age`, or up to a tenth earlier."""
        found = self.endpoint._age_at
        if self.max_age is None:
            assert found is None
        else:
            assert found is not None
            delay = self.max_age * part
            assert 0.9 * delay - TINY <= found - self.now <= delay + TINY
        self.model.aged_at = found

    def is_up(self) -> None:
        model = self.model
        model.up, model.probing, model.renews, model.attempt = True, False, False, None
        model.proven_at = self.now + PAUSES.proven

    def keep(self, attempt: int) -> None:
        live = self.endpoint.live
        orders = self.endpoint.kept(attempt, self.now)
        self.is_up()
        assert self.endpoint.live is live
        assert (Act.WAKE in acts(orders)) == bool(self.model.waiting)
        self.reached["kept"] += 1
        self.carry_out(orders)

    def fail_attempt(self, attempt: int, verdict: Verdict) -> None:
        endpoint, model, error = self.endpoint, self.model, Lost()
        orders = endpoint.failed(attempt, error, self.now, verdict)
        found = acts(orders)
        assert endpoint.last_error is error
        model.counters.connect_failures += 1
        model.attempt = None
        if model.renews:
            model.renews = False
            assert endpoint.live is not None
            assert Act.FAIL not in found
            self.reached["failed renewal"] += 1
        elif verdict is Verdict.RETRY:
            assert found == []
            self.pause(eager=bool(model.waiting))
            self.reached["failed attempt"] += 1
        else:
            refused = verdict is Verdict.REFUSED
            if refused and self.dedicated and not model.generation:
                refused = False
            assert Act.FAIL in found, "the waiting callers are not failed"
            assert endpoint.verdict is error
            self.reached[verdict.name] += 1
            if not refused and not self.lasting:
                assert Act.STOP in found
                self.closing()
            else:
                assert found == [Act.FAIL]
                model.held = refused
                self.pause(eager=False)
        self.carry_out(orders)

    def pause(self, *, eager: bool) -> None:
        """The pause that was chosen is one of the promised length."""
        model, planned = self.model, self.endpoint.link.next_dial_at
        assert planned is not None, "no attempt is planned"
        if eager:
            base = min(0.02 * 2.0**model.eager, 0.2)
            model.eager += 1
        else:
            base = min(0.25 * 2.0**model.patient, 30.0)
            model.patient += 1
        found = planned - self.now
        assert 0.75 * base - TINY <= found <= 1.25 * base + TINY, f"{found}, not about {base}"
        self.reached["an eager pause" if eager else "a patient pause"] += 1
        model.planned = planned

    def begin_refresh(self) -> None:
        assert not self.model.refreshing, "two refreshes at once"
        assert self.now >= self.model.no_refresh_before
        self.model.refreshing = True
        self.mine(self.rng.choice([0.01, 0.5]), self.end_refresh)

    def end_refresh(self) -> None:
        error = Lost() if self.rng.random() < 0.3 else None
        model, counters = self.model, self.model.counters
        model.refreshing = False
        model.no_refresh_before = self.now + 0.75
        model.credential += error is None
        counters.credential_refreshes += error is None
        counters.credential_refresh_failures += error is not None
        orders = self.endpoint.refreshed(error, self.now)
        assert acts(orders) == [Act.PUT]
        self.carry_out(orders)

    def ended(self, act: Act) -> None:
        """The attempt and the strategy are given up; what the attempt does comes too late."""
        model = self.model
        if act is Act.REST:
            assert not model.closed
        else:
            assert model.closed, "closed without a reason"
        self.turn_off()
        self.notify()

    def turn_off(self) -> None:
        """There is no connection and no attempt."""
        model = self.model
        model.up = model.probing = model.renews = model.held = False
        model.off, model.attempt, model.planned, model.aged_at = True, None, None, None
        model.proven_at, model.unused_since = math.inf, None

    def closing(self) -> None:
        """It is closed for good: calls in flight may end soon."""
        self.model.closed, self.model.closed_at = True, self.now
        for channel in self.channels:
            channel.grace_ends = self.now + CLOSING

    def begin_probe(self, live: Live) -> None:
        self.model.probing = True
        late = PROBE if self.calm else 8.0
        delay = late if self.servers[live.address] == "hung" else self.rng.choice([0.01, 0.2])
        self.mine(delay, self.end_probe, live)

    def end_probe(self, live: Live) -> None:
        model = self.model
        server = self.servers[live.address]
        healthy = live.channel.alive and server != "hung" and not live.channel.closed
        if live is not self.endpoint.live or not model.probing:
            before = self.everything()
            assert self.endpoint.probed(live, healthy, self.now) == []
            assert self.everything() == before
            self.reached["stale probe"] += 1
            return
        orders = self.endpoint.probed(live, healthy, self.now)
        if healthy:
            model.counters.probes_healthy += 1
            model.probing, model.used_at = False, self.now
            assert (Act.WAKE in acts(orders)) == bool(model.waiting)
        else:
            live.channel.alive = False  # a hung server counts as lost
            model.counters.probes_unhealthy += 1
            self.lose(orders, keep=False)
        self.reached[f"healthy: {healthy}"] += 1
        self.carry_out(orders)

    def end_check(self, live: Live) -> None:
        model, connected = self.model, live is self.endpoint.live and live.channel.alive
        if live.number != model.suspected:
            before = self.everything()
            assert self.endpoint.checked(live, connected, self.now, keep=self.keeps) == []
            assert self.everything() == before
            self.reached["stale check"] += 1
            return
        current = live.number == model.generation and model.up
        orders = self.endpoint.checked(live, connected, self.now, keep=self.keeps)
        model.suspected = 0
        if connected:
            assert orders == []
            model.counters.unavailable_answers += 1
        elif current:
            self.lose(orders, keep=self.keeps)
        else:
            assert orders == []
            model.counters.stale_errors += live.number < model.generation
        self.reached[f"checked: {connected}"] += 1
        self.carry_out(orders)

    def close_channel(self, live: Live) -> None:
        channel: Channel = live.channel
        assert live is not self.endpoint.live
        channel.closed += 1
        assert channel.closed == 1, "a channel was closed twice"
        ended = self.model.closed and self.now >= channel.grace_ends - TINY
        assert not live.calls or channel.condemned or ended, "closed under its calls"
        for call in [each for each in self.calls if each.live is live]:
            self.reached["cut"] += 1
            self.calls.remove(call)
            call.over = True
            live.leave()
        self.mine(self.rng.choice([0.0, 0.01]), self.gone, live)

    def gone(self, live: Live) -> None:
        self.endpoint.gone(live)
        self.notify()

    # -- callers -------------------------------------------------------------------------------

    def check_out(self, timeout: float | None = None) -> None:
        if self.model.closed:
            return
        client = self.rng.choice([None, Client()])
        model = self.model
        if self.rng.random() < 0.5:
            recent = self.now - model.used_at <= IDLE
            found = self.endpoint.hand_out(client, self.now)
            assert found == (model.up and not model.probing and recent)
            if found:
                model.used_at = self.now
                self.taken(client)
                self.reached["handed out"] += 1
                self.reached["served"] += 1
                return
        limit = self.rng.choice([0.0, 0.1, 1.0, 5.0]) if timeout is None else timeout
        self.look_again(Waiter(self.now, self.now + limit, client))

    def look_again(self, waiter: Waiter) -> None:
        """Request the connection, and wait unless it is usable."""
        endpoint, model = self.endpoint, self.model
        if model.closed:
            return
        last = max(model.used_at, self.called_at)
        orders = endpoint.requested(self.called_at, self.now)
        serving = model.up and not model.probing and not model.renews
        probed = serving and self.now - last > IDLE
        assert acts(orders) == [Act.PROBE] * probed, "an idle connection is probed, and no other"
        model.used_at = last if probed else self.now
        self.carry_out(orders)
        if endpoint.usable:
            endpoint.taken(waiter.client)
            self.taken(waiter.client)
            self.served(waiter)
            return
        self.wait(waiter)

    def taken(self, client: Client | None) -> None:
        self.clients.append(client)
        self.lasting = True
        self.model.unused_since = None

    def wait(self, waiter: Waiter) -> None:
        endpoint, model = self.endpoint, self.model
        waiter.waits, waiter.verdicts = True, endpoint.verdicts
        self.waiters.append(waiter)
        self.mine(max(0.0, waiter.deadline - self.now), self.give_up, waiter)
        planned, was_off = model.planned, model.off
        model.waiting += 1
        if waiter.is_call:
            model.counters.calls_waited += 1
            orders = endpoint.call_waits(self.now)
        else:
            orders = endpoint.waits(self.now)
        found = acts(orders)
        if model.closed:
            assert found == [Act.WAKE]
        elif was_off:
            assert found == [Act.DIAL]
            model.patient = model.eager = 0
            self.reached["woken from rest"] += 1
        elif model.held:
            assert planned is not None
            assert found == [Act.FAIL] * (self.now < planned), "a refusal lasts for its pause"
            self.reached["held"] += 1
        else:
            assert found == []
            if planned is not None:
                model.planned = min(planned, max(self.now, model.tried_at + 0.2))
                self.reached["sooner"] += model.planned < planned
        self.carry_out(orders)

    def call(self) -> None:
        """A call over a channel that was handed out, or opened lazily, also long ago."""
        if not self.lasting:
            return
        self.called_at = self.now
        if self.gate is not None:
            self.start_call(self.gate)
            return
        limit = self.rng.choice([0.0, 0.05, 0.5, 5.0])
        if self.endpoint.closed and self.rng.random() < 0.5:
            return
        waiter = Waiter(self.now, self.now + limit, is_call=True)
        self.wait(waiter)
        self.notify()

    def start_call(self, live: Live, longest: float = 0.0) -> None:
        assert live is self.endpoint.live, "a call over a channel that is not the current one"
        assert live.number == self.model.generation
        assert live.until is None
        assert not live.channel.closed
        live.calls.append(None)
        call = Call(live, self.endpoint.credential)
        self.calls.append(call)
        longest = longest or self.rng.choices([0.01, 0.3, 3.0, 60.0], [20, 30, 10, 5])[0]
        self.after(longest * self.rng.random(), self.end_call, call)

    def end_call(self, call: Call) -> None:
        if call.over or call.live.channel.inherited:
            return
        live, channel = call.live, call.live.channel
        server = self.servers[channel.address]
        if channel.alive and server == "hung" and self.rng.random() < 0.7:
            self.after(0.5, self.end_call, call)
            return
        call.over = True
        self.calls.remove(call)
        if not channel.alive:
            live.unavailable.append(None)
            # gRPC may report the loss of the connection after that of the call.
            self.report(live.number, connected=self.rng.random() < 0.4)
        elif server == "busy":
            live.unavailable.append(None)
            self.report(live.number, connected=True, renew=self.rng.random() < 0.1)
        elif server == "well":
            live.unavailable.clear()
            if self.rng.random() < 0.05:
                self.refuse(call.credential)
        live.leave()

    def call_ended(self, live: Live) -> None:
        if not live.calls:
            orders = self.endpoint.ended(live, self.now)
            assert orders or live.closed or live.channel.inherited, "its last call has ended"
            self.carry_out(orders)

    def report(self, number: int, *, connected: bool, renew: bool = False) -> None:
        """A call over a generation has failed."""
        endpoint, model = self.endpoint, self.model
        current = number == model.generation and model.up
        before, live = self.everything(), endpoint.live
        # The shell looks at the connection of the current channel.
        connected = connected and live is not None
        news = current and not (connected and number == model.suspected)
        assert endpoint.heeds(number, connected) == news
        orders = endpoint.broken(
            number,
            Lost(),
            self.now,
            connected=connected,
            keep=self.keeps,
            renew=renew,
            follows=self.follows,
        )
        if not current:
            assert orders == []
            assert self.everything() == before, "an old error has changed something"
            model.counters.stale_errors += number < model.generation
            self.reached["old error"] += number < model.generation
        elif not connected:
            self.lose(orders, keep=self.keeps)
        else:
            assert live is not None
            too_many = len(live.unavailable) >= TOO_MANY and not self.follows
            expected = [Act.CHECK] * (number != model.suspected)
            model.suspected = number
            self.reached["too many"] += too_many
            if (renew or too_many) and self.may_renew():
                expected.append(Act.DIAL)
                self.renewal()
            assert acts(orders) == expected
        self.carry_out(orders)

    def may_renew(self) -> bool:
        model = self.model
        serving = model.up and not model.probing and not model.renews
        return serving and self.now - model.renewed_at >= PAUSES.proven

    def renewal(self) -> None:
        self.model.renews, self.model.renewed_at = True, self.now
        self.reached["renewal"] += 1

    def lose(self, orders: Orders, *, keep: bool) -> None:
        """The current connection was lost; check how it is replaced."""
        model, found = self.model, acts(orders)
        assert model.up
        model.counters.recoveries += 1
        model.up = model.probing = False
        assert (Act.RETIRE in found) == (not keep)
        assert (self.endpoint.live is None) == (not keep)
        proven = self.now >= model.proven_at
        if proven:
            model.eager = model.patient = 0
        model.proven_at = math.inf
        if model.renews:
            model.renews = False
            assert Act.DIAL not in found
            self.reached["lost while it was renewed"] += 1
        elif proven:
            assert found[-1] is Act.DIAL, "a proven connection is dialed again at once"
            self.reached["lost, proven"] += 1
        else:
            assert Act.DIAL not in found
            self.pause(eager=bool(model.waiting))
            self.reached["lost, young"] += 1

    # -- other events --------------------------------------------------------------------------

    def tick(self) -> None:
        """Call `due` at its time, or a little early."""
        model, endpoint = self.model, self.endpoint
        planned, wanted = model.planned, self.lasting or model.waiting > 0
        serving = model.up and not model.probing and not model.renews
        old_at = model.aged_at is not None and self.now >= model.aged_at
        orders = endpoint.due(self.now)
        found = acts(orders)
        due = planned is not None and wanted and self.now >= planned
        if Act.DIAL not in found:
            assert not due, "no attempt was made"
        elif not due:
            assert serving, "an attempt before its time"
            assert old_at, "renewed before its age"
            model.renews = True
            self.reached["aged"] += 1
        if old_at:
            assert Act.DIAL in found or not serving, "an old channel was not renewed"
            self.ages(0.1)
        self.carry_out(orders)

    def tick_early(self) -> None:
        self.tick()
        self.reached["early tick"] += 1

    def change_server(self) -> None:
        address = self.rng.choice([NORTH, NORTH, SOUTH])
        state = self.rng.choice(["well", "well", "well", "down", "hung", "busy"])
        self.servers[address] = state
        if state == "down":
            for channel in self.channels:
                if channel.address == address:
                    channel.alive = False
            for call in self.calls:
                if not call.live.channel.alive:
                    self.after(self.rng.choice([0.0, 0.003, 0.5]), self.end_call, call)
        elif state == "busy":
            for _ in range(TOO_MANY + 1):
                self.call()

    def change_verdict(self) -> None:
        self.verdict = self.rng.choice([Verdict.RETRY, Verdict.RETRY, *Verdict])

    def move(self) -> None:
        """The topology has another primary."""
        self.primary = self.rng.choice([NORTH, SOUTH])
        if self.follows and self.model.up and self.endpoint.address != self.primary:
            self.reached["moved"] += 1
            self.report(self.model.generation, connected=False)

    def release(self) -> None:
        """Release a channel, perhaps once too often."""
        if not self.clients or self.rng.random() < 0.1:
            client: Client | None = self.rng.choice([None, Client()])
        else:
            client = self.rng.choice(self.clients)
        known = client in self.clients
        if known:
            self.clients.remove(client)
        last = self.dedicated and not self.clients
        assert self.endpoint.is_last(client) == last
        orders = self.endpoint.given_back(client, self.now)
        ends = last and not self.model.closed
        assert (Act.STOP in acts(orders)) == ends
        if ends:
            self.reached["released"] += 1
            self.closing()
        self.carry_out(orders)

    def sweep(self) -> None:
        """Sweep; first perhaps everyone leaves."""
        if self.rng.random() < 0.2:
            self.leave_all()
        for _ in range(self.rng.choice([1, 6])):
            self.sweep_once()
            self.check()
            self.run_until(self.now + 0.3 * LINGER)
            if self.rng.random() < 0.5:  # a short use
                self.check_out(0.0)
                self.leave_all()

    def leave_all(self) -> None:
        """All clients of a shared endpoint release it."""
        while self.clients and not self.dedicated:
            self.carry_out(self.endpoint.given_back(self.clients.pop(), self.now))

    def sweep_once(self) -> None:
        model = self.model
        calls = sum(not each.live.channel.inherited for each in self.calls)
        named = any(each is not None for each in self.clients)
        used = named or (self.clients and not self.dedicated) or calls or model.waiting
        last = max(model.used_at, self.called_at)
        orders = self.endpoint.swept(calls, self.called_at, LINGER, self.now)
        model.used_at = last
        rests = False
        if used or model.off:
            model.unused_since = None
        elif model.unused_since is None:
            model.unused_since = self.now
        else:
            rests = self.now - max(model.unused_since, self.called_at) >= LINGER
        assert (Act.REST in acts(orders)) == rests, "it rests when no one uses it, and only then"
        self.reached["rests"] += rests
        self.carry_out(orders)

    def report_old(self) -> None:
        """A late error of an old generation."""
        if self.model.generation:
            number = self.rng.randrange(self.model.generation)
            self.report(number, connected=self.rng.random() < 0.5, renew=self.rng.random() < 0.3)

    def end_old_attempt(self) -> None:
        """An attempt that was abandoned, or has ended before, ends."""
        if (dials := self.endpoint.link.dials) > 1:
            self.end_late(self.rng.randrange(1, dials))

    def end_old_probe(self) -> None:
        """A probe or a check of an old channel ends, or a second one of the current channel."""
        current = self.endpoint.live if self.model.probing else None
        old = [each for each in self.lives if each is not current]
        if old:
            live = self.rng.choice(old)
            self.end_probe(live)
            if live.number != self.model.suspected:
                self.end_check(live)

    def report_undated(self) -> None:
        """An error without a generation."""
        model = self.model
        young = model.generation > 1 and model.up and self.now < model.proven_at
        blamed = self.endpoint.blamed(self.now)
        assert blamed == model.generation - young
        self.reached["blamed on the one before"] += young
        self.report(blamed, connected=False)

    def report_own_error(self) -> None:
        """An application's own error: the connection is to be replaced."""
        self.report(self.model.generation, connected=False)

    def ask_for_renewal(self) -> None:
        live = self.endpoint.live
        orders = self.endpoint.renew("asked", self.now)
        expected = self.may_renew()
        assert acts(orders) == [Act.DIAL] * expected
        if expected:
            self.renewal()
            assert self.endpoint.is_being_replaced
        assert self.endpoint.live is live
        self.carry_out(orders)
        if expected and not self.calm and self.rng.random() < 0.4:
            self.servers = dict.fromkeys(self.servers, "down")
            self.report_own_error()

    def connect(self) -> None:
        if not self.lasting:
            return
        was_off = self.model.off and not self.model.closed
        model = self.model
        if model.planned is not None and not model.held:
            model.planned = min(model.planned, max(self.now, model.tried_at + 0.2))
        planned = model.planned
        orders = self.endpoint.connect(self.now)
        due = was_off or (planned is not None and self.now >= planned)
        assert acts(orders) == [Act.DIAL] * due
        if was_off:
            self.model.patient = self.model.eager = 0
        self.carry_out(orders)

    def cancel(self) -> None:
        """A caller is cancelled."""
        if self.waiters:
            self.stop_waiting(self.rng.choice(self.waiters))

    def open_lazily(self) -> None:
        """Hand out a channel without a connection."""
        if not self.model.closed:
            client = Client()
            self.endpoint.taken(client)
            self.taken(client)

    def refuse_credentials(self) -> None:
        self.refuse(self.rng.choice([self.endpoint.credential, 0]))

    def refuse(self, credential: int) -> None:
        model = self.model
        orders = self.endpoint.refused(credential, self.now)
        if credential != model.credential or model.refreshing:
            assert orders == [], "refreshed once, and not for old credentials"
            self.reached["old refusal"] += 1
        self.carry_out(orders)

    def fork(self) -> None:
        """Go on in the child."""
        self.process += 1
        self.endpoint.forked()
        self.gate = None
        for channel in self.channels:
            channel.inherited = channel.inherited or not channel.closed
        self.calls, self.waiters = [], []
        model = self.model
        self.turn_off()
        model.waiting = model.eager = model.patient = model.suspected = 0
        model.tried_at = model.renewed_at = model.no_refresh_before = -math.inf
        model.refreshing = False
        self.reached["fork"] += 1

    def close(self) -> None:
        was_closed = self.model.closed
        orders = self.endpoint.close("enough", self.now)
        if was_closed:
            assert orders == []
            return
        found = acts(orders)
        assert found[-2:] == [Act.STOP, Act.WAKE]
        self.closing()
        self.carry_out(orders)

    # -- what must hold ------------------------------------------------------------------------

    def everything(self) -> tuple[object, ...]:
        """The whole state, but for the count of stale errors."""
        endpoint = self.endpoint
        link, counters = endpoint.link, endpoint.counters
        return (
            *(endpoint.machine.state, len(endpoint.machine.history), endpoint.generation),
            *(endpoint.live, tuple(endpoint.old), endpoint.waiting, endpoint.last_error),
            *(endpoint.verdict, endpoint.verdicts, endpoint.next_at, endpoint.last_used_at),
            *(link.dials, link.number, link.is_up, link.proven_at, link.backoff.attempts),
            *(endpoint.recovering, endpoint.suspicion, endpoint.credential, endpoint.lasting),
            tuple(getattr(counters, each) for each in COUNTED),
        )

    def check(self) -> None:
        endpoint, model = self.endpoint, self.model
        machine = endpoint.machine
        self.reached[str(machine.state)] += 1
        assert machine.at("up") == model.up
        assert machine.at("probing") == model.probing
        assert machine.at("renewing") == model.renews
        assert machine.at("off") == model.off
        assert endpoint.closed == model.closed
        assert endpoint.usable == (model.up and not model.probing)
        assert machine.at("connecting") == (model.attempt is not None and not model.renews)
        assert endpoint.generation == model.generation
        assert endpoint.counters == model.counters, f"{endpoint.counters}, not {model.counters}"
        assert endpoint.waiting == model.waiting
        assert endpoint.verdicts == model.verdicts
        assert endpoint.link.next_dial_at == model.planned
        assert endpoint.credential == model.credential
        assert endpoint.refreshes == model.refreshing
        assert self.gate is endpoint.live, "the gate was not told of the current channel"
        live = endpoint.live
        assert not model.up or live is not None
        assert live is None or (live.number == model.generation and live.until is None)
        assert len(endpoint.clients) + endpoint.anonymous == len(self.clients)
        for each in endpoint.old:
            assert each.calls or each.closed, "a replaced channel without calls stays open"
            cut = self.now > model.closed_at + CLOSING + TINY
            assert each.closed or not cut, "calls of a closed endpoint go on"
        assert not model.off or endpoint.old or endpoint.next_at is None
        self.check_waiters()

    def check_waiters(self) -> None:
        endpoint, model = self.endpoint, self.model
        for waiter in self.waiters:
            assert not model.off, "no one connects for a caller"
            assert not endpoint.usable, "the connection is usable, and a caller was not woken"
            assert waiter.verdicts == endpoint.verdicts, "it waits in spite of a verdict"
            assert not waiter.is_call or self.gate is None
            assert model.probing or model.attempt is not None or model.planned is not None
            at = endpoint.next_at
            if model.planned is not None:
                assert at is not None
                assert model.planned >= at
                held = model.held or self.now < model.planned <= self.now + 0.25 + TINY
                assert held or model.planned <= self.now, "the pause is long, and a caller waits"


def acts(orders: Orders) -> list[Act]:
    return [order.act for order in orders]


async def life(sim: Sim) -> Counter[str]:
    """The life of one endpoint."""
    found = Life(sim)
    found.live()
    return +found.reached


def test_the_rules_hold_in_every_schedule() -> None:
    simulate(life, scaled(5000, least=40))


def test_the_schedules_reach_every_condition() -> None:
    assert_reached(life, CONDITIONS, within=400)


CONDITIONS = {
    *(act.name for act in Act),
    *("connected", "renewed", "kept", "failed attempt", "failed renewal", "MISTAKE", "REFUSED"),
    *("abandoned", "abandoned attempt ends", "unable", "an eager pause", "a patient pause"),
    *("lost, proven", "lost, young", "lost while it was renewed", "moved", "old error"),
    *("too many", "renewal", "aged", "blamed on the one before", "stale probe", "stale check"),
    *("checked: True", "checked: False", "healthy: True", "healthy: False", "early tick"),
    *("served", "served call", "handed out", "timed out", "sooner", "held", "woken from rest"),
    *("calls may go on", "calls are cut", "cut", "rests", "released", "old refusal", "fork"),
    *("off/resting", "off/stopped", "connecting/dialing", "down/waiting"),
    *("up/serving", "up/probing", "up/renewing"),
}


# -- planted defects -------------------------------------------------------------------------------


def edited(name: str, method: str, before: str, after: str, owner: type = Endpoint) -> Mutant:
    return tests.mutants.edited(owner, name, method, before, after)


STALE = "if not self._is_current(attempt):"

MUTANTS = [
    edited(
        "an attempt begins for each caller", "waits", 'if self.machine.at("resting"):', "if True:"
    ),
    edited("a caller waits for a long pause", "_hurry", "self._eager.max", "30.0"),
    edited("a caller dials at once", "_hurry", "self._tried_at + self._eager.max", "now"),
    edited("a caller ends a refusal", "_hurry", "if not self._held:", "if True:"),
    edited(
        "a caller waits in spite of a refusal", "waits", "return self._fail(self.verdict)", "pass"
    ),
    edited("a closed endpoint counts no waiter", "waits", "self.waiting += 1", "pass"),
    edited("the last waiter is forgotten", "leaves", "if not (self.waiting or ", "if not ("),
    edited("an attempt goes on for no one", "leaves", "self.lasting or ", "True or "),
    edited("a refusal is forgotten", "leaves", " or self._held", ""),
    edited("an idle connection is not probed", "requested", "self._idle", "99.0"),
    edited("an idle connection is handed out", "hand_out", "> self._idle", "> 99.0"),
    edited("a checkout is no use", "hand_out", "self._unused_since = None", "pass"),
    edited("the probe of an old channel counts", "probed", "live is not self.live or ", ""),
    edited("a late probe counts", "probed", ' or not self.machine.at("probing")', ""),
    edited("callers wait after a probe", "probed", "return self._arrived()", "return []"),
    edited("an old error counts", "broken", "generation != self.generation or ", ""),
    edited("an error while it connects counts", "broken", ' or not self.machine.at("up")', ""),
    edited("an answer replaces a connection", "broken", "if not connected:", "if True:"),
    edited("each error is checked", "broken", "if self._suspected != generation:", "if True:"),
    edited("a busy server keeps its calls", "broken", "renew or (too_many", "renew or (False"),
    edited("a topology is not asked", "broken", " and not follows", ""),
    edited("one answer is too many", "broken", ">= TOO_MANY", ">= 1"),
    edited("a check of an old channel counts", "checked", "!= self._suspected", "< 0"),
    edited("a lost connection is kept", "checked", "if not connected:", "if False:"),
    edited("the current generation is blamed", "blamed", "- fresh", ""),
    edited("a storm of renewals", "renew", " or now - self._renewed_at < PAUSES.proven", ""),
    edited("a renewal without a connection", "renew", 'not self.machine.at("serving") or ', ""),
    edited("an abandoned attempt succeeds", "dialed", STALE, "if False:"),
    edited("an abandoned attempt fails", "failed", STALE, "if False:"),
    edited("an abandoned attempt keeps", "kept", "not self._is_current(attempt) or ", ""),
    edited("callers wait for a kept connection", "kept", "return self._arrived()", "return []"),
    edited("a replaced channel stays open", "dialed", "orders += self._retire(old, now)", "pass"),
    edited("calls begin over the old channel", "dialed", "[Order(Act.PUT)]", "[]"),
    edited("callers wait for an open channel", "dialed", ", Order(Act.WAKE)]", "]"),
    edited("a failed renewal ends the link", "failed", 'if self.machine.at("renewing"):', "if 0:"),
    edited("a refused attempt is retried soon", "failed", "verdict is Verdict.RETRY", "True"),
    edited("a mistake closes a used endpoint", "failed", " and not self.lasting", ""),
    edited("callers wait after a mistake", "_fail", "return [Order(Act.FAIL)]", "return []"),
    edited("a channel never ages", "due", "if self.machine.at(", "if False and self.machine.at("),
    edited("a failed renewal is not tried again", "due", "again=True", "again=False"),
    edited("the last call does not close it", "ended", "not live.calls", "False"),
    edited("a channel is closed under its calls", "ended", " and not live.calls", ""),
    edited("a grace is never over", "reviewed", "if not stays or self.closed:", "if False:"),
    edited("calls get no second grace", "reviewed", "now + self._grace", "now"),
    edited("a used endpoint rests", "swept", "if used or calls or self.waiting or ", "if "),
    edited("a call is no use", "swept", "used or calls or", "used or"),
    edited("it rests at once", "swept", ">= self._patience(linger)", ">= 0"),
    edited("a shared endpoint is released", "given_back", "self.dedicated and ", ""),
    edited("a dedicated one is kept", "given_back", "if self.dedicated", "if False"),
    edited("a client is not given back", "given_back", "self.anonymous -= 1", "pass"),
    edited("waiters stay when it is closed", "close", ", Order(Act.WAKE)]", "]"),
    edited("it is closed twice", "close", "[] if self.closed else ", ""),
    edited("the parent's refresh goes on", "forked", "self.refusals.forked()", "pass"),
    edited("the child opens what was closed", "forked", "if self.closed:", "if False:"),
    edited("the child dials for the parent", "forked", "self._begin_anew()", "pass"),
    edited("an old attempt is current", "_is_current", "self.link.is_current(attempt)", "True"),
    edited("a caller waits as if no one did", "_pause", "self.waiting and", "False and"),
    edited("the pauses never begin anew", "_lost", "self._eager.succeed()", "pass"),
    edited("a lost channel is used", "_lost", "[] if keep else self._drop(now)", "[]"),
    edited("a closed channel is closed again", "_shut", "live.closed or ", ""),
    edited("a channel is closed and not marked", "_shut", "live.shut()", "pass"),
    edited("an endpoint at rest is renewed", "_leave", "self._age_at = None", "pass"),
    edited("calls of a closed one go on", "_stop", "live.retire(now + CLOSING)", "pass"),
    edited("calls get no grace", "_retire", "now + self._grace", "now"),
    edited("a failed renewal is proven", "lost_early", ", math.inf", ", self.proven_at", _Link),
    edited("a lost renewal is not the dial", "lost_early", "= self.dials,", "= 0,", _Link),
    edited("old pauses after a renewal", "lost_early", "self.backoff.succeed()", "pass", _Link),
    edited("a renewed link is proven", "renewed", "+ self.pauses.proven", "", _Link),
    edited("a caller postpones the attempt", "sooner", "min(self.next_dial_at, at)", "at", _Link),
    edited("a refresh for each refusal", "refused", ".refuse(credential, now)", ""),
    edited("a refresh is not noted", "refreshed", "self.refusals.refreshed(error, now)", "pass"),
]


#: Those that take many schedules.
LATE = (
    "a call is no use",
    "a caller ends a refusal",
    "a checkout is no use",
    "a refusal is forgotten",
    "a topology is not asked",
    "an abandoned attempt keeps",
    "callers wait for a kept connection",
    "calls get no second grace",
    "the current generation is blamed",
    "the last waiter is forgotten",
    "the parent's refresh goes on",
    "the pauses never begin anew",
)


@pytest.mark.parametrize("planted", planted_defects(MUTANTS, *LATE))
def test_a_planted_defect_is_noticed(planted: Mutant) -> None:
    assert_caught(life, planted, within=400, clean=0)
