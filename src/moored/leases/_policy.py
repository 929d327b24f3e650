"""The settings of a client, checked once and then immutable."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from moored.kernel import refuse, unmet

__all__ = ["OnUnavailable", "Policy", "check_key", "check_ttl"]

OnUnavailable = Literal["local", "refuse"]

#: Every store can hold a key of this length together with its own prefix and suffix.
MAX_KEY_BYTES = 1024


@dataclass(frozen=True)
class Policy:
    """How a client renews leases, times out, and behaves in an outage."""

    _: KW_ONLY
    #: What `acquire` does while the store is unavailable: "local" applies the limit within this
    #: process and logs a warning, "refuse" raises `StoreUnavailable`. With "local", held leases
    #: with a limit above 1 that expire in an outage become local, too, and are not lost.
    on_unavailable: OnUnavailable = "local"
    #: How many leases of a key this process may hold in an outage; None means the key's limit,
    #: which is correct for one process, and too much for several.
    local_limit: int | None = None
    #: Seconds between renewals, at most a third of the ttl, so that two renewals may fail.
    renew_every: float = 60.0
    #: Seconds by which a holder's deadline is earlier than the expiry in the store, because clocks
    #: drift and holders need time to stop; None means a tenth of the ttl, at most 5 s.
    margin: float | None = None
    #: Timeout of one call to the store, in seconds.
    timeout: float = 5.0
    #: How many leases are renewed or released in one call to the store.
    batch: int = 250

    def __post_init__(self) -> None:
        refuse("leases", self._mistakes())

    def _mistakes(self) -> list[str]:
        mode, limit, margin = self.on_unavailable, self.local_limit, self.margin
        positive = "more than 0 seconds, and finite"
        least = "at least 0 seconds, and finite, or None"
        return unmet(
            ("on_unavailable", mode, mode in ("local", "refuse"), "'local' or 'refuse'"),
            ("local_limit", limit, (limit or 0) >= 0, "at least 0, or None"),
            ("renew_every", self.renew_every, 0 < self.renew_every < math.inf, positive),
            ("timeout", self.timeout, 0 < self.timeout < math.inf, positive),
            ("margin", margin, 0 <= (margin or 0) < math.inf, least),
            ("batch", self.batch, self.batch >= 1, "at least 1"),
        )


def check_key(key: str) -> list[str]:
    """Return the mistakes in a key."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return [f"key={key!r} must be valid Unicode, without lone surrogates"]
    if not 1 <= size <= MAX_KEY_BYTES:
        return [f"key has {size} bytes, and must have 1 to {MAX_KEY_BYTES}"]
    return [f"key={key!r} must not contain a NUL"] if "\0" in key else []


def check_ttl(ttl: float, margin: float) -> list[str]:
    """Return the mistakes in a ttl."""
    if not 0 < ttl < math.inf:
        return [f"ttl={ttl!r} must be more than 0 seconds, and finite"]
    if margin >= ttl / 2:
        return [f"ttl={ttl:g} must be more than twice the margin of {margin:g} s"]
    return []
