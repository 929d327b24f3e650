"""Encrypted connections: the modes of libpq, certificates, and the errors.

On an installed PostgreSQL: the embedded one is built without TLS.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import require_server
from tests.soaking import some_of

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import ConfigurationError, Postgres
from moored.postgres.report._health import Health
from moored.testing import scaled

from .certificates import Authority, Certificate
from .conftest import Sql
from .names import by_name
from .server import LIMIT, following, ids, one, published, quicken, until, walsender

Make = Callable[..., Postgres]
soak = pytest.mark.soak


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"):
        monkeypatch.delenv(name, raising=False)


# -- a server with TLS ---------------------------------------------------------------------------


class Trust:
    """The trusted authority, and another one."""

    def __init__(self, openssl: str, directory: Path) -> None:
        self.ours = Authority(openssl, directory, "ours")
        self.theirs = Authority(openssl, directory, "theirs")
        self.missing = directory / "missing.crt"

    def root(self, name: str) -> Path:
        return {"ours": self.ours.root, "theirs": self.theirs.root}.get(name, self.missing)


class TlsServer:
    """What can be changed about a running server's TLS."""

    def __init__(self, url: str) -> None:
        self._conn = psycopg.connect(url, autocommit=True)
        self.directory = Path(str(self._ask("show data_directory")))
        self._hba = self.directory / "pg_hba.conf"
        self._before = self._hba.read_text()

    def identify(self, certificate: Certificate) -> None:
        """The certificate that it shows."""
        certificate.give(self.directory, "server")

    def trust(self, root: Path) -> None:
        """Whom it trusts to sign the certificates of clients."""
        Certificate(root, root).give(self.directory, "root")

    def admit(self, *lines: str) -> None:
        """Whom it lets in, and how; without lines, as in the beginning."""
        self._hba.write_text("".join(f"{line}\n" for line in lines) or self._before)
        self.reload()

    def switch(self, ssl: str) -> None:
        """TLS on or off."""
        self._conn.execute(f"alter system set ssl = {ssl}".encode())
        self.reload()

    def reload(self) -> None:
        """Reload the configuration; return when it applies to new connections."""
        before = self._ask("select pg_conf_load_time()")
        self._conn.execute("select pg_reload_conf()")
        ends = time.monotonic() + LIMIT
        while self._ask("select pg_conf_load_time()") == before:
            assert time.monotonic() < ends
            time.sleep(0.01)

    def close(self) -> None:
        self._conn.close()

    def _ask(self, query: str) -> Any:
        row = self._conn.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    return Trust(require_server("openssl"), tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[SyncEmbeddedPostgres]:
    """In the place of the embedded one."""
    with SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent) as server:
        yield server


@pytest.fixture(scope="module")
def running(postgres: SyncEmbeddedPostgres, trust: Trust) -> Iterator[TlsServer]:
    server = TlsServer(postgres.url)
    server.identify(trust.ours.sign("server", "localhost"))
    server.trust(trust.ours.root)
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        conn.execute("alter system set ssl_ca_file = 'root.crt'")
    server.switch("on")
    yield server
    server.close()


@pytest.fixture
def tls(running: TlsServer, streamed_url: str) -> Iterator[TlsServer]:
    """A server with TLS; what was changed is changed back before the database is dropped."""
    yield running
    running.admit()
    running.switch("on")


@pytest.fixture
def url(streamed_url: str) -> str:
    """By the name that stands in the certificate."""
    return by_name(streamed_url, "localhost")


@pytest.fixture
def make(stream_id: str, tmp_path: Path) -> Make:
    def made(url: str, **options: Any) -> Postgres:
        known = {"stream_id": stream_id, "state_dir": tmp_path, "pool_size": 2}
        return Postgres(url, application_name=stream_id, **{**known, **options})

    return made


ENCRYPTED = """
select array_agg(s.ssl) from pg_stat_ssl s join pg_stat_activity a using (pid)
where a.application_name = %s
"""


async def streams(pg: Postgres, sql: Sql, url: str, *, encrypted: bool) -> None:
    """See that changes come, and that all connections, of the stream and the pools, are alike."""
    changes = pg.changes(tables=["orders"])
    await published(url, pg.settings.stream_id)
    await until(lambda: walsender(sql, pg))
    async with pg.connection() as conn:
        await conn.execute("insert into orders values (1, 'x')")
    assert ids(await following(changes)) == [1]
    assert await one(sql, ENCRYPTED, pg.settings.application_name) == [encrypted] * 3


async def refused(pg: Postgres) -> str:
    """Return the text of the fatal error."""
    async with pg:
        with pytest.raises(ConfigurationError) as caught:
            await pg.wait_until_active(LIMIT)
        assert pg.health is Health.FAILED
        assert [event.name for event in pg.last_events].count("config_error") == 1
        return str(caught.value)


