"""One session for each profile in the whole cluster: the leases of the sessions of a process.

Without leases all of this says yes. With them a session has one before it is started, and gets
another one before each link if the last one is over. Between the two somebody else may have had
the account: what a link of ours had left behind is not said any more, and what is stored counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moored.kernel import Clock, Recorder
from moored.leases import LeaseRefused, Leases, StoreUnavailable, connect

if TYPE_CHECKING:
    from ._runtime import SessionRuntime

__all__ = ["Leasing"]


class Leasing:
    """The leases of all sessions of one `Sessions` object.

    :param leases: a client, which stays its owner's; a URL, for which one is made; None for none.
    :param name: the first word of the keys.
    """

    __slots__ = ("_client", "_clock", "_mine", "_name", "_token", "_ttl")

    def __init__(self, leases: Leases | str | None, *, name: str, ttl: float, clock: Clock) -> None:
        self._client = leases
        self._mine = False
        self._name = name
        self._ttl = ttl
        self._clock = clock
        # Tells leases of this object from those of others in the same process.
        self._token = f"{clock.random.getrandbits(48):012x}"

    @property
    def needed(self) -> bool:
        """Whether sessions need leases at all."""
        return self._client is not None

    async def open(self, recorder: Recorder) -> None:
        """Connect to the store, if that is for us to do."""
        if isinstance(self._client, str):
            self._client = connect(self._client, clock=self._clock, recorder=recorder)
            self._mine = True
            await self._client.open()

    async def close(self) -> None:
        """Let go of the store, if it is ours."""
        if self._mine and isinstance(self._client, Leases):
            await self._client.close()

    async def renew(self, runtime: SessionRuntime) -> None:
        """See to it that the session has its lease, if it needs one."""
        before = runtime.lease
        if self._client is None or (before is not None and before.live):
            return
        assert isinstance(self._client, Leases)
        key = f"{self._name}/{runtime.profile}"
        owner = f"{runtime.profile} ({self._token})"
        exclusive = self._client.exclusive(key, ttl=self._ttl, wait=0, owner=owner)
        try:
            lease = runtime.lease = await exclusive.acquire()
        except LeaseRefused as error:
            held = await self._client.held(key)
            if any(each.holder.owner != owner for each in held):
                raise
            if held or before is not None:
                # It was asked for and not answered, or nobody waited for the answer, or it was
                # lost because the store could not be reached. Nobody else has it.
                raise StoreUnavailable(f"its own last lease is not over yet: {error}") from error
            lease = runtime.lease = await exclusive.acquire()  # whoever had it is gone
        lease.on_lost(lambda error: runtime.fenced() if runtime.lease is lease else None)
        if before is not None:
            # Whoever had it since has said other things, and may have other credentials. What the
            # old link had not confirmed was settled when the lease was lost: it must not follow.
            runtime.memory = runtime.protocol.forget(runtime.memory)
            if not runtime.credentials.unsaved:  # otherwise they are nowhere else
                runtime.credentials.value = None
