"""Many processes on Redis and on Postgres: killed, stopped, and cut off from their store."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from tests.leases.fleet import KEY, Fleet
from tests.leases.redis_server import RedisServer
from tests.leases.trials import FleetTrials

from moored.leases.postgres import ddl


class TestRedisFleet(FleetTrials):
    @pytest.fixture
    def url(self, redis_url: str) -> str:
        return redis_url


@pytest.mark.soak
class TestPostgresFleet(FleetTrials):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url


@pytest.fixture
def targets(redis_server: RedisServer, postgres_url: str) -> dict[str, str]:
    """Where the owners write: a table, and a list."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(ddl().encode())
        connection.execute("create table written (n serial, fence bigint)")
    redis_server.run("FLUSHALL")
    # A stopped owner may hold the lock of its fence; the server then ends its transaction.
    option = quote("-c idle_in_transaction_session_timeout=300")
    return {"postgres": f"{postgres_url}?options={option}", "redis": redis_server.url}


def written(target: str, url: str, server: RedisServer) -> list[int]:
    """The fences that were written, in their order."""
    if target == "redis":
        found = server.run("LRANGE", KEY, 0, -1)
        assert isinstance(found, list)
        return [int(each) for each in found]
    with psycopg.connect(url) as connection:
        return [fence for (fence,) in connection.execute("select fence from written order by n")]


@pytest.mark.parametrize(
    ("store", "target"),
    [
        ("redis", "postgres"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("postgres", "redis"), ("redis", "redis"), ("postgres", "postgres"))
        ),
    ],
)
def test_a_suspended_owner_is_rejected_by_the_fence(
    store: str,
    target: str,
    targets: dict[str, str],
    redis_url: str,
    postgres_url: str,
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    url = {"redis": redis_url, "postgres": postgres_url}[store]
    with Fleet(url, tmp_path, ttl=3.0) as fleet:
        first = fleet.spawn("own", target=targets[target])
        fleet.wait_for("wrote", 3, pid=first)
        fleet.stop(first)
        second = fleet.spawn("own", target=targets[target])
        (taken,) = fleet.wait_for("acquired", pid=second)
        fleet.wait_for("wrote", 3, pid=second)
        fleet.go_on(first)
        (refused,) = fleet.wait_for("rejected", pid=first)
        fleet.wait_for("wrote", 6, pid=second)
    assert refused["seen"] == taken["fence"] > refused["fence"]
    assert refused["live"] is False
    fences = written(target, postgres_url, redis_server)
    assert fences == sorted(fences)
    assert set(fences) == {refused["fence"], taken["fence"]}


def test_workers_end_with_their_fleet(tmp_path: Path) -> None:
    with Fleet("memory://", tmp_path) as fleet:
        pids = [fleet.spawn("once", limit=1) for _ in range(3)]
        fleet.wait_for("ready", 3)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.getpid() not in pids
