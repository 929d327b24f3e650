"""Topology sources: a real HTTP server with its failures, a list, DNS, a function."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rpc.topology_server import Conversation, TopologyServer, body_of

from moored.kernel import LoopThread, Recorder
from moored.rpc._errors import ConfigError, TopologyError
from moored.rpc.milvus._config import MilvusConfig
from moored.rpc.topology._refresher import Refresher
from moored.rpc.topology._sources import (
    CallableTopology,
    DnsTopology,
    HttpTopology,
    StaticTopology,
    TopologySource,
)
from moored.rpc.topology._topology import Capability, Member, Topology, address_of
from moored.testing import Sim, simulate

SECRET = "s3cr3t"
PATH = "/directory/topology"
GOOD = body_of(7, ("in01", "https://in01.example.com", 1), ("in02", "https://in02.example.com", 3))

Fetch = Callable[..., Topology]


@pytest.fixture
def server() -> Iterator[TopologyServer]:
    """A server with a valid topology."""
    with TopologyServer(GOOD) as started:
        yield started


def ask(source: TopologySource) -> Topology:
    return asyncio.run(source.fetch())


@pytest.fixture
def fetch() -> Fetch:
    """Fetch from a source, on its own loop."""
    return ask


class Pauses:
    """Records pauses without waiting for them."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.taken.append(seconds)


def without_pauses(uri: str, token: str = "", **options: Any) -> tuple[HttpTopology, list[float]]:
    """Return a source that does not wait, and the list of its pauses."""
    pauses = Pauses()
    source = HttpTopology(uri, token, sleep=pauses.sleep, **options)
    return source, pauses.taken


# -- HTTP ------------------------------------------------------------------------------------------


def test_request_has_the_path_and_the_token(server: TopologyServer, fetch: Fetch) -> None:
    found = fetch(HttpTopology(f"{server.url}{PATH}", SECRET))
    assert found.version == 7
    assert found.primary == Member("in02", "https://in02.example.com", 3)
    [(path, headers)] = server.requests
    assert path == PATH
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert headers["Host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("tail", ["", "/", "//"])
def test_path_of_the_uri_is_requested(server: TopologyServer, tail: str) -> None:
    ask(HttpTopology(f"{server.url}/some/path{tail}"))
    ask(HttpTopology(f"{server.url}/p%20q{tail}"))
    ask(HttpTopology(f"{server.url}{tail}"))
    assert [path for path, _ in server.requests] == ["/some/path", "/p%20q", "/"]


def test_no_authorization_is_sent_without_a_token(server: TopologyServer, fetch: Fetch) -> None:
    fetch(HttpTopology(f"http://user:{SECRET}@127.0.0.1:{server.port}"))
    [(_, headers)] = server.requests
    assert "Authorization" not in headers
    assert SECRET not in str(headers)


def test_non_ascii_token_is_sent_as_utf8(server: TopologyServer) -> None:
    ask(HttpTopology(server.url, "käse:€"))
    sent = server.requests[0][1]["Authorization"]
    assert sent.encode("latin-1").decode() == "Bearer käse:€"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("g.example.com", "https://g.example.com"),
        ("g.example.com:8443", "https://g.example.com:8443"),
        ("http://g.example.com", "http://g.example.com"),
        ("tcp://g.example.com:80", "http://g.example.com"),
        ("https://u:p@[::1]:1/x/", "https://[::1]:1/x"),
    ],
)
def test_uri_decides_the_address_of_the_request(uri: str, shown: str) -> None:
    assert repr(HttpTopology(uri, SECRET)) == f"<HttpTopology {shown}>"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "unix:///run/a.sock",
        "ftp://host",
        f"http://u:{SECRET}@host:port",
        "http://",
        "http://[x]",
    ],
)
def test_invalid_uri_is_refused_without_showing_the_password(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpTopology(uri)
    assert SECRET not in str(caught.value)


def test_token_with_control_characters_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="control character") as caught:
        HttpTopology("http://host", f"{SECRET}\r\nX: y")
    assert SECRET not in str(caught.value)


# -- HTTP failures ------------------------------------------------------------


