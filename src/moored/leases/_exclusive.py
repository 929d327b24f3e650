"""The block made by `Leases.exclusive`: one owner of a key in the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from moored.kernel import Backoff, Deadline, duration, refuse, unmet

from ._errors import LeaseLost, LeaseRefused, StoreUnavailable
from ._lease import Lease

if TYPE_CHECKING:
    from ._client import Leases

__all__ = ["Exclusive"]

_CANCELLED = asyncio.CancelledError

#: First and longest delay between attempts while another owner holds the lease, in seconds.
POLL = (0.05, 1.0)


@dataclass(eq=False, repr=False)
class Exclusive:
    """An exclusive lease as an async context manager, made by `Leases.exclusive`."""

    leases: Leases
    key: str
    _: KW_ONLY
    ttl: float
    wait: float | None
    owner: str | None
    cancel: bool
    _lease: Lease | None = field(default=None, init=False)
    _task: asyncio.Task[object] | None = field(default=None, init=False)
    _cancelled: bool = field(default=False, init=False)
    _cancelling: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        what = "at least 0 seconds, or None to wait without limit"
        refuse("exclusive", unmet(("wait", self.wait, (self.wait or 0) >= 0, what)))

    async def acquire(self) -> Lease:
        """Wait for the lease and return it; raise `LeaseRefused` after `wait` seconds.

        For use without `async with`: the caller releases the lease, and is not cancelled when the
        lease is lost.
        """
        clock = self.leases._clock
        deadline = Deadline.after(self.wait, clock)
        polls = Backoff(*POLL, jitter=0.25, clock=clock)
        while True:
            lease = await self.leases.acquire(self.key, limit=1, ttl=self.ttl, owner=self.owner)
            if lease is not None:
                return lease
            left = deadline.remaining()
            if left <= 0:
                raise LeaseRefused(await self._refusal())
            await asyncio.sleep(min(polls.fail(), left))

    async def _refusal(self) -> str:
        waited = "" if not self.wait else f" within {self.wait:g} s"
        try:
            held = await self.leases.held(self.key)
        except StoreUnavailable:
            held = ()
        if not held:
            return f"no lease of {self.key!r}{waited}: other owners acquired it first"
        now = self.leases._clock.wall()
        holder, age = held[0].holder, duration(now - held[0].created_at)
        return (
            f"no lease of {self.key!r}{waited}: held by {holder.owner} of {holder.service_name} "
            f"(host {holder.host}, pid {holder.pid}, for {age}); it expires in "
            f"{duration(held[0].expires_in)} unless it is renewed"
        )

    async def __aenter__(self) -> Lease:
        if self._lease is not None:
            raise RuntimeError("this exclusive() block was entered before: call exclusive() again")
        self._lease = await self.acquire()
        if self.cancel:
            self._task = asyncio.current_task()
            self._cancelling = 0 if self._task is None else self._task.cancelling()
            self._lease.on_lost(self._interrupt)
        return self._lease

    def _interrupt(self, error: LeaseLost) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._lease is not None
        task, self._task = self._task, None
        await self._lease.release()
        if self._cancelled and task is not None:
            await self._uncancel(task, kind)
        lost = self._lease.error
        if lost is not None and (kind is None or (self._cancelled and kind is _CANCELLED)):
            raise lost from None

    async def _uncancel(self, task: asyncio.Task[object], kind: type[BaseException] | None) -> None:
        """Undo our own cancellation, as asyncio.timeout() does; re-raise any other one."""
        if kind is not _CANCELLED:
            try:
                # The block has not received our cancellation yet: receive it here.
                await asyncio.sleep(0)
            except _CANCELLED:
                pass
        if task.uncancel() > self._cancelling:
            raise _CANCELLED
