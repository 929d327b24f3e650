"""Queued inbound messages that need an acknowledgement, when their link or session ends."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest
from tests.sessions.support import until

from moored.sessions import EventStream, Incoming, Session, Sessions, Text
from moored.sessions.events._event_queue import MOST_LATE, EventQueue, QueuedEvent
from moored.sessions.events._sink import CLOSE_TIMEOUT, Sink
from moored.testing import Sim, simulate
from moored.testing.demo import Demo, DemoServer
from moored.testing.demo._protocol import DemoDialogue

#: Three times the limit for the end of a session.
AT_MOST = 3 * CLOSE_TIMEOUT


# -- the event queue, which has no I/O ------------------------------------------------------------


class NumberQueue:
    """An event queue of numbers; those below 100 need an acknowledgement."""

    def __init__(self, *numbers: int, returns: bool = True) -> None:
        self.waiting = EventQueue("alice", 5, returns=returns, outlives=returns)
        self.add(*numbers)

    def add(self, *numbers: int) -> None:
        for number in numbers:
            event = Incoming("number", number, "alice")
            done = None if number >= 100 else lambda handled: None
            self.waiting.add(QueuedEvent(event, done))

    def rest(self) -> list[Any]:
        found = []
        while (taken := self.waiting.take()) is not None:
            found.append(taken[0].data)
        return found


def test_queued_messages_are_discarded_with_their_link_if_the_server_sends_them_again() -> None:
    box = NumberQueue(1, 100, 2)
    assert box.waiting.take() is not None
    box.add(3, 101)
    box.waiting.link_lost()
    assert len(box.waiting) == 2
    box.waiting.link_ready(again=True)
    box.add(1, 2, 3)
    assert box.rest() == [100, 101, 1, 2, 3]
    assert (box.waiting.returned, box.waiting.dropped, box.waiting.owed) == (2, 0, 0)


def test_messages_that_the_server_has_forgotten_are_restored_in_order_and_kept() -> None:
    box = NumberQueue(1, 2, 100, 3)
    assert box.waiting.take() is not None
    box.waiting.link_lost()
    box.waiting.link_ready(again=False)
    box.add(4)
    # No server has a copy of these: losing the next link must not discard them.
    box.waiting.link_lost()
    box.waiting.link_ready(again=True)
    assert box.rest() == [2, 3, 100]
    assert box.waiting.returned == 1


def test_messages_set_aside_are_delivered_at_a_stop_if_no_other_session_gets_them() -> None:
    box = NumberQueue(1, 2, 100)
    box.waiting.outlives = False
    box.waiting.link_lost()
    box.waiting.refuse()
    assert box.rest() == [1, 2, 100]
    assert box.waiting.returned == 0


def test_messages_that_the_server_never_repeats_stay_queued() -> None:
    box = NumberQueue(1, 2, 100, returns=False)
    box.waiting.link_lost()
    box.waiting.link_ready(again=False)
    box.waiting.refuse()
    assert box.rest() == [1, 2, 100]


def test_links_that_never_became_ready_set_aside_no_more_than_the_limit() -> None:
    box = NumberQueue(1, 2)
    for _ in range(10):
        box.waiting.link_lost()
        box.add(3, 4)
    box.waiting.link_lost()
    assert len(box.waiting) == 0
    assert box.waiting._aside is not None
    assert len(box.waiting._aside) == box.waiting.limit
    box.waiting.link_ready(again=False)
    # The server has forgotten them all: messages of links that never became ready are kept too.
    assert box.rest() == [1, 2, 3, 4, 3]


def test_message_put_back_to_a_full_queue_does_not_raise_its_limit() -> None:
    box = NumberQueue(1, 2, 3, 4, 5)
    taken, era = box.waiting.take(), box.waiting.era
    assert taken is not None
    box.add(6)
    box.waiting.link_lost()
    box.waiting.put_back(taken, era)
    box.add(1, 2, 3, 4, 5)
    box.waiting.link_lost()
    box.waiting.link_ready(again=False)
    assert box.rest() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("links", "rest", "returned"),
    [
        ([], [1, 2], 0),
        (["lost"], [], 0),
        (["lost", "again"], [], 2),
        (["lost", "forgotten"], [1, 2], 0),
        (["lost", "again", "lost"], [], 2),
        (["lost", "forgotten", "lost", "again"], [1, 2], 0),
        (["refuse"], [], 2),
    ],
)
def test_message_put_back_unhandled_follows_the_rules_of_queued_messages(
    links: list[str], rest: list[int], returned: int
) -> None:
    box = NumberQueue(1, 2)
    waiting = box.waiting
    taken, era = waiting.take(), waiting.era
    assert taken is not None
    for each in links:
        match each:
            case "lost":
                waiting.link_lost()
            case "refuse":
                waiting.refuse()
            case _:
                waiting.link_ready(again=each == "again")
    waiting.put_back(taken, era)
    assert box.rest() == rest
    assert waiting.returned == returned
    waiting.link_ready(again=True)
    assert waiting.owed == 0


class LetterQueue:
    """An event queue of letters, each its own key; records the link of each acknowledgement."""

    def __init__(self) -> None:
        self.waiting = EventQueue("alice", 5, returns=True, outlives=True)
        self.link = 1
        self.acknowledged: list[tuple[str, int]] = []

    def come(self, letters: str, *, again: bool = True) -> None:
        for letter in letters:
            event = Incoming("letter", letter, "alice")
            done = partial(self._done, letter, self.link)
            assert self.waiting.add(QueuedEvent(event, done, letter, again))

    def _done(self, letter: str, link: int, handled: bool) -> bool:
        there = handled and link == self.link
        if there:
            self.acknowledged.append((letter, link))
        return there

    def cut(self, *, again: bool | None = True) -> None:
        """Lose the link; the next one is ready with `again`, or there is none if it is None."""
        self.link = 0
        self.waiting.link_lost()
        if again is not None:
            self.next_link(again=again)

    def next_link(self, *, again: bool) -> None:
        self.link = self.waiting.era + 1
        self.waiting.link_ready(again=again)

    def take(self) -> QueuedEvent:
        taken = self.waiting.take()
        assert taken is not None
        return taken

    def finish(self) -> str:
        """Handle every queued letter, and return them."""
        found = ""
        while (taken := self.waiting.take()) is not None:
            found += taken.event.data
            self.waiting.handled(taken)
        return found


def test_message_handled_after_its_link_was_lost_is_not_delivered_again() -> None:
    box = LetterQueue()
    box.come("ab", again=False)
    in_hand = box.take()
    box.cut()
    box.waiting.handled(in_hand)
    assert box.acknowledged == []
    box.come("abc")
    assert box.acknowledged == [("a", 2)]
    assert box.finish() == "bc"
    assert box.acknowledged == [("a", 2), ("b", 2), ("c", 2)]
    # Only that copy is settled: a new message with the same key is delivered.
    box.come("a", again=False)
    assert box.finish() == "a"
    assert box.waiting.owed == 0


def test_handling_a_message_late_acknowledges_its_queued_copy() -> None:
    box = LetterQueue()
    box.come("ab", again=False)
    in_hand = box.take()
    for link in (2, 3):
        box.cut()
        box.come("ab")
        assert box.link == link
    box.waiting.handled(in_hand)
    assert box.acknowledged == [("a", 3)]
    assert box.finish() == "b"
    assert box.waiting.owed == 0


def test_handling_a_message_between_links_acknowledges_its_copy_on_the_next() -> None:
    box = LetterQueue()
    box.come("ab", again=False)
    in_hand = box.take()
    box.cut()
    box.come("ab")
    box.cut(again=None)
    box.waiting.handled(in_hand)
    box.next_link(again=True)
    box.come("ab")
    assert box.acknowledged == [("a", 3)]
    assert box.finish() == "b"


@pytest.mark.parametrize("finished_first", [True, False])
def test_forgotten_copy_of_a_handled_message_is_not_delivered(finished_first: bool) -> None:
    box = LetterQueue()
    box.come("ab", again=False)
    in_hand = box.take()
    box.cut()
    box.come("ab")
    box.cut(again=None)
    if finished_first:
        box.waiting.handled(in_hand)
    box.next_link(again=False)
    if not finished_first:
        box.waiting.handled(in_hand)
    assert box.finish() == "b"
    assert box.acknowledged == []
    assert box.waiting.owed == 0


def test_new_message_with_a_reused_key_is_delivered() -> None:
    box = LetterQueue()
    box.come("a", again=False)
    in_hand = box.take()
    box.cut()
    box.waiting.handled(in_hand)
    # The server has lost the old message: this new one only has the same key.
    box.come("a", again=False)
    box.cut()
    box.come("a")
    assert box.finish() == "a"


def test_number_of_remembered_late_messages_is_bounded() -> None:
    box = LetterQueue()
    for number in range(100):
        box.come(chr(number + 100), again=False)
        in_hand = box.take()
        box.cut()
        box.waiting.handled(in_hand)
    assert box.waiting._late == [chr(number + 100) for number in range(100 - MOST_LATE, 100)]


async def test_replaced_event_loop_consumer_settles_no_message_with_the_same_key() -> None:
    box = LetterQueue()
    sink = Sink(box.waiting)
    first, second = EventStream(sink), EventStream(sink)
    box.come("a", again=False)
    assert (await anext(first)).data == "a"
    box.cut()
    box.come("a")
    assert (await anext(second)).data == "a"
    waits = asyncio.ensure_future(anext(second))
    await until(lambda: box.acknowledged == [("a", 2)])
    # The first stream only now finishes its event.
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    # A different message with the same key, whose first copy was lost with its link.
    box.cut()
    assert sink.put(Incoming("letter", "a", "alice"), partial(box._done, "a", 3), "a", again=True)
    assert (await asyncio.wait_for(waits, 30)).data == "a"
    await second.aclose()


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("after", range(4))
async def test_cancelled_call_of_a_stream_loses_no_event(before: int, after: int) -> None:
    box, got = LetterQueue(), ""
    sink = Sink(box.waiting)
    stream = EventStream(sink)
    for letter in "abcde":
        call = asyncio.ensure_future(anext(stream))
        for _ in range(before):
            await asyncio.sleep(0)
        assert sink.put(Incoming("letter", letter, "alice"), partial(box._done, letter, 1), letter)
        for _ in range(after):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        got += "" if call.cancelled() else call.result().data
    while len(got) < 5:
        got += (await asyncio.wait_for(anext(stream), AT_MOST)).data
    assert got == "abcde"
    await stream.aclose()
    assert "".join(letter for letter, _ in box.acknowledged) == "abcd"


async def test_cancelled_stream_that_was_replaced_ends() -> None:
    sink, heard = Sink(LetterQueue().waiting), list[Incoming]()
    stream = EventStream(sink)
    call = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    sink.attach(heard.append)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    sink.put(Incoming("letter", "a", "alice"))
    await until(lambda: heard)


async def test_replaced_handler_settles_no_message_with_the_same_key() -> None:
    box, heard, may_go_on = LetterQueue(), list[str](), asyncio.Event()
    sink = Sink(box.waiting)

    async def stubborn(event: Incoming) -> None:
        heard.append("stubborn")
        while not may_go_on.is_set():
            try:
                await may_go_on.wait()
            except asyncio.CancelledError:
                heard.append("goes on")
        heard.append("done")

    sink.attach(stubborn)
    assert sink.put(Incoming("letter", "a", "alice"), partial(box._done, "a", 1), "a")
    await until(lambda: heard)
    sink.attach(None)
    await until(lambda: heard[1:])
    box.cut()
    # A different message with the same key, whose first copy was lost with its link.
    box.come("a")
    may_go_on.set()
    await until(lambda: heard[2:])
    await asyncio.sleep(0)
    assert box.acknowledged == []
    assert box.finish() == "a"


def test_message_put_back_from_a_link_that_never_became_ready_is_kept() -> None:
    box = NumberQueue()
    waiting = box.waiting
    waiting.link_lost()
    box.add(1)
    taken, era = waiting.take(), waiting.era
    assert taken is not None
    waiting.link_lost()
    waiting.put_back(taken, era)
    waiting.link_ready(again=False)
    # No server has a copy of it: losing another link must not discard it.
    waiting.link_lost()
    waiting.link_ready(again=True)
    assert box.rest() == [1]


def test_message_put_back_between_links_is_first_again() -> None:
    box = NumberQueue(1, 2, 3)
    taken, era = box.waiting.take(), box.waiting.era
    assert taken is not None
    box.waiting.link_lost()
    box.waiting.put_back(taken, era)
    box.waiting.link_ready(again=False)
    assert box.rest() == [1, 2, 3]


async def test_finished_sink_accepts_messages_without_acknowledging_them() -> None:
    sink, told = Sink(EventQueue("alice", 1, returns=True, outlives=True)), list[bool]()
    await sink.finish()
    for number in range(3):
        assert sink.put(Incoming("number", number, "alice"), told.append)
    assert (len(sink.queue), sink.queue.dropped, sink.queue.returned, told) == (0, 0, 3, [])


# -- the end of a session --------------------------------------------------------------------------


class BlockedHandler:
    """A handler that blocks on each message until `go_on` is set."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.go_on = asyncio.Event()

    async def __call__(self, event: Incoming) -> None:
        if event.type == "messages_upsert":
            self.begun.append(event.data.content)
            await self.go_on.wait()


