"""How a reservoir behaves: every number in one place, checked once, then sealed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from moored.kernel import refuse, unmet

from ._environment import Environment

__all__ = ["ReservoirConfig"]

SIZE = 10


@dataclass(frozen=True, kw_only=True)
class ReservoirConfig:
    """The settings of a reservoir, in seconds and per second; the defaults suit Aurora DSQL.

    All mistakes are reported together, with what to change.
    """

    #: Whether connections are opened ahead of need; without, each is opened when somebody waits.
    enabled: bool = True
    #: How many physical connections there may be, ready, in use, opening and closing together.
    max_size: int = SIZE
    #: How many to have, ready or in use, before anybody waits; `max_size`, if not given, because
    #: a connection that is opened on demand is opened at the worst time.
    target_ready: int | None = None
    #: With fewer ready than this, `batch` are opened at once instead of one at a time; also what
    #: `open(wait=True)` waits for. `target_ready`, if not given.
    low_watermark: int | None = None
    #: How long each connection may live at least; infinity for as long as it works. Well below the
    #: server's own limit, because the server's end comes in the middle of a transaction.
    base_lifetime: float = 660.0
    #: Up to so much is added to each connection's life, drawn once at its birth, so that those
    #: that were born together do not die together.
    lifetime_jitter: float = 120.0
    #: With less life left than this a connection is not handed out, nor kept when it comes back:
    #: whoever gets one can work for this long.
    guard_window: float = 45.0
    #: How many connections may be opened per second by all users of the lease store together.
    rate: float = 100.0
    #: How many of them at once; one second's worth, if not given.
    burst: int | None = None
    #: How many are opened at once below the low watermark.
    batch: int = 5
    #: How many may be on their way at the same time, in all reservoirs of this endpoint.
    max_in_flight: int = 8
    #: How long one connect may take before it counts as failed.
    connect_timeout: float = 30.0
    #: The first connection is opened at once, the others begin up to so much later, so that
    #: processes which start together do not connect together; the time that the filling takes at
    #: the rate, if not given.
    start_stagger: float | None = None
    #: Seconds between two looks at those that are ready, for what has expired or broken.
    scan_every: float = 1.0
    #: What more than `target_ready` is closed when it was unused for so long; infinity for never.
    max_idle: float = 600.0
    #: Whether a connection that comes back while nobody waits is kept; the null pools close it.
    keep: bool = True
    #: Whether the number of connections is limited in the whole cluster, by leases.
    lease_enabled: bool = False
    #: The store of the leases, as `moored.leases.connect` takes it; it also keeps the rate.
    lease_url: str | None = None
    #: How many connections there may be in the whole cluster.
    lease_limit: int = 10_000
    #: How long a lease outlives the process that held it.
    lease_ttl: float = 180.0

    def __post_init__(self) -> None:
        refuse("ReservoirConfig", self._mistakes())

    @property
    def target(self) -> int:
        """How many connections to have before anybody waits."""
        if not self.enabled:
            return 0
        return self.max_size if self.target_ready is None else self.target_ready

    @property
    def watermark(self) -> int:
        """With fewer ready than this, several are opened at once."""
        if not self.enabled:
            return 0
        return self.target if self.low_watermark is None else self.low_watermark

    @property
    def usable_lifetime(self) -> float:
        """How long a connection can be handed out at least: until its guard window begins."""
        return self.base_lifetime - self.guard_window

    @property
    def stagger(self) -> float:
        """Up to how many seconds the filling waits at the start."""
        return self.target / self.rate if self.start_stagger is None else self.start_stagger

    def but(self, **changes: Any) -> Self:
        """The same with some settings changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def for_lifetime(cls, longest: float, **settings: Any) -> Self:
        """Settings with which no connection gets older than `longest` seconds.

        The jitter is 5 % of it, the guard window a tenth, and never more than the usual 45 s.
        """
        if longest == math.inf:
            return cls(**{"base_lifetime": math.inf, "lifetime_jitter": 0.0, **settings})
        jitter = 0.05 * longest
        life = {"base_lifetime": longest - jitter, "lifetime_jitter": jitter}
        return cls(**{**life, "guard_window": min(45.0, 0.1 * longest), **settings})

    @classmethod
    def from_env(
        cls,
        prefix: str = "MOORED_",
        *,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Self:
        """Settings from environment variables; what is passed by name goes before them.

        `PREFIX_RESERVOIR_ENABLED` is off unless set: then the same pool connects on demand, so
        that a rollout, and its way back, is one variable. Durations are written like `11m`, `45s`
        or `660`. With `prefix="DSQL_"` it reads the names of the original.
        """
        found = Environment(prefix, os.environ if environ is None else environ)
        values: dict[str, Any] = {
            "enabled": found.flag("RESERVOIR_ENABLED", False),
            "target_ready": found.count("RESERVOIR_TARGET_READY", least=0),
            "low_watermark": found.count("RESERVOIR_LOW_WATERMARK", least=0),
            "base_lifetime": found.duration("RESERVOIR_BASE_LIFETIME"),
            "lifetime_jitter": found.duration("RESERVOIR_LIFETIME_JITTER"),
            "guard_window": found.duration("RESERVOIR_GUARD_WINDOW"),
            "rate": found.rate("RESERVOIR_RATE"),
            "burst": found.count("RESERVOIR_BURST", least=2),
            "lease_enabled": found.flag("DISTRIBUTED_CONN_LEASE_ENABLED", False),
            "lease_url": found.lease_store(),
            "lease_limit": found.count("DISTRIBUTED_CONN_LIMIT"),
        }
        found.done()
        return cls(**{**{k: v for k, v in values.items() if v is not None}, **settings})

    # -- checks --------------------------------------------------------------------------------

    def _mistakes(self) -> list[str]:
        found = [*self._wrong_numbers(), *self._wrong_sizes()]
        if not found:
            found = [*self._wrong_lifetimes(), *self._wrong_leases()]
        return found

    def _wrong_numbers(self) -> list[str]:
        counts = ("max_size", "batch", "max_in_flight", "lease_limit")
        finite = ("rate", "connect_timeout", "scan_every", "lease_ttl")
        spans = ("lifetime_jitter", "guard_window", "start_stagger")
        value = vars(self)
        return unmet(
            *((n, value[n], value[n] >= 1, "at least 1") for n in counts),
            *((n, value[n], 0 < value[n] < math.inf, "more than 0, and finite") for n in finite),
            *(
                (n, value[n], 0 <= (value[n] or 0) < math.inf, "at least 0 seconds, and finite")
                for n in spans
            ),
            ("base_lifetime", self.base_lifetime, self.base_lifetime > 0, "more than 0 seconds"),
            ("max_idle", self.max_idle, self.max_idle >= 0, "at least 0 seconds"),
            ("burst", self.burst, self.burst is None or self.burst >= 2, "at least 2"),
        )

    def _wrong_sizes(self) -> list[str]:
        # As if it were on: what is wrong is told before somebody turns it on.
        target = self.max_size if self.target_ready is None else self.target_ready
        watermark = target if self.low_watermark is None else self.low_watermark
        found = []
        if not 0 <= target <= max(self.max_size, 0):
            found.append(
                f"target_ready={self.target_ready!r} must be between 0 and max_size={self.max_size}"
            )
        elif not 0 <= watermark <= target:
            found.append(
                f"low_watermark={self.low_watermark!r} must be between 0 and target_ready={target}"
            )
        return found

    def _wrong_lifetimes(self) -> list[str]:
        if self.guard_window >= self.base_lifetime:
            return [
                f"guard_window={self.guard_window:g} s must be less than "
                f"base_lifetime={self.base_lifetime:g} s: no connection could ever be handed out"
            ]
        needed = self.max_size / self.usable_lifetime
        if needed <= self.rate:
            return []
        most = math.floor(self.usable_lifetime * self.rate)
        fewer = f"lower max_size to {most}, or " if most else ""
        return [
            f"max_size={self.max_size} connections that can be used for {self.usable_lifetime:g} s "
            f"each (base_lifetime - guard_window) need {needed:.3g} new ones per second, and "
            f"rate={self.rate:g} allows fewer: {fewer}let them live for "
            f"{self.max_size / self.rate + self.guard_window:.3g} s, or allow a greater rate"
        ]

    def _wrong_leases(self) -> list[str]:
        if self.lease_enabled and self.lease_limit < self.target:
            return [
                f"lease_limit={self.lease_limit} for the whole cluster is less than "
                f"target_ready={self.target} of this process alone"
            ]
        return []

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"ReservoirConfig({', '.join(changed)})"
