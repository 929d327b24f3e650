"""Who a subscriber is: API keys, JSON web tokens and tickets."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.broker.serving import ACME, OTHER
from tests.kernel.fake_clock import FakeClock

from moored.broker import ApiKeys, Identity, Jwt, _identity
from moored.broker._identity import Tickets

pytestmark = pytest.mark.pure

SECRET = "a secret of at least thirty-two bytes"


def write(path: Path, text: str, at: int) -> None:
    """Write a file, with a time of change of its own."""
    path.write_text(text)
    os.utime(path, (at, at))


def test_file_of_keys_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, f"# keys\n\none {ACME}\n", 1)
    keys = ApiKeys(path)
    assert keys("one") == Identity(ACME)
    assert keys("two") is None
    write(path, f"two {OTHER}\n", 2)
    assert keys("one") is None, "the key was removed"
    assert keys("two") == Identity(OTHER)


@pytest.mark.parametrize("mistake", ["one", f"one {ACME}\none {OTHER}", "one two three", None])
def test_keys_stay_valid_while_the_file_has_a_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mistake: str | None
) -> None:
    path = tmp_path / "keys"
    write(path, f"one {ACME}\n", 1)
    keys = ApiKeys(path)
    if mistake is None:
        path.unlink()
    else:
        write(path, mistake, 2)
        with pytest.raises(ValueError, match="line"):
            ApiKeys(path)
    for _ in range(3):
        assert keys("one") == Identity(ACME)
    assert len(caplog.records) == 1, "it is reported once"
    write(path, f"two {OTHER}\n", 3)
    assert (keys("one"), keys("two")) == (None, Identity(OTHER))


def pem(private: Any) -> str:
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    encoding = serialization.Encoding.PEM
    text: bytes = private.public_key().public_bytes(encoding, kind)
    return text.decode()


RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


@pytest.mark.parametrize(
    ("algorithm", "private", "public"),
    [("HS256", SECRET, SECRET), ("RS256", RSA, pem(RSA)), ("ES256", EC, pem(EC))],
    ids=["HS256", "RS256", "ES256"],
)
def test_token_names_the_tenant_and_its_end(algorithm: str, private: Any, public: str) -> None:
    known = Jwt(public, algorithms=[algorithm], claim="https://example/tenant")
    until = int(time.time()) + 60
    claims = {"https://example/tenant": ACME, "exp": until}
    assert known(jwt.encode(claims, private, algorithm)) == Identity(ACME, float(until))
    for wrong in ({**claims, "exp": 1}, {"exp": until}, {**claims, "https://example/tenant": []}):
        assert known(jwt.encode(wrong, private, algorithm)) is None
    assert known("nonsense") is None


def test_token_signed_with_the_public_key_as_a_secret_is_not_valid() -> None:
    known = Jwt(pem(RSA), algorithms=["RS256"])
    claims = {"org_id": ACME, "exp": int(time.time()) + 60}
    assert known(jwt.encode(claims, SECRET, "HS256")) is None


def test_audience_and_issuer_are_checked() -> None:
    known = Jwt(SECRET, audience="shop", issuer="login")
    claims = {"org_id": ACME, "exp": int(time.time()) + 60, "aud": "shop", "iss": "login"}
    assert known(jwt.encode(claims, SECRET)) is not None
    for wrong in ({"aud": "other"}, {"iss": "other"}):
        assert known(jwt.encode({**claims, **wrong}, SECRET)) is None


@pytest.mark.parametrize(("claim", "tenant"), [("acme", "acme"), (7, "7")])
def test_claim_that_names_the_tenant_is_text_or_an_integer(claim: object, tenant: str) -> None:
    claims = {"org_id": claim, "exp": int(time.time()) + 60}
    found = Jwt(SECRET)(jwt.encode(claims, SECRET))
    assert found is not None
    assert found.tenant == tenant


@pytest.mark.parametrize("claim", [True, 7.5, ["acme"], None])
def test_token_without_a_tenant_is_not_valid(claim: object) -> None:
    claims = {"org_id": claim, "exp": int(time.time()) + 60}
    assert Jwt(SECRET)(jwt.encode(claims, SECRET)) is None


def test_ticket_is_valid_once_and_for_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_identity, "MAX_TICKETS", 2)
    clock = FakeClock()
    tickets = Tickets(30.0, clock)
    first, second = tickets.issue(Identity(ACME)), tickets.issue(Identity(OTHER))
    assert first is not None
    assert second is not None
    assert tickets.issue(Identity(ACME)) is None, "there are too many"
    assert tickets.redeem(first) == Identity(ACME)
    assert tickets.redeem(first) is None
    clock.advance(30.0)
    assert tickets.redeem(second) is None
    assert tickets.issue(Identity(ACME)) is not None
