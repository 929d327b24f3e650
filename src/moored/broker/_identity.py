"""Who a subscriber is: API keys and one-time tickets; see `_jwt` for JSON web tokens.

An authenticator is a function of a token that returns an `Identity`. For a token that is not valid
it returns None, or raises `TokenRefused` with the reason. It may be async.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from moored.kernel import Clock, describe

from ._events import BrokerError

__all__ = ["ApiKeys", "Authenticator", "Identity", "Tickets", "TokenRefused"]

log = logging.getLogger("moored.broker")

#: The most tickets that are valid at a time.
MAX_TICKETS = 100_000


class Identity(NamedTuple):
    """What a subscriber may see."""

    tenant: str
    #: The Unix time at which the stream ends; None for no end.
    expires: float | None = None
    #: The channels that it may have; None for all.
    channels: frozenset[str] | None = None
    #: The user of the tenant, for events that are meant for one; None for no user.
    user: str | None = None


class TokenRefused(BrokerError):
    """A token is not valid; raised by an authenticator that has a reason for the client.

    The client gets the text, so it must not have anything of the token or of the keys.

    :param reason: a short word, for metrics and the log.
    :param retry_after: seconds after which the same token may be valid (503); None for never (401).
    """

    def __init__(self, reason: str, text: str, *, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.retry_after = retry_after


Authenticator = Callable[[str], "Identity | Awaitable[Identity | None] | None"]


class ApiKeys:
    """An authenticator for API keys.

    :param keys: the tenant of each key; or a file with a key and its tenant on each line, which is
        read again when it has changed. Empty lines and lines that begin with # are ignored. While
        the file is missing or has a mistake, the keys that were read last stay valid.
    """

    def __init__(self, keys: Mapping[str, str] | str | Path) -> None:
        self._path = None if isinstance(keys, Mapping) else Path(keys)
        self._changed = 0
        self._mistake = ""
        # By their hashes: a comparison of hashes does not reveal a key by the time that it takes.
        self._tenants: dict[bytes, str] = {}
        if isinstance(keys, Mapping):
            self._tenants = {_hash(key): tenant for key, tenant in keys.items()}
        else:
            self._read(Path(keys))

    def __call__(self, token: str) -> Identity | None:
        if self._path is not None:
            try:
                self._read(self._path)
                self._mistake = ""
            except (OSError, ValueError) as error:
                if (mistake := describe(error)) != self._mistake:
                    log.error("the API keys are not updated: %s", mistake)
                self._mistake = mistake
        tenant = self._tenants.get(_hash(token))
        return None if tenant is None else Identity(tenant)

    def _read(self, path: Path) -> None:
        if (changed := path.stat().st_mtime_ns) == self._changed:
            return
        found: dict[bytes, str] = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ValueError(f"{path}, line {number}: expected a key and a tenant")
            if found.setdefault(_hash(words[0]), words[1]) != words[1]:
                raise ValueError(f"{path}, line {number}: the key has another tenant above")
        self._tenants, self._changed = found, changed


class Tickets:
    """One-time tickets for clients that cannot send headers, such as the browser's `EventSource`.

    :param lifetime: seconds for which a ticket is valid.
    """

    def __init__(self, lifetime: float = 30.0, clock: Clock | None = None) -> None:
        self.lifetime = lifetime
        self._clock = clock or Clock.current()
        self._tickets: dict[str, tuple[float, Identity]] = {}

    def issue(self, identity: Identity) -> str | None:
        """Return a ticket for an identity; None if there are too many."""
        now = self._clock.monotonic()
        while self._tickets and (oldest := next(iter(self._tickets))):
            if self._tickets[oldest][0] > now:
                break
            del self._tickets[oldest]
        if len(self._tickets) >= MAX_TICKETS:
            return None
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = (now + self.lifetime, identity)
        return ticket

    def redeem(self, ticket: str) -> Identity | None:
        """Return the identity of a ticket, once; None if it is not valid."""
        until, identity = self._tickets.pop(ticket, (0.0, None))
        return identity if until > self._clock.monotonic() else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