@pytest.mark.parametrize("number", [404, 429, 500, 503])
def test_failed_request_is_retried(server: TopologyServer, fetch: Fetch, number: int) -> None:
    server.script.extend([server.status(number)] * 2)
    source, pauses = without_pauses(server.url)
    assert fetch(source).version == 7
    assert len(server.requests) == 3
    first, second = pauses
    assert 0.9 <= first <= 1.1
    assert 1.8 <= second <= 2.2


def test_third_failure_is_raised_with_all_reasons(server: TopologyServer, fetch: Fetch) -> None:
    server.script.extend([server.status(500), server.raw(b"<html>"), server.status(503)])
    source, pauses = without_pauses(server.url)
    with pytest.raises(TopologyError) as caught:
        fetch(source)
    assert "in 3 attempts: HTTP 500; the answer is not JSON; HTTP 503" in str(caught.value)
    assert (len(server.requests), len(pauses)) == (3, 2)


def test_pauses_grow_to_ten_seconds_with_jitter(server: TopologyServer) -> None:
    server.reply = server.status(500)
    source, pauses = without_pauses(server.url, attempts=7)
    with pytest.raises(TopologyError, match="in 7 attempts: HTTP 500"):
        ask(source)
    for pause, base in zip(pauses, [1, 2, 4, 8, 10, 10], strict=True):
        assert base * 0.9 <= pause <= base * 1.1
    assert len({pause / base for pause, base in zip(pauses, [1, 2, 4, 8, 10, 10], strict=True)}) > 1


def test_refusal_is_not_retried(server: TopologyServer, fetch: Fetch) -> None:
    server.body = {"code": 1800, "message": f"who is {SECRET}?"}
    source, pauses = without_pauses(server.url, SECRET)
    with pytest.raises(TopologyError, match=r"who is \*\*\*\? \(code 1800\)") as caught:
        fetch(source)
    assert SECRET not in str(caught.value) + repr(caught.value.__context__)
    assert (len(server.requests), pauses) == (1, [])


