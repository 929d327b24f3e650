"""A restored copy is detected by the commits that a slot sends again."""

from __future__ import annotations

from pathlib import Path

import pytest

from moored.kernel import Recorder
from moored.postgres import History
from moored.postgres._errors import StreamEnded
from moored.postgres.consume._continuity import NO_COMMIT, CommitMark, Continuity
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._store import StateStore
from moored.postgres.decode._body import Body
from moored.postgres.decode._transaction import Committed

pytestmark = pytest.mark.pure


def mark(end: int) -> CommitMark:
    return CommitMark(end, 7 * end)


def test_a_history_with_the_last_commit_is_the_same() -> None:
    log = Continuity(last=mark(200), received=250, confirmed=50)
    assert [log.committed(mark(end)) for end in (100, 200)] == [None, None]
    assert not log.proven
    assert log.committed(mark(300)) is None
    assert log.proven


@pytest.mark.parametrize("end", [201, 249, 250, 251, 1000])
def test_a_history_without_the_last_commit_is_another(end: int) -> None:
    log = Continuity(last=mark(200), received=250, confirmed=50)
    assert log.committed(mark(100)) is None
    assert "other commits" in str(log.committed(mark(end)))


def test_a_new_commit_before_the_received_lsn_is_of_another_history() -> None:
    log = Continuity(last=mark(200), received=250, confirmed=210)
    assert "a new one ends at 0/E6" in str(log.committed(mark(230)))


def test_a_commit_with_the_same_end_and_another_time_is_of_another_history() -> None:
    log = Continuity(last=mark(200), received=250, confirmed=50)
    assert "a new one ends at" in str(log.committed(CommitMark(200, 7)))


def test_a_keepalive_beyond_the_last_commit_shows_that_it_is_missing() -> None:
    log = Continuity(last=mark(200), received=250, confirmed=50)
    assert log.passed(200) is None
    assert "no longer exists" in str(log.passed(201))


@pytest.mark.parametrize(
    ("last", "received", "confirmed"),
    [(0, 0, 0), (0, 250, 50), (200, 200, 199), (200, 200, 200), (200, 250, 249), (200, 100, 300)],
)
def test_there_is_nothing_to_compare_if_nothing_is_sent_again(
    last: int, received: int, confirmed: int
) -> None:
    assert Continuity(mark(last) if last else NO_COMMIT, received, confirmed).proven


def test_the_last_commit_is_not_expected_if_the_slot_has_passed_it() -> None:
    log = Continuity(last=mark(200), received=250, confirmed=199)
    assert not log.proven
    assert log.committed(mark(300)) is None


def apply(hub: Hub, *ends: int) -> None:
    hub.apply_all([Committed(1, Body(), {}, e - 5, e) for e in ends])


async def test_no_transaction_of_another_history_is_delivered(tmp_path: Path) -> None:
    store, history = StateStore(tmp_path / "state.db"), History("1", 1)
    hub = Hub(store, Recorder())
    hub.begin(history, 100)
    changes = hub.attach("search")
    apply(hub, 110, 120)
    for end in (110, 120):
        hub.acknowledge(changes._attachment, end)
    await hub.checkpoint(120)
    assert store.last() == CommitMark(120, 0)

    hub = Hub(store, Recorder())
    changes = hub.attach("search")
    hub.begin(history, 100)
    with pytest.raises(StreamEnded, match="was restored"):
        apply(hub, 110, 130)
    assert not changes._queue
    assert "was restored" in str(store.given_up())
    await hub.reset("was restored")
    hub.begin(history, 100)
    apply(hub, 110, 130)  # it is the log from now on
    store.close()
