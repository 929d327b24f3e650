"""Stale tokens are recognised."""

from __future__ import annotations

import threading

import pytest

from moored.kernel import Generation, StaleGeneration

pytestmark = pytest.mark.pure


def test_only_the_newest_token_is_current() -> None:
    generation = Generation()
    assert generation.current == 0
    first = generation.next()
    assert generation.is_current(first)
    second = generation.next()
    assert (first, second, generation.current) == (1, 2, 2)
    assert not generation.is_current(first)
    assert repr(generation) == "<Generation 2>"


def test_check_names_both_numbers() -> None:
    generation = Generation()
    token = generation.next()
    generation.check(token, "the connection")
    generation.next()
    generation.next()
    with pytest.raises(StaleGeneration, match=r"the connection is of generation 1, but 3 is"):
        generation.check(token, "the connection")


def test_threads_never_get_the_same_token() -> None:
    generation = Generation()
    tokens: list[int] = []

    def take() -> None:
        tokens.extend([generation.next() for _ in range(5000)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tokens) == list(range(1, 20_001))
    assert generation.current == 20_000
