"""The steps of sends: in order for each recipient, concurrently for different recipients.

A plain step runs immediately, and a send with only plain steps needs no worker. If a step must be
awaited, the recipient gets a worker, which ends when it is idle.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moored.kernel import KeyedWorkers, QueueFull, is_cancelled

from .._errors import NotConnected, StepFailed
from .._protocol import Outgoing, Step
from ._acks import Parked

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["LIMIT", "Senders"]

#: The most sends of a session without an outcome, to all recipients or to one.
LIMIT = 10_000
#: Errors of a step that fail only one send: its own, and a query without a link.
FAILURES = (StepFailed, NotConnected)
#: A send, the index of its current step, and the awaitable that the step returned.
Work = tuple[Parked, int, Awaitable[Any] | None]


@dataclass(slots=True, eq=False, repr=False)
class Senders:
    """The senders of one session."""

    _runtime: SessionRuntime
    _steps: Sequence[tuple[str, Step]]
    _workers: KeyedWorkers[str, Work, None] | None = None
    #: The number of senders that crashed.
    crashes: int = 0

    def push(self, parked: Parked) -> None:
        """Run the steps of a send, and then relay it."""
        recipient = parked.outgoing.recipient
        if self._workers is not None and recipient in self._workers:
            self._submit(parked, 0, None)
            return
        try:
            if (waiting := self._walk(parked, 0)) is not None:
                self._submit(parked, *waiting)
        except Exception as error:
            self.crashed(recipient, error)

    def _walk(self, parked: Parked, index: int) -> tuple[int, Awaitable[Any]] | None:
        """Run the steps from this one on; return the first that must be awaited, or relay."""
        steps = self._steps
        while index < len(steps):
            parked.stage, step = steps[index]
            try:
                outcome = step(parked.outgoing, self._runtime.session)
            except FAILURES as error:
                self._runtime.sends.table.failed(parked, error)
                return None
            except asyncio.CancelledError as error:
                raise _gave_up(parked.stage) from error
            if inspect.isawaitable(outcome):
                return index, outcome
            self._took(parked, outcome)
            index += 1
        self._runtime.sends.relay(parked)
        return None

    def _submit(self, parked: Parked, index: int, waiting: Awaitable[Any] | None) -> None:
        if self._workers is None:
            self._workers = KeyedWorkers(
                self._work, max_queue=LIMIT, name=f"senders of {self._runtime.profile}"
            )
        try:
            self._workers.submit(parked.outgoing.recipient, (parked, index, waiting))
        except QueueFull:
            # Most of them have timed out, and wait behind a slow step.
            why = f"{LIMIT} sends to this recipient are queued: wait for outcomes first"
            _drop(waiting)
            self._runtime.sends.table.failed(parked, why)

    async def _work(self, recipient: str, work: Work) -> None:
        parked, index, waiting = work
        try:
            while parked.outcome is None:
                if waiting is None:
                    if (found := self._walk(parked, index)) is None:
                        return
                    index, waiting = found
                elif not await self._finish(parked, waiting):
                    return
                else:
                    index, waiting = index + 1, None
            _drop(waiting)  # settled meanwhile: run no more steps
        except Exception as error:
            self.crashed(recipient, error)
            raise

    async def _finish(self, parked: Parked, waiting: Awaitable[Any]) -> bool:
        """Await a step, until the send's timeout: the sends behind it must go on."""
        table = self._runtime.sends.table
        try:
            async with asyncio.timeout_at(parked.deadline) as limit:
                self._took(parked, await waiting)
        except FAILURES as error:
            table.failed(parked, error)
            return False
        except TimeoutError:
            if not limit.expired():
                raise
            table.expired(parked.deadline)
            return False
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            # The awaitable was cancelled, not the sender.
            raise _gave_up(parked.stage) from error
        return True

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
        """Fail all sends to a recipient, for which a step raised an unexpected error."""
        self.crashes += 1
        count = self._runtime.sends.table.crashed(recipient, error)
        self._runtime.sender_crashed(error, count)

    def stop(self) -> None:
        """Cancel the workers of all recipients."""
        if self._workers is not None:
            self._workers.cancel()
            self._workers = None

    def __len__(self) -> int:
        """The number of recipients with a worker."""
        return 0 if self._workers is None else len(self._workers)


def _gave_up(stage: str) -> RuntimeError:
    return RuntimeError(f"the step {stage!r} raised CancelledError, but was not cancelled")


def _drop(waiting: Awaitable[Any] | None) -> None:
    if inspect.iscoroutine(waiting):
        waiting.close()
