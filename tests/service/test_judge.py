"""The judgement of parts and servers: whose fault it is, who waits, and who only stands beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moored.kernel import Callers, Link
from moored.service._judge import Judged, Observed, judge

pytestmark = pytest.mark.pure

NOW = 100.0
DB, DIRECT, GRPC = "127.0.0.1:5432", "127.0.0.1:5433", "127.0.0.1:50051"
RUNS = {DB: "server", DIRECT: "server", GRPC: "grpc-server"}
NEEDS = {
    "db": ["server", DB],
    "postgres": ["server", DIRECT],
    "live": ["postgres"],
    "load": ["db", "grpc", "chat"],
    "grpc": [GRPC],
    "search": ["postgres"],
    "chat": ["chat-server"],
}


def link(server: str, heard_at: float | None = NOW - 0.1, **more: Any) -> Link:
    return Link(server, True, heard_at, kind="PostgreSQL")._replace(**more)


def works(*links: Link, **more: Any) -> Observed:
    return replace(Observed("active", "", worked=True, links=links), **more)


def demo(**changed: Observed) -> dict[str, Judged]:
    """Judge the parts of the demo, which all work but for these."""
    parts = {
        "server": works(),
        "db": works(link(DB)),
        "postgres": works(link(DIRECT, of="change stream"), link(DB, of="pool", heard_at=NOW - 60)),
        "live": works(),
        "grpc-server": works(),
        "grpc": works(link(GRPC, kind="gRPC server")),
        "chat": works(),
        "search": works(),
        "load": works(),
    }
    return judge(parts | {k.replace("_", "-"): v for k, v in changed.items()}, NEEDS, RUNS, NOW)


def states(judged: dict[str, Judged]) -> dict[str, str]:
    return {node: each.state for node, each in judged.items() if each.state != "works"}


WAITING = dict.fromkeys(("db", "postgres", "live", "search", "load"), "waits")
BESIDE = {"chat-server": "unknown"}


def test_a_server_that_nobody_watches_is_unknown() -> None:
    judged = demo()
    assert states(judged) == BESIDE
    assert judged["chat-server"].fact == "not watched"
    assert judged["server"].kind == "PostgreSQL"


def test_a_silent_server_is_the_root_when_the_first_link_notices() -> None:
    lost = link(DB, heard_at=NOW - 2.6, up=False, silent=True)
    stream = link(DIRECT, heard_at=NOW - 2.5, of="change stream")  # it has not noticed it yet
    judged = demo(db=works(lost, callers=Callers(6, 2.4)), postgres=works(stream))
    assert states(judged) == {"server": "down", **WAITING, **BESIDE}
    server = judged["server"]
    assert (server.fact, server.how, server.heard_at) == ("does not answer", "silent", NOW - 2.5)
    assert {judged[part].roots for part in WAITING} == {("server",)}
    assert judged["db"].fact == "waits for PostgreSQL"
    assert judged["live"].fact == "waits for postgres"


def test_while_one_link_hears_the_server_the_part_whose_link_is_lost_is_the_root() -> None:
    lost = link(DIRECT, heard_at=NOW - 4, up=False, silent=True, of="change stream")
    judged = demo(postgres=works(lost))
    assert states(judged) == {"postgres": "down", "live": "waits", "search": "waits", **BESIDE}
    assert judged["postgres"].fact == "no answer on the change stream"
    assert (judged["postgres"].roots, judged["postgres"].heard_at) == (("postgres",), NOW - 4)


def test_a_server_that_refuses_one_link_is_not_down() -> None:
    refused = link(DB, heard_at=NOW - 60, up=False, refused=True, why="FATAL: no such database")
    quiet = link(DIRECT, heard_at=NOW - 60)
    judged = demo(db=works(refused), postgres=works(quiet))
    assert states(judged) == {"db": "down", "load": "waits", **BESIDE}
    assert judged["db"].why == "FATAL: no such database"


def test_a_server_that_is_started_again_is_down_and_not_starting() -> None:
    again = Observed("starting", "PostgreSQL is being started", worked=True, worked_at=NOW - 0.3)
    judged = demo(server=again)
    assert states(judged) == {"server": "down", **WAITING, **BESIDE}
    assert judged["server"].fact == "coming back"
    assert judged["server"].heard_at == NOW - 0.3


def test_what_has_never_worked_is_starting_and_nothing_is_down() -> None:
    new = Observed("starting", "waits for server")
    judged = demo(server=Observed("starting", "PostgreSQL is being started"), db=new)
    assert states(judged) == {"server": "starting", "db": "starting", **BESIDE}
    assert judged["db"].fact == "waits for PostgreSQL"


def test_an_external_server_that_was_never_reached_is_starting() -> None:
    never = Link("db:5432", False, None, "connection refused", kind="PostgreSQL")
    judged = judge({"db": Observed("starting", "x", links=[never])}, {}, {}, NOW)
    assert states(judged) == {"db": "starting", "db:5432": "starting"}
    assert judged["db"].fact == "waits for PostgreSQL"


def test_two_faults_have_two_roots_and_a_part_that_needs_both_waits_for_both() -> None:
    ended = Observed("starting", "ended by SIGKILL", worked=True)
    judged = demo(server=ended, grpc_server=ended)
    assert judged["grpc"].roots == ("grpc-server",)
    assert judged["db"].roots == ("server",)
    assert judged["load"].roots == ("server", "grpc-server")
    assert judged["chat"].state == "works"


def test_a_pool_whose_callers_wait_longer_than_a_moment_does_not_work() -> None:
    assert demo(db=works(link(DB), callers=Callers(6, 0.4)))["db"].state == "works"
    judged = demo(db=works(link(DB), callers=Callers(6, 15.24), detail="12 of 12 in use"))
    assert states(judged) == {"db": "degraded", **BESIDE}
    db = judged["db"]
    assert db.fact == "6 requests wait, the longest for 15.2 s"
    assert (db.heard_at, db.roots, db.why) == (NOW - 15.24, ("db",), "12 of 12 in use")
    assert "1 request waits, for 2.0 s" in demo(db=works(callers=Callers(1, 2)))["db"].fact


def test_a_pool_that_opens_all_its_connections_again_works_until_callers_wait() -> None:
    filling = Observed("starting", "no connection is open yet", True, links=[link(DB)])
    assert demo(db=filling)["db"].state == "works"
    judged = demo(db=replace(filling, callers=Callers(2, 1.5)))
    assert (judged["db"].state, judged["db"].how) == ("degraded", "callers")


def test_a_lost_link_that_is_not_vital_degrades_its_part_alone() -> None:
    lost = link(DIRECT, up=False, of="listener", vital=False, why="reset by peer")
    judged = demo(
        postgres=works(link(DIRECT), lost), live=Observed("degraded", "late", worked=True)
    )
    assert states(judged) == {"postgres": "degraded", "live": "degraded", **BESIDE}
    assert judged["postgres"].fact == "the listener is lost"
    assert judged["live"].roots == ("postgres",)  # it follows from what it needs
    alone = demo(live=Observed("degraded", "late", worked=True))
    assert alone["live"].roots == ("live",)


def test_a_part_that_still_comes_back_waits_for_its_root() -> None:
    coming = Observed("starting", "connecting", worked=True, follows="server")
    assert demo(db=coming)["db"].roots == ("server",)
    assert states(demo(db=coming)) == {"db": "waits", "load": "waits", **BESIDE}
    assert states(demo(db=replace(coming, follows=None)))["db"] == "down"


def test_a_part_that_has_failed_for_good_is_down_also_while_its_server_is() -> None:
    ended = Observed("starting", "ended", worked=True)
    judged = demo(server=ended, search=Observed("failed", "wrong password", worked=True))
    assert (judged["search"].state, judged["search"].how) == ("down", "failed")


@pytest.mark.parametrize(
    ("health", "shown"), [("sleeping", "asleep"), ("waiting", "standby"), ("degraded", "degraded")]
)
def test_other_states_of_health_are_shown_by_their_own_words(health: str, shown: str) -> None:
    judged = demo(chat=Observed(health, "why", worked=True))  # type: ignore[arg-type]
    assert (judged["chat"].state, judged["chat"].fact) == (shown, "why")


def test_a_part_that_says_nothing_is_unknown_and_one_that_needs_itself_is_judged() -> None:
    parts = {"quiet": Observed("active", says=False), "a": works(), "b": works()}
    judged = judge(parts, {"a": ["b"], "b": ["a"]}, {}, NOW)
    assert judged["quiet"].state == "unknown"
    assert judged["a"].state == judged["b"].state == "works"
