"""The rules of a link in random schedules, under the policies of its three users.

The oracle states the rules a second time, case by case, and compares after every event. The planted
defects are edits of one line of the class.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
import tests.mutants
from tests.mutants import planted_defects
from tests.reached import assert_reached

from moored.kernel import (
    At,
    Backoff,
    Clock,
    Dial,
    Loss,
    Machine,
    Pauses,
    Reconnect,
    link_chart,
)
from moored.testing import Mutant, Sim, assert_caught, scaled, simulate

pytestmark = pytest.mark.pure

CHART = link_chart("greeting", "login")
EVENTS = 150


class Policy(NamedTuple):
    """How one user of the class reconnects."""

    pauses: Pauses
    start: float
    longest: float
    attempts: int | None
    jitter: str | float
    #: The shortest and the longest pause, as factors of their base.
    spread: tuple[float, float]
    #: Whether it makes a new link before it breaks the old one.
    renews: bool = False


POLICIES = {
    "listener": Policy(Pauses(1.0, at_once=True, series=8.0), 0.5, 4.0, 5, "half", (1.0, 1.5)),
    "sessions": Policy(Pauses(5.0), 1.0, 60.0, 4, "full", (0.0, 1.0)),
    "rpc": Policy(Pauses(5.0, at_once=True), 0.02, 2.0, None, 0.25, (0.75, 1.25), renews=True),
}


class Life:
    """One link, what happens to it, and what it must be."""

    def __init__(self, sim: Sim, policy: Policy) -> None:
        self.rng = sim.rng
        self.policy = policy
        self.now = 100.0
        self.reached: Counter[str] = Counter()
        clock = Clock(lambda: self.now, lambda: self.now, sim.rng)
        backoff = Backoff(
            policy.start,
            policy.longest,
            jitter=policy.jitter,  # type: ignore[arg-type]
            max_attempts=policy.attempts,
            clock=clock,
        )
        self.link = Reconnect(Machine("link", CHART, clock=clock), policy.pauses, backoff)
        # What must be so.
        self.state = "off/resting"
        self.number = self.dials = self.failures = self.renewal = 0
        self.proven_at = math.inf
        self.due: tuple[float, float] | None = None
        self.why = ""

    # -- events --------------------------------------------------------------------------------

    def live(self) -> None:
        """Let a random event happen, many times; then the link must come up by itself."""
        events = {
            self.wait: 8,
            self.poll: 8,
            self.lose: 5,
            self.step: 2,
            self.succeed: 4,
            self.report_stale: 4,
            self.want: 3,
            self.prove: 1,
            self.lose_with_pause: 1,
            self.rest: 0.5,
            self.refuse: 0.5,
            self.stop: 0.1,
            self.renew: 2 * self.policy.renews,
        }
        self.want()
        for event in self.rng.choices([*events], [*events.values()], k=EVENTS):
            event()
            self.check()
        self.recover()

    def recover(self) -> None:
        """Unless it is off, the link is up, dials, or says when it dials."""
        if self.due is not None:
            self.now = max(self.now, self.link.next_dial_at or 0.0)
            self.poll()
            assert self.number == self.dials, "the dial that was due was not made"
        assert self.state.startswith("off") or self.number

    def wait(self) -> None:
        self.now += self.rng.choice([0.0, 0.01, 0.3, 1.0, 6.0])
        if self.rng.random() < 0.3 and self.link.next_dial_at is not None:
            self.now = max(self.now, self.link.next_dial_at)

    def poll(self) -> None:
        due = self.link.next_dial_at
        found = self.link.due(self.now)
        if self.due is None or due is None:
            assert found is None
        elif self.now < due:
            assert found == At(due)
            self.reached["too early"] += 1
        else:
            self.dials += 1
            assert found == Dial(self.dials)
            self.state, self.number, self.due = "connecting/dialing", self.dials, None

    def want(self) -> None:
        self.reached[f"wanted: {self.state}"] += 1
        self.link.want(self.now, "wanted")
        if self.state in ("off/resting", "off/refused"):
            self.failures = 0
        elif self.state != "down/waiting":
            return
        self.state, self.due = "connecting/dialing", (self.now, self.now)

    def rest(self) -> None:
        self.turn_off("off/resting", self.link.rest("rests"), "rests")

    def refuse(self) -> None:
        self.turn_off("off/refused", self.link.refuse("refused"), "refused")

    def stop(self) -> None:
        stopped = self.state == "off/stopped"
        changed = self.link.stop("stopped")
        assert changed != stopped
        if changed:
            self.turn_off("off/stopped", changed, "stopped", was_off=False)

    def turn_off(self, to: str, changed: bool, why: str, *, was_off: bool | None = None) -> None:
        off = self.state.startswith("off") if was_off is None else was_off
        assert changed != off
        self.reached["turned off again" if off else f"from {self.state} to {to}"] += 1
        if not off:
            self.ended(to, None)
            self.why = why

    def step(self) -> None:
        name = self.rng.choice(["greeting", "login"])
        late = self.state == "up"
        if self.state == "connecting/login" and name == "greeting":
            return  # it would be a step back
        taken = self.link.step(self.number, name, "a step")
        assert taken == (bool(self.number) and not late)
        if taken:
            self.state = f"connecting/{name}"
        self.reached["a step, taken" if taken else "a step, too late"] += 1

    def succeed(self) -> None:
        if not self.number or (self.state != "up" and self.rng.random() < 0.3):
            return
        taken = self.link.up(self.number, self.now, "it works")
        assert taken == (self.state != "up")
        if taken:
            self.state, self.proven_at = "up", self.now + self.policy.pauses.proven
        self.reached["up" if taken else "up already"] += 1

    def prove(self) -> None:
        self.link.proven(self.number)
        if self.state == "up":
            self.proven_at = -math.inf
            self.reached["declared proven"] += 1

    def lose_with_pause(self) -> None:
        self.lose(self.rng.choice([0.0, 30.0]))

    def lose(self, pause: float | None = None) -> None:
        """The dial fails, or the link is lost."""
        found = self.link.lost(self.number, why := f"loss {self.now}", self.now, pause=pause)
        if not self.number:
            assert found is None, "nothing could be lost"
            return
        was_up, proven = self.state == "up", self.now >= self.proven_at
        self.failures = 0 if proven else self.failures
        kind = "proven" if proven else "young" if was_up else "failed"
        self.why = why
        if pause is not None:
            self.planned(pause, pause)
            self.reached[f"{kind}, known pause"] += 1
        elif proven and self.policy.pauses.at_once:
            self.planned(0.0, 0.0)
            self.reached["proven, at once"] += 1
        else:
            self.failures += 1
            self.reached[kind] += 1
            if self.failures == self.policy.attempts:
                self.exhausted(was_up, found)
                return
            base = min(self.policy.start * 2.0 ** (self.failures - 1), self.policy.longest)
            self.planned(*(base * factor for factor in self.policy.spread))
        assert found == Loss(was_up, False, why)
        if self.renewal:
            self.continue_renewal()

    def exhausted(self, was_up: bool, found: Loss | None) -> None:
        if (series := self.policy.pauses.series) is None:
            self.why = f"given up after attempt {self.failures}: {self.why}"
            self.ended("off/refused", None)
        else:
            self.planned(*(series * factor for factor in self.policy.spread))
            self.failures = 0
        assert found == Loss(was_up, True, self.why)
        self.reached["exhausted"] += 1

    def planned(self, low: float, high: float) -> None:
        state = "down/waiting" if high else "connecting/dialing"
        self.ended(state, (self.now + low, self.now + high))

    def ended(self, state: str, due: tuple[float, float] | None) -> None:
        self.state, self.number, self.proven_at, self.due = state, 0, math.inf, due
        if due is None:
            self.renewal = 0

    def report_stale(self) -> None:
        """Something reports with the number of an older or a later dial, or none."""
        number = self.rng.choice([n for n in range(self.dials + 2) if n != self.number or not n])
        before = self.everything()
        link = self.link
        assert not link.is_current(number)
        assert not link.step(number, "login", "stale")
        assert not link.up(number, self.now, "stale")
        link.proven(number)
        assert link.lost(number, "stale", self.now) is None
        assert self.everything() == before, f"a report of {number} has changed {link.machine}"
        self.reached[f"stale: {self.state}"] += 1

    # -- make before break: what rpc does with the attributes ------------------------------------

    def renew(self) -> None:
        link = self.link
        if self.state != "up":
            return
        if not self.renewal:
            link.dials += 1
            self.dials += 1
            self.renewal = self.dials
        elif self.rng.random() < 0.5:
            self.renewal = 0
            self.reached["a renewal failed"] += 1
        else:
            link.number, link.proven_at = self.renewal, self.now + self.policy.pauses.proven
            self.number, self.proven_at, self.renewal = self.renewal, link.proven_at, 0
            self.reached["a renewal succeeded"] += 1
        assert link.is_current(self.number)
        assert not link.is_current(self.renewal)

    def continue_renewal(self) -> None:
        """The link was lost while an attempt is made to replace it: that is its dial now."""
        link = self.link
        link.number, link.next_dial_at = self.renewal, None
        if self.state == "down/waiting":
            link.machine.move("connecting/dialing", cause="the renewal goes on")
        self.state, self.number, self.due = "connecting/dialing", self.renewal, None
        self.renewal = 0
        self.reached["a renewal became the dial"] += 1

    # -- what must hold ------------------------------------------------------------------------

    def everything(self) -> tuple[object, ...]:
        link = self.link
        return (
            *(link.machine.state, len(link.machine.history), link.backoff.attempts),
            *(link.dials, link.number, link.is_up, link.proven_at, link.next_dial_at, link.why),
        )

    def check(self) -> None:
        link = self.link
        assert str(link.machine.state) == self.state
        assert (link.number, link.dials) == (self.number, self.dials)
        assert (link.is_up, link.proven_at) == (self.state == "up", self.proven_at)
        assert link.why == self.why
        assert link.backoff.attempts in (self.failures, self.policy.attempts)
        assert (link.next_dial_at is None) == (self.due is None), "an unplanned dial, or none"
        if self.due is not None and link.next_dial_at is not None:
            assert self.due[0] <= link.next_dial_at <= self.due[1]


async def three_lives(sim: Sim) -> Counter[str]:
    """A link under each policy."""
    reached: Counter[str] = Counter()
    for name, policy in POLICIES.items():
        life = Life(sim, policy)
        life.live()
        reached.update({f"{name}: {each}": count for each, count in life.reached.items()})
    return reached


def test_the_rules_hold_in_every_schedule_under_every_policy() -> None:
    simulate(three_lives, scaled(5000, least=50))


COMMON = {
    *("too early", "up", "up already", "a step, taken", "a step, too late", "turned off again"),
    *("failed", "young", "failed, known pause", "young, known pause", "proven, known pause"),
    *("declared proven", "stale: down/waiting", "stale: up", "stale: connecting/dialing"),
    *("stale: off/resting", "stale: off/refused", "stale: off/stopped"),
    *("wanted: down/waiting", "wanted: connecting/dialing", "wanted: connecting/login"),
    *("wanted: up", "wanted: off/resting", "wanted: off/refused", "wanted: off/stopped"),
    *(f"from {state} to off/resting" for state in ("down/waiting", "connecting/dialing", "up")),
    *(f"from {state} to off/refused" for state in ("down/waiting", "connecting/dialing", "up")),
    *("from up to off/stopped", "from down/waiting to off/stopped"),
}
OWN = {
    "listener": {"exhausted", "proven, at once"},
    "sessions": {"exhausted", "proven"},
    "rpc": {
        "proven, at once",
        "a renewal failed",
        "a renewal succeeded",
        "a renewal became the dial",
    },
}


def test_the_schedules_reach_every_condition_under_every_policy() -> None:
    wanted = {f"{name}: {each}" for name, own in OWN.items() for each in COMMON | own}
    assert_reached(three_lives, wanted, within=300)


# -- planted defects ---------------------------------------------------------------------------


edited = partial(tests.mutants.edited, Reconnect)
BUSY = 'at("connecting", "up", "off/stopped")'
STALE = "self.is_up or not self.is_current(number)"
RESET = "self.number, self.is_up, self.proven_at = 0, False, math.inf"
MUTANTS = [
    edited("a dial before its time", "due", "now < self.next_dial_at", "False"),
    edited("a second dial while one is under way", "due", "self.next_dial_at = None", "pass"),
    edited("a number is used twice", "due", "self.dials += 1", "self.dials = self.number + 1"),
    edited("a dial without a number", "due", "self.number = self.dials", "pass"),
    edited("it waits while it dials", "due", 'self.machine.at("down")', "False"),
    edited("every report counts", "is_current", "number == self.number", "self.number"),
    edited("a report without a number counts", "is_current", " != 0", ""),
    edited("the attempt to replace a link counts", "is_current", "== self.number", "== self.dials"),
    edited("a stale step", "step", STALE, "self.is_up"),
    edited("a step of a link that is up", "step", STALE, "not self.is_current(number)"),
    edited("a stale success", "up", STALE, "self.is_up"),
    edited("a repeated success", "up", STALE, "not self.is_current(number)"),
    edited("proven at once", "up", "now + self.pauses.proven", "now"),
    edited("never proven", "up", "now + self.pauses.proven", "math.inf"),
    edited("a stale proof", "proven", " and self.is_current(number)", ""),
    edited("a proof of a dial", "proven", "self.is_up and ", ""),
    edited("no proof by the user", "proven", "-math.inf", "self.proven_at"),
    edited("a stale loss", "lost", "not self.is_current(number)", "not self.number"),
    edited("a lost link taken for a failed dial", "lost", "= self.is_up, False", "= False, False"),
    edited("a proven link counts for nothing", "lost", "now >= self.proven_at", "False"),
    edited("every link is proven", "lost", "now >= self.proven_at", "self.is_up"),
    edited("every failed dial is proven", "lost", "now >= self.proven_at", "True"),
    edited("a pause after a proven link", "lost", "self.pauses.at_once", "False"),
    edited("no pause after a proven link", "lost", " and self.pauses.at_once", ""),
    edited("a known pause is not used", "lost", "pause is None and self.pauses", "self.pauses"),
    edited("it never gives up", "lost", "= self.pauses.series)", "= self.pauses.series or 9.0)"),
    edited("one series for ever", "lost", "self.backoff.succeed()\n            pause", "pause"),
    edited("a short pause between series", "lost", "start=series, ", ""),
    edited("the end of a series is not reported", "lost", "exhausted = True", "pass"),
    edited("a loss is dialed at once", "lost", "=now + pause", "=now"),
    edited("it dials while it waits", "lost", '"down" if pause else ', ""),
    edited("it waits although it dials at once", "lost", "if pause else", "if True else"),
    edited("the reason is forgotten", "lost", "self.why = in_words(why)", "pass"),
    edited("a wanted link is dialed twice", "want", BUSY, 'at("up", "off/stopped")'),
    edited("a link that is up is dialed", "want", BUSY, 'at("connecting", "off/stopped")'),
    edited("a stopped link is dialed", "want", BUSY, 'at("connecting", "up")'),
    edited("a pause does not end early", "want", BUSY, 'at("connecting", "up", "down")'),
    edited("old failures count", "want", "self.backoff.succeed()", "pass"),
    edited("an early dial forgets the failures", "want", 'self.machine.at("off")', "True"),
    edited("a link that is off rests", "rest", 'not self.machine.at("off") and ', ""),
    edited("a link that is off is refused", "refuse", 'not self.machine.at("off") and ', ""),
    edited("a link is stopped twice", "stop", 'not self.machine.at("off/stopped") and ', ""),
    edited("an ended link may report", "_move", RESET, "self.is_up = False"),
    edited("an ended link is up", "_move", RESET, "self.number, self.proven_at = 0, math.inf"),
    edited("an ended link is proven", "_move", RESET, "self.number, self.is_up = 0, False"),
    edited(
        "a link that is off dials",
        "_move",
        "self.next_dial_at = next_dial_at",
        "self.next_dial_at = next_dial_at or self.next_dial_at",
    ),
]


@pytest.mark.parametrize("planted", planted_defects(MUTANTS))
def test_a_planted_defect_is_noticed(planted: Mutant) -> None:
    assert_caught(three_lives, planted, within=100, clean=0)
