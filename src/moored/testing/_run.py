"""Run one schedule: one scenario with one seed, on its own event loop."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack

from moored.kernel import counted

from ._errors import SimulationError, Unretrieved
from ._loop import ScheduleOptions, SimLoop
from ._sim import Sim
from ._teardown import Teardown, deterministic_process
from ._trace import Trace

__all__ = ["Outcome", "Scenario", "refuse_running_loop", "run_one"]

T = TypeVar("T")

#: A coroutine function to simulate; its argument is the `Sim` of the schedule.
Scenario = Callable[[Sim], Awaitable[T]]


@dataclass(frozen=True, repr=False)
class Outcome(Generic[T]):
    """The result of one schedule."""

    #: The seed of the schedule.
    seed: int
    #: The return value of the scenario, or None if it failed.
    value: T | None
    #: Why the schedule failed, or None if it passed.
    error: BaseException | None
    #: A hash of the schedule: equal schedules have equal digests.
    digest: int
    #: Virtual seconds.
    seconds: float
    #: Turns of the event loop.
    turns: int
    #: The names of tasks that did not end when they were cancelled at the end.
    abandoned: tuple[str, ...]
    #: The events of the schedule, with `trace=True`.
    trace: Trace | None

    @property
    def ok(self) -> bool:
        """Whether the scenario passed."""
        return self.error is None

    def result(self) -> T:
        """Return the value of the scenario, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "passed" if self.error is None else f"failed with {self.error!r}"
        return (
            f"<Outcome of seed {self.seed}: {state} after {self.seconds:.6f} s, {self.turns} turns>"
        )


def run_one(
    scenario: Scenario[T],
    seed: int,
    *,
    trace: bool = False,
    check: bool = True,
    **options: Unpack[ScheduleOptions],
) -> Outcome[T]:
    """Run one schedule of a scenario in this process and return its result.

    A failed schedule raises its error, so that a test that ignores the result still fails.

    :param trace: record the events in `Outcome.trace`, which is slower.
    :param check: False returns the outcome of a failed schedule instead of raising its error.
    :param options: `drift`, `lateness`, `timer_slack` and `time_limit` of `SimLoop`.
    """
    refuse_running_loop()
    with deterministic_process(seed) as unraisable:
        loop = SimLoop(seed, trace=Trace() if trace else None, **options)
        try:
            outcome = _outcome(loop, scenario, unraisable)
        finally:
            loop.close()
    if check:
        outcome.result()
    return outcome


def refuse_running_loop() -> None:
    """Raise SimulationError inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SimulationError(
        "a simulation runs its own event loop: call it from a plain function, not from a coroutine"
    )


def _outcome(loop: SimLoop, scenario: Scenario[T], unraisable: list[str]) -> Outcome[T]:
    value, error = _main(loop, scenario)
    # The teardown is not part of the schedule.
    trace, loop.trace = loop.trace, None
    digest, seconds, turns = loop.digest, loop.time(), loop.turns
    abandoned = Teardown(loop, unraisable).run(passed=error is None)
    return Outcome(
        seed=loop.seed,
        value=value,
        error=_with_unretrieved(error, loop, unraisable),
        digest=digest & 0xFFFF_FFFF_FFFF_FFFF,
        seconds=seconds,
        turns=turns,
        abandoned=abandoned,
        trace=trace,
    )


def _main(loop: SimLoop, scenario: Scenario[T]) -> tuple[T | None, BaseException | None]:
    async def enter() -> T:
        return await scenario(Sim(loop))

    context = loop.network.host("main").process.context()
    task: asyncio.Task[T] = loop.create_task(enter(), name="scenario", context=context)
    try:
        return loop.run_until_complete(task), None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return None, _without_loop_frames(error)


def _with_unretrieved(
    error: BaseException | None, loop: SimLoop, unraisable: list[str]
) -> BaseException | None:
    """Return the error of the scenario, with the unretrieved exceptions as its note."""
    texts = [_context_text(context) for context in loop.unhandled] + unraisable
    if not texts:
        return error
    message = f"{counted(len(texts), 'exception')} never retrieved:\n" + "\n".join(texts)
    if error is not None:
        error.add_note(message)
        return error
    unretrieved = Unretrieved(message)
    causes = (context.get("exception") for context in loop.unhandled)
    unretrieved.__cause__ = next((cause for cause in causes if cause is not None), None)
    return unretrieved


def _without_loop_frames(error: BaseException) -> BaseException:
    """Remove the frames of the event loop from the start of the traceback."""
    frames = error.__traceback__
    while frames is not None and _is_loop_module(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    return error.with_traceback(frames)


def _is_loop_module(module: str) -> bool:
    return module.startswith("asyncio.") or module in (__name__, SimLoop.__module__)


def _context_text(context: dict[str, Any]) -> str:
    text = f"  {context.get('message', 'unhandled exception')}"
    for name in ("task", "future", "handle", "protocol"):
        if name in context:
            text += f" ({context[name]!r:.200})"
    if (error := context.get("exception")) is not None:
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return text
