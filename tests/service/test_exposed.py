"""What an unauthorised client can do to a running service, and which secrets it exposes."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from tests.http_client import ONE_REQUEST
from tests.service.support import LIMIT, Running, moored, running, until

from moored.embedded import SyncEmbeddedPostgres
from moored.service._connections import BACKLOG
from moored.testing import scaled

#: What a client may have sent when it falls silent.
HALVES = (b"", b"GET /v1/health HT", b"POST /login HTTP/1.1\r\n")


def test_a_flood_of_silent_connections_does_not_lock_out_clients(postgres_url: str) -> None:
    with (
        running("--database-url", postgres_url, descriptors=256) as service,
        ExitStack() as flood,
    ):
        service.wait_active()
        before = len(service.lines)
        place = urlsplit(service.url)
        assert place.port is not None
        for _ in range(scaled(4, least=2)):
            # The service finds them all at once, as many as its backlog holds.
            service.process.send_signal(signal.SIGSTOP)
            try:
                for n in range(BACKLOG):
                    one = socket.create_connection((place.hostname, place.port), LIMIT)
                    flood.enter_context(one).sendall(HALVES[n % len(HALVES)])
            finally:
                service.process.send_signal(signal.SIGCONT)
            # On a busy machine it was stopped for so long that it must connect to PostgreSQL again.
            service.wait_active()
        assert _refused(service) > BACKLOG
        # A line or two for all of them, not one for each.
        assert len(service.lines) - before < 20, service.lines[before:]
        assert service.stop() == 0


def _refused(service: Running) -> float:
    start = 'moored_http_closed_total{reason="refused"} '
    lines = service.get("/metrics").text.splitlines()
    return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))


def test_the_password_of_the_database_is_exposed_nowhere(tmp_path: Path) -> None:
    with (
        SyncEmbeddedPostgres(tmp_path / "data") as server,
        running("--log-level", "debug", environ={"DATABASE_URL": server.url}) as service,
    ):
        password = urlsplit(server.url).password
        assert password
        service.wait_active()
        answers = _all_answers(service)
        # Errors of a connection tell most about it.
        server.stop()
        until(lambda: service.health()[0] == 202, "the loss is noticed")
        answers |= {f"{path}, in the outage": text for path, text in _all_answers(service).items()}
        assert service.stop() == 0
    assert [path for path, text in answers.items() if password in text] == []
    assert [line for line in service.lines if password in line] == []


def _all_answers(service: Running) -> dict[str, str]:
    """Return the responses of all routes."""
    with httpx.Client(
        base_url=service.url,
        timeout=LIMIT,
        limits=ONE_REQUEST,
        trust_env=False,
        verify=False,
        follow_redirects=True,
    ) as client:
        assert client.get(service.link).is_success  # a session, as a browser has it
        components = client.get("/v1/explain/nothing").json()["known"]
        assert "moored/postgres" in components
        paths = ("/", "/v1/status", "/metrics")
        answers = {path: client.get(path).raise_for_status().text for path in paths}
        for path in components:  # in an outage, some end before they are explained
            answer = client.get(f"/v1/explain/{path}")
            assert answer.status_code in (200, 404)
            answers[path] = answer.text
        with client.stream("GET", "/v1/events") as stream:
            first = next(line for line in stream.iter_lines() if line.startswith("data:"))
    return {**answers, "/v1/events": first}


def test_a_wrong_password_is_not_exposed_either(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    url = parts._replace(netloc=f"postgres:wr0ngW0rd@{parts.hostname}:{parts.port}").geturl()
    ended = moored("serve", "--log-level", "debug", "--port", "0", DATABASE_URL=url)
    assert ended.returncode == 2
    assert "password authentication failed" in ended.stderr
    assert "wr0ngW0rd" not in ended.stdout + ended.stderr