async def in_hand(sessions: Sessions, server: DemoServer, hung: Any, count: int = 3) -> Session:
    """Return a session whose handler is blocked on the first of `count` messages."""
    alice = await sessions.connect("alice", Demo(server), on_event=hung)
    for number in range(count):
        server.deliver("alice", Text(str(number)))
    await until(lambda: hung.begun and alice.status()["events_waiting"] == count - 1)
    return alice


async def test_stop_waits_for_the_running_handler_and_acknowledges_its_message(
    sessions: Sessions, server: DemoServer
) -> None:
    hung = BlockedHandler()
    alice = await in_hand(sessions, server, hung)
    stopping = asyncio.create_task(alice.stop())
    await until(lambda: alice.status()["events_returned"] == 2)
    server.deliver("alice", Text("late"))
    await until(lambda: alice.status()["events_returned"] == 3)
    assert alice.state == "online"
    assert server.mail("alice") == 4
    hung.go_on.set()
    await stopping
    assert hung.begun == [Text("0")]
    await until(lambda: server.mail("alice") == 3)
    assert sessions.totals()["demo"]["events_dropped"] == 0


@pytest.mark.parametrize("first", [0.5, 4.5, 1000.0])
@pytest.mark.parametrize("how", ["stop", "close"])
def test_hung_handler_delays_the_end_by_one_limit_only(first: float, how: str) -> None:
    async def scenario(sim: Sim) -> None:
        server = DemoServer()

        async def handler(event: Incoming) -> None:
            if event.type == "messages_upsert":
                await asyncio.sleep(first)
            elif event.data.state == "stopped":
                await asyncio.sleep(1000.0)  # after the goodbye

        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(server), on_event=handler)
            server.deliver("alice", Text("1"))
            server.deliver("alice", Text("2"))
            await asyncio.sleep(0.1)
            begun = sim.now
            await (alice.stop() if how == "stop" else sessions.close())
            assert sim.now - begun == pytest.approx(CLOSE_TIMEOUT)
            assert server.mail("alice") == (2 if first > CLOSE_TIMEOUT else 1)

    simulate(scenario, seeds=1)


