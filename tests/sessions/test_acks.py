"""The table of sends: each send gets exactly one, correct outcome."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from moored.sessions import (
    Acked,
    LinkLost,
    NotSent,
    Outcome,
    Rejected,
    SenderCrashed,
    SessionError,
    Unknown,
)
from moored.sessions._protocol import Outgoing
from moored.sessions.sending._acks import AckTable, Parked
from moored.testing import scaled

pytestmark = pytest.mark.pure


class Outcomes:
    """Records the outcome of each send, and checks that there is only one."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def __call__(self, parked: Parked, outcome: Outcome) -> None:
        assert parked.id not in self.outcomes, "a send was settled twice"
        self.outcomes[parked.id] = outcome


@pytest.fixture
def settled() -> Outcomes:
    return Outcomes()


@pytest.fixture
def table(settled: Outcomes) -> AckTable:
    return AckTable(settled)


def park(
    table: AckTable,
    id: str,
    to: str = "bob",
    timeout: float = 30.0,
    *,
    idempotent: bool = False,
    hold: bool = False,
) -> Parked:
    outgoing = Outgoing(id, to, b"")
    parked = Parked(outgoing, timeout, timeout, idempotent=idempotent, hold=hold)
    table.park(parked)
    return parked


def test_first_confirmation_settles_a_send_and_later_ones_change_nothing(
    table: AckTable, settled: Outcomes
) -> None:
    table.written(park(table, "1"), 1)
    assert table.confirmed("1", "secret", 1)
    assert not table.confirmed("1", None, 1)
    assert not table.refused("1", 479, "", 1)
    assert settled.outcomes == {"1": Acked("1", "secret")}
    assert table.late == 2
    assert len(table) == 0


def test_refusal_is_a_rejection_with_its_code(table: AckTable, settled: Outcomes) -> None:
    table.written(park(table, "1"), 1)
    table.refused("1", 463, "no such account", 1)
    assert settled.outcomes == {"1": Rejected("1", 463, "no such account")}


def test_unwritten_send_cannot_be_confirmed(table: AckTable, settled: Outcomes) -> None:
    park(table, "1")
    assert not table.confirmed("1", None, 1)
    assert not table.confirmed("1", None, 0)
    assert settled.outcomes == {}


def test_confirmation_over_an_old_link_is_ignored(table: AckTable, settled: Outcomes) -> None:
    parked = park(table, "1", idempotent=True)
    table.written(parked, 1)
    table.lost("reset", resumes=False)
    assert not table.confirmed("1", None, 1)
    assert table.forgotten("new server") == [parked]
    table.written(parked, 2)
    assert not table.confirmed("1", None, 1)
    assert table.confirmed("1", None, 2)


def test_lost_link_settles_all_sends_that_are_not_held(table: AckTable, settled: Outcomes) -> None:
    table.written(park(table, "written"), 1)
    park(table, "queued").stage = "encrypt"
    park(table, "held", hold=True)
    table.lost("connection reset", resumes=False)
    unknown, not_sent = settled.outcomes["written"], settled.outcomes["queued"]
    assert isinstance(unknown, Unknown)
    assert isinstance(unknown.reason, LinkLost)
    assert isinstance(not_sent, NotSent)
    assert not_sent.stage == "encrypt"
    assert "connection reset" in str(not_sent.reason)
    assert [parked.id for parked in table] == ["held"]


def test_resuming_protocol_keeps_written_sends_until_the_next_link(
    table: AckTable, settled: Outcomes
) -> None:
    for id in ("a", "b", "c"):
        table.written(park(table, id), 1)
    table.lost("reset", resumes=True)
    assert settled.outcomes == {}
    assert not table.confirmed("a", None, 1)
    table.resumed(["a", "b", "never heard of"], 2)
    assert table.confirmed("a", None, 2)
    assert table.forgotten("the server knows no more") == []
    assert isinstance(settled.outcomes["c"], Unknown)
    assert [parked.id for parked in table] == ["b"]