@pytest.mark.parametrize("number", [401, 403])
def test_refused_token_is_not_sent_again(server: TopologyServer, fetch: Fetch, number: int) -> None:
    server.reply = server.status(number)
    source, pauses = without_pauses(server.url, SECRET)
    with pytest.raises(TopologyError, match=rf"does not accept the token \(HTTP {number}\)"):
        fetch(source)
    assert (len(server.requests), pauses) == (1, [])


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>not found</html>", b"{", b"\xff\xfe", b"[" * 200_000],
)
def test_invalid_json_is_retried(server: TopologyServer, fetch: Fetch, body: bytes) -> None:
    server.script.append(server.raw(body))
    assert fetch(without_pauses(server.url)[0]).version == 7
    server.reply = server.raw(body)
    with pytest.raises(TopologyError, match="the answer is not JSON"):
        fetch(without_pauses(server.url)[0])


@pytest.mark.parametrize("body", [[], {}, {"code": 0, "data": {"version": "1"}}, None, "x"])
def test_unexpected_json_is_refused_with_the_address(
    server: TopologyServer, fetch: Fetch, body: Any
) -> None:
    server.body = body
    with pytest.raises(TopologyError, match=f"^{server.url}: .* is not understood"):
        fetch(without_pauses(server.url)[0])
    assert len(server.requests) == 1


def test_oversized_answer_is_not_read(server: TopologyServer, fetch: Fetch) -> None:
    def flood(talk: Conversation) -> None:
        talk.send_response(200)
        talk.end_headers()
        while True:
            talk.wfile.write(b" " * 65536)

    server.reply = flood
    with pytest.raises(TopologyError, match="more than 1048576 bytes"):
        fetch(without_pauses(server.url)[0])
    server.wait(lambda: server.ended == 1)


def test_closed_connection_is_retried(server: TopologyServer, fetch: Fetch) -> None:
    server.script.append(lambda talk: talk.connection.shutdown(socket.SHUT_RDWR))
    assert fetch(without_pauses(server.url)[0]).version == 7


def test_truncated_answer_is_retried(server: TopologyServer, fetch: Fetch) -> None:
    def half(talk: Conversation) -> None:
        talk.send_response(200)
        talk.send_header("Content-Length", "1000")
        talk.end_headers()
        talk.wfile.write(b'{"code": 0, "data"')

    server.script.append(half)
    assert fetch(without_pauses(server.url)[0]).version == 7


def test_non_http_answer_is_a_failure(server: TopologyServer, fetch: Fetch) -> None:
    server.reply = lambda talk: talk.connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n") or None
    with pytest.raises(TopologyError, match="BadStatusLine"):
        fetch(without_pauses(server.url)[0])


def test_refused_connection_is_a_failure(fetch: Fetch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(TopologyError, match="ConnectionRefusedError"):
            fetch(without_pauses(f"http://127.0.0.1:{port}")[0])


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid"])
def test_unresolvable_name_is_a_failure(fetch: Fetch, host: str) -> None:
    with pytest.raises(TopologyError, match="could not be fetched from"):
        fetch(without_pauses(f"http://{host}")[0])


def drip(talk: Conversation) -> None:
    """Send an endless header one letter at a time: each read succeeds."""
    talk.send_response(200)
    talk.flush_headers()
    while True:
        talk.wfile.write(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["hang", "drip"])
def test_slow_server_is_abandoned_after_the_timeout(
    server: TopologyServer, fetch: Fetch, kind: str
) -> None:
    server.script.append(drip if kind == "drip" else server.hang)
    begun = time.monotonic()
    assert fetch(without_pauses(server.url, timeout=1.0)[0]).version == 7
    assert 0.9 < time.monotonic() - begun < 10.0
    # The request has ended, not only the wait for it.
    server.wait(lambda: server.ended == 2)


def test_redirect_to_the_same_server_is_followed(server: TopologyServer, fetch: Fetch) -> None:
    server.script.append(server.status(307, Location="/elsewhere?x=y"))
    server.script.append(server.status(302, Location=f"{server.url}/again"))
    assert fetch(without_pauses(server.url, SECRET)[0]).version == 7
    assert [path for path, _ in server.requests] == ["/", "/elsewhere", "/again"]
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for _, headers in server.requests)


def test_redirect_to_another_server_does_not_get_the_token(
    server: TopologyServer, fetch: Fetch
) -> None:
    with TopologyServer(GOOD) as other:
        server.reply = server.status(302, Location=f"{other.url}{PATH}")
        with pytest.raises(TopologyError, match="would leak the token"):
            fetch(without_pauses(server.url, SECRET)[0])
        assert other.requests == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/again", "redirects more than 5 times"),
        ("", "redirects more than 5 times"),
        ("ftp://host/", "to an invalid URL"),
        ("http://[x", "to an invalid URL"),
        (f"http://u:{SECRET}@host:port/", "to an invalid URL"),
        ("https://127.0.0.1/", "would leak the token"),
    ],
)
def test_invalid_or_endless_redirect_is_an_error(
    server: TopologyServer, fetch: Fetch, target: str, said: str
) -> None:
    server.reply = server.status(301, Location=target)
    with pytest.raises(TopologyError, match=said) as caught:
        fetch(without_pauses(server.url)[0])
    assert SECRET not in str(caught.value)


async def test_fetch_does_not_block_the_loop(server: TopologyServer) -> None:
    def slow(talk: Conversation) -> None:
        time.sleep(1.0)
        server.tell(talk)

    server.script.append(slow)
    fetching = asyncio.create_task(HttpTopology(server.url).fetch())
    turns = 0
    while not fetching.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert (await fetching).version == 7
    assert turns > 10, "it took a second, in which the loop did not run"


async def test_cancelled_fetch_ends_its_request(server: TopologyServer) -> None:
    server.reply = server.hang
    fetching = asyncio.create_task(HttpTopology(server.url).fetch())
    await asyncio.to_thread(server.wait, lambda: len(server.requests) == 1)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await asyncio.to_thread(server.wait, lambda: server.ended == 1, 5.0)


