"""Each check finds a problem on a real server, and its statements fix it."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest

from moored.postgres.doctor import CHECKS, Examination, _check, _server, examine
from moored.postgres.outbox import ddl

from .plants import PLANTS, PUBLISH, Options, Plant
from .world import PASSWORD, World

LIMIT = 30.0


@pytest.fixture(autouse=True)
def sensitive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a transaction at once, and a notification queue of a few pages."""
    monkeypatch.setattr(_check, "LONG", 0.0)
    monkeypatch.setattr(_check, "HELD", 0.0)
    monkeypatch.setattr(_check, "QUEUE", 1e-6)


async def examined(world: World, options: Options) -> Examination:
    return await examine(**{"database_url": world.url, **options})


def checks(found: Examination) -> set[str]:
    return {each.check for each in found.findings}


async def test_a_healthy_database_has_no_finding(world: World) -> None:
    world.own("create publication moored_publication_default for table orders")
    found = await examine(world.url, tables=["orders"])
    assert found.findings == []
    assert found.ok
    assert [each.user for each in found.connections] == ["app"]


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, id=plant.name, marks=[pytest.mark.soak] if plant.variant else [])
        for plant in PLANTS
    ],
)
async def test_a_planted_problem_is_found_and_fixed(world: World, plant: Plant) -> None:
    options = plant.plant(world)
    plant.hold(world)
    found = await examined(world, options)
    assert checks(found) == set(plant.checks), found.findings
    assert PASSWORD not in str(found)
    assert "another-secret" not in str(found)
    assert "a secret" not in str(found)

    finding = next(each for each in found.findings if each.check == plant.checks[0])
    if plant.advised is not None:
        assert finding.advice
        assert not finding.statements
        options |= plant.advised(world)
    else:
        world.run(*finding.statements)
    if "restart the server" in finding.advice:
        world.restart()
        plant.hold(world)
    ends = time.monotonic() + LIMIT  # a backend is terminated, and a file read, a moment later
    while finding.check in checks(found := await examined(world, options)):
        assert time.monotonic() < ends, found.findings


async def test_commits_that_wait_for_each_other_now_and_then_are_found(world: World) -> None:
    """Two of them meet for a tenth of a second, and then write nothing for two."""
    world.configure(fsync="on", synchronous_commit="on", commit_delay="100000", commit_siblings="0")
    meet, over = threading.Barrier(2), threading.Event()

    def publish() -> None:
        with psycopg.connect(world.url) as conn:
            while not over.wait(0.2):
                conn.execute(
                    "select pg_logical_emit_message(true, '', ''), pg_notify('orders', '')"
                )
                with suppress(threading.BrokenBarrierError):
                    meet.wait(LIMIT)
                conn.commit()

    with ThreadPoolExecutor(2) as threads:
        publishing = [threads.submit(publish) for _ in range(2)]
        try:
            for _ in range(3):
                assert "notify_lock" in checks(await examined(world, {}))
        finally:
            over.set()
            meet.abort()
        for each in publishing:
            each.result()


async def test_the_publisher_that_holds_delivery_back_is_named(world: World) -> None:
    world.own(ddl())
    culprit = world.own("set application_name = 'importer'", "begin", PUBLISH)
    assert "outbox_delivery" not in checks(await examine(world.url)), "nothing waits for it"
    world.own(PUBLISH)
    found = await examine(world.url)
    (finding,) = (each for each in found.findings if each.check == "outbox_delivery")
    who = f"of backend {culprit.info.backend_pid} in database 'shop' (application \"importer\")"
    assert who in finding.problem
    assert finding.problem.endswith(": select moored.outbox_publish(…, …)")


async def test_a_publisher_that_commits_soon_holds_nothing_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was given a lower id than the last event is not known at first."""
    monkeypatch.setattr(_check, "HELD", 1.0)
    early = "insert into moored.outbox (channel, payload, at) values ('a', 'b', now() - interval "
    world.own(ddl(), early + "'1 hour')")
    publisher = world.own("begin", "select pg_sleep(1)", PUBLISH)
    examining = asyncio.ensure_future(examine(world.url))
    looked = (
        "select from pg_stat_activity where application_name = 'moored doctor' "
        "and query like '%pg_prepared_xacts p on a.pid is null%'"
    )
    while world.admin.execute(looked).fetchone() is None and not examining.done():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    publisher.execute("commit")
    assert "outbox_delivery" not in checks(await examining)


async def test_a_table_that_is_called_like_one_of_an_outbox_is_left_alone(world: World) -> None:
    for schema in ("theirs", '"Their tables"'):
        world.own(f"create schema {schema}", f"create table {schema}.outbox_state (version int)")
    assert "outbox_delivery" not in checks(await examine(world.url))


def test_every_check_has_a_planted_problem() -> None:
    planted = {check for plant in PLANTS for check in plant.checks}
    assert planted | {"server_version"} == {check.name for check in CHECKS}


async def test_every_query_runs_on_the_newest_server(postgres_url: str) -> None:
    """The other tests run with it only in `make soak`."""
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table log (line text); create publication newest for table log")
    found = await examine(postgres_url, tables=["log"], publication="newest")
    assert "the check could not run" not in str(found.findings)
    assert "table_identity" in checks(found)


# -- versions ------------------------------------------------------------------------------------


async def test_a_known_problem_names_the_version_that_mends_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _server.KnownProblem("LISTEN may fail", {99: 3})
    monkeypatch.setattr(_server, "KNOWN_PROBLEMS", [problem])
    (finding,) = (await examine(world.url)).findings
    assert finding.check == "server_version"
    assert finding.problem.endswith("LISTEN may fail")
    assert finding.advice == "upgrade to 99.3 or newer"


@pytest.mark.parametrize(
    ("version", "mended"),
    [
        (170005, "17.6"),
        (170006, None),
        (160009, "16.10"),
        (150014, None),
        (180000, None),
        (120022, "13.22"),
    ],
)
def test_a_problem_ends_with_the_minor_version_of_its_branch(
    version: int, mended: str | None
) -> None:
    problem = _server.KnownProblem("", {17: 6, 16: 10, 15: 14, 14: 19, 13: 22})
    assert problem.mended_in(version) == mended
