"""The translation of Redis errors, and mistakes in URLs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from redis import exceptions as theirs
from redis.asyncio import Redis
from tests.leases.conformance import request
from tests.leases.on_redis.support import Start, prefix_of, refusal

from moored.kernel import Clock
from moored.leases import LeaseError, StoreMisconfigured, StoreUnavailable
from moored.leases._redis._errors import translate
from moored.leases.redis import RedisStore
from moored.leases.redis import open_store as open_redis


async def test_a_refused_connection_raises_store_unavailable(unused_port: int) -> None:
    error = await refusal(f"redis://127.0.0.1:{unused_port}")
    assert isinstance(error, StoreUnavailable)
    assert f"127.0.0.1:{unused_port}" in str(error)


async def test_wrong_credentials_raise_store_misconfigured(start_redis: Start) -> None:
    server = start_redis("--requirepass", "secret")
    place = f"127.0.0.1:{server.port}"
    for url in (f"redis://{place}", f"redis://:wrong@{place}", f"redis://nobody:wrong@{place}"):
        error = await refusal(url)
        assert isinstance(error, StoreMisconfigured), url
        assert "password" in str(error)
        assert "wrong@" not in str(error)
    right = open_redis(f"redis://:secret@{place}", clock=Clock.current())
    assert await right.acquire(request()) is not None
    assert "secret" not in repr(right)
    await right.close()


def rights() -> list[str]:
    """What the how-to says that a user needs, with the prefix that is the default."""
    page = Path(__file__).parents[3] / "docs" / "howto" / "leases-redis.md"
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("ACL SETUSER")]
    return line.replace("PASSWORD", "pw").replace("shop:", "moored:").split()


async def test_the_permissions_in_the_docs_are_sufficient(start_redis: Start) -> None:
    server = start_redis()
    server.run(*rights())
    store = open_redis(f"redis://app:pw@127.0.0.1:{server.port}", clock=Clock.current())
    await store.open()
    wanted = request()
    assert await store.acquire(wanted) is not None
    assert list(await store.renew([wanted])) == [True]
    assert len(await store.held()) == 1
    assert (await store.take("connects", rate=1.0, burst=1, tokens=1)).granted == 1
    assert list(await store.release([wanted])) == [True]
    await store.close()


async def test_missing_permissions_are_reported(start_redis: Start) -> None:
    server = start_redis()
    server.run("ACL", "SETUSER", "app", "on", ">pw", "~other:*", "+@all")
    error = await refusal(f"redis://app:pw@127.0.0.1:{server.port}")
    assert isinstance(error, StoreMisconfigured)
    assert "how-to" in str(error)


async def test_info_is_optional(start_redis: Start) -> None:
    server = start_redis()
    server.run(*(right for right in rights() if right != "+info"))
    store = open_redis(f"redis://app:pw@127.0.0.1:{server.port}", clock=Clock.current())
    assert await store.acquire(request()) is not None
    await store.close()


async def test_a_redis_key_of_another_type_is_misconfigured(
    store: RedisStore, client: Redis
) -> None:
    await client.set(f"{prefix_of(store)}:{{db}}:live", "not a set")
    with pytest.raises(StoreMisconfigured, match="prefix="):
        await store.acquire(request("db"))


async def test_connections_are_replaced_after_a_failover(start_redis: Start) -> None:
    first, second = start_redis(), start_redis()
    store = open_redis(second.url, clock=Clock.current())
    await store.acquire(request("db", limit=5))
    second.run("REPLICAOF", "127.0.0.1", first.port)
    with pytest.raises(StoreUnavailable, match="READONLY"):
        await store.acquire(request("db", limit=5))
    second.run("REPLICAOF", "NO", "ONE")
    assert await store.acquire(request("db", limit=5)) is not None
    await store.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (theirs.BusyLoadingError("Redis is loading the dataset in memory"), StoreUnavailable),
        (theirs.TimeoutError("Timeout reading from socket"), StoreUnavailable),
        (theirs.ConnectionError("max number of clients reached"), StoreUnavailable),
        (theirs.ResponseError("MISCONF Redis is configured to save RDB"), StoreUnavailable),
        (theirs.ResponseError("NOREPLICAS Not enough good replicas"), StoreUnavailable),
        (theirs.ResponseError("BUSY Redis is busy running a script"), StoreUnavailable),
        (theirs.OutOfMemoryError("command not allowed when used memory"), StoreUnavailable),
        (theirs.ResponseError("Error running script: -READONLY You can't"), StoreUnavailable),
        (theirs.ClusterDownError("CLUSTERDOWN The cluster is down"), StoreUnavailable),
        (theirs.MovedError("3999 127.0.0.1:6381"), StoreMisconfigured),
        (theirs.ResponseError("unknown command 'EVALSHA'"), StoreMisconfigured),
        (theirs.ClusterCrossSlotError("Keys in request don't hash"), StoreMisconfigured),
        (OSError("no route to host"), StoreUnavailable),
    ],
)
def test_driver_errors_are_translated(error: Exception, kind: type[LeaseError]) -> None:
    assert type(translate(error, "cache:6379")) is kind


@pytest.mark.parametrize(
    ("options", "risky"),
    [
        (("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"), True),
        (("--maxmemory", "100mb", "--maxmemory-policy", "noeviction"), False),
        (("--maxmemory-policy", "allkeys-lru"), False),
    ],
)
async def test_an_evicting_server_is_reported(
    start_redis: Start, caplog: pytest.LogCaptureFixture, options: tuple[str, ...], risky: bool
) -> None:
    store = open_redis(start_redis(*options).url, clock=Clock.current())
    with caplog.at_level(logging.WARNING, logger="moored.leases"):
        await store.open()
        await store.acquire(request())
    await store.close()
    assert caplog.text.count("noeviction") == int(risky)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://cache?prefx=a", "did you mean 'prefix'"),
        ("redis://cache?timeout=soon&connections=0", "timeout='soon'"),
        ("redis://cache?timeout=soon&connections=0", "connections='0'"),
        ("redis://cache?prefix={a}", "braces"),
        ("redis://cache/main", "must be a number"),
        ("redis://cache?ssl_ca_certs=ca.pem", "rediss://"),
        ("redis://cache?cluster=maybe", "yes or no"),
        ("redis://cache/1?cluster=yes", "database 0"),
        ("unix://?db=1", "socket"),
    ],
)
def test_one_error_lists_the_mistakes_in_a_url(url: str, words: str) -> None:
    with pytest.raises(StoreMisconfigured) as caught:
        open_redis(url, clock=Clock.system())
    assert words in str(caught.value)


def test_the_url_is_shown_without_its_secrets() -> None:
    store = open_redis("redis://app:hidden@cache:6380/2?prefix=shop", clock=Clock.system())
    assert repr(store) == "<RedisStore cache:6380, prefix shop>"
    assert "hidden" not in repr(store._link.config)
