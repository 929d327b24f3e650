"""JSON web tokens: whom they name, why they are refused, and the keys of their issuer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from tests.broker.serving import ACME, stage
from tests.kernel.fake_clock import FakeClock

from moored.broker import Identity, Jwt, TokenRefused, _jwks
from moored.kernel import Clock

SECRET = "a secret of at least thirty-two bytes"


def pem(private: Any) -> str:
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    encoding = serialization.Encoding.PEM
    text: bytes = private.public_key().public_bytes(encoding, kind)
    return text.decode()


RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
RSA_2 = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def claims(**more: Any) -> dict[str, Any]:
    return {"org_id": ACME, "exp": int(time.time()) + 60, **more}


def reason(known: Jwt, token: str) -> str:
    with pytest.raises(TokenRefused) as refused:
        known(token)
    assert SECRET not in str(refused.value)
    return refused.value.reason


@pytest.mark.parametrize(
    ("algorithm", "private", "public"),
    [("HS256", SECRET, SECRET), ("RS256", RSA, pem(RSA)), ("ES256", EC, pem(EC))],
    ids=["HS256", "RS256", "ES256"],
)
def test_token_names_the_tenant_and_its_end(algorithm: str, private: Any, public: str) -> None:
    known = Jwt(public, algorithms=[algorithm], claim="https://example/tenant", subject="sub")
    until = int(time.time()) + 60
    named = {"https://example/tenant": ACME, "exp": until, "sub": "ann"}
    token = jwt.encode(named, private, algorithm)
    assert known(token) == Identity(ACME, float(until), user="ann")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"exp": 1}, "expired"),
        ({"nbf": 9e9}, "not_yet_valid"),
        ({"exp": None}, "claim"),
        ({"org_id": None}, "claim"),
        ({"org_id": ["acme"]}, "claim"),
        ({"org_id": True}, "claim"),
        ({"org_id": 7.5}, "claim"),
        ({"sub": None}, "claim"),
        ({"aud": "other"}, "audience"),
        ({"iss": "other"}, "issuer"),
    ],
)
def test_refusal_says_what_is_wrong(wrong: dict[str, Any], expected: str) -> None:
    known = Jwt(SECRET, audience="shop", issuer="login", subject="sub")
    good = claims(aud="shop", iss="login", sub="ann")
    assert known(jwt.encode(good, SECRET)) == Identity(ACME, float(good["exp"]), user="ann")
    given = {name: value for name, value in {**good, **wrong}.items() if value is not None}
    assert reason(known, jwt.encode(given, SECRET)) == expected


def test_token_that_is_signed_by_others_is_refused() -> None:
    known = Jwt(pem(RSA), algorithms=["RS256"])
    assert reason(known, "nonsense") == "malformed"
    assert reason(known, jwt.encode(claims(), SECRET, "HS256")) == "algorithm"
    assert reason(known, jwt.encode(claims(), "", "none")) == "algorithm"
    assert reason(known, jwt.encode(claims(), RSA_2, "RS256")) == "signature"


@pytest.mark.parametrize(("claim", "tenant"), [("acme", "acme"), (7, "7")])
def test_claim_that_names_the_tenant_is_text_or_an_integer(claim: object, tenant: str) -> None:
    found = Jwt(SECRET)(jwt.encode(claims(org_id=claim), SECRET))
    assert isinstance(found, Identity)
    assert found.tenant == tenant


async def test_client_gets_the_reason_which_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moored.broker")
    async with stage(Jwt(SECRET)) as on:
        token = jwt.encode(claims(org_id=7.5), SECRET)
        answer = await on.get("/v1/subscribe", authorization=f"Bearer {token}")
        assert answer.status_code == 401
        text = "the token's claim 'org_id' must be text or an integer: it is a float"
        assert answer.json() == {"error": text}
        assert on.broker.statistics().refused == {"token_claim": 1}
    assert f"a token is refused: {text}" in caplog.text
    assert token not in caplog.text


# -- the keys of an issuer -----------------------------------------------------------------------


class Issuer(ThreadingHTTPServer):
    """Serves a set of keys, and counts how often it is read."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.keys = keys
        self.reads = 0
        self.broken = False
        #: Answers wait for it.
        self.go_on = threading.Event()
        self.go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/jwks.json"

    def token(self, id: str | None, private: Any = None, **more: Any) -> str:
        private = private or self.keys[id or ""]
        algorithm = "RS256" if isinstance(private, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode(claims(**more), private, algorithm, headers={"kid": id} if id else {})


class _Answer(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        self.server.reads += 1
        self.server.go_on.wait(60)
        if self.server.broken:
            return self.send_error(500)
        found = []
        for id, private in self.server.keys.items():
            kind: Any = RSAAlgorithm if isinstance(private, rsa.RSAPrivateKey) else ECAlgorithm
            key = kind.to_jwk(private.public_key(), as_dict=True)
            found.append(key | {"kid": id, "use": "enc" if id == "enc" else "sig"})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"keys": found}).encode())
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer(a=RSA, enc=RSA_2) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(Clock, "current", lambda: found)
    return found


