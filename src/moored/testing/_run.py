"""One schedule: one scenario, one seed, one loop, and nothing left behind."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ._errors import SimulationError, Unretrieved
from ._loop import SimLoop
from ._sim import Sim
from ._teardown import Teardown, still_machine
from ._trace import Trace

__all__ = ["Outcome", "Scenario", "refuse_running_loop", "run_one"]

T = TypeVar("T")

#: What is simulated: an `async def` that gets the handle.
Scenario = Callable[[Sim], Awaitable[T]]


@dataclass(frozen=True, repr=False)
class Outcome(Generic[T]):
    """What one schedule came to."""

    #: The seed that decided everything.
    seed: int
    #: What the scenario returned, if it did.
    value: T | None
    #: Why the schedule fails, if it does.
    error: BaseException | None
    #: A number that is the same whenever the same schedule ran.
    digest: int
    #: Virtual seconds that it took.
    seconds: float
    #: Turns of the loop that it took.
    turns: int
    #: Tasks that would not end when they were cancelled at the end.
    abandoned: tuple[str, ...]
    #: What happened, if a trace was asked for.
    trace: Trace | None

    @property
    def ok(self) -> bool:
        """Whether the scenario passed."""
        return self.error is None

    def result(self) -> T:
        """What the scenario returned; raises its error if it failed."""
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
    drift: bool = True,
    lateness: float = 0.0,
    timer_slack: float = 0.0,
    time_limit: float = 3600.0,
    trace: bool = False,
    check: bool = True,
) -> Outcome[T]:
    """Run one schedule of a scenario in this process and return what it came to.

    A schedule that fails raises its error, so that a test cannot pass by not looking.

    :param drift: whether tasks may overtake each other, as the seed likes.
    :param lateness: virtual seconds by which a task may be late, as on a busy machine; 0 keeps
        virtual times exact.
    :param timer_slack: virtual seconds by which a timer may fire before or after its deadline;
        uvloop's fire up to 0.001 s early.
    :param time_limit: virtual seconds after which the scenario counts as stuck.
    :param trace: keep what happened, in `Outcome.trace`; costs time.
    :param check: False returns a failed outcome too, for whoever looks at its `error`.
    """
    refuse_running_loop()
    with still_machine(seed) as unraisable:
        loop = SimLoop(
            seed,
            drift=drift,
            lateness=lateness,
            timer_slack=timer_slack,
            time_limit=time_limit,
            trace=Trace() if trace else None,
        )
        try:
            outcome = _outcome(loop, scenario, unraisable)
        finally:
            loop.close()
    if check:
        outcome.result()
    return outcome


def refuse_running_loop() -> None:
    """A loop cannot run inside another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SimulationError(
        "a simulation has a loop of its own: call it from a plain function, not from a coroutine"
    )


def _outcome(loop: SimLoop, scenario: Scenario[T], unraisable: list[str]) -> Outcome[T]:
    value, error = _main(loop, scenario)
    # What follows is not part of the schedule.
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
        return None, _without_machinery(error)


def _with_unretrieved(
    error: BaseException | None, loop: SimLoop, unraisable: list[str]
) -> BaseException | None:
    """The error of the scenario, with the exceptions that were never retrieved as its note."""
    texts = [_context_text(context) for context in loop.unhandled] + unraisable
    if not texts:
        return error
    many = "an exception" if len(texts) == 1 else f"{len(texts)} exceptions"
    story = f"{many} that nobody retrieved:\n" + "\n".join(texts)
    if error is not None:
        error.add_note(story)
        return error
    unretrieved = Unretrieved(story)
    causes = (context.get("exception") for context in loop.unhandled)
    unretrieved.__cause__ = next((cause for cause in causes if cause is not None), None)
    return unretrieved


def _without_machinery(error: BaseException) -> BaseException:
    """Let the traceback begin where the scenario does."""
    frames = error.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    return error.with_traceback(frames)


def _is_machinery(module: str) -> bool:
    return module.startswith("asyncio.") or module in (__name__, SimLoop.__module__)


def _context_text(context: dict[str, Any]) -> str:
    text = f"  {context.get('message', 'unhandled exception')}"
    for name in ("task", "future", "handle", "protocol"):
        if name in context:
            text += f" ({context[name]!r:.200})"
    if (error := context.get("exception")) is not None:
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return text
