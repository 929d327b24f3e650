"""The setup of a replication connection: steps, commands, and answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import ConfigurationError, DecodeError, Insert, Lsn
from moored.postgres._settings import Settings
from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._wire import KEEPALIVE, read_keepalive
from moored.postgres.server._setup import Setup, SlotLost, Step, literal, quoted
from moored.postgres.stream._link import ReplicationLink
from moored.postgres.stream._positions import Positions


def options_of(slot: str, publication: str) -> Settings:
    return Settings(
        database_url="", replication_url="", state_dir=Path(), slot=slot, publication=publication
    )


OPTIONS = options_of("moored_slot_default", "moored_publication_default")
#: `ORDER` has the steps in the order in which they run, without these two.
OURS_ALONE = ("check_existing", "alter_slot", "identify_again")
ORDER = [
    "connected", "identify_system", "query_pg_info", "acquire_lock", "create_publication",
    "drop_slot", "create_slot", "query_slot_flushed_lsn", "set_display_setting", "ready_to_stream",
    "start_streaming", "streaming",
]  # fmt: skip

IDENTIFIED = [("7300000000000000001", "3", "0/1500000", "shop")]
#: While the lock was waited for, it became another one.
PROMOTED = [("7300000000000000001", "4", "0/2345678", "shop")]
LOCKED = [("",)]
CREATED = [("moored_slot_default", "0/1600000", None, "pgoutput")]
OURS = ("t", "logical pgoutput shop", "t")
STANDS = [("0/1234567", "reserved", *OURS)]


def info(version: int = 180004) -> list[tuple[Any, ...]]:
    return [(str(version), 4711, "12000")]


class Refused(Exception):
    """An error of the scripted server."""


#: What a server answers at each step, or the SQLSTATE with which it refuses, one after the other.
Script = dict[Step, list[list[tuple[Any, ...]] | str]]


def everything_new(version: int = 180004) -> Script:
    return {
        Step.IDENTIFY_SYSTEM: [IDENTIFIED],
        Step.QUERY_PG_INFO: [info(version)],
        Step.ACQUIRE_LOCK: [LOCKED],
        Step.CHECK_EXISTING: [[("f", "f", "f")]],
        Step.CREATE_PUBLICATION: [[]],
        Step.DROP_SLOT: ["42704"],
        Step.CREATE_SLOT: [CREATED],
        Step.QUERY_SLOT_FLUSHED_LSN: [STANDS],
        Step.IDENTIFY_AGAIN: [PROMOTED],
        Step.SET_DISPLAY_SETTING: [[]] * 10,
    }


def everything_there(version: int = 180004) -> Script:
    return everything_new(version) | {
        Step.CHECK_EXISTING: [[("t", "t", "f")]],
        Step.DROP_SLOT: [[("",)]],
    }


def go(options: Settings, script: Script) -> tuple[Setup, list[tuple[str, str]]]:
    """Run a setup against a scripted server, until nothing is left but to begin streaming."""
    setup, sent = Setup(options), []
    left = {step: list(answers) for step, answers in script.items()}
    while (command := setup.command()) is not None:
        sent.append((setup.step.value, command))
        answer = left[setup.step].pop(0)
        if isinstance(answer, str):
            setup.refused(answer, Refused(answer))
        else:
            setup.answered(answer)
    return setup, sent


# -- steps and commands --------------------------------------------------------------------------

IDENTIFY = ("identify_system", "IDENTIFY_SYSTEM")
QUERY = (
    "query_pg_info",
    "SELECT current_setting('server_version_num'), pg_backend_pid(), ms FROM (SELECT CASE WHEN "
    "setting::int BETWEEN 1 AND 12000 THEN setting ELSE '12000' END AS ms FROM pg_catalog."
    "pg_settings WHERE name = 'wal_sender_timeout') AS found, "
    "set_config('wal_sender_timeout', ms, false) LEFT JOIN (SELECT set_config(name, '5000', false) "
    "FROM pg_catalog.pg_settings WHERE name = 'client_connection_check_interval') "
    "AS checks ON true",
)
LOCK = ("acquire_lock", "SELECT pg_advisory_lock(hashtext('moored_slot_default'))")
PUBLISH = (
    "create_publication",
    'CREATE PUBLICATION "moored_publication_default" WITH (publish_generated_columns = stored)',
)
CHECK = (
    "check_existing",
    "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_publication "
    "WHERE pubname = 'moored_publication_default'), "
    "EXISTS (SELECT 1 FROM pg_catalog.pg_replication_slots "
    "WHERE slot_name = 'moored_slot_default' AND NOT temporary), pg_is_in_recovery()",
)
DROP = (
    "drop_slot",
    "SELECT pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots "
    "WHERE slot_name = 'moored_slot_default' "
    "AND coalesce(database = current_database() AND plugin = 'pgoutput', false)",
)
CREATE = (
    "create_slot",
    'CREATE_REPLICATION_SLOT "moored_slot_default" LOGICAL pgoutput '
    "(SNAPSHOT 'nothing', FAILOVER true)",
)
FLUSHED = (
    "query_slot_flushed_lsn",
    "SELECT confirmed_flush_lsn, wal_status, "
    "coalesce(database = current_database() AND plugin = 'pgoutput', false), "
    "concat_ws(' ', slot_type, plugin, database), failover "
    "FROM pg_catalog.pg_replication_slots WHERE slot_name = 'moored_slot_default'",
)
DISPLAY = [("identify_again", "IDENTIFY_SYSTEM")] + [
    ("set_display_setting", command)
    for command in (
        "SET client_encoding = 'UTF8'",
        "SET bytea_output = 'hex'",
        "SET DateStyle = 'ISO, DMY'",
        "SET TimeZone = 'UTC'",
        "SET extra_float_digits = 1",
        "SET IntervalStyle = 'postgres'",
    )
]


def test_a_missing_publication_and_slot_are_created() -> None:
    """With a new publication an older slot could not be read, so it would be dropped."""
    setup, sent = go(OPTIONS, everything_new())
    assert sent == [IDENTIFY, QUERY, LOCK, CHECK, PUBLISH, DROP, CREATE, *DISPLAY]
    found = setup.findings
    assert (found.system_id, found.timeline_id) == ("7300000000000000001", 4)
    assert str(found.wal_position) == "0/2345678"
    assert (found.version, found.backend_pid, found.wal_sender_timeout) == (180004, 4711, 12.0)
    assert (found.publication_created, found.slot_created) == (True, True)
    assert str(found.confirmed) == "0/1600000"


def test_an_existing_publication_and_slot_are_not_created_again() -> None:
    setup, sent = go(OPTIONS, everything_there())
    assert sent == [IDENTIFY, QUERY, LOCK, CHECK, FLUSHED, *DISPLAY]
    found = setup.findings
    assert (found.publication_created, found.slot_created) == (False, False)
    assert found.confirmed == Lsn.parse("0/1234567")
    assert (found.timeline_id, found.wal_position) == (4, Lsn.parse("0/2345678"))


def test_with_a_new_publication_an_existing_slot_is_created_again() -> None:
    setup, sent = go(OPTIONS, everything_new() | {Step.CHECK_EXISTING: [[("f", "t", "f")]]})
    assert sent == [IDENTIFY, QUERY, LOCK, CHECK, PUBLISH, DROP, CREATE, *DISPLAY]
    assert setup.findings.slot_created


def test_recreate_slot_drops_and_creates_an_existing_slot() -> None:
    _, sent = go(replace(OPTIONS, recreate_slot=True), everything_there())
    assert sent == [IDENTIFY, QUERY, LOCK, CHECK, DROP, CREATE, *DISPLAY]


def test_a_manual_publication_is_only_checked() -> None:
    _, sent = go(replace(OPTIONS, manual_publication=True), everything_there())
    assert sent == [IDENTIFY, QUERY, LOCK, CHECK, FLUSHED, *DISPLAY]


def test_a_publication_or_slot_that_is_created_after_the_check_is_used() -> None:
    script = everything_new() | {Step.CREATE_PUBLICATION: ["42710"], Step.CREATE_SLOT: ["42710"]}
    setup, sent = go(OPTIONS, script)
    assert sent == [IDENTIFY, QUERY, LOCK, CHECK, PUBLISH, CREATE, FLUSHED, *DISPLAY]
    found = setup.findings
    assert (found.publication_created, found.slot_created) == (False, False)


def test_the_lock_is_requested_again_after_a_statement_timeout() -> None:
    script = everything_there() | {Step.ACQUIRE_LOCK: ["57014", "57014", LOCKED]}
    _, sent = go(OPTIONS, script)
    assert sent == [IDENTIFY, QUERY, LOCK, LOCK, LOCK, CHECK, FLUSHED, *DISPLAY]


def test_the_last_steps_have_no_command() -> None:
    setup, _ = go(OPTIONS, everything_new())
    steps = [setup.step]
    for _ in range(2):
        assert setup.command() is None
        setup.answered([])
        steps.append(setup.step)
    assert steps == [Step.READY_TO_STREAM, Step.START_STREAMING, Step.STREAMING]


def test_the_steps_run_in_the_documented_order() -> None:
    assert not OPTIONS.binary, "values come as text, which everybody can read"
    assert Setup(OPTIONS).step is Step.IDENTIFY_SYSTEM
    assert [step.value for step in Step if step.value not in OURS_ALONE] == ORDER


FLAGS = (
    "manual_publication", "recreate_slot", "temporary_slot", "failover_slot", "binary", "messages",
)  # fmt: skip
VERSIONS = (140000, 150018, 160014, 170000, 180004)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("there", [False, True])
def test_every_combination_of_options(version: int, there: bool) -> None:
    for chosen in itertools.product([False, True], repeat=len(FLAGS)):
        wanted: dict[str, Any] = dict(zip(FLAGS, chosen, strict=True))
        options = replace(OPTIONS, **wanted)
        script = everything_there(version) if there else everything_new(version)
        if options.manual_publication and not there:
            script |= {Step.CHECK_EXISTING: [[("t", "f", "f")]]}
        setup, sent = go(options, script)
        steps = [step for step, _ in itertools.groupby(step for step, _ in sent)]
        steps = [step for step in steps if step not in OURS_ALONE]
        assert steps == [step for step in ORDER if step in steps], "in the documented order"
        check_combination(options, version, there, dict(sent), setup.start_command())


def check_combination(
    options: Settings, version: int, there: bool, sent: dict[str, str], start: str
) -> None:
    """By what each option is for, not by how the setup decides."""
    published = not options.manual_publication and not there
    generated = " WITH (publish_generated_columns = stored)" if version >= 180000 else ""
    assert sent.get("create_publication") == (
        f'CREATE PUBLICATION "moored_publication_default"{generated}' if published else None
    )
    assert ("drop_slot" in sent) is (options.recreate_slot or published)
    assert ("query_slot_flushed_lsn" in sent) is (there and not options.recreate_slot)
    begin = 'CREATE_REPLICATION_SLOT "moored_slot_default"'
    if there and not options.recreate_slot:
        assert "create_slot" not in sent
    elif options.temporary_slot:
        assert sent["create_slot"] == f"{begin} TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT"
    elif version >= 170000 and options.failover_slot:
        assert sent["create_slot"] == (
            f"{begin} LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER true)"
        )
    else:
        assert sent["create_slot"] == f"{begin} LOGICAL pgoutput NOEXPORT_SNAPSHOT"
    extras = (", binary 'true'" if options.binary else "") + ", messages 'true'"
    assert start == (
        "START_REPLICATION SLOT \"moored_slot_default\" LOGICAL 0/0 (proto_version '1', "
        f"publication_names '\"moored_publication_default\"'{extras})"
    )


def test_old_servers_get_no_unsupported_options() -> None:
    setup, _ = go(replace(OPTIONS, binary=True, messages=True), everything_new(130000))
    assert setup.start_command().endswith(
        "(proto_version '1', publication_names '\"moored_publication_default\"')"
    )


def test_names_are_quoted_in_every_command() -> None:
    options = options_of("it's", 'so "big"')
    setup, sent = go(options, everything_new())
    said = dict(sent)
    assert said["acquire_lock"] == "SELECT pg_advisory_lock(hashtext('it''s'))"
    assert said["create_publication"].startswith('CREATE PUBLICATION "so ""big"""')
    assert "slot_name = 'it''s'" in said["drop_slot"]
    assert said["create_slot"].startswith('CREATE_REPLICATION_SLOT "it\'s"')
    assert 'publication_names \'"so ""big"""\'' in setup.start_command()
    assert quoted('a"b') == '"a""b"'
    assert literal("a'b") == "'a''b'"


