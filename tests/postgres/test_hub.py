"""Consumers without a server: delivery, acknowledgements, queues and resets."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.postgres.recording import begin, commit, framed, insert, relation, text, texts

from moored.kernel import Recorder
from moored.postgres import (
    Changes,
    ConfigurationError,
    Emitted,
    History,
    Insert,
    Lsn,
    Position,
    PostgresError,
    Reset,
    Transaction,
)
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._store import StateStore
from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._body import Body, Shelf
from moored.postgres.decode._transaction import Committed
from moored.postgres.server._setup import Findings

from .server import confirm_all

pytestmark = pytest.mark.pure

HISTORY = History("1", 1)
LIMIT = 30.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a running stream."""
    store = StateStore(tmp_path / "state.db")
    made = Hub(store, Recorder())
    made.on_tables = lambda: confirm_all(made)
    made.begin(HISTORY, 1000)
    yield made
    store.close()


def apply(hub: Hub, *ends: int) -> None:
    hub.apply_all([Committed(1, Body(), {}, end - 5, end) for end in ends])


async def following(changes: Changes) -> Transaction:
    item = await asyncio.wait_for(anext(changes), LIMIT)
    assert isinstance(item, Transaction), item
    return item


async def reset_of(changes: Changes) -> str:
    item = await asyncio.wait_for(anext(changes), LIMIT)
    assert isinstance(item, Reset), item
    return item.reason


def acknowledged(hub: Hub, name: str) -> object:
    return hub.consumers()[name]["acknowledged"]


def at(lsn: int) -> Position:
    return Position(HISTORY, Lsn(lsn))


# -- coming and going ----------------------------------------------------------------------------


async def test_a_consumer_can_attach_again_after_its_loop_failed(hub: Hub) -> None:
    """In the same frame, with the last transaction still at hand."""
    seen = []
    for attempt in range(3):
        try:
            changes = hub.attach("search")
            if attempt:
                hub.begin(HISTORY, 1000)
            apply(hub, 1100)
            iterator = aiter(changes)
            del changes
            async for txn in iterator:
                seen.append(txn)
                del iterator
                raise ValueError("the handler failed")
        except ValueError:
            pass
    assert len(seen) == 3
    assert not hub.attached()


async def test_a_consumer_can_attach_again_after_an_anonymous_loop_failed(hub: Hub) -> None:
    errors = []
    for _ in range(3):
        try:
            async for txn in ready(hub):
                assert isinstance(txn, Transaction)
                raise ValueError("the handler failed")
        except ValueError as error:
            errors.append(error)
    assert len(errors) == 3


def ready(hub: Hub) -> Changes:
    """A consumer for whom there is something."""
    changes = hub.attach("search")
    hub.begin(HISTORY, 1000)
    apply(hub, 1100)
    return changes


def test_a_second_consumer_of_the_same_name_is_refused(hub: Hub) -> None:
    changes = hub.attach("search")
    with pytest.raises(PostgresError, match="async with"):
        hub.attach("search")
    del changes
    hub.attach("search")


