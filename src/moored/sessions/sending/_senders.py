"""The steps that a send goes through, in order for each recipient, side by side for all of them.

A step that need not wait is done at once, and a send whose steps are all like that needs no worker
at all. Where a step waits, the recipient gets a worker, as long as it has work.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from moored.kernel import KeyedWorkers, QueueFull

from .._errors import NotConnected, StepFailed
from .._protocol import Outgoing, Step
from ._acks import Parked

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["LIMIT", "Senders"]

#: How many sends of a session may be under way at once, to all recipients or to one.
LIMIT = 10_000
#: What fails one send, and is no defect: what a step says, and that it cannot ask without a link.
FAILURES = (StepFailed, NotConnected)
#: A send, the step that it has come to, and what that step has not finished yet.
Work = tuple[Parked, int, Awaitable[Any] | None]


class Senders:
    """The senders of one session."""

    __slots__ = ("_runtime", "_steps", "_workers", "crashes")

    def __init__(self, runtime: SessionRuntime, steps: Sequence[tuple[str, Step]]) -> None:
        self._runtime = runtime
        self._steps = tuple(steps)
        self._workers: KeyedWorkers[str, Work, None] | None = None
        #: How many senders have crashed.
        self.crashes = 0

    def push(self, parked: Parked) -> None:
        """Take a send through the steps."""
        recipient = parked.outgoing.recipient
        if self._workers is not None and recipient in self._workers:
            self._submit(parked, 0, None)
            return
        if not self._steps:
            self._runtime.sends.relay(parked)
            return
        try:
            self._walk(parked, 0)
        except Exception as error:
            self.crashed(recipient, error)

    def _walk(self, parked: Parked, index: int) -> None:
        """Do the steps from this one on, until one of them must be waited for."""
        steps = self._steps
        while index < len(steps):
            parked.stage, step = steps[index]
            try:
                outcome = step(parked.outgoing, self._runtime.session)
            except FAILURES as error:
                self._runtime.sends.table.failed(parked, error)
                return
            except asyncio.CancelledError as error:
                raise _gave_up(parked.stage) from error
            if inspect.isawaitable(outcome):
                self._submit(parked, index, outcome)
                return
            self._took(parked, outcome)
            index += 1
        self._runtime.sends.relay(parked)

    def _submit(self, parked: Parked, index: int, waiting: Awaitable[Any] | None) -> None:
        if self._workers is None:
            self._workers = KeyedWorkers(
                self._work, max_queue=LIMIT, name=f"senders of {self._runtime.profile}"
            )
        try:
            self._workers.submit(parked.outgoing.recipient, (parked, index, waiting))
        except QueueFull:
            # Most of them were settled by their time: they only wait for the step before them.
            why = f"{LIMIT} sends to this recipient wait already: wait for some of them first"
            _drop(waiting)
            self._runtime.sends.table.failed(parked, why)

    async def _work(self, recipient: str, work: Work) -> None:
        parked, index, waiting = work
        table = self._runtime.sends.table
        steps = self._steps
        try:
            while index < len(steps):
                if parked.outcome is not None:
                    # Its caller was told: nothing more is done for it.
                    _drop(waiting)
                    return
                parked.stage, step = steps[index]
                try:
                    outcome = (
                        step(parked.outgoing, self._runtime.session) if waiting is None else waiting
                    )
                    waiting = None
                    if inspect.isawaitable(outcome):
                        # No longer than its send: those behind it would wait for ever.
                        async with asyncio.timeout_at(parked.deadline) as limit:
                            outcome = await outcome
                except FAILURES as error:
                    table.failed(parked, error)
                    return
                except TimeoutError:
                    if not limit.expired():
                        raise
                    table.expired(parked.deadline)
                    return
                except asyncio.CancelledError as error:
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        raise
                    # What it waited for was cancelled, and not the sender.
                    raise _gave_up(parked.stage) from error
                self._took(parked, outcome)
                index += 1
        except Exception as error:
            self.crashed(recipient, error)
            raise
        self._runtime.sends.relay(parked)

    @staticmethod
    def _took(parked: Parked, outcome: Any) -> None:
        if outcome is not None and outcome is not parked.outgoing:
            if not isinstance(outcome, Outgoing):
                found = type(outcome).__name__
                raise TypeError(f"the step {parked.stage!r} must return the send, not {found}")
            if (outcome.id, outcome.recipient) != (parked.id, parked.outgoing.recipient):
                raise ValueError(f"the step {parked.stage!r} must not change id or recipient")
            parked.outgoing = outcome

    def crashed(self, recipient: str, error: Exception) -> None:
        """A step raised what no step may: all that the recipient has fails with it."""
        self.crashes += 1
        count = self._runtime.sends.table.crashed(recipient, error)
        self._runtime.sender_crashed(error, count)

    def stop(self) -> None:
        """Cancel the work of every recipient."""
        if self._workers is not None:
            self._workers.cancel()
            self._workers = None

    def __len__(self) -> int:
        """How many recipients have a worker."""
        return 0 if self._workers is None else len(self._workers)


def _gave_up(stage: str) -> RuntimeError:
    return RuntimeError(f"the step {stage!r} has ended with CancelledError; nobody cancelled it")


def _drop(waiting: Awaitable[Any] | None) -> None:
    if inspect.iscoroutine(waiting):
        waiting.close()