# -- the modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "encrypted"),
    [
        ("", True),
        ("?sslmode=disable", False),
        pytest.param("?sslmode=allow", False, marks=soak),
        pytest.param("?sslmode=prefer", True, marks=soak),
        pytest.param("?sslmode=require", True, marks=soak),
        ("?sslmode=require&sslrootcert={ours}", True),
        pytest.param("?sslmode=verify-ca&sslrootcert={ours}", True, marks=soak),
        ("?sslmode=verify-full&sslrootcert={ours}", True),
    ],
)
async def test_each_sslmode_connects(
    make: Make, sql: Sql, url: str, tls: TlsServer, trust: Trust, mode: str, encrypted: bool
) -> None:
    async with make(url + mode.format(ours=trust.ours.root)) as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=encrypted)


async def test_verify_ca_ignores_the_host_name(
    make: Make, sql: Sql, streamed_url: str, tls: TlsServer, trust: Trust
) -> None:
    async with make(f"{streamed_url}?sslmode=verify-ca&sslrootcert={trust.ours.root}") as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, streamed_url, encrypted=True)


async def test_sslmode_of_the_environment_applies(
    make: Make, sql: Sql, url: str, tls: TlsServer, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls.admit("hostssl all all all scram-sha-256")
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    monkeypatch.setenv("PGSSLROOTCERT", str(trust.theirs.root))
    assert "certificate cannot be verified" in await refused(make(url))
    monkeypatch.setenv("PGSSLROOTCERT", str(trust.ours.root))
    async with make(url) as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=True)
    # The fixtures know the server by another name.
    monkeypatch.undo()


# -- a certificate that is not trusted -----------------------------------------------------------

CHECK = "check sslrootcert, and that the certificate is for the host name in the URL"


@pytest.mark.parametrize(
    ("mode", "root", "said"),
    [
        ("require", "theirs", "certificate verify failed"),
        pytest.param("verify-ca", "theirs", "certificate verify failed", marks=soak),
        ("verify-full", "theirs", "certificate verify failed"),
        ("verify-ca", "missing", "missing.crt"),
        pytest.param("verify-full", "missing", "missing.crt", marks=soak),
    ],
)
async def test_an_untrusted_certificate_is_fatal(
    make: Make, url: str, sql: Sql, tls: TlsServer, trust: Trust, mode: str, root: str, said: str
) -> None:
    text = await refused(make(f"{url}?sslmode={mode}&sslrootcert={trust.root(root)}"))
    assert said in text
    assert CHECK in text


async def test_a_certificate_for_another_name_is_fatal(
    make: Make, streamed_url: str, sql: Sql, tls: TlsServer, trust: Trust
) -> None:
    text = await refused(make(f"{streamed_url}?sslmode=verify-full&sslrootcert={trust.ours.root}"))
    assert 'does not match host name "127.0.0.1"' in text
    assert CHECK in text


async def test_an_untrusted_certificate_of_the_pool_is_fatal(
    make: Make, url: str, sql: Sql, tls: TlsServer, trust: Trust
) -> None:
    untrusted = f"{url}?sslmode=verify-full&sslrootcert={trust.theirs.root}"
    text = await refused(make(untrusted, replication_url=url))
    assert CHECK in text


# -- a server that wants none, or nothing else ---------------------------------------------------


@pytest.mark.parametrize("mode", some_of(["require", "verify-full"], "require"))
async def test_a_server_without_tls_is_fatal_if_tls_is_required(
    make: Make, url: str, sql: Sql, tls: TlsServer, trust: Trust, mode: str
) -> None:
    tls.switch("off")
    text = await refused(make(f"{url}?sslmode={mode}&sslrootcert={trust.ours.root}"))
    assert "the server does not support TLS" in text
    assert "set sslmode=disable or sslmode=prefer in the URL, or enable ssl on the server" in text


@pytest.mark.parametrize(
    "mode", ["", *(pytest.param(f"?sslmode={each}", marks=soak) for each in ("allow", "prefer"))]
)
async def test_a_server_without_tls_is_accepted_if_tls_is_preferred(
    make: Make, url: str, sql: Sql, tls: TlsServer, mode: str
) -> None:
    tls.switch("off")
    async with make(url + mode) as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=False)


async def test_sslmode_disable_is_fatal_if_the_server_requires_tls(
    make: Make, url: str, sql: Sql, tls: TlsServer
) -> None:
    tls.admit("hostssl all all all scram-sha-256")
    text = await refused(make(f"{url}?sslmode=disable"))
    assert "the server accepts only encrypted connections" in text
    assert "set sslmode=require in the URL" in text