# -- answers and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (Step.IDENTIFY_SYSTEM, "57P01"), (Step.QUERY_PG_INFO, "42501"),
        (Step.ACQUIRE_LOCK, "40P01"), (Step.ACQUIRE_LOCK, "42710"),
        (Step.CREATE_PUBLICATION, "42601"), (Step.CREATE_PUBLICATION, "57014"),
        (Step.DROP_SLOT, "55006"), (Step.CREATE_SLOT, "55000"), (Step.CREATE_SLOT, "53400"),
        (Step.CREATE_SLOT, "42501"), (Step.SET_DISPLAY_SETTING, "57014"),
    ],
)  # fmt: skip
def test_any_other_error_is_raised(step: Step, state: str) -> None:
    script = everything_new() | {step: [state]}
    with pytest.raises(Refused, match=state):
        go(replace(OPTIONS, recreate_slot=True), script)


def test_an_error_without_a_sqlstate_is_raised() -> None:
    with pytest.raises(Refused, match="cut off"):
        Setup(OPTIONS).refused(None, Refused("cut off"))


@pytest.mark.parametrize("manual", [False, True])
def test_a_missing_publication_that_may_not_be_created_is_an_error(manual: bool) -> None:
    script = everything_new() | {Step.CREATE_PUBLICATION: ["42501"]}
    with pytest.raises(ConfigurationError, match="does not exist, and may not be created here"):
        go(replace(OPTIONS, manual_publication=manual), script)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (("0/12", "lost"), "has lost WAL"), ((None, "lost"), "has lost WAL"),
        ((None, "reserved"), "was never completed"),
    ],
)  # fmt: skip
def test_a_lost_or_incomplete_slot_is_an_error(row: tuple[Any, ...], text: str) -> None:
    script = everything_there() | {Step.QUERY_SLOT_FLUSHED_LSN: [[(*row, *OURS)]]}
    with pytest.raises(SlotLost, match=text):
        go(OPTIONS, script)


