"""Consumers in services of their own: a restart with work waiting, and transactions that fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.service.support import Running, moored, running, until

from moored.testing import base_seed, scaled

#: The service. While the file `wait` exists, the consumer starts after the stream has its changes.
SERVICE = """
import asyncio
import os
from pathlib import Path

import moored
from moored.postgres import Reset

here = Path(__file__).parent
app = moored.App("orders")
pg = app.postgres(os.environ["ORDERS"], state_dir=here / "state", stream_id=here.name)


@app.component(once=True, after=["postgres"])
async def schema(ctx):
    async with pg.connection() as conn:
        await conn.execute("create table if not exists orders (id int primary key)")
    await pg.wait_until_active()
    while (here / "wait").exists() and not pg.statistics()["consumers"]["search"]["behind"]:
        await asyncio.sleep(0.01)


@app.consumer(pg, "search", tables=["orders"], after=["schema"], **{options})
async def index(txn):
    if isinstance(txn, Reset):
        return
    numbers = [change.new["id"] for change in txn if change.new]
    poison = here / "poison"
    if poison.exists() and set(map(int, poison.read_text().split())) & set(numbers):
        raise ValueError(f"order {{numbers[0]}} has no item")
    with (here / "handled").open("a") as handled:
        print(*numbers, sep="\\n", file=handled)
"""


class Orders:
    """The folder of the service, and its database."""

    def __init__(self, folder: Path, url: str, options: str) -> None:
        self.folder = folder
        self.url = url
        (folder / "orders.py").write_text(SERVICE.format(options=options))

    @contextmanager
    def served(self) -> Iterator[Running]:
        """Run the service."""
        with running("orders:app", cwd=self.folder, environ={"ORDERS": self.url}) as service:
            yield service

    def insert(self, *numbers: int) -> None:
        """Commit a transaction for each of these orders."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            for number in numbers:
                conn.execute("insert into orders values (%s)", (number,))

    def handled(self) -> list[int]:
        """Return the orders that the function has handled."""
        found = self.folder / "handled"
        return list(map(int, found.read_text().split())) if found.exists() else []

    def write(self, name: str, text: str = "") -> Path:
        """Write a file that the service reads."""
        path = self.folder / name
        path.write_text(text)
        return path


def ready(service: Running) -> int:
    return service.get("/v1/health?ready").status_code


def until_health(service: Running, part: str, health: str) -> None:
    """Wait for the health of a part."""

    def found() -> bool:
        return bool(service.get("/v1/health").json()["parts"][part] == health)

    until(found, f"{part} {health}; {service.lines}")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"orders_{os.getpid()}_")


def test_a_consumer_with_a_backlog_at_its_start_becomes_ready(
    folder: Path, postgres_url: str
) -> None:
    orders = Orders(folder, postgres_url, "{'required': True}")
    with orders.served() as service:
        service.wait_active()
        orders.insert(1)
        until(lambda: orders.handled() == [1], "order 1 is handled")
    orders.insert(*range(2, 102))
    orders.write("wait")
    with orders.served() as service:
        until(lambda: len(orders.handled()) == 101, f"all orders are handled {service.lines}")
        until_health(service, "consumer-search", "active")
        assert ready(service) == 200
    assert orders.handled() == list(range(1, 102))


def test_a_consumer_that_always_fails_leaves_the_service_ready_and_is_named_everywhere(
    folder: Path, postgres_url: str
) -> None:
    orders = Orders(folder, postgres_url, "{}")
    orders.write("poison", "2")
    with orders.served() as service:
        service.wait_active()
        orders.insert(1, 2, 3)
        until_health(service, "consumer-search", "starting")
        assert ready(service) == 200
        answer = service.get("/v1/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["degraded"] == ["consumer-search"]
        assert "\nmoored_degraded 1.0\n" in service.get("/metrics").text
        sentence = service.get("/v1/status").json()["sentence"]
        assert sentence.startswith("consumer-search has failed, and is coming back: ")
        assert "rder 2 has no item" in sentence
        assert "order 2 has no item" in service.get("/v1/explain/consumer-search").text
        assert orders.handled() == [1]
        (folder / "poison").unlink()
        service.wait_active()
        until(lambda: orders.handled() == [1, 2, 3], "every order is handled")


def parked(orders: Orders, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `moored consumers`."""
    return moored("consumers", *arguments, "--json", DATABASE_URL=orders.url)


def test_a_parked_transaction_is_kept_until_a_retry_handles_it(
    folder: Path, postgres_url: str
) -> None:
    orders = Orders(folder, postgres_url, "{'on_poison': 'park', 'tries': 2}")
    orders.write("poison", "2")
    with orders.served() as service:
        service.wait_active()
        orders.insert(1, 2, 3)
        until(lambda: orders.handled() == [1, 3], "the transactions around it are handled")
        until_health(service, "consumer-search", "degraded")
        assert ready(service) == 200
        assert (
            '\nmoored_consumer_parked{part="consumer-search"} 1.0\n' in service.get("/metrics").text
        )
        explained = service.get("/v1/explain/consumer-search").json()["explanation"]
        assert "1 change of public.orders" in explained
        assert "order 2 has no item" in explained
        assert "1 item parked" in service.get("/v1/status").json()["sentence"]
        service.process.kill()
    # Neither a kill nor the loss of the state directory loses it.
    shutil.rmtree(folder / "state")
    (item,) = json.loads(parked(orders, "list").stdout)
    assert (item["consumer"], item["tries"]) == ("search", 2)
    assert item["error"] == "order 2 has no item (ValueError)"
    with orders.served() as service:
        until_health(service, "consumer-search", "degraded")
        failed = parked(orders, "retry", str(item["id"]))
        assert (failed.returncode, json.loads(failed.stdout)["failed"]) == (1, [item["id"]])
        assert json.loads(parked(orders, "list").stdout)[0]["tries"] == 3
        (folder / "poison").unlink()
        done = parked(orders, "retry", "--consumer", "search")
        assert (done.returncode, json.loads(done.stdout)["handled"]) == (0, [item["id"]])
        assert orders.handled() == [1, 3, 2]
        service.wait_active()
    assert json.loads(parked(orders, "list").stdout) == []


def test_under_kills_each_transaction_is_handled_or_parked(
    folder: Path, postgres_url: str, record_property: Callable[[str, object], None]
) -> None:
    chance, sent = random.Random(base_seed()), 0
    orders = Orders(folder, postgres_url, "{'on_poison': 'park', 'tries': 1, 'max_parked': 10**6}")
    orders.write("poison", " ".join(map(str, range(0, 10_000, 3))))
    with orders.served() as service:
        service.wait_active()
    kills = scaled(30, least=2)
    for _ in range(kills):
        with orders.served() as service:
            service.wait_for("ready after")
            orders.insert(*range(sent, sent + 30))
            sent += 30
            time.sleep(chance.uniform(0.0, 0.6))
            service.process.kill()

    def found() -> tuple[set[int], list[int]]:
        errors = [each["error"] for each in json.loads(parked(orders, "list").stdout)]
        return set(orders.handled()), [int(each.split()[1]) for each in errors]

    def complete() -> bool:
        handled, aside = found()
        return len(handled) + len(aside) >= sent

    with orders.served() as service:
        until(complete, f"every order is handled or parked; {service.lines[-3:]}")
    handled, aside = found()
    assert sorted(aside) == list(range(0, sent, 3))
    assert handled == set(range(sent)) - set(aside)
    record_property("kills", kills)
    record_property("orders", sent)