async def test_cancelled_stop_still_ends_the_session(
    sessions: Sessions, server: DemoServer
) -> None:
    hung = BlockedHandler()
    alice = await in_hand(sessions, server, hung)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await alice.stop()
    hung.go_on.set()
    await until(lambda: sessions.whereis("alice") is None)
    await until(lambda: server.mail("alice") == 2)


async def test_handler_and_event_loop_can_stop_their_own_session(
    sessions: Sessions, server: DemoServer
) -> None:
    begun = time.monotonic()
    ended = asyncio.Event()

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            await sessions.stop("alice")
            ended.set()

    await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", Text("quit"))
    await asyncio.wait_for(ended.wait(), AT_MOST)
    bob = await sessions.connect("bob", Demo(server))
    server.deliver("bob", Text("quit"))
    async for event in bob.events():
        if event.type == "messages_upsert":
            await bob.stop()
    assert time.monotonic() - begun < CLOSE_TIMEOUT


async def test_disconnect_does_not_wait_for_the_handler_and_no_message_is_handled_twice(
    sessions: Sessions, server: DemoServer
) -> None:
    hung = BlockedHandler()
    alice = await in_hand(sessions, server, hung)
    await alice.disconnect()
    assert alice.state == "offline/resting"
    hung.go_on.set()
    await alice.connect()
    await until(lambda: server.mail("alice") == 0)
    assert hung.begun == [Text(each) for each in ("0", "1", "2")]