def test_a_slot_of_another_database_is_an_error() -> None:
    row = (None, "lost", "f", "logical pgoutput elsewhere", "t")
    script = everything_there() | {Step.QUERY_SLOT_FLUSHED_LSN: [[row]]}
    with pytest.raises(ConfigurationError, match=r"pgoutput elsewhere.*another stream_id"):
        go(OPTIONS, script)


@pytest.mark.parametrize("status", ["reserved", "extended", "unreserved", None])
def test_a_slot_with_any_other_wal_status_is_used(status: str | None) -> None:
    script = everything_there() | {Step.QUERY_SLOT_FLUSHED_LSN: [[("0/99", status, *OURS)]]}
    setup, _ = go(OPTIONS, script)
    assert setup.findings.confirmed == 0x99


@pytest.mark.parametrize(
    ("step", "rows"),
    [
        (Step.IDENTIFY_SYSTEM, []),
        (Step.IDENTIFY_SYSTEM, [("1", "2")]),
        (Step.IDENTIFY_SYSTEM, [*IDENTIFIED, *IDENTIFIED]),
        (Step.IDENTIFY_SYSTEM, [("7", "three", "0/0", "shop")]),
        (Step.IDENTIFY_SYSTEM, [("7", "3", "nowhere", "shop")]),
        (Step.QUERY_PG_INFO, []),
        (Step.QUERY_PG_INFO, [("eighteen", 1, "0")]),
        (Step.CHECK_EXISTING, []),
        (Step.CHECK_EXISTING, [("t", "t")]),
        (Step.QUERY_SLOT_FLUSHED_LSN, []),
        (Step.QUERY_SLOT_FLUSHED_LSN, [("0/0",)]),
        (Step.QUERY_SLOT_FLUSHED_LSN, [("0-0", "reserved", *OURS)]),
        (Step.IDENTIFY_AGAIN, []),
    ],
)
def test_an_invalid_answer_is_an_error(step: Step, rows: list[tuple[Any, ...]]) -> None:
    script = everything_there() | {step: [rows]}
    with pytest.raises(DecodeError):
        go(OPTIONS, script)


