"""Around a schedule: a machine that holds still before it, and nothing left behind after it."""

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

__all__ = ["Teardown", "still_machine"]

# Virtual seconds that cancelled tasks get for their own clean-up.
_GRACE = 60.0
# Clean-up may start new tasks and connections; so often they are ended as well.
_ROUNDS = 5
# How often a coroutine is asked to end that awaits something in its `finally` blocks.
_STUBBORN = 100


@contextmanager
def still_machine(seed: int) -> Iterator[list[str]]:
    """Take away what differs from run to run: collector, shared chance, errors in destructors."""
    unraisable: list[str] = []
    hook, state, collects = sys.unraisablehook, random.getstate(), gc.isenabled()
    gc.disable()
    # What exists already is none of our garbage, and need not be looked at.
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
    """Ends what a scenario has left running, and finds what nobody has retrieved."""

    def __init__(self, loop: SimLoop, unraisable: list[str]) -> None:
        self._loop = loop
        self._unraisable = unraisable
        self._abandoned: dict[int, str] = {}

    def run(self, *, passed: bool) -> tuple[str, ...]:
        """End everything; returns the names of tasks that would not end."""
        if passed:
            # A task that nobody holds is a defect: found here, because cancelling would hide it.
            gc.collect()
        self._wind_down()
        gc.collect()
        self._bury()
        self._loop.forget_plans()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        gc.collect()
        return tuple(self._abandoned.values())

    def _wind_down(self) -> None:
        loop = self._loop
        loop.time_limit = float("inf")
        for host in loop.network.hosts():
            host.process.resume()
        self._end_foreign()
        for _ in range(_ROUNDS):
            tasks = [task for task in loop.tasks() if self._may_end(task)]
            if not tasks and not loop.network.busy:
                break
            self._settle(tasks)

    def _end_foreign(self) -> None:
        """Tasks that somebody's own task factory has made."""
        tasks = [task for task in asyncio.all_tasks(self._loop) if not isinstance(task, SimTask)]
        for task in sorted(tasks, key=lambda task: task.get_name()):
            task.cancel()
        if tasks:
            self._let_run(_wait_for(tasks))

    def _may_end(self, task: SimTask) -> bool:
        killed = task.process is not None and not task.process.alive
        return not killed and task.serial not in self._abandoned

    def _settle(self, tasks: list[SimTask]) -> None:
        for task in tasks:
            task.cancel()
        self._let_run(_wait_for(tasks))
        for task in tasks:
            if not task.done():
                self._abandoned[task.serial] = task.get_name()
            elif not task.cancelled() and (error := task.exception()) is not None:
                message = f"task {task.get_name()} failed when it was cancelled at the end"
                self._loop.call_exception_handler({"message": message, "exception": error})
        self._loop.network.shut_down()
        self._let_run(_a_few_turns())

    def _let_run(self, coro: Any) -> None:
        self._loop.be_patient_again()
        with suppress(Stuck):
            self._loop.run_until_complete(coro)

    def _bury(self) -> None:
        """Take killed hosts and tasks that would not end apart; what they say now is no news."""
        loop = self._loop
        heard = len(loop.unhandled), len(self._unraisable)
        for _ in range(_ROUNDS):
            tasks = list(loop.tasks())
            if not tasks:
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loop.forget_plans()
                loop.run_until_complete(_discard_all(tasks))
                loop.network.forget_graves()
                del tasks
                gc.collect()
        del loop.unhandled[heard[0] :]
        del self._unraisable[heard[1] :]


async def _wait_for(tasks: Sequence[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=_GRACE)


async def _a_few_turns() -> None:
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)


async def _discard_all(tasks: list[SimTask]) -> None:
    """Close every coroutine, inside a running loop, because their clean-up may ask for it."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coro: Any = task.get_coro()
        for _ in range(_STUBBORN):
            try:
                coro.close()
                break
            except Exception:
                continue  # It awaits something in a `finally`: it is asked to end there again.
