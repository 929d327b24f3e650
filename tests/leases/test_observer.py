"""The checkers of the fleet tests detect violations, and only those."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.leases.fleet import Fleet, one_shot, storm
from tests.leases.observer import (
    SECOND,
    Belief,
    Grant,
    beliefs,
    events,
    excess,
    grants,
    overfull,
    peak,
)
from tests.leases.trials import takers


def belief(start: float, end: float) -> Belief:
    return Belief(int(start * SECOND), int(end * SECOND), f"{start}-{end}", 1, 1)


def line(what: str, at: float, **data: object) -> dict[str, object]:
    return {"at": int(at * SECOND), "what": what, "pid": 1, "fence": 1, **data}


def test_leases_within_the_limit_pass() -> None:
    assert overfull([belief(0, 2), belief(1, 3), belief(2, 4)], 2) is None
    assert overfull([], 0) is None


def test_one_lease_too_many_is_detected() -> None:
    planted = [belief(0, 2), belief(1, 3), belief(1.999, 4)]
    found = overfull(planted, 2)
    assert found is not None
    assert found.at == 1.999 * SECOND
    assert sorted(found.holders) == planted


def test_an_overlap_of_a_nanosecond_is_detected() -> None:
    planted = [Belief(0, 11, "a", 1, 1), Belief(10, 20, "b", 1, 1)]
    assert overfull(planted, 1) is not None
    assert overfull([planted[0]._replace(end=10), planted[1]], 1) is None


def test_the_peak_against_a_plain_count() -> None:
    chance = random.Random(1)
    for _ in range(100):
        some = [
            belief(start := chance.uniform(0, 9), start + chance.uniform(0.1, 3)) for _ in "abcdef"
        ]
        plain = max(sum(b.start <= each.start < b.end for b in some) for each in some)
        assert peak(some) == plain
        assert overfull(some, plain) is None
        assert overfull(some, plain - 1) is not None


def test_a_belief_ends_at_the_release_the_loss_or_the_deadline() -> None:
    story = [
        line("acquired", 1.0, lease="a", until=3 * SECOND),
        line("renewed", 2.0, lease="a", until=4 * SECOND),
        line("released", 3.5, lease="a"),
        line("acquired", 1.0, lease="killed", until=3 * SECOND),
        line("acquired", 1.0, lease="told", until=3 * SECOND),
        line("lost", 2.5, lease="told"),
        line("refused", 2.0),
    ]
    found = {each.id: (each.start / SECOND, each.end / SECOND) for each in beliefs(story)}
    assert found == {"a": (1.0, 3.5), "killed": (1.0, 3.0), "told": (1.0, 2.5)}


def test_an_incomplete_log_line_is_ignored(tmp_path: Path) -> None:
    whole = json.dumps(line("acquired", 2.0, lease="a"))
    (tmp_path / "1.log").write_text(f"{whole}\n{whole[:20]}")
    (tmp_path / "2.log").write_text(json.dumps(line("refused", 1.0)) + "\n")
    assert [event["what"] for event in events(tmp_path)] == ["refused", "acquired"]


def grant(at: float, tokens: int = 1) -> Grant:
    return Grant(int(at * SECOND), tokens)


def test_a_burst_and_then_the_rate() -> None:
    assert excess([grant(0, 5), *(grant(n / 10) for n in range(1, 50))], rate=10, burst=5) is None
    assert excess([], rate=10, burst=5) is None


def test_one_token_too_many_is_detected() -> None:
    planted = [grant(0), grant(5.0, 3), grant(5.1, 2), grant(5.15), grant(9.0)]
    found = excess(planted, rate=10, burst=5)
    assert found is None
    found = excess([*planted[:4], grant(5.19), grant(9.0)], rate=10, burst=5)
    assert found is not None
    assert (found.start, found.end, found.tokens) == (5 * SECOND, int(5.19 * SECOND), 7)


def test_windows_against_a_plain_count() -> None:
    chance = random.Random(2)
    verdicts = set()
    for _ in range(300):
        some = sorted(grant(chance.uniform(0, 2), chance.randint(1, 3)) for _ in range(8))
        plain = any(
            sum(each.tokens for each in some[i : j + 1])
            > 6 * (some[j].at - some[i].at) / SECOND + 5 + 1e-6
            for i in range(8)
            for j in range(i, 8)
        )
        assert (excess(some, rate=6, burst=5) is not None) is plain
        verdicts.add(plain)
    assert verdicts == {True, False}


def test_a_store_that_is_not_shared_is_detected(tmp_path: Path) -> None:
    # In memory, each process has a store of its own: nothing is agreed upon, and the trials see it.
    with Fleet("memory://", tmp_path / "leases", ttl=9.0) as fleet:
        storm(fleet, limit=2, workers=6, seconds=1.0, seed=1)
        fleet.wait_until(lambda seen: seen["acquired"] >= 6)
        fleet.kill_all()
        assert overfull(beliefs(fleet.events()), 2) is not None
    with Fleet("memory://", tmp_path / "once") as fleet:
        assert one_shot(fleet, workers=4, limit=1) == 4
    with Fleet("memory://", tmp_path / "rate") as fleet:
        takers(fleet, 20.0, 8)
        fleet.wait_until(lambda seen: seen["took"] > 40)
        fleet.kill_all()
        assert excess(grants(fleet.events()), rate=20.0, burst=8) is not None