@pytest.mark.parametrize("rows", [[], [("slot", "somewhere")]], ids=["none", "no_lsn"])
def test_an_invalid_answer_to_create_slot_is_an_error(rows: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DecodeError):
        go(OPTIONS, everything_new() | {Step.CREATE_SLOT: [rows]})


# -- for real ------------------------------------------------------------------------------------


@pytest.fixture
def names(postgres_url: str) -> Iterator[Settings]:
    """Options with names of their own: slots are the whole server's."""
    name = f"setup_{os.getpid()}_{postgres_url.rpartition('_')[2]}"
    yield options_of(name, name)
    until_free(postgres_url, name)
    drop = "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
    run(postgres_url, f"{drop} where slot_name = '{name}'")


def until_free(url: str, slot: str, limit: float = 30.0) -> None:
    """Wait until a slot is inactive: the server ends a connection with a delay."""
    deadline = time.monotonic() + limit
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(
            "select 1 from pg_replication_slots where slot_name = %s and active", [slot]
        ).fetchone():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@asynccontextmanager
async def dialed(url: str, **options: Any) -> AsyncIterator[ReplicationLink]:
    link = await ReplicationLink.dial(url, **options)
    try:
        yield link
    finally:
        link.cut()
        await link.close()


async def set_up(link: ReplicationLink, options: Settings) -> tuple[Setup, list[str]]:
    """The setup against a real server, and the steps that it took."""
    setup, steps = Setup(options), []
    while (command := setup.command()) is not None:
        steps.append(setup.step.value)
        try:
            rows = await link.command(command)
        except psycopg.Error as error:
            setup.refused(error.sqlstate, error)
        else:
            setup.answered(rows)
    return setup, [step for step, _ in itertools.groupby(steps)]