@pytest.mark.parametrize(
    "mode",
    [
        "",
        *(pytest.param(f"?sslmode={each}", marks=soak) for each in ("allow", "prefer", "require")),
    ],
)
async def test_a_server_that_requires_tls_is_reached_by_default(
    make: Make, url: str, sql: Sql, tls: TlsServer, mode: str
) -> None:
    tls.admit("hostssl all all all scram-sha-256")
    async with make(url + mode) as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=True)


async def test_sslmode_require_is_fatal_if_the_server_rejects_tls(
    make: Make, url: str, sql: Sql, tls: TlsServer
) -> None:
    tls.admit("hostnossl all all all scram-sha-256")
    text = await refused(make(f"{url}?sslmode=require"))
    assert "SSL encryption" in text
    assert "check pg_hba.conf" in text
    async with make(f"{url}?sslmode=prefer") as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=False)


# -- certificates of clients ---------------------------------------------------------------------


@pytest.fixture
def shown(url: str, trust: Trust) -> Callable[[Certificate], str]:
    """The URL with a certificate of a client."""

    def with_certificate(certificate: Certificate) -> str:
        return f"{url}?sslmode=require&sslcert={certificate.certificate}&sslkey={certificate.key}"

    return with_certificate


async def test_a_client_certificate_instead_of_a_password(
    make: Make, sql: Sql, tls: TlsServer, trust: Trust, shown: Callable[[Certificate], str]
) -> None:
    tls.admit("hostssl all all all cert")
    url = shown(trust.ours.sign("postgres"))
    async with make(url) as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=True)


@pytest.mark.parametrize("mode", ["require", "prefer"])
async def test_a_missing_client_certificate_is_fatal(
    make: Make, url: str, sql: Sql, tls: TlsServer, mode: str
) -> None:
    tls.admit("hostssl all all all scram-sha-256 clientcert=verify-ca")
    text = await refused(make(f"{url}?sslmode={mode}"))
    assert "the server requires a client certificate that it trusts" in text
    assert "set sslcert and sslkey in the URL" in text


async def test_an_untrusted_client_certificate_is_fatal(
    make: Make, sql: Sql, tls: TlsServer, trust: Trust, shown: Callable[[Certificate], str]
) -> None:
    tls.admit("hostssl all all all cert")
    text = await refused(make(shown(trust.theirs.sign("postgres"))))
    assert "a client certificate that it trusts" in text


async def test_a_missing_or_world_readable_key_is_fatal(
    make: Make, sql: Sql, tls: TlsServer, trust: Trust, shown: Callable[[Certificate], str]
) -> None:
    signed = trust.ours.sign("open")
    signed.key.chmod(0o644)
    assert "only this user may have permission to read the key" in await refused(
        make(shown(signed))
    )
    signed.key.unlink()
    assert "set sslcert and sslkey in the URL" in await refused(make(shown(signed)))


# -- while it runs -------------------------------------------------------------------------------


async def test_the_stream_survives_a_renewed_certificate(
    make: Make, sql: Sql, url: str, tls: TlsServer, trust: Trust
) -> None:
    async with make(f"{url}?sslmode=verify-full&sslrootcert={trust.ours.root}") as pg:
        await pg.wait_until_active(LIMIT)
        await streams(pg, sql, url, encrypted=True)
        tls.identify(trust.ours.sign("server", "localhost"))
        tls.reload()
        changes = pg.changes("other", tables=["orders"])
        before = await walsender(sql, pg)
        await sql.execute("select pg_terminate_backend(%s)", (before,))
        await sql.execute("insert into orders values (2, 'x')")
        assert ids(await following(changes))[-1] == 2
        assert await walsender(sql, pg) != before


async def test_no_message_stays_in_the_tls_layer(
    make: Make, sql: Sql, url: str, tls: TlsServer
) -> None:
    """Decrypted data that was not read yet does not make the socket readable."""
    sizes = random.Random(7)
    async with make(f"{url}?sslmode=require") as pg:
        changes = pg.changes(tables=["orders"])
        await published(url, pg.settings.stream_id)
        await until(lambda: walsender(sql, pg))
        for number in range(scaled(1000, least=50)):
            size = sizes.choice((100, 5_000, 8_000, 16_000, 30_000, 70_000, 200_000))
            text = f"repeat('x', {sizes.randrange(size)})"
            await sql.execute(f"insert into orders values ({number}, {text})".encode())
            # Less than until the server is asked for a sign of life, which would bring it along.
            txn = await following(changes, 3.0)
            assert ids(txn) == [number]
            await txn.ack()
