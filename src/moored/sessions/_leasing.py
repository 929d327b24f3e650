"""The leases of profiles, so that each has one session in the whole cluster.

Without leases, everything is allowed. With leases, a session acquires one before it is started, and
another one before each link if the last lease has expired. In between, another process may have had
the account: unconfirmed sends of the old link are not repeated, and credentials are loaded again.
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

    :param leases: a client, which its owner closes; a URL, for which a client is created; or None.
    :param name: the prefix of the keys.
    """

    def __init__(self, leases: Leases | str | None, *, name: str, ttl: float, clock: Clock) -> None:
        self._client = leases
        self._mine = isinstance(leases, str)
        self._name = name
        self._ttl = ttl
        self._clock = clock
        # Distinguishes the leases of this object from those of others in the same process.
        self._token = f"{clock.random.getrandbits(48):012x}"

    @property
    def needed(self) -> bool:
        """Whether sessions need leases."""
        return self._client is not None

    async def open(self, recorder: Recorder) -> None:
        """Create and open the client, if a URL was given."""
        if isinstance(self._client, str):
            self._client = connect(self._client, clock=self._clock, recorder=recorder)
            await self._client.open()

    async def close(self) -> None:
        """Close the client, if it was created here."""
        if self._mine and isinstance(self._client, Leases):
            await self._client.close()

    async def renew(self, runtime: SessionRuntime) -> None:
        """Acquire the lease of a session, unless it holds a live one or needs none."""
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
                # Held by an earlier acquire of ours that got no answer or was cancelled, or lost
                # because the store could not be reached. No other process has it.
                text = f"the last lease of this session has not expired yet: {error}"
                raise StoreUnavailable(text) from error
            lease = runtime.lease = await exclusive.acquire()  # its holder has released it
        lease.on_lost(lambda error: runtime.fenced() if runtime.lease is lease else None)
        if before is not None:
            # Another process may have used the account, and have changed its credentials. Sends
            # of the old link were settled when the lease was lost: they must not be repeated.
            runtime.memory = runtime.protocol.forget(runtime.memory)
            if not runtime.credentials.unsaved:  # otherwise there is no other copy
                runtime.credentials.value = None
