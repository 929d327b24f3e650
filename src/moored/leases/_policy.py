"""The knobs of a client, checked once and then sealed."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from moored.kernel import refuse, unmet

__all__ = ["OnUnavailable", "Policy", "check_key", "check_ttl"]

OnUnavailable = Literal["local", "refuse"]

#: Every store can keep a key of this length, whatever it puts before and after it.
MAX_KEY_BYTES = 1024


@dataclass(frozen=True)
class Policy:
    """How a client renews, waits and behaves in an outage."""

    _: KW_ONLY
    #: What `acquire` does while the store does not answer: "local" goes on with a limit of this
    #: process alone, and says so; "refuse" raises `StoreUnavailable`. With "local", leases of a
    #: limit above 1 that expire in an outage stay with their holders as local ones, too.
    on_unavailable: OnUnavailable = "local"
    #: How many leases of a key this process may hold in an outage; None takes the key's limit,
    #: which is right for one process and generous for many.
    local_limit: int | None = None
    #: Seconds between renewals; a third of the ttl where that is less, so that two may fail.
    renew_every: float = 60.0
    #: Seconds before the lease ends in the store at which it is over here, because clocks drift
    #: and holders need time to stop; None takes a tenth of the ttl, at most 5 s.
    margin: float | None = None
    #: Seconds that one call of the store may take before it counts as unanswered.
    timeout: float = 5.0
    #: How many leases go into one call of the store.
    batch: int = 250

    def __post_init__(self) -> None:
        refuse("leases", self._mistakes())

    def _mistakes(self) -> list[str]:
        mode, limit, margin = self.on_unavailable, self.local_limit, self.margin
        positive, least = (
            "more than 0 seconds, and finite",
            "at least 0 seconds, and finite, or None",
        )
        return unmet(
            ("on_unavailable", mode, mode in ("local", "refuse"), "'local' or 'refuse'"),
            ("local_limit", limit, (limit or 0) >= 0, "at least 0, or None"),
            ("renew_every", self.renew_every, 0 < self.renew_every < math.inf, positive),
            ("timeout", self.timeout, 0 < self.timeout < math.inf, positive),
            ("margin", margin, 0 <= (margin or 0) < math.inf, least),
            ("batch", self.batch, self.batch >= 1, "at least 1"),
        )


def check_key(key: str) -> list[str]:
    """What is wrong with a key."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return [f"key={key!r} has halves of surrogate pairs: no store can keep it"]
    if not 1 <= size <= MAX_KEY_BYTES:
        return [f"key has {size} bytes, and must have 1 to {MAX_KEY_BYTES}"]
    return [f"key={key!r} must not hold a NUL"] if "\0" in key else []


def check_ttl(ttl: float, margin: float) -> list[str]:
    """What is wrong with a time to live."""
    if not 0 < ttl < math.inf:
        return [f"ttl={ttl!r} must be more than 0 seconds, and finite"]
    if margin >= ttl / 2:
        return [f"ttl={ttl:g} must be more than twice the margin of {margin:g} s"]
    return []
