"""Describe what each task awaits, for the message of a `Deadlock`."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any

__all__ = ["describe_waits", "location"]

_SHOWN = 20


def describe_waits(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return two lines per task: its name and what it awaits, and its stack."""
    tasks = list(tasks)
    lines = [line for task in tasks[:_SHOWN] for line in _describe(task)]
    if len(tasks) > _SHOWN:
        lines.append(f"  … and {len(tasks) - _SHOWN} more tasks")
    return "\n".join(lines)


def location(task: asyncio.Task[Any]) -> str:
    """Return the line at which a task is suspended, and the asyncio function that it awaits."""
    frames = list(_walk(task.get_coro()))
    own = [frame for frame in frames if not _is_asyncio(frame)]
    if not own or own[-1] is frames[-1]:
        return _here(frames[-1]) if frames else "its end"
    return f"{_here(own[-1])}, in {frames[-1].f_code.co_qualname}"


def _here(frame: FrameType) -> str:
    code = frame.f_code
    return f"{PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"


def _is_asyncio(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("asyncio.")


def _describe(task: asyncio.Task[Any]) -> list[str]:
    frames = list(_walk(task.get_coro()))
    places = "  <-  ".join(_here(frame) for frame in reversed(frames)) or "not started yet"
    return [f"  {task.get_name()}  waits on  {_thing(task, frames)}", f"      at {places}"]


def _thing(task: asyncio.Task[Any], frames: list[FrameType]) -> str:
    """Return the lock, queue or stream of the innermost frame, else the future."""
    future = getattr(task, "_fut_waiter", None)
    if isinstance(future, asyncio.Task):
        return f"task {future.get_name()}"
    if frames and _is_asyncio(frames[-1]):
        owner = frames[-1].f_locals.get("self")
        if owner is not None:
            return _safe_repr(owner)
    return "nothing: ready to run" if future is None else _safe_repr(future)


def _walk(awaitable: Any) -> Iterator[FrameType]:
    while awaitable is not None:
        frame, inner = _step(awaitable)
        if frame is None and inner is None:
            inner = _hidden_generator(awaitable)
        if frame is not None:
            yield frame
        awaitable = inner


def _step(awaitable: Any) -> tuple[FrameType | None, Any]:
    for prefix, link in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(awaitable, link):
            return getattr(awaitable, f"{prefix}_frame"), getattr(awaitable, link)
    return None, None


def _hidden_generator(awaitable: Any) -> Any:
    """Return the generator that `async for` awaits; only the garbage collector can reach it."""
    if "async_generator" not in type(awaitable).__name__:
        return None
    return next((held for held in gc.get_referents(awaitable) if hasattr(held, "ag_await")), None)


def _safe_repr(thing: Any) -> str:
    try:
        text = repr(thing)
    except Exception as error:
        text = f"<{type(thing).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else text[:197] + "…"
