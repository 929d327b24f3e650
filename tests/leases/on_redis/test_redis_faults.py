"""The Redis store with a killed or silent server, over a Unix socket and over TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.leases.conformance import request
from tests.leases.on_redis.support import PATIENCE, Start, refusal
from tests.leases.redis_server import RedisServer
from tests.leases.scale import thorough

from moored.kernel import Clock
from moored.leases import StoreMisconfigured, StoreUnavailable
from moored.leases.redis import RedisStore
from moored.leases.redis import open_store as open_redis
from moored.testing.proxy import FaultProxy

pytestmark = pytest.mark.every_loop


@pytest.mark.parametrize("fault", thorough(["black_hole"], ["stall", "black_hole"]))
async def test_a_silent_server_raises_within_the_timeout(
    far_store: RedisStore, proxy: FaultProxy, fault: str
) -> None:
    getattr(proxy, fault)()
    begin = time.monotonic()
    # More calls than connections: those that wait for one are not kept longer than the others.
    calls = [far_store.acquire(request(limit=99)) for _ in range(10)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 10
    assert time.monotonic() - begin < 3 * PATIENCE
    proxy.heal()
    assert await far_store.acquire(request(limit=99)) is not None


async def test_a_connection_reset_is_reported_at_once(
    far_store: RedisStore, proxy: FaultProxy
) -> None:
    proxy.stall()
    call = asyncio.ensure_future(far_store.acquire(request()))
    await asyncio.sleep(0.05)
    proxy.reset()
    with pytest.raises(StoreUnavailable):
        await call
    proxy.heal()
    assert await far_store.acquire(request(limit=2)) is not None


async def test_a_late_response_is_not_taken_for_another(
    far_store: RedisStore, proxy: FaultProxy
) -> None:
    first = request("db/a", limit=5)
    proxy.latency(0.2)
    calls = [asyncio.ensure_future(far_store.acquire(first)) for _ in range(8)]
    await asyncio.sleep(0.3)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    proxy.latency(0.0)
    for n in range(8):
        wanted = request(f"db/{n}")
        grant = await far_store.acquire(wanted)
        assert grant is not None
        assert grant.id == wanted.id
        assert [held.id for held in await far_store.held(f"db/{n}")] == [wanted.id]


async def test_leases_survive_a_sigkill_of_the_server(start_redis: Start) -> None:
    server = start_redis()
    store = open_redis(server.url, clock=Clock.current())
    wanted = request("db")
    grant = await store.acquire(wanted)
    await asyncio.to_thread(server.kill)
    with pytest.raises(StoreUnavailable):
        await store.acquire(request("db"))
    await asyncio.to_thread(server.start)
    assert await store.acquire(request("db")) is None
    assert list(await store.renew([wanted])) == [True]
    await store.release([wanted])
    again = await store.acquire(request("db"))
    assert grant is not None
    assert again is not None
    assert again.fence > grant.fence
    await store.close()


async def test_without_persistence_leases_are_lost_and_fences_still_grow(
    start_redis: Start,
) -> None:
    server = start_redis("--appendonly", "no")
    store = open_redis(server.url, clock=Clock.current())
    grant = await store.acquire(request("db"))
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    again = await store.acquire(request("db"))
    assert grant is not None
    assert again is not None
    assert again.fence > grant.fence
    await store.close()


async def test_an_idle_connection_that_ended_is_replaced_without_an_error(
    start_redis: Start,
) -> None:
    server = start_redis()
    store = open_redis(server.url, clock=Clock.current())
    await store.acquire(request("db"))
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    assert len(await store.held("db")) == 1
    await store.close()


async def test_a_unix_socket_works(redis_server: RedisServer) -> None:
    # A prefix for each run: the server keeps the leases of the run on the other event loop.
    url = f"unix://{redis_server.socket}?prefix=socket-{time.monotonic_ns()}&db=1"
    store = open_redis(url, clock=Clock.current())
    assert await store.acquire(request()) is not None
    assert len(await store.held()) == 1
    assert redis_server.run("DBSIZE") is not None
    await store.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key, and a certificate that it signed itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    key, cert = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return key, cert


async def test_tls_works(
    start_redis: Start, certificate: tuple[Path, Path], unused_port: int
) -> None:
    key, cert = certificate
    start_redis(
        *("--tls-port", str(unused_port), "--tls-key-file", str(key)),
        *("--tls-cert-file", str(cert), "--tls-auth-clients", "no"),
    )
    url = f"rediss://127.0.0.1:{unused_port}"
    store = open_redis(f"{url}?ssl_ca_certs={cert}", clock=Clock.current())
    assert await store.acquire(request()) is not None
    await store.close()
    error = await refusal(url)
    assert isinstance(error, StoreMisconfigured)
    assert "ssl_ca_certs" in str(error)
