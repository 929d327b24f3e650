"""The recorder keeps a bounded number of the newest events, and explains them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from tests.kernel.fake_clock import NOON, FakeClock

from moored.kernel import Event, Recorder

pytestmark = pytest.mark.pure


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder(clock: FakeClock) -> Recorder:
    return Recorder(clock=clock)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class AdminShutdown(Exception):
    sqlstate = "57P01"


def test_an_event_has_text_time_and_cause(recorder: Recorder, clock: FakeClock) -> None:
    clock.advance(1.5)
    event = recorder.record("link", "lost", kind="failure", cause="the peer hung up", port=5432)
    assert event == Event(
        id=1,
        at=1.5,
        wall=NOON + 1.5,
        component="link",
        kind="failure",
        text="lost",
        cause_id=None,
        cause_component=None,
        because=("the peer hung up",),
        data={"port": 5432},
    )
    assert recorder.events("link") == [event]
    assert repr(event) == "<Event 1 link failure: lost>"
    assert len({event, event}) == 1


def test_an_empty_cause_is_no_reason(recorder: Recorder) -> None:
    event = recorder.record("db", "it is ready", cause="")
    assert (event.because, event.cause_id) == ((), None)


def test_an_event_cannot_be_changed(recorder: Recorder) -> None:
    event = recorder.record("link", "up")
    with pytest.raises(AttributeError):
        event.text = "down"  # type: ignore[misc]


def test_data_may_use_the_names_of_the_positional_parameters(recorder: Recorder) -> None:
    event = recorder.record("link", "up", text="other", component="other")
    assert event.text == "up"
    assert event.data == {"text": "other", "component": "other"}


def test_as_dict_is_ready_for_json(recorder: Recorder) -> None:
    first = recorder.record("link", "up", peer=("127.0.0.1", 5432), error=ValueError("x"))
    second = recorder.record("link", "down", cause=first)
    assert json.loads(json.dumps(first.as_dict()))["data"] == {
        "peer": ["127.0.0.1", 5432],
        "error": "ValueError('x')",
    }
    plain = json.loads(json.dumps(second.as_dict()))
    assert plain["cause_id"] == first.id
    assert plain["because"] == ["up"]


def test_the_ring_keeps_the_newest_and_counts_the_rest(clock: FakeClock) -> None:
    recorder = Recorder(3, clock=clock)
    for number in range(5):
        recorder.record("link", str(number))
    recorder.record("other", "x")
    assert [event.text for event in recorder.events("link")] == ["2", "3", "4"]
    assert [event.text for event in recorder.events("link", limit=2)] == ["3", "4"]
    assert recorder.events("link", limit=0) == []
    assert [event.text for event in recorder.events(limit=2)] == ["4", "x"]
    assert recorder.statistics()[:4] == (6, 4, 2, 2)
    assert repr(recorder) == "<Recorder: 4 events of 2 components, 2 dropped>"


def test_the_least_recently_changed_component_is_dropped_first(clock: FakeClock) -> None:
    recorder = Recorder(max_components=2, clock=clock)
    recorder.record("a", "1")
    recorder.record("b", "2")
    recorder.record("a", "3")
    recorder.record("c", "4")
    assert recorder.components() == ("a", "c")
    assert recorder.events("b") == []
    statistics = recorder.statistics()
    assert statistics.dropped_components == 1
    assert statistics.dropped == 1


def test_above_the_limit_of_all_events_each_component_keeps_an_equal_share(
    clock: FakeClock,
) -> None:
    recorder = Recorder(max_events=40, clock=clock)
    for component in ("a", "b"):
        for number in range(20):
            recorder.record(component, str(number))
    assert recorder.statistics().kept == 40
    recorder.record("a", "one more")
    assert [event.text for event in recorder.events("a")][-2:] == ["19", "one more"]
    assert [len(recorder.events(component)) for component in ("a", "b")] == [10, 10]
    assert recorder.statistics().dropped == 21
    # Events that a ring has replaced, and forgotten ones, do not count.
    recorder.forget("b")
    small = Recorder(2, max_events=40, clock=clock)
    for recorded, component in ((recorder, "a"), (small, "c")):
        for number in range(30):
            recorded.record(component, str(number))
    assert len(recorder.events("a")) == 40
    assert len(small.events("c")) == 2


def test_forgotten_events_do_not_count_as_dropped(recorder: Recorder) -> None:
    recorder.record("a", "1")
    recorder.forget("a")
    recorder.forget("never seen")
    assert recorder.components() == ()
    assert recorder.statistics()[:3] == (1, 0, 0)


def test_events_of_all_components_come_in_order(recorder: Recorder) -> None:
    for number in range(6):
        recorder.record("ab"[number % 2], str(number))
    assert [event.text for event in recorder.events()] == list("012345")


def test_a_cause_is_found_by_number_while_it_is_kept(clock: FakeClock) -> None:
    recorder = Recorder(2, clock=clock)
    cause = recorder.record("server", "restarted")
    effect = recorder.record("link", "lost", cause=cause)
    assert recorder.cause(effect) is cause
    assert recorder.cause(cause) is None
    recorder.record("server", "x")
    recorder.record("server", "y")
    assert recorder.cause(effect) is None
    assert effect.because == ("restarted",)


def test_an_event_of_another_recorder_is_a_cause_as_text_only(recorder: Recorder) -> None:
    foreign = Recorder().record("link", "theirs")
    recorder.record("link", "ours")
    effect = recorder.record("link", "lost", cause=foreign)
    assert recorder.cause(effect) is None
    assert effect.because == ("theirs",)


def test_a_chain_of_causes_is_not_kept_alive(clock: FakeClock) -> None:
    class Token(str):
        __slots__ = ("__weakref__",)

    recorder = Recorder(2, clock=clock)
    token = Token("first")
    watch = weakref.ref(token)
    event = recorder.record("link", "first", token=token)
    del token
    for number in range(5):
        event = recorder.record("link", str(number), cause=event)
    gc.collect()
    assert watch() is None


def test_a_recorded_error_keeps_no_frames_alive(recorder: Recorder) -> None:
    class Big:
        pass

    def fail() -> weakref.ref[Big]:
        big = Big()
        try:
            raise ValueError("oh")
        except ValueError as error:
            recorder.record("link", "lost", cause=error)
        return weakref.ref(big)

    watch = fail()
    gc.collect()
    assert watch() is None


def test_sinks_see_each_event_until_they_unsubscribe(recorder: Recorder) -> None:
    seen: list[str] = []
    unsubscribe = recorder.subscribe(lambda event: seen.append(event.text))
    recorder.record("link", "one")
    unsubscribe()
    unsubscribe()
    recorder.record("link", "two")
    assert seen == ["one"]


def test_a_sink_that_raises_is_counted_and_logged_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def broken(event: Event) -> None:
        raise ValueError("disk full")

    recorder.subscribe(broken)
    recorder.subscribe(lambda event: seen.append(event.text))
    with caplog.at_level(logging.ERROR, "moored.kernel"):
        recorder.record("link", "one")
        recorder.record("link", "two")
    assert seen == ["one", "two"]
    assert recorder.statistics().sink_errors == 2
    assert len(caplog.records) == 1
    assert "broken" in caplog.text
    assert "disk full" in caplog.text


def test_all_wrong_arguments_are_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"size=0 .* at least 1; max_components=-1 .*"):
        Recorder(0, max_components=-1)


async def test_the_time_is_the_running_loops() -> None:
    recorder = Recorder()
    before = asyncio.get_running_loop().time()
    event = recorder.record("link", "up")
    assert before <= event.at <= asyncio.get_running_loop().time()


def test_threads_record_at_the_same_time_without_loss() -> None:
    recorder = Recorder(100_000)
    each = 2_000

    def work(name: str) -> None:
        for number in range(each):
            recorder.record(name, str(number))
            recorder.record("shared", name)
            if number % 100 == 0:
                recorder.events()

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.events("shared")) == 4 * each
    assert len({event.id for event in recorder.events()}) == 8 * each
    for number in range(4):
        texts = [event.text for event in recorder.events(f"t{number}")]
        assert texts == [str(n) for n in range(each)]


@pytest.mark.usefixtures("utc")
class TestExplain:
    def test_a_failure_with_its_cause_and_what_came_after(
        self, recorder: Recorder, clock: FakeClock
    ) -> None:
        clock.advance(1)
        lost = recorder.record(
            "replication",
            "streaming stopped",
            kind="failure",
            cause=AdminShutdown("the server closed the connection"),
        )
        clock.advance(0.5)
        recorder.record("replication", "3rd retry in 4.2 s", cause=lost)
        clock.advance(2)
        assert recorder.explain("replication").splitlines() == [
            "streaming stopped at 12:00:01, 2.5 s ago",
            "  because  the server closed the connection (57P01 admin shutdown)",
            "  then     3rd retry in 4.2 s, 2.0 s ago",
        ]

    def test_a_state_with_a_chain_across_components_and_advice(
        self, recorder: Recorder, clock: FakeClock
    ) -> None:
        other = recorder.record("slot", "another instance is active")
        clock.advance(3)
        held = recorder.record("lock", "held by backend 4711", cause=other, so="wait: standby")
        clock.advance(1)
        recorder.record("postgres", "starting, at lock / acquiring", kind="state", cause=held)
        clock.advance(14)
        assert recorder.explain("postgres").splitlines() == [
            "starting, at lock / acquiring for 14 s",
            "  because  lock: held by backend 4711 at 12:00:03",
            "  because  slot: another instance is active at 12:00:00",
            "  so       wait: standby",
        ]

    def test_the_errors_behind_an_error(self, recorder: Recorder) -> None:
        try:
            try:
                raise ConnectionResetError("peer reset")
            except ConnectionResetError as low:
                raise RuntimeError("login failed") from low
        except RuntimeError as error:
            recorder.record("link", "down", kind="failure", cause=error)
        assert recorder.explain("link").splitlines()[1:] == [
            "  because  login failed (RuntimeError)",
            "  because  peer reset (ConnectionResetError)",
        ]

    def test_without_a_state_or_failure_the_newest_note_is_the_first_line(
        self, recorder: Recorder
    ) -> None:
        recorder.record("link", "one")
        recorder.record("link", "two", advice="look at one")
        assert recorder.explain("link").splitlines() == [
            "two at 12:00:00, 0.0 s ago",
            "  so       look at one",
        ]

    def test_many_notes_are_counted(self, recorder: Recorder) -> None:
        recorder.record("link", "up", kind="state")
        for number in range(5):
            recorder.record("link", f"note {number}")
        lines = recorder.explain("link").splitlines()
        assert lines[1] == "  then     2 earlier notes"
        assert [line.split(",")[0] for line in lines[2:]] == [
            "  then     note 2",
            "  then     note 3",
            "  then     note 4",
        ]

    def test_a_note_with_its_own_cause_shows_it(self, recorder: Recorder) -> None:
        recorder.record("link", "up", kind="state")
        recorder.record("link", "ping late", cause="the machine slept")
        assert recorder.explain("link").endswith("0.0 s ago, because the machine slept")

    def test_a_dropped_cause_is_still_shown_as_text(self, recorder: Recorder) -> None:
        cause = recorder.record("server", "restarted")
        recorder.record("link", "down", kind="failure", cause=cause)
        recorder.forget("server")
        assert "  because  restarted (its own cause is no longer kept)" in recorder.explain("link")

    def test_a_long_chain_is_cut(self, recorder: Recorder) -> None:
        event = recorder.record("link", "0")
        for number in range(1, 30):
            event = recorder.record("link", str(number), cause=event)
        lines = recorder.explain("link").splitlines()
        assert len(lines) == 12
        assert lines[-1] == "  because  19 earlier causes"

    def test_an_event_older_than_a_day_is_shown_with_its_date(
        self, recorder: Recorder, clock: FakeClock
    ) -> None:
        recorder.record("link", "lost", kind="failure")
        clock.advance(2 * 86_400)
        assert recorder.explain("link") == "lost on 2026-11-15 at 12:00:00, 2 days 0 h ago"

    def test_an_unknown_component(self, recorder: Recorder) -> None:
        assert (
            recorder.explain("x")
            == "no events are recorded for 'x', or for any other component yet"
        )
        for number in range(25):
            recorder.record(f"part{number:02}", "up")
        first, second = recorder.explain("part1").splitlines()
        assert first == "no events are recorded for 'part1'; did you mean 'part10'?"
        assert second.startswith("  known    part00, part01, ")
        assert second.endswith(", part19 and 5 more")

    def test_a_misspelt_component_gets_a_suggestion(self, recorder: Recorder) -> None:
        recorder.record("root/postgres", "up")
        assert "did you mean 'root/postgres'?" in recorder.explain("postgres")
        assert "did you mean 'root/postgres'?" in recorder.explain("root/postgrse")
        assert "did you mean" not in recorder.explain("zzz")

    def test_an_unknown_component_may_have_been_dropped(self, clock: FakeClock) -> None:
        recorder = Recorder(max_components=1, clock=clock)
        recorder.record("first", "up")
        recorder.record("second", "up")
        assert "the recorder was full and dropped 1 component" in recorder.explain("first")
