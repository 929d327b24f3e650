"""Before a schedule: make the process deterministic. After it: end all that still runs."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ._errors import Stuck
from ._loop import SimLoop
from ._tasks import SimTask

__all__ = ["Teardown", "deterministic_process"]

# Virtual seconds that cancelled tasks get for their own clean-up.
_GRACE = 60.0
# Clean-up may start new tasks and connections: the number of rounds in which they are ended too.
_ROUNDS = 5
# How often a coroutine is closed that awaits in its `finally` blocks.
_CLOSE_ATTEMPTS = 100


@contextmanager
def deterministic_process(seed: int) -> Iterator[list[str]]:
    """Stop the garbage collector, seed `random`, and collect errors of destructors."""
    unraisable: list[str] = []
    hook, state, collects = sys.unraisablehook, random.getstate(), gc.isenabled()
    gc.disable()
    # Exclude the existing objects from collections, to save time.
    gc.freeze()
    random.seed(seed)
    sys.unraisablehook = lambda args: unraisable.append(_unraisable_text(args))
    try:
        yield unraisable
    finally:
        sys.unraisablehook = hook
        random.setstate(state)
        gc.unfreeze()
        if collects:
            gc.enable()


def _unraisable_text(args: Any) -> str:
    return f"{args.err_msg or 'in a destructor'}: {args.exc_value!r} ({args.object!r:.100})"


class Teardown:
    """Ends the tasks and connections of a scenario, and finds unretrieved exceptions."""

    def __init__(self, loop: SimLoop, unraisable: list[str]) -> None:
        self._loop = loop
        self._unraisable = unraisable
        self._abandoned: dict[int, str] = {}

    def run(self, *, passed: bool) -> tuple[str, ...]:
        """End everything; return the names of tasks that did not end."""
        if passed:
            # A pending task without references is a defect: reported here, because cancelling would
            # hide it.
            gc.collect()
        self._wind_down()
        gc.collect()
        self._discard_remaining()
        self._loop.drop_scheduled()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        gc.collect()
        return tuple(self._abandoned.values())

    def _wind_down(self) -> None:
        loop = self._loop
        loop.time_limit = float("inf")
        for host in loop.network.hosts():
            host.process.resume()
        for _ in range(_ROUNDS):
            tasks = [task for task in loop.tasks() if self._may_end(task)]
            if not tasks and not loop.network.busy:
                break
            self._cancel_and_wait(tasks)

    def _may_end(self, task: SimTask) -> bool:
        killed = task.process is not None and not task.process.alive
        return not killed and task.serial not in self._abandoned

    def _cancel_and_wait(self, tasks: list[SimTask]) -> None:
        for task in tasks:
            task.cancel()
        self._run_unless_stuck(_wait_for(tasks))
        for task in tasks:
            if not task.done():
                self._abandoned[task.serial] = task.get_name()
            elif not task.cancelled() and (error := task.exception()) is not None:
                message = f"task {task.get_name()} failed when it was cancelled at the end"
                self._loop.call_exception_handler({"message": message, "exception": error})
        self._loop.network.shut_down()
        self._run_unless_stuck(_a_few_turns())

    def _run_unless_stuck(self, coro: Any) -> None:
        self._loop.reset_turn_count()
        with suppress(Stuck):
            self._loop.run_until_complete(coro)

    def _discard_remaining(self) -> None:
        """Discard the tasks of killed hosts and those that did not end; ignore their errors."""
        loop = self._loop
        unhandled, unraisable = len(loop.unhandled), len(self._unraisable)
        for _ in range(_ROUNDS):
            tasks = list(loop.tasks())
            if not tasks:
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loop.drop_scheduled()
                loop.run_until_complete(_discard_all(tasks))
                loop.kept.clear()
                del tasks
                gc.collect()
        del loop.unhandled[unhandled:]
        del self._unraisable[unraisable:]


async def _wait_for(tasks: Sequence[SimTask]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=_GRACE)


async def _a_few_turns() -> None:
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)


async def _discard_all(tasks: list[SimTask]) -> None:
    """Close every coroutine, inside a running loop, which their clean-up may need."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coro: Any = task.get_coro()
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                coro.close()
                break
            except Exception:
                continue  # The coroutine awaits in a `finally` block: close it there again.