def test_loop_can_end_while_a_server_hangs(server: TopologyServer) -> None:
    server.reply = server.hang

    async def leave() -> None:
        fetching = asyncio.create_task(HttpTopology(server.url).fetch())
        await asyncio.to_thread(server.wait, lambda: len(server.requests) == 1)
        assert not fetching.done()

    begun = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - begun < 8.0, "an attempt would take 10 s"
    gc.collect()


def test_finished_fetches_leave_no_threads(server: TopologyServer) -> None:
    source = HttpTopology(server.url)
    ask(source)
    server.wait(lambda: server.ended == 1)
    before = threading.active_count()
    for _ in range(50):
        ask(source)
    server.wait(lambda: server.ended == 51)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


# -- HTTPS -----------------------------------------------------------------------------------------


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


@pytest.fixture
def secure_server(certificate: tuple[Path, Path]) -> Iterator[TopologyServer]:
    """A server with TLS."""
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with TopologyServer(GOOD, context=context) as started:
        yield started


def test_custom_certificate_authority_is_used(
    secure_server: TopologyServer, certificate: tuple[Path, Path], fetch: Fetch
) -> None:
    _, cert = certificate
    for ca in (cert, str(cert), cert.read_bytes(), cert.read_text()):
        # Without a scheme, it is https.
        source = HttpTopology(f"127.0.0.1:{secure_server.port}", SECRET, ca=ca)
        assert fetch(source).version == 7
    config = MilvusConfig.from_uri(f"{secure_server.url}/global-cluster", token=SECRET, ca=cert)
    assert fetch(config.topology_source()).version == 7