async def refusal(known: Jwt, token: str) -> TokenRefused:
    with pytest.raises(TokenRefused) as refused:
        await _given(known, token)
    return refused.value


async def _given(known: Jwt, token: str) -> Identity:
    found = known(token)
    assert not isinstance(found, Identity)
    return await found


async def test_keys_are_read_once_and_again_for_an_unknown_key(
    issuer: Issuer, clock: FakeClock
) -> None:
    known = Jwt(jwks=issuer.url)
    many = await asyncio.gather(*[_given(known, issuer.token("a")) for _ in range(20)])
    assert {each.tenant for each in many} == {ACME}
    assert issuer.reads == 1
    issuer.keys["b"] = EC
    clock.advance(5)
    # A key that the issuer may have added since then: the client comes back.
    soon = await refusal(known, issuer.token("b"))
    assert soon.reason == "keys_unavailable"
    assert soon.retry_after == 25
    assert issuer.reads == 1
    clock.advance(25)
    assert (await _given(known, issuer.token("b"))).tenant == ACME
    assert issuer.reads == 2
    clock.advance(30)
    for id in ("c", "enc", None):
        clock.advance(30)
        assert (await refusal(known, issuer.token(id, RSA_2))).reason == "key"
    assert issuer.reads == 5


async def test_token_without_an_id_of_its_key_is_checked_by_the_only_key(issuer: Issuer) -> None:
    known = Jwt(jwks=issuer.url)
    assert (await _given(known, issuer.token(None, RSA))).tenant == ACME
    assert (await refusal(known, issuer.token(None, RSA_2))).reason == "signature"
    assert (await refusal(known, issuer.token("a", EC))).reason == "signature"
    assert (await refusal(known, "nonsense")).reason == "malformed"


async def test_old_keys_stay_while_the_url_cannot_be_read(
    issuer: Issuer, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    known = Jwt(jwks=issuer.url)
    issuer.broken = True
    first = await refusal(known, issuer.token("a"))
    assert (first.reason, first.retry_after is None) == ("keys_unavailable", False)
    issuer.broken = False
    clock.advance(30)
    await _given(known, issuer.token("a"))
    issuer.broken = True
    for _ in range(3):
        clock.advance(700)
        await _given(known, issuer.token("a"))
        assert (await refusal(known, issuer.token("b", EC))).reason == "keys_unavailable"
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2, "once for each outage"
    assert "HTTP Error 500" in caplog.text


async def test_removed_key_is_forgotten_and_stale_keys_delay_no_token(
    issuer: Issuer, clock: FakeClock
) -> None:
    known = Jwt(jwks=issuer.url)
    token = issuer.token("a")
    await _given(known, token)
    issuer.keys = {"b": EC}
    clock.advance(700)
    issuer.go_on.clear()
    await _given(known, token)  # the URL is being read, and does not answer
    waiting = asyncio.ensure_future(_given(known, issuer.token("b")))
    issuer.go_on.set()
    assert (await waiting).tenant == ACME
    clock.advance(30)
    assert (await refusal(known, token)).reason == "key"


async def test_url_that_does_not_answer_has_a_timeout(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_jwks, "TIMEOUT", 0.2)
    issuer.go_on.clear()
    async with asyncio.timeout(60):
        refused = await refusal(Jwt(jwks=issuer.url), issuer.token("a"))
    assert refused.reason == "keys_unavailable"


async def test_unreadable_keys_are_a_temporary_answer(issuer: Issuer) -> None:
    issuer.broken = True
    async with stage(Jwt(jwks=issuer.url)) as on:
        answer = await on.get("/v1/subscribe", authorization=f"Bearer {issuer.token('a')}")
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 30


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({}, "either a key or the URL"),
        ({"key": SECRET, "jwks": "https://login/keys"}, "either a key or the URL"),
        ({"jwks": "file:///etc/keys"}, "must begin with https://"),
        ({"jwks": "https://login/keys", "algorithms": ["RS256", "HS256"]}, "cannot sign HS256"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        Jwt(**options)