async def receive(
    link: ReplicationLink, positions: Positions, transactions: int
) -> list[dict[str, Any]]:
    """The new rows of so many transactions, which are acknowledged."""
    assembler, found = Assembler(), []
    while transactions:
        for data in await link.receive():
            if data[0] == KEEPALIVE:
                positions.keepalive(read_keepalive(data), inside=assembler.inside)
            elif (committed := assembler.feed(data)) is not None:
                found += [c.new for c in committed if isinstance(c, Insert) and c.new is not None]
                positions.committed(committed.end_lsn)
                positions.acknowledged(committed.end_lsn)
                transactions -= 1
    await link.send(positions.status(0.0))
    return found


async def until_confirmed(url: str, slot: str, place: int) -> None:
    """Wait until the server has received the status update."""
    async with (
        asyncio.timeout(30),
        await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
    ):
        while True:
            query = "select confirmed_flush_lsn from pg_replication_slots where slot_name = %s"
            row = await (await connection.execute(query, [slot])).fetchone()
            if row is not None and Lsn.parse(row[0]) >= place:
                return
            await asyncio.sleep(0.01)


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_a_second_connection_continues_at_the_confirmed_lsn(
    postgres_url: str, names: Settings, binary: bool
) -> None:
    options = replace(names, binary=binary)
    run(postgres_url, "create table t (id int primary key, name text)")
    async with dialed(postgres_url) as link:
        setup, steps = await set_up(link, options)
        assert steps == [
            "identify_system", "query_pg_info", "acquire_lock", "check_existing",
            "create_publication", "drop_slot", "create_slot", "identify_again",
            "set_display_setting",
        ]  # fmt: skip
        found = setup.findings
        assert (found.version // 10000, found.publication_created, found.slot_created) == (
            18, True, True,
        )  # fmt: skip
        assert found.wal_sender_timeout == 12.0
        assert found.confirmed >= found.wal_position
        run(postgres_url, f"alter publication {options.publication} add table t")
        run(postgres_url, "insert into t values (1, 'a'), (2, 'é')", "insert into t values (3)")
        await link.stream(setup.start_command())
        positions = Positions(found.confirmed)
        rows = await receive(link, positions, 2)
        assert rows == [
            {"id": 1, "name": "a"}, {"id": 2, "name": "é"}, {"id": 3, "name": None},
        ]  # fmt: skip
        await until_confirmed(postgres_url, options.slot, positions.last_seen)
    run(postgres_url, "insert into t values (4, 'd')")
    async with dialed(postgres_url) as link:
        setup, steps = await set_up(link, options)
        assert steps == [
            "identify_system", "query_pg_info", "acquire_lock", "check_existing",
            "query_slot_flushed_lsn", "identify_again", "set_display_setting",
        ]  # fmt: skip
        assert not setup.findings.slot_created
        assert setup.findings.confirmed == positions.flushed + 1
        await link.stream(setup.start_command())
        again = await receive(link, Positions(setup.findings.confirmed), 1)
        assert again == [{"id": 4, "name": "d"}], "nothing is sent twice, and nothing is lost"