def test_idempotent_send_is_written_again_once(table: AckTable, settled: Outcomes) -> None:
    parked = park(table, "1", idempotent=True)
    table.written(parked, 1)
    table.lost("reset", resumes=False)
    assert table.forgotten("gone") == [parked]
    table.written(parked, 2)
    table.lost("reset again", resumes=False)
    assert isinstance(settled.outcomes["1"], Unknown)
    assert table.forgotten("gone") == []


def test_crashed_sender_fails_its_own_recipient_only(table: AckTable, settled: Outcomes) -> None:
    table.written(park(table, "written"), 1)
    park(table, "queued")
    park(table, "other", to="carol")
    error = RuntimeError("bad bundle")
    assert table.crashed("bob", error) == 2
    written, queued = settled.outcomes["written"], settled.outcomes["queued"]
    assert isinstance(written, Unknown)
    assert isinstance(queued, NotSent)
    for outcome in (written, queued):
        assert isinstance(outcome.reason, SenderCrashed)
        assert outcome.reason.reason is error
    assert "other" not in settled.outcomes
    assert table.crashed("nobody", error) == 0


def test_expired_sends_say_what_they_waited_for(table: AckTable, settled: Outcomes) -> None:
    table.written(park(table, "written", timeout=5.0), 1)
    park(table, "queued", timeout=5.0)
    park(table, "later", timeout=9.0)
    assert table.next_deadline() == 5.0
    assert table.expired(4.9) == 0
    assert table.expired(5.0) == 2
    assert isinstance(settled.outcomes["written"], Unknown)
    assert "no confirmation within 5" in str(settled.outcomes["written"].reason)
    assert isinstance(settled.outcomes["queued"], NotSent)
    assert "not written within 5" in str(settled.outcomes["queued"].reason)
    assert table.next_deadline() == 9.0


def test_repeated_write_takes_one_cumulative_confirmation(
    table: AckTable, settled: Outcomes
) -> None:
    table.linked(cumulative=True)
    table.written(park(table, "old"), 1)
    table.confirmed_up_to(1, 1)
    table.repeated("old")
    table.written(park(table, "new"), 1)
    table.confirmed_up_to(1, 1)
    assert set(settled.outcomes) == {"old"}, "the count covered a send that was not confirmed"
    table.confirmed_up_to(1, 1)
    assert settled.outcomes["new"] == Acked("new", None)


def test_cumulative_confirmations_settle_in_the_order_of_writing(
    table: AckTable, settled: Outcomes
) -> None:
    table.linked(cumulative=True)
    for id in ("a", "b", "c", "d"):
        table.written(park(table, id), 1)
    table.refused("b", "blocked", "", 1)
    assert table.confirmed_up_to(3, 1) == ["a", "b", "c"]
    assert {id for id, outcome in settled.outcomes.items() if isinstance(outcome, Acked)} == {
        "a",
        "c",
    }
    assert isinstance(settled.outcomes["b"], Rejected)
    assert table.confirmed_up_to(99, 1) == ["d"]


def test_cumulative_count_after_a_resumption_skips_sends_settled_meanwhile(
    table: AckTable, settled: Outcomes
) -> None:
    table.linked(cumulative=True)
    table.written(park(table, "slow", timeout=1.0), 1)
    table.written(park(table, "quick"), 1)
    table.lost("reset", resumes=True)
    table.expired(1.0)
    assert isinstance(settled.outcomes["slow"], Unknown)
    table.linked(cumulative=True)
    table.resumed(["quick"], 2)
    assert table.confirmed_up_to(1, 2) == ["quick"]
    assert settled.outcomes["quick"] == Acked("quick")


def test_id_in_flight_cannot_be_used_twice(table: AckTable) -> None:
    park(table, "1")
    with pytest.raises(SessionError, match="is in progress"):
        park(table, "1")


def test_end_of_the_session_settles_all_sends(table: AckTable, settled: Outcomes) -> None:
    table.written(park(table, "written"), 1)
    park(table, "held", hold=True)
    table.over("stopped")
    assert isinstance(settled.outcomes["written"], Unknown)
    assert isinstance(settled.outcomes["held"], NotSent)
    assert len(table) == 0


