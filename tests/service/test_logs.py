"""The output of the service: text lines, JSON lines, and few tracebacks."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moored.kernel import SECRETS, Backoff, Child, Context, MooredError, Recorder, Supervisor
from moored.service._logs import Logs

pytestmark = pytest.mark.pure


class Said(io.StringIO):
    """A stream that is not a terminal."""

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@contextmanager
def logs(layout: str = "text", level: str = "info", stream: Said | None = None) -> Iterator[Logs]:
    handlers, before = list(logging.root.handlers), logging.root.level
    it = Logs(layout=layout, level=level, stream=stream or Said())
    try:
        yield it
    finally:
        it.close()
    assert logging.root.handlers == handlers
    assert logging.root.level == before


def test_a_notice_is_a_plain_line_whatever_the_level() -> None:
    said = Said()
    with logs(level="error", stream=said) as it:
        it.say("ready")
    assert said.lines == ["moored: ready"]


def test_an_event_is_one_line_with_component_text_and_cause() -> None:
    said, recorder = Said(), Recorder()
    with logs(stream=said) as it:
        recorder.subscribe(it.sink)
        recorder.record("db", "lost", kind="failure", cause=OSError("no route"), attempt=3)
    (line,) = said.lines
    assert "[warning  ] db: lost, because no route (OSError) attempt=3" in line


def test_events_that_are_no_failures_are_logged_at_debug_level_only() -> None:
    recorder = Recorder()
    for level, expected in (("info", 0), ("debug", 1)):
        said = Said()
        with logs(level=level, stream=said) as it:
            unsubscribe = recorder.subscribe(it.sink)
            recorder.record("db", "running", kind="state")
            unsubscribe()
        assert len(said.lines) == expected


def test_as_json_every_line_is_an_object() -> None:
    said, recorder = Said(), Recorder()
    with logs("json", stream=said) as it:
        it.say("ready")
        recorder.subscribe(it.sink)
        recorder.record("db", "lost", kind="failure", cause="no route", level="high", event="x")
        logging.getLogger("elsewhere").warning("told by %s", "a library", extra={"size": 3})
        try:
            raise ValueError("unexpected")
        except ValueError:
            logging.getLogger("elsewhere").exception("it broke")
    notice, event, other, broken = (json.loads(line) for line in said.lines)
    assert (notice["event"], notice["level"]) == ("ready", "info")
    assert (event["component"], event["because"], event["level"]) == ("db", "no route", "warning")
    assert (event["level_"], event["event_"]) == ("high", "x")
    assert (other["event"], other["size"]) == ("told by a library", 3)
    assert "ValueError: unexpected" in broken["exception"]
    assert all("timestamp" in line for line in (notice, event, other, broken))


def test_a_failure_that_explains_itself_has_no_traceback() -> None:
    said = Said()
    with logs(stream=said):
        log = logging.getLogger("moored.supervisor")
        log.warning("db failed", exc_info=MooredError("no server"))
        log.error("told by the recorder as well")
    assert said.lines == []


def test_an_unexpected_failure_is_logged_with_its_traceback() -> None:
    said = Said()
    with logs(stream=said):
        try:
            secret = "hunter2"
            raise KeyError("unexpected")
        except KeyError as error:
            logging.getLogger("moored.supervisor").warning("db failed", exc_info=error)
    text = said.getvalue()
    assert "Traceback" in text
    assert f'secret = "{secret}"' not in text.replace("            secret =", "")


async def test_a_lost_connection_is_one_line_with_its_cause_and_the_next_attempt() -> None:
    errors = iter([ConnectionRefusedError("no server"), KeyError("defect"), KeyError("defect")])
    said, done = Said(), asyncio.Event()

    async def run(ctx: Context) -> None:
        ctx.started()
        if (error := next(errors, None)) is not None:
            raise error
        done.set()
        await asyncio.Event().wait()

    with logs(stream=said) as it:
        async with Supervisor("orders", intensity=None) as root:
            root.recorder.subscribe(it.sink)
            await root.start_child(Child("importer", run, backoff=Backoff(0.01)))
            await asyncio.wait_for(done.wait(), 60)
    text = said.getvalue()
    lost = [line for line in said.lines if "no server" in line]
    assert len(lost) == 1
    assert "orders/importer: 1st restart in 0.0 s, because no server (ConnectionRefused" in lost[0]
    assert text.count("Traceback") == 1
    assert text.count("KeyError: 'defect'") == 1


def test_a_failure_that_is_recorded_and_logged_is_one_line() -> None:
    said, recorder = Said(), Recorder()
    with logs(stream=said) as it:
        recorder.subscribe(it.sink)
        for _ in range(2):
            text = "could not open a connection (connect); next try in 1.0 s"
            recorder.record("pool-1", text, kind="failure", cause=OSError("no route"))
            log = logging.getLogger("moored.reservoir")
            log.warning("%s: %s: %s", "pool-1", text, "no route (OSError)")
        log.warning("pool-1: something else")
    assert [line.count("next try") for line in said.lines] == [1, 1, 0]


def test_lines_that_any_client_can_provoke_are_logged_once_a_minute() -> None:
    said = Said()
    with logs(stream=said):
        for _ in range(100):
            logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
            try:
                raise OSError(24, "Too many open files")
            except OSError as error:
                logging.getLogger("asyncio").error(
                    "socket.accept() out of system resource\nsocket: x", exc_info=error
                )
    assert len(said.lines) == 2


@pytest.mark.parametrize("layout", ["text", "json"])
def test_no_line_shows_a_secret_that_the_process_was_given(layout: str) -> None:
    SECRETS.add_from("postgresql://app:gr%22umpf-7/x@db/orders")
    said, recorder = Said(), Recorder()
    with logs(layout, stream=said) as it:
        it.say('no host "gr"umpf-7"')
        recorder.subscribe(it.sink)
        recorder.record("db", "lost", kind="failure", cause=OSError('no "gr"umpf-7/x"'))
        logging.getLogger("elsewhere").warning("sent %s", 'gr"umpf-7', extra={"pw": 'gr"umpf-7/x'})
        try:
            raise ValueError('gr"umpf-7/x')
        except ValueError:
            logging.getLogger("elsewhere").exception("it broke")
    assert len(said.lines) >= 4
    assert "umpf" not in said.getvalue()


def test_a_closed_stdout_is_no_error() -> None:
    said = Said()
    with logs(stream=said) as it:
        said.close()
        it.say("ready")
        logging.getLogger("elsewhere").warning("told")


def test_a_request_that_the_stop_cut_off_is_not_logged_as_an_error() -> None:
    stream = Said()
    with logs(stream=stream):
        log = logging.getLogger("uvicorn.error")
        for error in (asyncio.CancelledError(), ValueError("a real one")):
            log.error("Exception in ASGI application", exc_info=error)
    assert stream.getvalue().count("Exception in ASGI application") == 1
    assert "a real one" in stream.getvalue()
