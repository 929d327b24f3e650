"""Live events of `moored serve`: from an outbox to a stream, with health, status and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from tests.servers import free_port
from tests.service.support import LIMIT, Running, moored, running, until

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres.outbox import ddl
from moored.service import ConfigError, load

ACME, OTHER = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


@pytest.fixture
def environ(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    """The settings of a service with a broker, whose outbox is not installed yet."""
    keys = tmp_path / "keys"
    keys.write_text(f"acme-key {ACME}\nother-key {OTHER}\n")
    return {
        "DATABASE_URL": postgres_url,
        "MOORED_ADMIN_TOKEN": "of-the-operator",
        "MOORED_BROKER_CHANNELS": "orders",
        "MOORED_BROKER_KEYS": str(keys),
        "MOORED_BROKER_JWKS_URL": "http://127.0.0.1:9/keys.json",
    }


@contextmanager
def stream(service: Running, key: str = "acme-key", **headers: str) -> Iterator[Iterator[Any]]:
    """Open a stream; yield an iterator over the fields of its events, after the first one."""
    given = {"X-API-Key": key, **{name.replace("_", "-"): value for name, value in headers.items()}}
    url = f"{service.url}/v1/subscribe"
    with httpx.stream(
        "GET", url, headers=given, timeout=LIMIT, trust_env=False, verify=False
    ) as response:
        assert response.status_code == 200, response.read()
        yield events(response.iter_lines())


def events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        found[name] = value
        if not line:
            if "event" in found:
                yield found
            found = {}


def publish(url: str, number: int) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        body = json.dumps({"org_id": ACME, "number": number})
        conn.execute("select moored.outbox_publish('orders', %s, %s)", (body, ACME))


def part(service: Running) -> str:
    return str(service.get("/v1/health").json()["parts"]["broker"])


def test_outbox_reaches_a_stream_and_a_missing_one_only_degrades_the_service(
    environ: dict[str, str],
) -> None:
    url = environ["DATABASE_URL"]
    operator = {"Authorization": "Bearer of-the-operator"}
    with running(environ=environ) as service:
        until(lambda: service.health() == (200, "degraded"), "degraded without an outbox")
        assert part(service) == "degraded"
        why = service.get("/v1/explain/broker", headers=operator).json()["explanation"]
        assert re.match(r"(starting|degraded) for .* s\n  because  ", why)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(ddl().encode())
        until(lambda: part(service) == "active", "the outbox is installed now")
        assert service.health() == (200, "active")

        assert service.get("/v1/subscribe").status_code == 401
        refused = service.get("/v1/subscribe", headers=operator)
        assert refused.status_code == 401
        assert refused.json()["error"] == "this is not a JSON web token"
        assert "export function subscribe" in service.get("/v1/subscribe.js").text
        with stream(service) as found:
            start = next(found)
            assert start["event"] == "start"
            publish(url, 1)
            first = next(found)
            assert (first["event"], json.loads(first["data"])["number"]) == ("orders", 1)
            status = service.get("/v1/status", headers=operator).json()["broker"]
            assert (status["subscribers"], status["delivered"]) == (1, 1)
            metrics = service.get("/metrics", headers=operator).text
            assert 'moored_broker_subscribers{broker="broker"} 1.0' in metrics
            assert service.stop() == 0
            assert list(found) == [], "the stream ended in order"
    publish(url, 2)
    with running(environ=environ) as service:
        until(lambda: part(service) == "active", "active again")
        with stream(service, last_event_id=first["id"]) as found:
            assert json.loads(next(found)["data"])["number"] == 2


def test_stream_is_refused_while_the_database_has_never_been_reached(
    environ: dict[str, str], tmp_path: Path
) -> None:
    data, port = tmp_path / "data", free_port()
    with SyncEmbeddedPostgres(data, port=port) as server:
        url = server.url
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(ddl().encode())
    environ |= {"DATABASE_URL": url, "MOORED_DATABASE_WAIT": str(LIMIT)}
    with running(environ=environ) as service:
        refused = service.get("/v1/subscribe", headers={"X-API-Key": "acme-key"})
        assert refused.status_code == 503
        assert refused.json()["error"] == (
            "live events have not begun here: their source is not connected yet"
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        with SyncEmbeddedPostgres(data, port=port):
            until(lambda: part(service) == "active", "the database is reached now")
            with stream(service) as found:
                assert next(found)["event"] == "start"
                publish(url, 1)
                assert json.loads(next(found)["data"])["number"] == 1
            assert service.stop() == 0


def test_mistakes_of_the_broker_are_reported_before_the_start(
    environ: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"_BROKER_KEYS, .*_JWT_KEY or .*_JWKS_URL"):
        load({}, {"MOORED_BROKER_CHANNELS": "orders"})
    with pytest.raises(ConfigError, match="redis://"):
        load({}, {"MOORED_BROKER_SOURCE": "http://x"})
    with pytest.raises(ConfigError, match="a file with a key is set too"):
        load({}, {"MOORED_BROKER_JWKS_URL": "https://login/keys", "MOORED_BROKER_JWT_KEY": "key"})
    with pytest.raises(ConfigError, match="it is not a URL of the web"):
        load({}, {"MOORED_BROKER_JWKS_URL": "file:///keys"})
    config = load({}, {"MOORED_BROKER_JWT_ALGORITHM": "es256"})
    assert config.broker_jwt_algorithm == "ES256"
    symmetric = {**environ, "MOORED_BROKER_JWT_ALGORITHM": "HS256"}
    done = moored("serve", "--port", "0", cwd=None, **symmetric)
    assert "the broker cannot start: Jwt: keys that can be read at a URL cannot" in done.stderr
    environ["MOORED_BROKER_KEYS"] = str(tmp_path / "missing")
    done = moored("serve", "--port", "0", cwd=None, **environ)
    assert done.returncode == 2
    assert "the broker cannot start" in done.stderr
    assert "No such file" in done.stderr
