"""Stories: a whole service as its owner uses it. Each shows one line of figures at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _pytest.terminal import TerminalReporter

__all__ = ["pytest_terminal_summary"]

NAME = "figures of the story"


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Show a line after the run, also if it was a worker's."""
    return lambda line: record_property(NAME, line)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    told = {
        report.nodeid.rpartition("::")[2].removeprefix("test_"): value
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, value in report.user_properties
        if name == NAME
    }
    if told:
        terminalreporter.section("stories")
        for story in sorted(told):
            terminalreporter.line(f"{story.replace('_', ' ')}: {told[story]}")
