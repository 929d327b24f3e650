"""Tokens, sessions and names, as plain functions."""

from __future__ import annotations

import pytest

from moored.service import _auth


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


def test_a_session_is_good_for_its_time_and_its_token() -> None:
    session = _auth.issue_session("token", now=1000.0)
    assert "token" not in session
    assert _auth.session_holds("token", session, now=1000.0)
    assert _auth.session_holds("token", session, now=1000.0 + _auth.LIFETIME - 1)
    assert not _auth.session_holds("token", session, now=1000.0 + _auth.LIFETIME)
    assert not _auth.session_holds("another", session, now=1000.0)


@pytest.mark.parametrize("session", [None, "", ".", "99999999999", "99999999999.", "x.y", "²³.y"])
def test_a_session_that_was_made_up_is_none(session: str | None) -> None:
    assert not _auth.session_holds("token", session, now=0.0)


def test_a_session_cannot_be_prolonged() -> None:
    until, _, signature = _auth.issue_session("token", now=1000.0).partition(".")
    assert not _auth.session_holds("token", f"{int(until) + 1}.{signature}", now=1000.0)


def test_our_cookie_is_found_among_others() -> None:
    assert _auth.session_of(f"a=b; {_auth.COOKIE}=1.2; c=d") == "1.2"
    assert _auth.session_of("a=b") is None
    assert _auth.session_of(None) is None
    assert _auth.session_of("\x00;;=;") is None


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:8089", "localhost"),
        ("LOCALHOST", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]:8089", "::1"),
        ("[::1]", "::1"),
        ("evil.example:8089", "evil.example"),
        (None, ""),
    ],
)
def test_the_name_is_read_from_the_host_header(header: str | None, name: str) -> None:
    assert _auth.name_in_host(header) == name


def test_secrets_of_any_length_and_alphabet_can_be_compared() -> None:
    assert _auth.same("ä", "ä")
    assert not _auth.same("ä", "a")
    assert not _auth.same("", "a")
