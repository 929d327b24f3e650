"""Write each test's outcome to a file: a plugin of pytest, and settings of Django's own tests."""

from __future__ import annotations

import json
import os
import time
import unittest
from types import SimpleNamespace
from typing import Any, Protocol


class Report(Protocol):
    """What pytest reports of a test's set-up, call or tear-down, or of a file."""

    nodeid: str
    outcome: str
    when: str
    failed: bool


class Item(Protocol):
    """A test of pytest."""

    module: Any


def write(test: str, outcome: str) -> None:
    """Append an outcome: passed, skipped or failed."""
    with open(os.environ["CONFORMANCE_OUTCOMES"], "a") as file:
        file.write(json.dumps([test, outcome]) + "\n")


def pytest_runtest_logreport(report: Report) -> None:
    """Write the outcome of a test, and what went wrong before and after it."""
    if report.when == "call" or report.outcome != "passed":
        write(report.nodeid, report.outcome)


def pytest_collectreport(report: Report) -> None:
    """Write which file could not be imported."""
    if report.failed:
        write(report.nodeid, "failed")


def pytest_itemcollected(item: Item) -> None:
    """Give the programs that Procrastinate's tests interrupt after a second four to start."""
    if item.module.__name__.endswith("acceptance.test_nominal"):
        item.module.time = SimpleNamespace(sleep=lambda seconds: time.sleep(4 * seconds))


class Result(unittest.TextTestResult):
    """Writes the outcomes of unittest."""

    def _counts(self) -> tuple[int, int]:
        wrong = len(self.failures) + len(self.errors) + len(self.unexpectedSuccesses)
        return wrong, len(self.skipped)

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Remember what there was before the test."""
        self._before = self._counts()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Write what the test has added."""
        super().stopTest(test)
        (failed, skipped), (failed_before, skipped_before) = self._counts(), self._before
        outcome = "skipped" if skipped > skipped_before else "passed"
        write(test.id(), "failed" if failed > failed_before else outcome)


# Django's runner passes no class of its own, so this one is used.
unittest.TextTestRunner.resultclass = Result  # type: ignore[assignment]


def _database(name: str) -> dict[str, object]:
    server = {key: os.environ.get(f"PG{key}", "") for key in ("HOST", "PORT", "USER", "PASSWORD")}
    engine = "django.db.backends.postgresql"
    options = {"pool": {"min_size": 1, "max_size": 8}}
    return {"ENGINE": engine, "NAME": name, **server, "OPTIONS": options}


DATABASES = {"default": _database("django"), "other": _database("other")}
SECRET_KEY = "conformance"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = False