async def test_a_slot_older_than_its_publication_is_created_again(
    postgres_url: str, names: Settings
) -> None:
    run(postgres_url, f"select pg_create_logical_replication_slot('{names.slot}', 'pgoutput')")
    async with dialed(postgres_url) as link:
        setup, steps = await set_up(link, names)
        assert "drop_slot" in steps
        assert (setup.findings.publication_created, setup.findings.slot_created) == (True, True)
        await link.stream(setup.start_command())


async def test_a_temporary_slot_is_dropped_with_its_connection(
    postgres_url: str, names: Settings
) -> None:
    async with dialed(postgres_url) as link:
        setup, _ = await set_up(link, replace(names, temporary_slot=True))
        await link.stream(setup.start_command())
    until_free(postgres_url, names.slot)
    async with dialed(postgres_url) as link:
        again, steps = await set_up(link, replace(names, temporary_slot=True))
        assert again.findings.slot_created
        assert "query_slot_flushed_lsn" not in steps


async def test_failover_slots_are_created_as_such(postgres_url: str, names: Settings) -> None:
    for failover in (True, False):
        until_free(postgres_url, names.slot)
        async with dialed(postgres_url) as link:
            await set_up(link, replace(names, failover_slot=failover, recreate_slot=True))
        with psycopg.connect(postgres_url) as connection:
            found = connection.execute(
                "select failover from pg_replication_slots where slot_name = %s", [names.slot]
            ).fetchone()
        assert found == (failover,)


async def test_an_existing_slot_becomes_a_failover_slot(postgres_url: str, names: Settings) -> None:
    for failover, expected in ((False, False), (True, True), (False, True)):
        until_free(postgres_url, names.slot)
        async with dialed(postgres_url) as link:
            setup, _ = await set_up(link, replace(names, failover_slot=failover))
        with psycopg.connect(postgres_url) as connection:
            found = connection.execute(
                "select failover from pg_replication_slots where slot_name = %s", [names.slot]
            ).fetchone()
        assert found == (expected,)
    assert not setup.findings.slot_created