def test_unknown_certificate_authority_gets_no_token(
    secure_server: TopologyServer, fetch: Fetch
) -> None:
    with pytest.raises(TopologyError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(without_pauses(secure_server.url, SECRET)[0])
    assert secure_server.requests == []


def test_hung_tls_handshake_is_abandoned(fetch: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source, _ = without_pauses(
            f"https://127.0.0.1:{silent.getsockname()[1]}", attempts=1, timeout=1.0
        )
        begun = time.monotonic()
        with pytest.raises(TopologyError, match="could not be fetched"):
            fetch(source)
        assert time.monotonic() - begun < 10.0


# -- a list ----------------------------------------------------------------------------------------


def test_static_list_is_the_topology(fetch: Fetch) -> None:
    replica = Member("c", "http://c", Capability.READABLE)
    source = StaticTopology(["http://a", "b:5", replica, "b:5"])
    found = fetch(source)
    assert found.version == 1
    assert [address_of(each) for each in found.members] == ["a:80", "b:5", "c:80"]
    assert found.primary.endpoint == "http://a"
    assert fetch(source) is found
    assert repr(source) == "<StaticTopology: 3 members>"


def test_list_of_other_types_is_refused() -> None:
    with pytest.raises(TopologyError, match="must be a Member or a str, not int"):
        StaticTopology([5])  # type: ignore[list-item]


def test_cluster_id_of_a_member_hides_its_account() -> None:
    [found] = ask(StaticTopology([f"http://u:{SECRET}@a"])).members
    assert SECRET not in found.cluster_id


# -- DNS -------------------------------------------------------------------------------------------


def test_dns_name_is_resolved(fetch: Fetch) -> None:
    found = fetch(DnsTopology("localhost", 5))
    assert found.version == 1
    assert {address_of(each) for each in found.members} <= {"127.0.0.1:5", "[::1]:5"}
    assert all(each.server_name == "localhost" for each in found.members)


def test_dns_version_grows_when_the_addresses_change(fetch: Fetch) -> None:
    answers: list[list[str]] = [
        ["10.0.0.2", "10.0.0.1"],
        ["10.0.0.1", "10.0.0.2"],  # another order is not a change
        ["10.0.0.2", "10.0.0.0", "10.0.0.1"],  # known addresses keep their position
        ["10.0.0.2", "10.0.0.0"],
        ["::1"],
    ]
    source = DnsTopology("db", 5, resolve=lambda host, port: answers.pop(0))
    seen = []
    while answers:
        found = fetch(source)
        seen.append((found.version, [each.cluster_id for each in found.members]))
    assert seen == [
        (1, ["10.0.0.1", "10.0.0.2"]),
        (1, ["10.0.0.1", "10.0.0.2"]),
        (2, ["10.0.0.1", "10.0.0.2", "10.0.0.0"]),
        (3, ["10.0.0.2", "10.0.0.0"]),
        (4, ["::1"]),
    ]
    assert repr(source) == "<DnsTopology db:5>"


def test_failed_dns_lookup_is_an_error(fetch: Fetch) -> None:
    with pytest.raises(TopologyError, match=r"name no-such-host\.invalid could not be looked up"):
        fetch(DnsTopology("no-such-host.invalid", 5))
    with pytest.raises(TopologyError, match="could not be looked up: it has no address"):
        fetch(DnsTopology("db", 5, resolve=lambda host, port: []))


def test_silent_name_server_is_abandoned(fetch: Fetch) -> None:
    over = threading.Event()

    def silent(host: str, port: int) -> list[str]:
        over.wait(30)
        return []

    try:
        with pytest.raises(
            TopologyError, match=r"db could not be looked up: no answer within 0\.2"
        ):
            fetch(DnsTopology("db", 5, timeout=0.2, resolve=silent))
    finally:
        over.set()


# -- functions -------------------------------------------------------------------------------------

KNOWN = Topology(9, (Member("a", "http://a"),))


async def topology_async() -> Topology:
    await asyncio.sleep(0)
    return KNOWN


def topology() -> Topology:
    return KNOWN


def test_plain_and_async_functions_are_called(fetch: Fetch) -> None:
    assert fetch(CallableTopology(topology)) is KNOWN
    assert fetch(CallableTopology(topology_async)) is KNOWN
    assert fetch(CallableTopology(lambda: topology_async())) is KNOWN
    assert repr(CallableTopology(topology)) == "<CallableTopology topology>"


def test_function_may_return_a_list_of_addresses(fetch: Fetch) -> None:
    answers: list[Any] = [["http://a", "http://b"], ("http://b", "http://a"), iter(["http://b"])]
    source = CallableTopology(lambda: answers.pop(0))
    versions = [(found := fetch(source)).version for _ in range(3)]
    assert versions == [1, 1, 2]
    assert found.primary.endpoint == "http://b"


@pytest.mark.parametrize(("answer", "kind"), [(None, "NoneType"), ("http://a", "str"), (5, "int")])
def test_function_that_returns_another_type_is_refused(
    fetch: Fetch, answer: Any, kind: str
) -> None:
    with pytest.raises(TopologyError, match=f"must return a Topology.*not {kind}"):
        fetch(CallableTopology(lambda: answer))


def test_exception_of_a_function_is_the_cause(fetch: Fetch) -> None:
    def broken() -> Topology:
        raise RuntimeError("the shelf is empty")

    async def broken_async() -> Topology:
        raise RuntimeError("the shelf is empty")

    def ended() -> Topology:
        return next(iter(()))

    for function in (broken, broken_async):
        with pytest.raises(TopologyError, match="the shelf is empty") as caught:
            fetch(CallableTopology(function))
        assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(TopologyError, match="StopIteration"):
        fetch(CallableTopology(ended))


def test_function_that_never_returns_is_abandoned(fetch: Fetch) -> None:
    over = threading.Event()

    def silent() -> Topology:
        over.wait(30)
        return KNOWN

    async def silent_async() -> Topology:
        await asyncio.sleep(3600)
        return KNOWN

    try:
        for function in (silent, silent_async):
            with pytest.raises(TopologyError, match=r"no answer within 0\.1 s"):
                fetch(CallableTopology(function, timeout=0.1))
    finally:
        over.set()


async def test_blocking_function_does_not_block_the_loop() -> None:
    inside, over = threading.Event(), threading.Event()

    def slow() -> Topology:
        inside.set()
        over.wait(30)
        return KNOWN

    fetching = asyncio.create_task(CallableTopology(slow).fetch())
    assert await asyncio.to_thread(inside.wait, 30)
    over.set()
    assert await fetching is KNOWN


# -- the refresher ------------------------------------------------------------


def run_virtual(scenario: Callable[[Sim], Any]) -> None:
    simulate(scenario, seeds=20, processes=1)


async def ended(refresher: Refresher) -> None:
    await asyncio.wait([refresher.task])
    assert refresher.task.cancelled()


async def stopped(refresher: Refresher) -> None:
    refresher.stop()
    await ended(refresher)


def test_refresher_runs_about_every_five_minutes() -> None:
    async def scenario(sim: Sim) -> None:
        times: list[float] = []

        async def refresh() -> None:
            times.append(sim.now)

        refresher = Refresher(refresh)
        await asyncio.sleep(3500)
        await stopped(refresher)
        gaps = [late - early for early, late in zip([0.0, *times], times, strict=False)]
        assert all(270 <= gap <= 330 for gap in gaps)
        assert 10 <= len(times) <= 13
        assert len(set(gaps)) == len(gaps), "a fleet must not query at the same time"

    run_virtual(scenario)


def test_triggers_are_combined_and_spaced() -> None:
    async def scenario(sim: Sim) -> None:
        times: list[float] = []

        async def refresh() -> None:
            times.append(sim.now)
            await asyncio.sleep(0.25)

        refresher = Refresher(refresh, pause=1.0)
        await asyncio.sleep(10)
        for _ in range(100):
            refresher.trigger()
        await asyncio.sleep(0.125)
        # A refresh has begun: a trigger now may mean a change that it has not seen.
        for _ in range(100):
            refresher.trigger()
            await asyncio.sleep(0.001)
        await asyncio.sleep(5)
        assert times == [10, 11]
        await stopped(refresher)

    run_virtual(scenario)


def test_trigger_before_the_start_is_not_lost() -> None:
    async def scenario(sim: Sim) -> None:
        asked = asyncio.Event()

        async def refresh() -> None:
            asked.set()

        refresher = Refresher(refresh)
        refresher.trigger()
        await asked.wait()
        assert sim.now == 0
        await stopped(refresher)

    run_virtual(scenario)


def test_failures_are_recorded_and_do_not_stop_the_refresher() -> None:
    async def scenario(sim: Sim) -> None:
        async def refresh() -> None:
            raise error

        recorder = Recorder()
        refresher = Refresher(refresh, every=10, recorder=recorder, name="rpc.test")
        for error in (TopologyError("no primary"), RuntimeError("a bug"), TimeoutError("slow")):
            await asyncio.sleep(12)
            assert str(error) in recorder.explain("rpc.test/refresh")
        assert not refresher.task.done()
        (child,) = refresher.supervisor.tree().children
        assert (child.state, child.restarts) == ("running", 3)
        assert "slow" in str(child.last_failure)
        await stopped(refresher)

    run_virtual(scenario)


def test_stop_ends_the_refresher_immediately() -> None:
    async def scenario(sim: Sim) -> None:
        under_way = 0

        async def refresh() -> None:
            nonlocal under_way
            under_way += 1
            try:
                await asyncio.sleep(10)
            finally:
                under_way -= 1

        refresher = Refresher(refresh, every=5)
        await asyncio.sleep(sim.random(0, 100))
        stopped_at = sim.now
        refresher.trigger()
        await stopped(refresher)
        assert (sim.now, under_way) == (stopped_at, 0)
        refresher.trigger()  # no effect after stop()
        refresher.stop()

    run_virtual(scenario)


def test_refresher_stopped_before_its_first_step_does_not_refresh() -> None:
    async def scenario(sim: Sim) -> None:
        async def refresh() -> None:
            raise AssertionError("nobody wants it")

        await stopped(Refresher(refresh))
        assert sim.now == 0

    run_virtual(scenario)


def test_refresher_on_a_loop_thread_can_be_triggered_and_stopped_from_any_thread() -> None:
    asked = threading.Semaphore(0)

    async def refresh() -> None:
        asked.release()

    async def start() -> Refresher:
        return Refresher(refresh, pause=0.0)

    with LoopThread("test-refresher") as loop:
        refresher = loop.run(start())
        for _ in range(5):
            refresher.trigger()
            assert asked.acquire(timeout=10)
        refresher.stop()
        loop.run(asyncio.wait_for(ended(refresher), 10))
    refresher.trigger()
    refresher.stop()