async def test_nothing_is_acknowledged_after_the_lease_is_lost(
    sessions: Sessions, server: DemoServer
) -> None:
    hung = BlockedHandler()
    alice = await in_hand(sessions, server, hung)
    server.refusing = True
    alice._runtime.fenced()
    await until(lambda: not server.online)
    hung.go_on.set()
    await until(lambda: alice._runtime.sink._consumer is None)
    assert hung.begun == [Text("0")], "handled more messages, which the next owner may have too"
    assert server.mail("alice") == 3
    server.refusing = False
    await until(lambda: server.mail("alice") == 0)


# -- defects of a protocol -------------------------------------------------------------------------


class Defective(DemoDialogue):
    """A dialogue whose method `_at` raises the first time it is called."""

    __slots__ = ("_at", "_failed")
    _at: str
    _failed: list[str]

    def _fail(self, at: str) -> None:
        if at == self._at and not self._failed:
            self._failed.append(at)
            raise ZeroDivisionError(at)

    def ping(self) -> bytes:
        self._fail("ping")
        return super().ping()

    def acknowledge(self, token: Any) -> bytes:
        self._fail("acknowledge")
        return super().acknowledge(token)

    def goodbye(self) -> bytes:
        self._fail("goodbye")
        return super().goodbye()


class DefectiveDemo(Demo):
    """A protocol whose dialogue raises once in the method `at`."""

    def __init__(self, server: DemoServer, at: str, **how: Any) -> None:
        super().__init__(server, **how)
        self._at = at
        self.failed: list[str] = []

    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> DemoDialogue:
        dialogue = Defective(profile, credentials, memory)
        dialogue._at, dialogue._failed = self._at, self.failed
        return dialogue