def test_a_slot_that_cannot_become_a_failover_slot_is_used_as_it_is() -> None:
    stands = [(*STANDS[0][:-1], "f")]
    script = everything_there() | {
        Step.QUERY_SLOT_FLUSHED_LSN: [stands],
        Step.ALTER_SLOT: ["55006"],
    }
    setup, sent = go(OPTIONS, script)
    altered = 'ALTER_REPLICATION_SLOT "moored_slot_default" (FAILOVER true)'
    assert dict(sent)["alter_slot"] == altered
    assert setup.step is Step.READY_TO_STREAM


async def test_generated_columns_are_published(postgres_url: str, names: Settings) -> None:
    run(postgres_url, "create table t (id int, twice int generated always as (id * 2) stored)")
    async with dialed(postgres_url) as link:
        setup, _ = await set_up(link, names)
        run(postgres_url, f"alter publication {names.publication} add table t")
        run(postgres_url, "insert into t values (4)")
        await link.stream(setup.start_command())
        rows = await receive(link, Positions(setup.findings.confirmed), 1)
    assert rows == [{"id": 4, "twice": 8}]


BEFORE_THE_LOCK = (Step.IDENTIFY_SYSTEM, Step.QUERY_PG_INFO, Step.ACQUIRE_LOCK)


async def test_the_wait_for_the_lock_survives_statement_timeouts(
    postgres_url: str, names: Settings
) -> None:
    async with (
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as holder,
        dialed(postgres_url, options="-c statement_timeout=500ms") as link,
    ):
        await holder.execute("select pg_advisory_lock(hashtext(%s))", [names.slot])
        setup, timeouts = Setup(names), 0
        while (command := setup.command()) is not None and setup.step in BEFORE_THE_LOCK:
            try:
                setup.answered(await link.command(command))
            except errors.QueryCanceled as error:
                setup.refused(error.sqlstate, error)
                timeouts += 1
            if timeouts == 2 and not holder.closed:
                await holder.close()
        assert setup.step is Step.CHECK_EXISTING
        assert timeouts >= 2


async def test_a_user_without_create_needs_an_existing_publication(
    postgres: SyncEmbeddedPostgres, postgres_url: str, names: Settings
) -> None:
    """First there is no publication, then there is one that others have made."""
    role = f"role_{names.slot}"
    run(postgres_url, f"create role {role} login replication password 'secret'")
    try:
        user = {"user": role, "password": "secret"}
        async with dialed(postgres_url, **user) as link:
            with pytest.raises(ConfigurationError, match="does not exist"):
                await set_up(link, names)
        run(postgres_url, f"create publication {names.publication}")
        async with dialed(postgres_url, **user) as link:
            setup, steps = await set_up(link, names)
            assert steps[3:5] == ["check_existing", "create_slot"]
            await link.stream(setup.start_command())
    finally:
        run(postgres_url, f"drop role {role}")


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_a_database_with_another_encoding_than_utf_8(
    postgres: SyncEmbeddedPostgres, names: Settings, binary: bool
) -> None:
    options = replace(names, binary=binary, temporary_slot=True)
    database = sql.Identifier(f"latin_{names.slot}")
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        create = "create database {} encoding 'LATIN1' locale 'C' template template0"
        connection.execute(sql.SQL(create).format(database))
        url = postgres.url_of(f"latin_{names.slot}")
        try:
            with psycopg.connect(url, autocommit=True, client_encoding="utf8") as there:
                there.execute('create table "é" (id int, "ñame" text)')
                async with dialed(url) as link:
                    setup, _ = await set_up(link, options)
                    there.execute(
                        sql.SQL("alter publication {} add table {}").format(
                            sql.Identifier(options.publication), sql.Identifier("é")
                        )
                    )
                    there.execute("insert into \"é\" values (1, 'Ærøskøbing')")
                    await link.stream(setup.start_command())
                    rows = await receive(link, Positions(setup.findings.confirmed), 1)
            assert rows == [{"id": 1, "ñame": "Ærøskøbing"}]
        finally:
            until_free(postgres.url, options.slot)
            connection.execute(sql.SQL("drop database {} with (force)").format(database))
