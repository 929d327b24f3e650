"""Which errors of a child are defects, whose traceback is logged."""

from __future__ import annotations

import pytest

from moored.kernel import MooredError
from moored.kernel._rules import is_defect

pytestmark = pytest.mark.pure


class OperationalError(Exception):
    """The error of a DB-API driver whose connection is lost."""


class AdminShutdown(OperationalError):
    """One of its subclasses."""


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("no server"),
        TimeoutError(),
        OSError(113, "No route to host"),
        EOFError(),
        MooredError("no connection within 5.0 s"),
        AdminShutdown("terminated"),
        ExceptionGroup("tasks", [ConnectionResetError(), AdminShutdown()]),
    ],
)
def test_a_lost_connection_is_no_defect(error: BaseException) -> None:
    assert not is_defect(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        FileNotFoundError(2, "No such file or directory", "orders.csv"),
        ExceptionGroup("tasks", [ConnectionResetError(), KeyError("x")]),
    ],
)
def test_every_other_error_is_a_defect(error: BaseException) -> None:
    assert is_defect(error)