async def test_the_refusal_of_a_consumer_is_raised_and_not_logged_too(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    changes = hub.attach("search")
    hub.refuse(changes, "the table orders does not exist")
    with pytest.raises(ConfigurationError, match="the consumer 'search': the table orders does"):
        await following(changes)
    assert caplog.text == ""


async def test_delivered_transactions_can_be_acknowledged_after_close(hub: Hub) -> None:
    async with hub.attach("search") as changes:
        apply(hub, 1100, 1200)
        first, second = await following(changes), await following(changes)
    await first.ack()
    assert first.acknowledged
    assert acknowledged(hub, "search") == str(Lsn(1100))
    back = hub.attach("search")
    await second.ack()  # it comes again: whether it has an effect is for who is here now to say
    assert not second.acknowledged
    hub.begin(HISTORY, 1000)
    apply(hub, 1100, 1200)
    again = await following(back)
    assert again.position == second.position
    await again.ack()
    assert acknowledged(hub, "search") == str(Lsn(1200))


async def test_an_acknowledgement_after_a_reset_is_invalid(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "moored.postgres")
    changes = hub.attach("search")
    apply(hub, 1100)
    txn = await following(changes)
    await changes.aclose()
    await hub.reset("restored")
    hub.begin(HISTORY, 900)
    await txn.ack()
    assert not txn.acknowledged
    assert acknowledged(hub, "search") == str(Lsn(900))
    assert "came too late" in caplog.text


async def test_an_attached_consumer_that_is_dropped_gets_an_error(hub: Hub) -> None:
    changes = hub.attach("search")
    waiting = [asyncio.create_task(anext(changes)) for _ in range(2)]
    await asyncio.sleep(0)
    await hub.drop("search")
    for task in waiting:
        with pytest.raises(PostgresError, match="'search' was dropped"):
            await asyncio.wait_for(task, LIMIT)
    assert hub.consumers() == {}
    apply(hub, 1100)
    assert hub.flushed() == 1100
    hub.attach("search")  # and may come back, as a new one


async def test_attaching_again_redelivers_from_memory(hub: Hub) -> None:
    rewinds = []
    hub.on_rewind = lambda: rewinds.append(True)
    for attempt in range(3):
        async with hub.attach("search") as changes:
            if not attempt:
                apply(hub, 1100, 1200, 1300)
            first, second = await following(changes), await following(changes)
            assert [first.position.lsn, second.position.lsn] == [1100, 1200]
            if attempt == 1:
                await second.ack()  # not the first: both come again
        apply(hub, 1400 + attempt)  # while it is away
    async with hub.attach("search") as changes:
        found = [int((await following(changes)).position.lsn) for _ in range(6)]
        assert found == [1100, 1200, 1300, 1400, 1401, 1402]
    assert not rewinds


async def test_attaching_again_redelivers_transactions_from_before_a_reconnect(hub: Hub) -> None:
    changes = hub.attach("search")
    apply(hub, 1100, 1200)
    await following(changes)
    hub.begin(HISTORY, 1000)
    apply(hub, 1100, 1200, 1300)
    await changes.aclose()
    back = hub.attach("search")
    found = [int((await following(back)).position.lsn) for _ in range(3)]
    assert found == [1100, 1200, 1300]


@pytest.mark.parametrize("start", [None, 1000])
async def test_attaching_again_restarts_the_stream_if_the_backlog_is_incomplete(
    tmp_path: Path, start: int | None
) -> None:
    store = StateStore(tmp_path / "state.db")
    hub = Hub(store, Recorder())
    hub.pressure.queue_length = 2
    hub.begin(HISTORY, 1000)
    rewinds = []
    hub.on_rewind = lambda: rewinds.append(True)
    async with hub.attach("search") as changes:
        apply(hub, *((1100, 1200, 1300) if start is None else (1100,)))
    async with hub.attach("search", start=None if start is None else at(start)) as changes:
        assert rewinds == [True]
        assert not changes._queue
        apply(hub, 1400)  # too early for it
    changes = hub.attach("search")  # it has missed one by now
    assert len(rewinds) == 2
    assert not changes._queue
    hub.begin(HISTORY, 1000)
    apply(hub, 1100)
    assert (await following(changes)).position.lsn == 1100
    store.close()


async def test_transactions_before_a_requested_restart_are_delivered_after_it(hub: Hub) -> None:
    async with hub.attach("search"):
        apply(hub, 1100)
    await hub.drop("search", "too much")
    apply(hub, 1200)
    async with hub.attach("search") as changes:
        reset = await anext(changes)
        assert isinstance(reset, Reset)
        await hub.reset_handled(changes, reset)
        apply(hub, 1300)  # too early for it
    back = hub.attach("search")
    assert not back._queue
    hub.begin(HISTORY, 1000)
    apply(hub, 1100, 1200, 1300)
    assert [int((await following(back)).position.lsn) for _ in range(2)] == [1200, 1300]


async def test_no_transaction_is_delivered_before_the_reset(hub: Hub) -> None:
    changes = hub.attach("search")
    await hub.reset("restored")
    hub.begin(HISTORY, 900)
    apply(hub, 950)
    assert not changes._queue  # its tables were not confirmed yet
    confirm_all(hub)
    apply(hub, 960)
    assert await reset_of(changes) == "restored"
    assert (await following(changes)).position.lsn == 960


async def test_a_second_reset_with_the_same_reason_is_delivered_too(hub: Hub) -> None:
    changes = hub.attach("search")
    await hub.reset("the slot was missing")
    hub.begin(HISTORY, 2000)
    confirm_all(hub)
    await reset_of(changes)
    await hub.reset("the slot was missing")
    coming = asyncio.ensure_future(reset_of(changes))  # the first copy is complete
    while changes._last is not None:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    confirm_all(hub)
    assert await asyncio.wait_for(coming, LIMIT) == "the slot was missing"


async def test_a_handled_reset_does_not_clear_a_later_one_with_the_same_reason(hub: Hub) -> None:
    changes = hub.attach("search")
    await hub.reset("the slot was missing")
    confirm_all(hub)
    await reset_of(changes)
    await hub.reset("the slot was missing")
    confirm_all(hub)
    await reset_of(changes)  # the first copy is complete, and the second begins
    saved = hub._store.load().consumers["search"].reset
    assert saved is not None
    assert saved.reason == "the slot was missing"


async def test_iteration_ends_for_a_consumer_that_is_closed_while_it_handles_a_reset(
    hub: Hub,
) -> None:
    changes = hub.attach("search")
    await hub.reset("the slot was missing")
    confirm_all(hub)
    await reset_of(changes)
    hub.end(None)
    hub._store.close()
    with pytest.raises(StopAsyncIteration):
        await anext(changes)


async def test_after_a_reset_no_table_is_known_to_be_published(hub: Hub) -> None:
    hub.published.add(["orders"])
    await asyncio.wait_for(hub.published.wait(["orders"], hub.attached), LIMIT)
    await hub.reset("restored")
    waiting = asyncio.create_task(hub.published.wait(["orders"], hub.attached))
    await asyncio.sleep(0)
    assert not waiting.done()
    hub.published.add(["orders"])
    await asyncio.wait_for(waiting, LIMIT)


# -- several tasks, one consumer -----------------------------------------------------------------


async def test_each_transaction_goes_to_one_of_several_tasks(hub: Hub) -> None:
    changes = hub.attach("search")
    waiting = [asyncio.create_task(following(changes)) for _ in range(3)]
    for _ in range(5):  # until all of them wait
        await asyncio.sleep(0)
    for end in (1100, 1200, 1300):
        apply(hub, end)
    found = [(await asyncio.wait_for(task, LIMIT)).position.lsn for task in waiting]
    assert found == [1100, 1200, 1300]  # whoever has waited longest is the first


async def test_a_cancelled_task_passes_its_wakeup_to_the_next(hub: Hub) -> None:
    changes = hub.attach("search")
    first, second = (asyncio.create_task(anext(changes)) for _ in range(2))
    await asyncio.sleep(0)
    apply(hub, 1100)
    first.cancel()
    txn = await asyncio.wait_for(second, LIMIT)
    assert isinstance(txn, Transaction)
    assert first.cancelled()


# -- back-pressure -------------------------------------------------------------------------------


async def test_a_full_consumer_is_reported(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.db")
    hub = Hub(store, Recorder())
    hub.pressure.queue_length = 2
    hub.begin(HISTORY, 1000)
    dead, quick = hub.attach("dead"), hub.attach("quick")
    apply(hub, 1100, 1200, 1300)
    for _ in range(3):
        await following(quick)
    assert hub.full
    found = hub.consumers()
    assert (found["dead"]["queued"], found["dead"]["full"]) == (3, True)
    assert (found["quick"]["queued"], found["quick"]["full"]) == (0, False)
    assert found["dead"]["queued_bytes"] == 0  # there is nothing in them
    del dead
    assert not hub.pressure.stalled
    await asyncio.wait_for(hub.room(), LIMIT)
    store.close()


# -- the places that consumers choose ------------------------------------------------------------


def test_a_keepalive_does_not_advance_a_consumer_that_waits_for_a_restart(
    hub: Hub,
) -> None:
    changes = hub.attach("search")
    apply(hub, 1100, 1200)
    for item in list(changes._queue):
        assert isinstance(item, Transaction)
        assert hub.acknowledge(changes._attachment, item.position.lsn)
    changes._end(None)
    hub.detach(changes)
    changes = hub.attach("search", start=at(1050))
    hub.passed(1300)
    assert acknowledged(hub, "search") == str(Lsn(1050))
    hub.begin(HISTORY, 1200)
    (item,) = changes._queue
    assert isinstance(item, Reset)
    assert "is before the last acknowledged transaction" in item.reason


async def test_a_start_beyond_the_end_of_the_wal_is_a_reset(hub: Hub) -> None:
    rewinds = []
    hub.on_rewind = lambda: rewinds.append(True)
    other = hub.attach("other")
    hub.check_starts(HISTORY, Findings(wal_position=Lsn(1500), confirmed=Lsn(1000)))
    known = hub.attach("known", start=at(1400))  # further than what was received, and in the log
    assert not rewinds
    changes = hub.attach("far", start=at(5000))
    assert rewinds == [True]  # only the server knows whether its log goes as far
    apply(hub, 1100)
    hub.check_starts(HISTORY, Findings(wal_position=Lsn(1600), confirmed=Lsn(1000)))
    hub.begin(HISTORY, 1000)
    assert "beyond the end of the database's WAL" in await reset_of(changes)
    asking = asyncio.create_task(following(changes))
    await asyncio.sleep(0)
    apply(hub, 1100, 1700)
    assert (await asking).position.lsn == 1100
    assert [(await following(known)).position.lsn] == [1700]
    assert [(await following(other)).position.lsn for _ in range(2)] == [1100, 1700]


async def test_an_existing_start_is_used_after_a_restart_of_the_stream(hub: Hub) -> None:
    hub.check_starts(HISTORY, Findings(wal_position=Lsn(1500), confirmed=Lsn(1000)))
    changes = hub.attach("far", start=at(2000))
    hub.check_starts(HISTORY, Findings(wal_position=Lsn(2000), confirmed=Lsn(1000)))
    hub.begin(HISTORY, 1000)
    apply(hub, 1900, 2100)
    assert (await following(changes)).position.lsn == 2100


async def test_a_start_that_does_not_exist_is_not_stored(hub: Hub) -> None:
    """What is kept is compared with the log's end: for all, and at each beginning."""
    changes = hub.attach("far", start=at(5000))
    await hub.checkpoint(1000)
    assert hub._store.load().consumers["far"].acknowledged is None
    hub.begin(HISTORY, 1000)
    await hub.checkpoint(1000)
    assert hub._store.load().consumers["far"].acknowledged == 5000
    assert changes.name == "far"


async def test_a_start_before_the_creation_of_the_slot_is_a_reset(hub: Hub) -> None:
    hub.check_starts(
        HISTORY, Findings(wal_position=Lsn(1000), confirmed=Lsn(1000), slot_created=True)
    )
    hub.begin(HISTORY, 1000)
    assert "older than the replication slot" in await reset_of(hub.attach("old", start=at(900)))
    new = hub.attach("new", start=at(1000))
    apply(hub, 1100)
    assert (await following(new)).position.lsn == 1100


# -- resets --------------------------------------------------------------------------------------


async def test_transactions_received_during_a_reset_are_not_outstanding(hub: Hub) -> None:
    changes = hub.attach("slow")
    apply(hub, 1100)
    dropping = asyncio.create_task(hub.drop("slow", "too much"))
    await asyncio.sleep(0)  # it is with the disk now
    apply(hub, 1200)
    await dropping
    assert await reset_of(changes) == "too much"
    apply(hub, 1300)
    txn = await following(changes)
    assert txn.position.lsn == 1300
    await txn.ack()
    assert acknowledged(hub, "slow") == str(Lsn(1300))
    assert hub.consumers()["slow"]["outstanding"] == 0


async def test_positions_are_stored_before_they_are_confirmed(hub: Hub) -> None:
    changes = hub.attach("slow")
    apply(hub, 1100)
    dropping = asyncio.create_task(hub.drop("slow", "too much"))
    await asyncio.sleep(0)
    assert hub.flushed() == 1000
    await dropping
    assert hub.flushed() == 1100
    assert changes.name == "slow"


async def test_positions_are_stored_while_the_threads_of_the_event_loop_are_busy(
    hub: Hub,
) -> None:
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, release.wait)
    try:
        await asyncio.wait_for(hub.checkpoint(1000), LIMIT)
    finally:
        release.set()
        await busy
    assert hub._store.confirmed() == 1000


async def test_only_acknowledgements_count_as_use(hub: Hub) -> None:
    """For scale to zero: received transactions are not a use of the database."""
    uses = []
    hub.on_progress = lambda: uses.append(True)
    apply(hub, 1100)
    assert hub.flushed() == 1100
    assert not uses
    changes = hub.attach("search")
    apply(hub, 1200)
    await (await following(changes)).ack()
    assert uses == [True]


# -- tables and messages -------------------------------------------------------------------------

ORDERS, OTHER = 16400, 16500


def emitted(prefix: str, content: bytes = b"x", *, xid: int | None = None) -> bytes:
    head = b"M" + (b"" if xid is None else struct.pack("!I", xid))
    return (
        head + struct.pack("!BQ", 1, 7) + text(prefix) + struct.pack("!I", len(content)) + content
    )


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(f"!IB{len(oids)}I", len(oids), 0, *oids)


def transactions(*groups: list[bytes], spill_after: int = 2**20) -> list[Committed]:
    """A transaction of each group; the tables are described in the first."""
    assembler = Assembler(lambda: Body(Shelf(spill_after=spill_after)))
    known = [relation([("id", 23)], oid=ORDERS, name="orders")]
    known.append(relation([("id", 23)], oid=OTHER, name="other"))
    done = []
    for number, group in enumerate(groups, start=11):
        lsn = number * 100
        whole = [begin(number, lsn), *known, *group, commit(lsn, lsn + 8)]
        known = []
        done += assembler.feed_all([framed(message) for message in whole])[0]
    return done


@pytest.mark.parametrize("spill_after", [0, 2**20])
async def test_emitted_messages_are_delivered_with_any_tables(hub: Hub, spill_after: int) -> None:
    orders, other = hub.attach("orders", tables=("orders",)), hub.attach("other", tables=("other",))
    rows = [insert(texts("1"), oid=ORDERS), emitted("with a row")]
    hub.apply_all(transactions(rows, [emitted("alone")], spill_after=spill_after))
    first, second = await following(orders), await following(orders)
    assert [type(change) for change in first] == [Insert, Emitted]
    assert [change.prefix for change in second if isinstance(change, Emitted)] == ["alone"]
    for wanted in ("with a row", "alone"):
        (change,) = await following(other)
        assert isinstance(change, Emitted)
        assert change.prefix == wanted


@pytest.mark.parametrize("spill_after", [0, 2**20])
async def test_the_length_equals_the_number_of_iterated_changes(hub: Hub, spill_after: int) -> None:
    orders, everything = hub.attach("orders", tables=("orders",)), hub.attach("everything")
    mixed = [insert(texts(str(n)), oid=OTHER) for n in range(9)]
    mixed.append(insert(texts("1"), oid=ORDERS))
    groups = [mixed, mixed[:9], [truncate(OTHER)], [truncate(ORDERS, OTHER)]]
    hub.apply_all(transactions(*groups, spill_after=spill_after))
    for wanted in (1, 1):  # those of other tables alone do not concern it
        txn = await following(orders)
        assert len(txn) == len(list(txn)) == wanted
        assert f"{wanted} changes" in repr(txn)
    for wanted in (10, 9, 1, 2):
        txn = await following(everything)
        assert len(txn) == len(list(txn)) == wanted
    assert hub.consumers()["orders"]["queued"] == 0


def test_a_large_transaction_is_not_read_to_find_its_consumers(
    monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    rows = [insert(texts(str(n)), oid=OTHER) for n in range(1000)]
    (committed,) = transactions(rows, spill_after=1000)
    assert committed.body.spilled
    monkeypatch.setattr(Body, "entries", None)  # whoever reads it fails
    consumers = [hub.attach(name, tables=("orders",)) for name in "abc"]
    hub.apply_all([committed])
    assert [len(each._queue) for each in consumers] == [0, 0, 0]
    assert acknowledged(hub, "a") == str(Lsn(committed.end_lsn))
