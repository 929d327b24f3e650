"""Run the tests in several processes, which are forked after the tests were collected.

pytest-xdist imports and collects all tests in each of its workers instead, which takes a tenth of
the CPU time of `make test`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest._io import TerminalWriter

__all__ = ["Schedule", "pytest_addoption", "pytest_runtestloop"]

#: What a worker sends, beside its reports.
_NEXT, _RAN = "next", "ran"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--workers` to pytest's command line."""
    parser.addoption("--workers", type=int, default=1, metavar="N", help="run N tests at a time")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in processes, if more than one is wanted."""
    options = session.config.option
    if options.workers < 2 or options.collectonly or session.testsfailed:
        return None
    _Run(session, options.workers).run()
    return True


class Schedule:
    """Which worker runs which test: one module after the other, and at the end parts of modules.

    The tests of a module share its servers, so a module is divided only when no other is left.
    """

    def __init__(self, modules: Sequence[Sequence[int]], workers: int) -> None:
        self._modules = deque(modules)
        self._of: list[deque[int]] = [deque() for _ in range(workers)]

    def next(self, worker: int) -> int | None:
        """Return the number of the next test of a worker, or None if none is left."""
        mine = self._of[worker]
        if not mine and self._modules:
            mine.extend(self._modules.popleft())
        elif not mine:
            longest = max(self._of, key=len)
            mine.extendleft([longest.pop() for _ in range((len(longest) + 1) // 2)])
        return mine.popleft() if mine else None

    def put_back(self, worker: int, test: int) -> None:
        """Let a worker run this test next."""
        self._of[worker].appendleft(test)


@dataclass
class _Worker:
    number: int
    pid: int
    connection: Connection
    #: The test that it runs, and the one that it runs next.
    tests: deque[int] = field(default_factory=deque)


class _Run:
    """The process that has collected the tests: it hands them out, and reports their results."""

    def __init__(self, session: pytest.Session, workers: int) -> None:
        self._session = session
        self._config = session.config
        numbers = range(len(session.items))
        modules = groupby(numbers, key=lambda number: session.items[number].path)
        self._schedule = Schedule([list(module) for _, module in modules], workers)
        self._wanted = workers
        self._left = len(session.items)
        self._workers: list[_Worker] = []

    def run(self) -> None:
        """Return when all tests have run; in a worker, raise `pytest.exit.Exception`."""
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False  # the results of several files come in turns
        # The directories of the workers are in this one, which is removed at the end.
        directory = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        assert directory.is_dir()
        try:
            for number in range(self._wanted):
                self._fork(number)
            while self._workers:
                ready = wait([worker.connection for worker in self._workers])
                for worker in [each for each in self._workers if each.connection in ready]:
                    self._receive(worker)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
            if self._left:
                raise self._session.Failed(f"{self._left} tests were not run: all workers ended")
        finally:
            for worker in self._workers:
                worker.connection.close()  # The worker ends after the test that it runs.
            for worker in self._workers:
                os.waitpid(worker.pid, 0)

    def _fork(self, number: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            # Some packages start a thread when they are imported; Python 3.12 warns of that.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            theirs.close()
            self._workers.append(_Worker(number, pid, ours))
            return
        for connection in (ours, *(worker.connection for worker in self._workers)):
            connection.close()  # Otherwise no worker would notice the end of the first process.
        self._workers.clear()
        _work(self._session, theirs, number, self._wanted)

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
            if message == _NEXT:
                test = self._schedule.next(worker.number)
                worker.connection.send(test)
                if test is not None:
                    worker.tests.append(test)
            elif message == _RAN:
                worker.tests.popleft()
                self._left -= 1
            else:
                hook = self._config.hook
                report = hook.pytest_report_from_serializable(config=self._config, data=message)
                hook.pytest_runtest_logreport(report=report)
        except (EOFError, ConnectionError):
            self._ended(worker)

    def _ended(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        _, status = os.waitpid(worker.pid, 0)
        if not worker.tests:
            return
        self._left -= 1
        item = self._session.items[worker.tests.popleft()]
        reason = f"the worker ended with code {os.waitstatus_to_exitcode(status)} in this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        if worker.tests:
            self._schedule.put_back(worker.number, worker.tests.popleft())
        self._fork(worker.number)


class _Reports:
    """The plugin of a worker that sends its reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self._connection.send(to_data(config=self._config, report=report))


def _work(session: pytest.Session, connection: Connection, number: int, workers: int) -> None:
    """Run tests until none is left, then end this process as pytest itself ends."""
    config: Any = session.config
    config.workerinput = {"workerid": f"gw{number}"}
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(workers)
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    # pytest-timeout writes the stacks of all threads here; they become a part of the report.
    config.get_terminal_writer = lambda: TerminalWriter(sys.stderr)
    # The files with the output of the tests would be shared with the other workers.
    capture: Any = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory
    factory._basetemp /= f"worker-{number}"
    factory._basetemp.mkdir(mode=0o700, exist_ok=True)

    def next_item() -> pytest.Item | None:
        connection.send(_NEXT)
        test = connection.recv()
        return None if test is None else session.items[test]

    plugins.register(_Reports(config, connection))
    try:
        item = next_item()
        while item is not None:
            following = next_item()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(_RAN)
            item = following
    except (EOFError, ConnectionError):
        pass  # The first process has ended, or it has seen enough failures.
    pytest.exit("no test is left for this worker", returncode=0)
