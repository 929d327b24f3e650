"""Errors, causes and durations as text."""

from __future__ import annotations

from enum import Enum

import pytest

from moored.kernel._words import MAX_TEXT, causes_of, describe, duration, refuse, unmet

pytestmark = pytest.mark.pure


class AdminShutdown(Exception):
    sqlstate = "57P01"


class Code(Enum):
    UNAVAILABLE = 14


class Unavailable(Exception):
    """An error with the interface of gRPC's errors."""

    def code(self) -> Code:
        return Code.UNAVAILABLE

    def details(self) -> str:
        return "nobody there"

    def __str__(self) -> str:
        return "a page"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad"), "bad (ValueError)"),
        (TimeoutError(), "TimeoutError"),
        (ConnectionResetError(104, "reset"), "[Errno 104] reset (ConnectionResetError)"),
        (AdminShutdown("the server is closing"), "the server is closing (57P01 admin shutdown)"),
        (AdminShutdown(), "57P01 admin shutdown"),
        (Unavailable(), "UNAVAILABLE: nobody there (Unavailable)"),
        (ValueError("two\n  lines"), "two lines (ValueError)"),
        (Unprintable(), "its message cannot be shown (Unprintable)"),
        (
            ExceptionGroup("both", [ValueError("a"), KeyError("b")]),
            "both: a (ValueError), 'b' (KeyError) (ExceptionGroup)",
        ),
    ],
)
def test_an_error_is_one_line(error: BaseException, words: str) -> None:
    assert describe(error) == words


def test_a_group_shows_its_first_errors_and_counts_the_rest() -> None:
    group = ExceptionGroup("many", [ValueError(str(n)) for n in range(10)])
    assert describe(group).endswith("2 (ValueError), 7 more (ExceptionGroup)")


def test_a_long_message_is_cut() -> None:
    words = describe(ValueError("x" * 10_000))
    assert words.startswith("xxx")
    assert words.endswith("… (ValueError)")
    assert len(words) == MAX_TEXT + len(" (ValueError)")


def test_causes_are_listed_nearest_first_up_to_a_limit() -> None:
    error: Exception = ValueError("0")
    for depth in range(1, 20):
        outer = ValueError(str(depth))
        outer.__cause__ = error
        error = outer
    told = causes_of(error)
    assert told[:2] == ("19 (ValueError)", "18 (ValueError)")
    assert told[-1] == "further causes, not kept"
    assert len(told) == 6


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0, "0.0 s"),
        (4.21, "4.2 s"),
        (14, "14 s"),
        (59.7, "1 m 0 s"),
        (492, "8 m 12 s"),
        (11_100, "3 h 5 m"),
        (86_400, "1 day 0 h"),
        (187_200, "2 days 4 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_refuse_raises_one_error_with_all_mistakes() -> None:
    refuse("Thing", [])
    with pytest.raises(ValueError, match=r"^Thing: a is wrong; b is wrong$"):
        refuse("Thing", ["a is wrong", "b is wrong"])


def test_a_setting_that_fails_its_check_is_a_mistake() -> None:
    checks = ("rate", -1, False, "at least 0"), ("burst", 5, True, "at least 2")
    assert unmet(*checks) == ["rate=-1 must be at least 0"]