async def test_exception_in_acknowledge_restarts_the_connection(
    sessions: Sessions, server: DemoServer
) -> None:
    events: list[str] = []
    protocol = DefectiveDemo(server, "acknowledge")
    alice = await sessions.connect(
        "alice", protocol, on_event=lambda event: events.append(event.type)
    )
    server.deliver("alice", Text("hello"))
    await until(lambda: server.mail("alice") == 0)
    assert protocol.failed == ["acknowledge"]
    assert alice.status()["crashes"] == 1
    # The message was handled; only its acknowledgement has failed.
    assert events.count("messages_upsert") == 1
    assert "session_crashed" in events


async def test_exception_in_ping_restarts_the_connection(
    sessions: Sessions, server: DemoServer
) -> None:
    protocol = DefectiveDemo(server, "ping", keepalive=0.02)
    alice = await sessions.connect("alice", protocol)
    await until(lambda: alice.status()["crashes"] == 1)
    await alice.online(30)
    assert alice.generation > 1


async def test_exception_in_goodbye_still_ends_the_link(
    sessions: Sessions, server: DemoServer
) -> None:
    protocol = DefectiveDemo(server, "goodbye")
    alice = await sessions.connect("alice", protocol)
    await alice.disconnect()
    await until(lambda: not server.online)
    assert alice.state == "offline/resting"
    await until(lambda: alice.status()["crashes"] == 1)
    await alice.connect()
    protocol.failed.clear()
    await alice.stop()
    await until(lambda: not server.online)
