"""Tokens, sessions and names, as plain functions."""

from __future__ import annotations

import time

import pytest

from moored.service import _auth

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("", None),
        (None, None),
    ],
)
def test_the_token_is_read_from_its_header(header: str | None, token: str | None) -> None:
    assert _auth.bearer_of(header) == token


def test_a_session_is_valid_for_its_lifetime_and_its_token() -> None:
    session = _auth.issue_session("token", now=1000.0)
    assert "token" not in session
    assert _auth.session_holds("token", session, now=1000.0)
    assert _auth.session_holds("token", session, now=1000.0 + _auth.LIFETIME - 1)
    assert not _auth.session_holds("token", session, now=1000.0 + _auth.LIFETIME)
    assert not _auth.session_holds("another", session, now=1000.0)


@pytest.mark.parametrize("session", [None, "", ".", "99999999999", "99999999999.", "x.y", "²³.y"])
def test_a_forged_session_is_refused(session: str | None) -> None:
    assert not _auth.session_holds("token", session, now=0.0)


def test_a_session_with_a_changed_expiry_is_refused() -> None:
    until, _, signature = _auth.issue_session("token", now=1000.0).partition(".")
    assert not _auth.session_holds("token", f"{int(until) + 1}.{signature}", now=1000.0)


def test_the_session_cookie_is_found_among_others() -> None:
    assert _auth.session_of(f"a=b; {_auth.COOKIE}=1.2; c=d") == "1.2"
    assert _auth.session_of("a=b") is None
    assert _auth.session_of(None) is None
    assert _auth.session_of("\x00;;=;") is None


@pytest.mark.parametrize(
    ("header", "name", "port"),
    [
        ("localhost:8089", "localhost", 8089),
        ("LOCALHOST", "localhost", None),
        ("localhost:", "localhost", None),
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("[::1]:8089", "::1", 8089),
        ("[::1].evil.com", "[::1].evil.com", None),
        ("[::1]x:80", "[::1]x:80", None),
        ("localhost:80.evil.com", "localhost:80.evil.com", None),
        ("localhost:" + "9" * 5000, "localhost:" + "9" * 5000, None),
        ("[::1]", "::1", None),
        ("evil.example:8089", "evil.example", 8089),
        (None, "", None),
    ],
)
def test_name_and_port_are_read_from_the_host_header(
    header: str | None, name: str, port: int | None
) -> None:
    assert _auth.address_in(header) == (name, port)


@pytest.mark.parametrize(
    "header",
    [
        'x={"a":1}; moored_session=abc',
        'a="b; moored_session=abc',
        "moored_session=abc; \xff=\x00",
        "  moored_session = abc ;;;",
        'moored_session="abc"',
    ],
)
def test_a_cookie_of_another_service_does_not_hide_ours(header: str) -> None:
    assert _auth.session_of(header) == "abc"


def test_a_long_cookie_header_is_read_in_linear_time() -> None:
    began = time.process_time()
    assert _auth.session_of('a="' + '\\"' * 16_000 + '"') is None
    assert _auth.session_of("a=" + ";" * 32_000) is None
    assert time.process_time() - began < 1.0  # some 4 s when it is quadratic


def test_secrets_of_any_length_and_alphabet_can_be_compared() -> None:
    assert _auth.same("ä", "ä")
    assert not _auth.same("ä", "a")
    assert not _auth.same("", "a")
