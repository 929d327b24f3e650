"""Checks of the arguments of public calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ._errors import SessionError
from ._protocol import Protocol


def check_drain(drain: object) -> None:
    """Raise `ValueError` unless it is a number of seconds, 0 or more."""
    if not isinstance(drain, (int, float)) or not drain >= 0:
        raise ValueError(f"drain={drain!r} must be a number of seconds, 0 or more")


def check_handler(handler: object) -> None:
    """Raise `TypeError` for a handler that cannot be given events."""
    if handler is not None and not callable(handler) and not isinstance(handler, asyncio.Queue):
        found = type(handler).__name__
        raise TypeError(f"the handler must be a function, an asyncio.Queue or None, not {found}")


def check_loop(loop: asyncio.AbstractEventLoop, home: asyncio.AbstractEventLoop | None) -> None:
    """Raise `SessionError` for a call from another event loop than the one of the sessions."""
    if loop is not home:
        raise SessionError(
            "these sessions belong to another event loop: call them there, from another thread "
            "with asyncio.run_coroutine_threadsafe, or open Sessions on this loop"
        )


def check_protocol(protocol: object) -> None:
    """Raise `TypeError` unless it is a `Protocol`; the value, perhaps a URL, is not shown."""
    if not isinstance(protocol, Protocol):
        found = type(protocol).__name__
        raise TypeError(f"protocol must be a Protocol, such as Mqtt(uri), not {found}")


def check_steps(steps: Iterable[object]) -> None:
    """Raise `TypeError` unless each step is a name and a function."""
    for step in steps:
        match step:
            case (str(), function) if callable(function):
                continue
        raise TypeError('steps are pairs of a name and a function: steps=[("sign", sign)]')


def check_texts(**texts: object) -> None:
    """Raise `TypeError` for an argument that is not a str, by its name."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {type(value).__name__}")


def check_timeout(timeout: object) -> None:
    """Raise unless it is a number of seconds above 0: NaN would never time out."""
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r} must be more than 0 seconds")
