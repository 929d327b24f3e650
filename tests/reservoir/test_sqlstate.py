"""The classification of errors by their SQLSTATE or their message."""

from __future__ import annotations

import asyncpg
import psycopg
import pytest
import sqlalchemy.exc
from psycopg import errors
from tests.reservoir.stand_in import SqlError

from moored.reservoir._sqlstate import Meaning, meaning_of, sqlstate_of


class Psycopg2Error(Exception):
    """As psycopg2's."""

    pgcode = "53400"


class Pg8000Error(Exception):
    """As pg8000's: a dictionary of the protocol's fields."""


class CodeError(Exception):
    """As those that call it a code."""

    def __init__(self, code: object) -> None:
        self.code = code


def asyncpg_error(sqlstate: str, text: str) -> BaseException:
    error: BaseException = asyncpg.PostgresError.new({"C": sqlstate, "M": text})
    return error


def with_cause(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


STATES = [
    ("53300", Meaning.THROTTLED),
    ("53400", Meaning.THROTTLED),
    ("28000", Meaning.UNAUTHORIZED),
    ("28P01", Meaning.UNAUTHORIZED),
    ("40001", Meaning.CONFLICT),
    ("OC000", Meaning.CONFLICT),
    ("OC001", Meaning.CONFLICT),
    ("40P01", Meaning.OTHER),
    ("0A000", Meaning.OTHER),
    ("54000", Meaning.OTHER),
    ("57P01", Meaning.OTHER),
    ("23505", Meaning.OTHER),
    ("00000", Meaning.OTHER),
]


@pytest.mark.parametrize(("state", "meaning"), STATES)
def test_meaning_by_sqlstate(state: str, meaning: Meaning) -> None:
    assert meaning_of(SqlError(state)) is meaning


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (errors.TooManyConnections("no"), "53300"),
        (errors.ConfigurationLimitExceeded("no"), "53400"),
        (errors.SerializationFailure("no"), "40001"),
        (errors.InvalidPassword("no"), "28P01"),
        (errors.InvalidAuthorizationSpecification("no"), "28000"),
        (asyncpg_error("53300", "no"), "53300"),
        (asyncpg_error("40001", "no"), "40001"),
        (Psycopg2Error("no"), "53400"),
        (Pg8000Error({"S": "FATAL", "C": "28P01", "M": "no"}), "28P01"),
        (CodeError("40001"), "40001"),
        (CodeError(40001), None),
        (CodeError("e3q8"), None),
        (Pg8000Error({"M": "no code"}), None),
        (psycopg.OperationalError("at the connect, libpq keeps it to itself"), None),
        (OSError("no route"), None),
        (Exception(), None),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_sqlstate_of_each_driver(error: BaseException, state: str | None) -> None:
    assert sqlstate_of(error) == state


WORDS = [
    ("FATAL:  Unable to accept connection, rate exceeded.", Meaning.THROTTLED),
    ("FATAL:  Unable to accept connection, too many open connections.", Meaning.THROTTLED),
    ("FATAL:  sorry, too many clients already", Meaning.THROTTLED),
    ('FATAL:  too many connections for role "app"', Meaning.THROTTLED),
    (
        "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
        Meaning.THROTTLED,
    ),
    ("FATAL:  no more connections allowed (max_client_conn)", Meaning.THROTTLED),
    ('FATAL:  password authentication failed for user "app"', Meaning.UNAUTHORIZED),
    ('FATAL:  PAM authentication failed for user "app"', Meaning.UNAUTHORIZED),
    ("FATAL:  unable to accept connection, access denied", Meaning.UNAUTHORIZED),
    ("fe_sendauth: no password supplied", Meaning.UNAUTHORIZED),
    (
        "ERROR:  change conflicts with another transaction, please retry: (OC000)",
        Meaning.CONFLICT,
    ),
    ("ERROR:  schema has been updated by another transaction: (OC001)", Meaning.CONFLICT),
    ('FATAL:  database "orders" does not exist', Meaning.OTHER),
    ("connection refused", Meaning.OTHER),
    ("", Meaning.OTHER),
]


@pytest.mark.parametrize(("text", "meaning"), WORDS)
def test_without_a_sqlstate_the_message_decides(text: str, meaning: Meaning) -> None:
    assert meaning_of(psycopg.OperationalError(text)) is meaning


def test_a_sqlstate_takes_precedence_over_the_message() -> None:
    assert meaning_of(SqlError("23505", "too many connections")) is Meaning.OTHER


def test_the_causes_of_an_error_are_examined() -> None:
    wrapped = with_cause(RuntimeError("could not save"), SqlError("40001"))
    assert meaning_of(wrapped) is Meaning.CONFLICT
    assert meaning_of(with_cause(SqlError("23505"), wrapped)) is Meaning.CONFLICT
    assert meaning_of(with_cause(RuntimeError("a"), ValueError("b"))) is Meaning.OTHER


def test_a_sqlalchemy_error_means_what_its_driver_said() -> None:
    driver = errors.SerializationFailure("no")
    for kind in (sqlalchemy.exc.OperationalError, sqlalchemy.exc.DBAPIError):
        assert meaning_of(kind("select 1", None, driver)) is Meaning.CONFLICT


def test_circular_causes_do_not_loop() -> None:
    error, other = RuntimeError("a"), RuntimeError("b")
    error.__cause__, other.__cause__ = other, error
    assert meaning_of(error) is Meaning.OTHER
