"""The credentials of one session: loaded for each link, stored when the server issues new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from moored.kernel import SECRETS, Secrets, awaited, describe, start_task
from moored.leases import Lease

from .._errors import SessionError, StorageError
from .._logs import log_forgetful, log_not_kept

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["Credentials", "CredentialsProvider"]

#: Returns the credentials of a profile, for one link.
CredentialsProvider: TypeAlias = Callable[[str], Awaitable[bytes] | bytes]

#: The namespace and the key of the credentials in the storage.
RECORD = ("creds", "creds")


@dataclass(slots=True, eq=False, repr=False)
class Credentials:
    """The credentials of one session."""

    _runtime: SessionRuntime
    # Returns them for each link, in place of the storage.
    _provider: CredentialsProvider | None
    #: The credentials for the next login; None before the first one.
    value: bytes | None = None
    # Whether the server has refused credentials since the last link that was ready.
    _refused: bool = False
    #: Whether the storage does not hold them yet.
    unsaved: bool = False
    # The lease under which the server issued them.
    _lease: Lease | None = None
    saving: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Load the credentials for a new link; raises `StorageError` if that fails."""
        runtime, provider = self._runtime, self._provider
        if provider is None and self.unsaved and self._lease is runtime.lease:
            self._save_soon()  # not under another lease: the storage may hold newer ones
        source = "the storage" if provider is None else "the credentials function"
        found: object = self.value
        try:
            async with asyncio.timeout(runtime.owner._connect_timeout):
                if provider is not None:
                    found = await awaited(provider(runtime.profile))
                else:
                    if (saving := self.saving) is not None:
                        await asyncio.shield(saving)
                    found = self.value or await runtime.records.get(*RECORD)
        except Exception as error:
            raise StorageError(f"{source} failed: {describe(error)}") from error
        if provider is not None and not isinstance(found, bytes):
            raise SessionError(f"{source} returned {type(found).__name__}, not bytes")
        self.value = found  # type: ignore[assignment]

    def hide(self, text: str) -> str:
        """Return a text of the server, which may quote these credentials, without them."""
        # Not in `SECRETS`, which keeps a few hundred values: a process may have more accounts.
        own = Secrets()
        if self.value is not None:
            secret = self.value.partition(b"\0")[2] or self.value  # the rest is a user name
            own.add(secret.decode(errors="surrogateescape"))
        return SECRETS.hide(own.hide(text))

    def refused(self) -> bool:
        """Record that the server refused them; return whether to ask the provider again."""
        is_first, self._refused = not self._refused, True
        return is_first and self._provider is not None

    def worked(self) -> None:
        """Record that the server accepted them."""
        self._refused = False

    def keep(self, credentials: bytes) -> None:
        """Use new credentials from now on, and store them."""
        runtime = self._runtime
        self.value, self._lease = credentials, runtime.lease
        self.unsaved = True
        if runtime.owner._forgetful:
            runtime.owner._forgetful = False
            log_forgetful(runtime.name)
        self._save_soon()

    def _save_soon(self) -> None:
        if self.saving is None:
            self.saving = start_task(self._save())

    async def _save(self) -> None:
        runtime = self._runtime
        saved: bytes | None = None
        try:
            while (value := self.value) is not None and value is not saved:
                await runtime.records.put(*RECORD, value)
                saved = value
            self.unsaved = False
        except Exception as error:
            runtime.record("the credentials could not be stored", kind="failure", cause=error)
            log_not_kept(runtime.name, describe(error))
            runtime.emit("credentials_not_kept", describe(error))
        finally:
            self.saving = None
