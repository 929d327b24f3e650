"""The output of the service: notices, the recorder's events and library logs, in one stream.

A *notice* is for the person who started the service (the address, ready, stopping). As text it is
a plain line; as JSON it is a log line like any other, so that every line can be parsed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from moored.kernel import SECRETS, Event, MooredError

__all__ = ["Logs"]

#: The log level of the recorder's events by kind; DEBUG for all other kinds.
LEVELS = {"failure": logging.WARNING, "abandoned": logging.ERROR, "restarting": logging.INFO}
#: Prefixes of components whose outages `moored.postgres` logs itself, one line for each.
LOGGED_BELOW = ("postgres.", "postgres/")


class Logs:
    """Routes all output to one stream, in one format; `close()` restores the logging settings."""

    def __init__(self, *, layout: str, level: str, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._as_json = layout == "json"
        self._handler = _Handler(self._stream)
        self._handler.setFormatter(_formatter(self._as_json, colours=self._stream.isatty()))
        self._recorded: deque[str] = deque(maxlen=50)
        self._handler.addFilter(_is_not_recorded)
        self._handler.addFilter(self._is_not_recorded_failure)
        self._handler.addFilter(_is_not_cancelled_request)
        self._handler.addFilter(_OncePerMinute())
        self._previous = (list(logging.root.handlers), logging.root.level)
        logging.root.handlers[:] = [self._handler]
        logging.root.setLevel(level.upper())
        # Below WARNING, these log internals that are not useful even at `info`.
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).setLevel(max(logging.root.level, logging.WARNING))
        self._log = structlog.wrap_logger(
            logging.getLogger("moored"),
            processors=[structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def say(self, text: str) -> None:
        """Print a notice for the person who started the service, at any log level."""
        if self._as_json:
            record = logging.LogRecord("moored", logging.INFO, "", 0, text, None, None)
            self._handler.handle(record)
        else:
            self._print(SECRETS.hide(text))

    def say_link(self, text: str, instead: str) -> None:
        """Print a notice with a secret for a person; programs, which read JSON, get another."""
        if self._as_json:
            self.say(instead)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        try:
            print(f"moored: {text}", file=self._stream, flush=True)
        except (OSError, ValueError):
            pass  # stdout was closed by its reader, which must not end the service

    def sink(self, event: Event) -> None:
        """Log an event of the recorder."""
        level, because = LEVELS.get(event.kind, logging.DEBUG), event.because
        if failure := event.data.get("failure"):
            level, because = logging.WARNING, (failure,)  # one line: the next attempt and the cause
        below = level < logging.ERROR and event.component.startswith(LOGGED_BELOW)
        if below or event.data.get("restarts"):
            level = logging.DEBUG
        if level >= logging.WARNING:
            self._recorded.append(f"{event.component}: {event.text}")
        known = {**event.data, "component": event.component, "kind": event.kind}
        if because:
            known["because"] = "; ".join(because)
        self._log.log(level, event.text, **_not_reserved(known))

    def _is_not_recorded_failure(self, record: logging.LogRecord) -> bool:
        """Drop failures that the recorder has too: packages log them for use without a service."""
        if not record.name.startswith("moored.") or record.exc_info:
            return True
        return not record.getMessage().startswith(tuple(self._recorded))

    def close(self) -> None:
        """Restore the previous logging settings."""
        logging.root.handlers[:], level = self._previous
        logging.root.setLevel(level)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Print no traceback for each line after the reader has closed the stream."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


def _is_not_cancelled_request(record: logging.LogRecord) -> bool:
    """Drop the traceback that uvicorn logs for a request that was cancelled by the stop."""
    cut_off = bool(record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
    return not (cut_off and record.name == "uvicorn.error")


class _OncePerMinute:
    """Passes lines that any client can provoke at most once a minute, without tracebacks."""

    _MESSAGES = ("Invalid HTTP request received.", "socket.accept() out of system resource")
    _EVERY = 60.0

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        found = next((each for each in self._MESSAGES if each in record.getMessage()), None)
        if found is None:
            return True
        if record.created < self._next.get(found, 0.0):
            return False
        self._next[found] = record.created + self._EVERY
        record.msg, record.args = f"{found} (logged at most once a minute)", ()
        record.exc_info = None
        return True


def _is_not_recorded(record: logging.LogRecord) -> bool:
    """Drop lines that the recorder has too, but keep tracebacks of defects."""
    if record.name != "moored.supervisor":
        return True
    error = record.exc_info[1] if record.exc_info else None
    return error is not None and not isinstance(error, MooredError)


def _not_reserved(known: dict[str, Any]) -> dict[str, Any]:
    reserved = ("event", "level", "timestamp", "exc_info", "stack_info")
    return {f"{name}_" if name in reserved else name: value for name, value in known.items()}


def _formatter(as_json: bool, *, colours: bool) -> logging.Formatter:
    formatter = structlog.stdlib.ProcessorFormatter
    processors: list[Processor] = [
        formatter.remove_processors_meta,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _without_secrets,
    ]
    if as_json:
        processors.append(structlog.processors.JSONRenderer(default=str))
    else:
        # A plain traceback: a rich one would print local variables, which may hold secrets.
        plain = structlog.dev.plain_traceback
        processors += [
            _as_sentence,
            structlog.dev.ConsoleRenderer(
                colors=colours, pad_event_to=0, exception_formatter=plain
            ),
        ]
    return formatter(foreign_pre_chain=[structlog.stdlib.ExtraAdder()], processors=processors)


def _without_secrets(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Hide the known secrets in all values, including tracebacks and texts of other libraries."""
    for name in event.keys() - {"component", "kind", "level", "timestamp"}:
        if not isinstance(event[name], bool | int | float | None):
            event[name] = SECRETS.hide(str(event[name]))
    return event


def _as_sentence(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Render an event of the recorder as one line: component, text, reason."""
    if component := event.pop("component", None):
        event["event"] = f"{component}: {event['event']}"
        event.pop("kind", None)
        for name in ("generation", "delay", "failure", "restarts"):
            event.pop(name, None)
    if because := event.pop("because", None):
        event["event"] = f"{event['event']}, because {because}"
    return event
