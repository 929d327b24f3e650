"""Values that are invalid for their type are refused before psycopg's loaders see them."""

from __future__ import annotations

import struct

import pytest
from tests.postgres.recording import begin, binary, commit, feed_all, insert, relation

from moored.postgres._errors import DecodeError
from moored.postgres.decode._checks import SIZES, check_of

pytestmark = pytest.mark.pure

NUMERIC = 1700


def numeric(digits: int, present: int) -> bytes:
    """A numeric with this number of digits in its header, and this number of digits."""
    return struct.pack("!HhHH", digits, digits - 1, 0, 0) + b"\0\x07" * present


@pytest.mark.parametrize("digits", [0, 1, 2, 9])
def test_a_numeric_must_have_the_size_of_its_digits(digits: int) -> None:
    check = check_of(NUMERIC)
    assert check is not None
    check(numeric(digits, digits))
    wrong = [numeric(digits, digits)[:-1], numeric(digits, digits) + b"\0"]
    wrong += [numeric(digits, digits + 1), numeric(digits + 1, digits)]
    for value in wrong:
        with pytest.raises(ValueError, match="digits"):
            check(value)


@pytest.mark.parametrize("present", [1, 3])
def test_a_numeric_with_a_digit_too_few_or_too_many_is_a_protocol_error(present: int) -> None:
    """It never reaches the loader, neither in general nor in generated code."""
    good = [insert([binary(numeric(2, 2))]) for _ in range(8)]
    for before in (0, 8):
        (committed,) = feed_all(
            [
                begin(),
                relation([("n", NUMERIC)]),
                *good[:before],
                insert([binary(numeric(2, present))]),
                commit(),
            ]
        )
        changes = list(committed)
        for change in changes[:-1]:
            assert change.new == {"n": 70007}
        with pytest.raises(DecodeError):
            assert changes[-1].new


@pytest.mark.parametrize("oid", sorted(SIZES))
def test_a_value_of_a_fixed_size_has_that_size(oid: int) -> None:
    check = check_of(oid)
    assert check is not None
    check(bytes(SIZES[oid]))
    for size in (SIZES[oid] - 1, SIZES[oid] + 1):
        with pytest.raises(ValueError, match="bytes"):
            check(bytes(size))
