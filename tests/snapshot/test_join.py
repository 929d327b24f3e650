"""The cores of a follower, and of joining: simulated schedules, and planted defects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.mutants import planted_defects

from moored.postgres import RESUME, CopyPosition, Lsn
from moored.postgres.snapshot._follow_core import FollowCore, SavedCopy, Ticket
from moored.postgres.snapshot._join import ChangePart, Chunk, CopyState, Placed, Sight
from moored.postgres.snapshot._position import CopyVersion
from moored.testing import Mutant, Sim, assert_caught, mutant, run_one, scaled, simulate

from .world import KEYS, AtLeastOnce, Exact, SimulatedTable, TwoAtOnce, write

pytestmark = pytest.mark.pure


async def scenario(sim: Sim) -> Counter[str]:
    """Three consumers follow a table while four writers change it."""
    table = SimulatedTable(dict.fromkeys(range(0, KEYS, 2), "first"))
    consumers = [Exact(sim, table), AtLeastOnce(sim, table), TwoAtOnce(sim, table)]
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for consumer in consumers:
            tasks.create_task(consumer.run(over))
        async with asyncio.TaskGroup() as writers:
            for _ in range(4):
                writers.create_task(write(sim, table, 8))
        over.set()
    for consumer in consumers:
        assert consumer.rows == table.rows, type(consumer).__name__
    return sum((each.saw for each in consumers), Counter())


def test_chunks_and_changes_add_up_to_the_table() -> None:
    simulate(scenario, scaled(4000, least=60))


def test_the_schedules_reach_every_case() -> None:
    saw: Counter[str] = Counter()
    wanted = {f"{part.value} of a row" for part in ChangePart} | {
        "a crash", "a chunk again", "an earlier snapshot", "begun again", "whole of truncate",
        "rows deleted",
    }  # fmt: skip
    for seed in range(300):
        saw += run_one(scenario, seed).result()
        if wanted <= saw.keys():
            return
    raise AssertionError(f"not met: {wanted - saw.keys()}")


# -- defects that must be noticed ----------------------------------------------------------------


def _one_too_many(self: Sight, xid: int) -> bool:
    """The first transaction after the snapshot is taken for one in it."""
    return _sees(Sight(self.xmax + 1, self.running), xid)


def _one_too_few(self: Sight, xid: int) -> bool:
    """The last transaction of the snapshot is taken for one after it."""
    return _sees(Sight(self.xmax - 1, self.running), xid)


def _forgets_running(self: Sight, xid: int) -> bool:
    """A transaction that commits out of the order of its ID is taken for one in the snapshot."""
    return _sees(Sight(self.xmax, frozenset()), xid)


def _half_an_id(self: Sight, xid: int) -> bool:
    """IDs are compared as the stream has them."""
    return xid < self.xmax and xid not in self.running


def _by_lsn(self: Chunk, xid: int, end: int) -> bool:
    """What is in the WAL is taken for visible."""
    return end <= self.limit


def _overtakes(self: CopyState, xid: int, end: int) -> bool:
    """The stream is consumed beyond the last snapshot."""
    return True


def _by_new_key(self: CopyState, xid: int, end: int, old: Any, new: Any) -> ChangePart | None:
    """An update of the key is delivered by its new key: the old row stays."""
    return _part(self, xid, end, None if new is not None else old, new)


def _by_old_key(self: CopyState, xid: int, end: int, old: Any, new: Any) -> ChangePart | None:
    """An update of the key is delivered by its old key: the new row is missing."""
    return _part(self, xid, end, old, None if old is not None else new)


def _keeps_all(self: CopyState, place: int | None, xid: int, end: int) -> bool:
    """A change is delivered although its chunk has it: a row that was deleted later reappears."""
    return place is not None and place < len(self.chunks)


def _early(self: CopyState, place: int | None, xid: int, end: int) -> bool:
    """A change of a chunk that is not copied yet is delivered."""
    return place is None or place >= len(self.chunks) or _lacks(self, place, xid, end)


def _settled_by_the_last(self: CopyState, end: int) -> bool:
    """The last chunk is taken for the one with the last snapshot."""
    return self.complete and end > self.chunks[-1].limit


def _truncates_partly(self: CopyState, xid: int, end: int, changes: Any) -> Any:
    """TRUNCATE empties also the chunks that were copied after it."""
    placed = [each for each in changes if not each.truncate]
    truncates = [(each.change, ChangePart.WHOLE) for each in changes if each.truncate]
    joined = _join(self, xid, end, placed)
    return joined._replace(kept=truncates + joined.kept)


def _merges_early(self: CopyState, lsn: int, most: int | None = None) -> CopyState:
    """Chunks are merged before their snapshots are passed: their changes come twice."""
    return _forget(self, 2**64 - 1, most)


def _none_resumes(self: FollowCore, saved: SavedCopy | None, acknowledged: Lsn) -> bool:
    """A consumer without a position goes on from the state file: its rows are never copied."""
    self._start = RESUME if self._start is None else self._start
    return _load(self, saved, acknowledged)


def _none_repeats(self: FollowCore, saved: SavedCopy | None, acknowledged: Lsn) -> bool:
    """A consumer without a position gets a chunk that it may have, joined with its first sight."""
    if self._start is None and saved is not None and saved.acked == 0:
        self._start = RESUME
    return _load(self, saved, acknowledged)


def _position_repeats(self: FollowCore, saved: SavedCopy | None, acknowledged: Lsn) -> bool:
    """A consumer with a position gets the chunks after it, joined with their first sights."""
    found = _load(self, saved, acknowledged)
    if isinstance(self._start, CopyPosition) and saved is not None:
        self._again = list(saved.state.chunks[len(self.state.chunks) :])
    return found


def _never_again(self: FollowCore, saved: SavedCopy | None, acknowledged: Lsn) -> bool:
    """Chunks that were not acknowledged are taken for delivered."""
    if saved is not None:
        saved = saved._replace(acked=len(saved.state.chunks))
    return _load(self, saved, acknowledged)


def _at_the_second_sight(self: FollowCore, chunk: Chunk) -> None:
    """A chunk that is copied again is joined with its second snapshot: deleted rows stay."""
    self._again = self._again[1:]
    self.state = self.state.copied(chunk)


def _of_any_generation(self: FollowCore, ticket: Ticket, passed: Callable[[], int]) -> bool:
    """An acknowledgement from before a `Reset` acknowledges the chunks of the next copy."""
    return _acknowledge(self, ticket._replace(generation=self._generation), passed)


def _acknowledges_all(self: FollowCore, ticket: Ticket, passed: Callable[[], int]) -> bool:
    """An acknowledgement counts for the chunks that were delivered after it, too."""
    return _acknowledge(self, self.ticket(), passed)


def _saves_delivered(self: FollowCore, version: CopyVersion) -> SavedCopy:
    """The chunks that are still to be copied again are not stored."""
    return _saved(self, version)._replace(state=self.state)


_load, _acknowledge, _saved = FollowCore.load, FollowCore.acknowledge, FollowCore.saved
_forget = CopyState.forget
_sees, _part, _lacks, _join = Sight.sees, CopyState._part, CopyState.lacks, CopyState.join

MUTANTS = (
    mutant(Sight, "sees", _one_too_many, name="one transaction too many"),
    mutant(Sight, "sees", _one_too_few, name="one transaction too few"),
    mutant(Sight, "sees", _forgets_running, name="running transactions are forgotten"),
    mutant(Sight, "sees", _half_an_id, name="half an ID"),
    mutant(Chunk, "has", _by_lsn, name="by LSN"),
    mutant(CopyState, "ready", _overtakes, name="the stream overtakes the snapshots"),
    mutant(CopyState, "_part", _by_new_key, name="a moved key leaves its old row"),
    mutant(CopyState, "_part", _by_old_key, name="a moved key loses its new row"),
    mutant(CopyState, "lacks", _keeps_all, name="a deleted row reappears"),
    mutant(CopyState, "lacks", _early, name="a change before its chunk"),
    mutant(CopyState, "settled", _settled_by_the_last, name="the last chunk has the last snapshot"),
    mutant(CopyState, "join", _truncates_partly, name="truncated too much"),
    mutant(CopyState, "forget", _merges_early, name="merged before it was passed"),
    mutant(FollowCore, "load", _none_resumes, name="deleted rows are never copied again"),
    mutant(FollowCore, "load", _none_repeats, name="a chunk again for a consumer without it"),
    mutant(FollowCore, "load", _position_repeats, name="a chunk again after a position"),
    mutant(FollowCore, "load", _never_again, name="an unacknowledged chunk is lost"),
    mutant(FollowCore, "copied", _at_the_second_sight, name="joined with the second sight"),
    mutant(FollowCore, "acknowledge", _of_any_generation, name="acknowledged before the reset"),
    mutant(FollowCore, "acknowledge", _acknowledges_all, name="acknowledged before delivery"),
    mutant(FollowCore, "saved", _saves_delivered, name="chunks to repeat are forgotten"),
)


#: They need two crashes, or a crash after a reset.
LATE = "acknowledged before the reset", "chunks to repeat are forgotten"


@pytest.mark.parametrize("planted", planted_defects(MUTANTS, *LATE))
def test_a_planted_defect_is_caught(planted: Mutant) -> None:
    assert_caught(scenario, planted, within=4000 if planted.name in LATE else 400, clean=2)


# -- rules, one by one ---------------------------------------------------------------------------


def test_a_snapshot_is_parsed_and_written_as_the_server_writes_it() -> None:
    sight = Sight.parse("10:20:10,14,15")
    assert sight == Sight(20, frozenset({10, 14, 15}))
    assert str(sight) == "10:20:10,14,15"
    assert str(Sight.parse("20:20:")) == "20:20:"
    assert [xid for xid in range(9, 22) if sight.sees(xid)] == [9, 11, 12, 13, 16, 17, 18, 19]


def test_transaction_ids_are_compared_across_their_wraparound() -> None:
    sight = Sight((3 << 32) + 5, frozenset({(3 << 32) - 2}))
    assert sight.sees(4)
    assert not sight.sees(5)
    assert sight.sees(2**32 - 1)
    assert not sight.sees(2**32 - 2)


def test_a_commit_after_the_limit_is_never_in_a_chunk() -> None:
    chunk = Chunk(None, Sight(100, frozenset()), 1000)
    assert chunk.has(99, 1000)
    assert not chunk.has(99, 1001)


def test_a_state_survives_its_text() -> None:
    state = CopyState(
        (Chunk(("5", "a"), Sight(9, frozenset({3})), 77), Chunk(None, Sight(9, frozenset()), 78))
    )
    assert CopyState.load(state.dump()) == state


def test_rows_that_were_copied_again_are_as_new_as_their_second_snapshot() -> None:
    """Else a change in between is taken for one of rows as they were before it."""
    first, second = (
        Chunk(None, Sight(xmax, frozenset()), end) for xmax, end in ((9, 70), (12, 90))
    )
    core = FollowCore(RESUME)
    assert core.load(SavedCopy(CopyVersion(), 0, CopyState((first,))), Lsn(60))
    core.copied(second)
    assert core.state.join(10, 80, [Placed("x", 0, 0)]).kept == [("x", ChangePart.WHOLE)]
    assert not core.state.settled(90)
    assert core.state.settled(91)


def test_forgotten_chunks_get_every_later_change() -> None:
    state = CopyState(
        (Chunk(("5",), Sight(9, frozenset()), 70), Chunk(("9",), Sight(9, frozenset()), 80))
    )
    assert state.forget(69) == state
    merged = state.forget(80)
    assert merged.bounds == [("9",)]
    assert merged.join(8, 81, [Placed("x", 0, 0)]).kept == [("x", ChangePart.WHOLE)]
    assert not merged.ready(8, 81)
    assert state.forget(80, most=1).bounds == [("5",), ("9",)]