def test_idle_recipients_use_no_memory() -> None:
    table = AckTable(lambda parked, outcome: None)

    def send_all(first: int, last: int) -> None:
        for number in range(first, last):
            parked = park(table, str(number), to=f"recipient {number}")
            table.written(parked, 1)
            table.confirmed(str(number), None, 1)

    send_all(0, 100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        send_all(100, 5_100)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # a single key of 50 bytes each would be a quarter of a million


class AnySchedule(RuleBasedStateMachine):
    """Events in any order: each send gets exactly one, correct outcome."""

    sends = Bundle("sends")

    def __init__(self) -> None:
        super().__init__()
        self.settled = Outcomes()
        self.table = AckTable(self.settled)
        self.link = 1
        self.up = True
        self.now = 0.0
        self.number = 0
        self.ever_written: set[str] = set()
        self.parked: dict[str, Parked] = {}

    @rule(
        target=sends,
        to=st.sampled_from("abc"),
        timeout=st.sampled_from((1.0, 5.0, 30.0)),
        idempotent=st.booleans(),
        hold=st.booleans(),
    )
    def send(self, to: str, timeout: float, idempotent: bool, hold: bool) -> Parked:
        self.number += 1
        parked = Parked(
            Outgoing(str(self.number), to, b""),
            timeout,
            self.now + timeout,
            idempotent=idempotent,
            hold=hold,
        )
        self.table.park(parked)
        self.parked[parked.id] = parked
        return parked

    @rule(parked=sends)
    def write(self, parked: Parked) -> None:
        if self.up and parked.outcome is None and not parked.written_in:
            self.ever_written.add(parked.id)
            self.table.written(parked, self.link)

    @rule(parked=consumes(sends), link=st.integers(0, 3))
    def confirm(self, parked: Parked, link: int) -> None:
        before = parked.outcome
        current = self.up and parked.written_in == self.link and not parked.orphan
        accepted = self.table.confirmed(parked.id, None, self.link - link)
        assert accepted == (before is None and current and link == 0)

    @rule(parked=sends)
    def reject(self, parked: Parked) -> None:
        self.table.refused(parked.id, 500, "", self.link)

    @rule(resumes=st.booleans())
    def cut(self, resumes: bool) -> None:
        if self.up:
            self.up = False
            self.table.lost("cut", resumes=resumes)

    @rule(resumed=st.booleans())
    def reconnect(self, resumed: bool) -> None:
        if not self.up:
            self.up = True
            self.link += 1
            if resumed:
                self.table.resumed([each.id for each in self.table if each.orphan], self.link)
            for parked in self.table.forgotten("forgotten"):
                self.table.written(parked, self.link)
            assert not any(each.orphan for each in self.table)

    @rule(to=st.sampled_from("abc"))
    def crash(self, to: str) -> None:
        self.table.crashed(to, RuntimeError("crash"))
        assert all(each.outgoing.recipient != to for each in self.table)

    @rule(step=st.sampled_from((0.5, 3.0, 20.0)))
    def wait(self, step: float) -> None:
        self.now += step
        self.table.expired(self.now)
        due = self.table.next_deadline()
        assert due is None or due > self.now

    @invariant()
    def not_sent_means_never_written(self) -> None:
        for id, outcome in self.settled.outcomes.items():
            if isinstance(outcome, NotSent):
                assert id not in self.ever_written
            else:
                assert id in self.ever_written

    @invariant()
    def every_send_is_parked_or_settled(self) -> None:
        waiting = {each.id for each in self.table}
        assert waiting | set(self.settled.outcomes) == set(self.parked)
        assert not waiting & set(self.settled.outcomes)

    def teardown(self) -> None:
        self.table.over("the end")
        assert set(self.settled.outcomes) == set(self.parked)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=scaled(60, least=10), stateful_step_count=40, deadline=None
)
