"""Tokens for AWS, signed offline with made-up credentials."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import botocore.loaders  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]
import pytest
from botocore.credentials import (  # type: ignore[import-untyped]
    DeferredRefreshableCredentials,
    RefreshableCredentials,
)

from moored.kernel import MissingExtra
from moored.reservoir import CachedTokens, Token, TokenError
from moored.reservoir.aws import DsqlTokens, RdsTokens
from moored.testing import scaled

pytestmark = pytest.mark.pure

DSQL = "foo0bar1baz2quux3quuux4.dsql.eu-central-1.on.aws"
RDS = "orders.abc123def456.us-east-1.rds.amazonaws.com"
LOADER = botocore.loaders.create_loader()


class Session(botocore.session.Session):  # type: ignore[misc]
    """A session that counts the clients that are made of it."""

    def __init__(self, credentials: Any = None) -> None:
        super().__init__()
        # What botocore knows of AWS is read from its files once, and not for each test.
        self.register_component("data_loader", LOADER)
        self.clients: list[str] = []
        self._given = credentials

    def get_credentials(self) -> Any:
        return self._given

    def create_client(self, service_name: str, *args: Any, **kwargs: Any) -> Any:
        self.clients.append(service_name)
        return super().create_client(service_name, *args, **kwargs)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own AWS settings, and no question to the metadata service."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def static(access_key: str = "AKIDEXAMPLE", token: str | None = None) -> Session:
    session = botocore.session.Session()
    session.set_credentials(access_key, "secret", token)
    return Session(session.get_credentials())


def refreshable(seconds: float, *, after: float = 36_000.0) -> tuple[Session, list[float]]:
    """A session whose credentials end so soon; those after them have longer to live."""
    refreshes: list[float] = []

    def refresh() -> dict[str, str]:
        refreshes.append(time.time())
        return {
            "access_key": f"ASIA{len(refreshes)}",
            "secret_key": "secret",
            "token": "session",
            "expiry_time": (datetime.now(UTC) + timedelta(seconds=after)).isoformat(),
        }

    credentials = RefreshableCredentials(
        "ASIA0",
        "secret",
        "session",
        datetime.now(UTC) + timedelta(seconds=seconds),
        refresh,
        "sts",
        advisory_timeout=60,
        mandatory_timeout=30,
    )
    return Session(credentials), refreshes


def parts(token: Token) -> tuple[Any, dict[str, str]]:
    """Where a token is for, and what it says."""
    url = urlsplit(f"https://{token.value}")
    return url, {name: values[0] for name, values in parse_qs(url.query).items()}


# -- Aurora DSQL -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "action"),
    [("admin", "DbConnectAdmin"), ("app", "DbConnect"), ("Admin", "DbConnect")],
)
def test_only_admin_gets_a_token_for_administrators(user: str, action: str) -> None:
    url, said = parts(DsqlTokens(DSQL, user=user, session=static())())
    assert (url.hostname, url.port, url.path) == (DSQL, None, "/")
    assert said["Action"] == action
    assert said["X-Amz-Expires"] == "900"
    assert said["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
    assert said["X-Amz-SignedHeaders"] == "host"
    today = said["X-Amz-Date"][:8]
    assert said["X-Amz-Credential"] == f"AKIDEXAMPLE/{today}/eu-central-1/dsql/aws4_request"
    assert len(said["X-Amz-Signature"]) == 64


def test_the_user_is_admin_if_not_given() -> None:
    tokens = DsqlTokens(DSQL, session=static())
    assert (tokens.user, tokens.lifetime, tokens.region) == ("admin", 900, "eu-central-1")


def test_the_lifetime_is_in_the_token_and_beside_it() -> None:
    before = math.floor(time.time())
    token = DsqlTokens(DSQL, lifetime=3600, session=static())()
    assert parts(token)[1]["X-Amz-Expires"] == "3600"
    assert token.expires_at is not None
    assert before + 3600 <= token.expires_at <= time.time() + 3600


def test_expires_at_is_never_after_the_signed_expiry() -> None:
    tokens = DsqlTokens(DSQL, session=static())
    for _ in range(scaled(5000, least=100)):
        token = tokens()
        date = parts(token)[1]["X-Amz-Date"]
        ends = datetime.strptime(date, "%Y%m%dT%H%M%S%z").timestamp() + 900
        assert token.expires_at is not None
        assert ends - 1 <= token.expires_at <= ends


def test_a_token_of_temporary_credentials_contains_their_session_token() -> None:
    _, said = parts(DsqlTokens(DSQL, session=static("ASIAX", "the-session"))())
    assert said["X-Amz-Security-Token"] == "the-session"
    assert said["X-Amz-Credential"].startswith("ASIAX/")


# -- RDS -------------------------------------------------------------------------------------------


def test_a_token_for_rds_names_host_port_and_user() -> None:
    token = RdsTokens(RDS, user="app", session=static())()
    url, said = parts(token)
    assert (url.hostname, url.port, url.path) == (RDS, 5432, "/")
    assert (said["Action"], said["DBUser"], said["X-Amz-Expires"]) == ("connect", "app", "900")
    today = said["X-Amz-Date"][:8]
    assert said["X-Amz-Credential"] == f"AKIDEXAMPLE/{today}/us-east-1/rds-db/aws4_request"
    assert token.expires_at == pytest.approx(time.time() + 900, abs=5.0)


def test_the_port_is_signed_too() -> None:
    url, _ = parts(RdsTokens(RDS, 6543, user="app", session=static())())
    assert url.port == 6543


# -- the region ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "region"),
    [
        ("abc.dsql.us-east-1.on.aws", "us-east-1"),
        ("abc.dsql-fnh4.ap-northeast-3.on.aws", "ap-northeast-3"),
        ("ABC.DSQL.EU-WEST-2.ON.AWS", "eu-west-2"),
        ("abc.dsql-gamma.us-gov-west-1.on.aws", "us-gov-west-1"),
    ],
)
def test_the_region_of_a_dsql_host(host: str, region: str) -> None:
    tokens = DsqlTokens(host, session=static())
    assert tokens.region == region
    assert f"/{region}/dsql/" in parts(tokens())[1]["X-Amz-Credential"]


@pytest.mark.parametrize(
    ("host", "region"),
    [
        (RDS, "us-east-1"),
        ("orders.cluster-abc.eu-central-1.rds.amazonaws.com", "eu-central-1"),
        ("orders.cluster-ro-abc.us-gov-east-1.rds.amazonaws.com", "us-gov-east-1"),
        ("orders.proxy-abc.sa-east-1.rds.amazonaws.com", "sa-east-1"),
        ("orders.abc.rds.cn-north-1.amazonaws.com.cn", "cn-north-1"),
    ],
)
def test_the_region_of_an_rds_host(host: str, region: str) -> None:
    assert RdsTokens(host, user="app", session=static()).region == region


def test_a_given_region_takes_precedence() -> None:
    tokens = DsqlTokens(DSQL, region="us-west-2", session=static())
    assert "/us-west-2/" in parts(tokens())[1]["X-Amz-Credential"]


def test_the_region_of_the_session_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert RdsTokens("db.example.com", user="app", session=static()).region == "eu-north-1"
    assert RdsTokens(RDS, user="app", session=static()).region == "us-east-1"


def test_a_missing_region_is_an_error_at_construction() -> None:
    for make in (
        lambda: DsqlTokens("db.example.com", session=static()),
        lambda: RdsTokens("db.example.com", user="app", session=static()),
    ):
        with pytest.raises(
            TokenError, match=r"no AWS region for .*@db\.example\.com.* region=, or"
        ):
            make()


# -- one client ------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["dsql", "rds"])
def test_a_client_is_made_once(service: str) -> None:
    session = static()
    tokens: Any = DsqlTokens(DSQL, session=session)
    if service == "rds":
        tokens = RdsTokens(RDS, user="app", session=session)
    assert session.clients == [], "and not before it is needed"
    for _ in range(50):
        tokens()
    assert session.clients == [service]


def test_a_client_is_made_once_also_for_many_threads() -> None:
    session = static()
    tokens = DsqlTokens(DSQL, session=session)
    start = threading.Barrier(8, timeout=30.0)
    found: list[Token] = []

    def ask() -> None:
        start.wait()
        found.extend(tokens() for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert session.clients == ["dsql"]
    assert len(found) == 160
    assert all("Action=DbConnectAdmin" in token.value for token in found)


def test_a_session_of_boto3_is_accepted() -> None:
    """It calls the same things otherwise."""
    own = static()

    class Boto3:
        region_name = "eu-south-1"

        def client(self, service: str, region_name: str) -> Any:
            return own.create_client(service, region_name=region_name)

        def get_credentials(self) -> Any:
            return own.get_credentials()

    tokens = RdsTokens("db.example.com", user="app", session=Boto3())
    assert "/eu-south-1/" in parts(tokens())[1]["X-Amz-Credential"]
    assert own.clients == ["rds"]


# -- credentials that end --------------------------------------------------------------------------


def test_static_credentials_do_not_end() -> None:
    token = DsqlTokens(DSQL, lifetime=604_800, session=static())()
    assert token.expires_at == pytest.approx(time.time() + 604_800, abs=5.0)


@pytest.mark.parametrize("kind", ["dsql", "rds"])
def test_credentials_that_end_sooner_cap_the_token(kind: str) -> None:
    session, refreshes = refreshable(300.0)
    tokens: Any = DsqlTokens(DSQL, session=session)
    if kind == "rds":
        tokens = RdsTokens(RDS, user="app", session=session)
    token = tokens()
    assert refreshes == []
    assert parts(token)[1]["X-Amz-Expires"] == "900"
    assert token.expires_at == pytest.approx(time.time() + 300.0, abs=5.0)


def test_credentials_that_end_later_do_not_cap_the_token() -> None:
    session, _ = refreshable(5000.0)
    token = DsqlTokens(DSQL, session=session)()
    assert token.expires_at == pytest.approx(time.time() + 900.0, abs=5.0)


def test_credentials_that_are_due_are_renewed_before_signing() -> None:
    session, refreshes = refreshable(10.0)
    token = DsqlTokens(DSQL, session=session)()
    assert len(refreshes) == 1
    assert parts(token)[1]["X-Amz-Credential"].startswith("ASIA1/")
    assert token.expires_at == pytest.approx(time.time() + 900.0, abs=5.0), "not after 10 s"


def test_credentials_are_fetched_at_first_use() -> None:
    def fetch() -> dict[str, str]:
        ends = (datetime.now(UTC) + timedelta(seconds=1200)).isoformat()
        return {"access_key": "ASIAX", "secret_key": "s", "token": "t", "expiry_time": ends}

    session = Session(DeferredRefreshableCredentials(fetch, "sso"))
    token = DsqlTokens(DSQL, lifetime=3600, session=session)()
    assert token.expires_at == pytest.approx(time.time() + 1200.0, abs=5.0)


async def test_the_cache_fetches_the_next_one_before_the_credentials_end() -> None:
    session, _ = refreshable(300.0)
    tokens = CachedTokens(DsqlTokens(DSQL, session=session))
    assert (await tokens.get()).startswith(f"{DSQL}/?Action=DbConnectAdmin")
    kept = tokens._cached
    assert kept is not None
    assert kept.good_until - time.monotonic() == pytest.approx(300.0, abs=5.0)
    assert kept.refresh_at - time.monotonic() == pytest.approx(240.0, abs=5.0)
    tokens.close()


# -- what can go wrong -----------------------------------------------------------------------------


def test_missing_credentials_are_an_error_with_advice() -> None:
    session = Session(None)
    tokens = DsqlTokens(DSQL, session=session)
    with pytest.raises(
        TokenError, match=rf"no token for admin@{DSQL}: there are no AWS credential"
    ):
        tokens()
    assert session.clients == []


def test_credentials_that_appear_later_are_found() -> None:
    session = Session(None)
    tokens = DsqlTokens(DSQL, session=session)
    with pytest.raises(TokenError):
        tokens()
    session._given = static().get_credentials()
    assert tokens().value
    assert session.clients == ["dsql"]


def test_a_failure_to_get_credentials_is_reported_with_its_cause() -> None:
    def refresh() -> dict[str, str]:
        raise OSError("sts does not answer")

    ended = datetime.now(UTC) - timedelta(seconds=1)
    credentials = RefreshableCredentials("a", "b", "c", ended, refresh, "sts")
    logging.getLogger("botocore.credentials").disabled = True
    try:
        with pytest.raises(TokenError, match="sts does not answer") as caught:
            DsqlTokens(DSQL, session=Session(credentials))()
    finally:
        logging.getLogger("botocore.credentials").disabled = False
    assert isinstance(caught.value.__cause__, OSError)


@pytest.fixture
def no_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)


@pytest.mark.usefixtures("no_botocore")
def test_without_botocore_the_error_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"botocore.* pip install 'moored\[aws\]'"):
        DsqlTokens(DSQL)


@pytest.mark.parametrize(
    "host", ["", "https://abc.dsql.eu-west-1.on.aws", f"{DSQL}:5432", f"admin@{DSQL}", "a b"]
)
def test_an_invalid_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="must be only a host name"):
        DsqlTokens(host, session=static())


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"^DsqlTokens: ") as caught:
        DsqlTokens("", user="", lifetime=604_801, session=static())
    for text in ("host=''", "user must be", "lifetime=604801 must be between 1 s and 604800 s"):
        assert text in str(caught.value)


# -- secrets ---------------------------------------------------------------------------------------


def test_no_token_is_shown_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moored")
    tokens = RdsTokens(RDS, user="app", session=static())
    token = tokens()
    assert repr(tokens) == f"<RdsTokens app@{RDS}, us-east-1>"
    signature = parts(token)[1]["X-Amz-Signature"]
    for shown in (repr(token), repr(tokens), str(vars(tokens)), caplog.text):
        assert signature not in shown
        assert "secret" not in shown
