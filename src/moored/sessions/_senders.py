"""The steps that a send goes through, in order for each recipient, side by side for all of them.

A step that need not wait is done at once, and a send whose steps are all like that needs no worker
at all. Where a step waits, the recipient gets a worker, as long as it has work.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from moored.kernel import Context, KeyedWorkers, QueueFull

from ._acks import Parked
from ._errors import NotConnected, StepFailed
from ._protocol import Outgoing, Step

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["LIMIT", "Senders"]

#: How many sends of a session may be under way at once, to all recipients or to one.
LIMIT = 10_000
#: What fails one send, and is no defect: what a step says, and that it cannot ask without a link.
FAILURES = (StepFailed, NotConnected)
#: A send, the step that it has come to, and what that step has not finished yet.
Work = tuple[Parked, int, Awaitable[Any] | None]


class Senders:
    """The senders of one session."""

    __slots__ = ("_owned", "_session", "_steps", "_workers", "crashes")

    def __init__(self, session: Session, steps: Sequence[tuple[str, Step]]) -> None:
        self._session = session
        self._steps = tuple(steps)
        self._workers: KeyedWorkers[str, Work, None] | None = None
        # Whether they are a part of the tree, or will be in a moment.
        self._owned = False
        #: How many senders have crashed.
        self.crashes = 0

    def push(self, parked: Parked) -> None:
        """Take a send through the steps."""
        recipient = parked.outgoing.recipient
        if self._workers is not None and recipient in self._workers:
            self._submit(parked, 0, None)
            return
        if not self._steps:
            self._session._relay(parked)
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
                outcome = step(parked.outgoing, self._session)
            except FAILURES as error:
                self._session._table.failed(parked, error)
                return
            except asyncio.CancelledError as error:
                raise _gave_up(parked.stage) from error
            if inspect.isawaitable(outcome):
                self._submit(parked, index, outcome)
                return
            self._took(parked, outcome)
            index += 1
        self._session._relay(parked)

    def _submit(self, parked: Parked, index: int, waiting: Awaitable[Any] | None) -> None:
        if self._workers is None:
            self._workers = KeyedWorkers(
                self._work, max_queue=LIMIT, name=f"senders of {self._session.profile}"
            )
            if not self._owned:
                self._owned = True
                self._session._owner._start_senders(self._session)
        try:
            self._workers.submit(parked.outgoing.recipient, (parked, index, waiting))
        except QueueFull:
            # Most of them were settled by their time: they only wait for the step before them.
            why = f"{LIMIT} sends to this recipient wait already: wait for some of them first"
            _drop(waiting)
            self._session._table.failed(parked, why)

    async def _work(self, recipient: str, work: Work) -> None:
        parked, index, waiting = work
        table = self._session._table
        steps = self._steps
        try:
            while index < len(steps):
                if parked.outcome is not None:
                    # Its caller was told: nothing more is done for it.
                    _drop(waiting)
                    return
                parked.stage, step = steps[index]
                try:
                    outcome = step(parked.outgoing, self._session) if waiting is None else waiting
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
        self._session._relay(parked)

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
        count = self._session._table.crashed(recipient, error)
        self._session._sender_crashed(error, count)

    async def run(self, ctx: Context) -> None:
        """Their life in the tree: they end with the connection, and start afresh with it."""
        self._owned = True
        ctx.started(self)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._owned = False
            self.stop()

    def stop(self) -> None:
        """Nothing more is done for anybody."""
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
