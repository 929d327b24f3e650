"""The settings of a reservoir: validated at construction, then immutable."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from moored.kernel import refuse, unmet

from ._environment import Environment

__all__ = ["ReservoirConfig", "config_of"]


@dataclass(frozen=True, kw_only=True)
class ReservoirConfig:
    """The settings of a reservoir, in seconds and per second; the defaults suit Aurora DSQL.

    All mistakes are reported together, with what to change.
    """

    #: Whether connections are opened in advance; if not, each is opened when a caller waits.
    enabled: bool = True
    #: The maximum number of physical connections: ready, in use, opening and closing together.
    max_size: int = 10
    #: How many connections to keep, ready or in use. By default `max_size`, because a connection
    #: that is opened on demand is opened when the load is highest.
    target_ready: int | None = None
    #: With fewer ready connections than this, `batch` are opened at once instead of one at a time;
    #: also how many `open(wait=True)` waits for. By default `target_ready`.
    low_watermark: int | None = None
    #: The minimum lifetime of a connection; infinity for no limit. Keep it well below the server's
    #: own limit, which ends a session in the middle of a transaction.
    base_lifetime: float = 660.0
    #: Up to this much is added to each lifetime, drawn once when the connection is opened, so that
    #: connections that were opened together do not expire together.
    lifetime_jitter: float = 120.0
    #: A connection that expires within this time is not handed out, and not kept when it is
    #: returned: each caller can use its connection for at least this long.
    guard_window: float = 45.0
    #: How many connections may be opened per second by all users of the lease store together.
    rate: float = 100.0
    #: How many connections may be opened at once; by default as many as in one second.
    burst: int | None = None
    #: How many connections are opened at once below the low watermark.
    batch: int = 5
    #: How many connects may be in progress at the same time, in all reservoirs of this endpoint.
    max_in_flight: int = 8
    #: How long one connect may take before it counts as failed.
    connect_timeout: float = 30.0
    #: The first connection is opened at once, the others after a random delay of up to this much,
    #: so that processes that start together do not connect together; by default the time that
    #: opening `target_ready` connections takes at the rate.
    start_stagger: float | None = None
    #: Seconds between two scans of the ready connections for expired and broken ones.
    scan_every: float = 1.0
    #: Connections above `target_ready` are closed when they were not needed for this long; infinity
    #: keeps them.
    max_idle: float = 600.0
    #: Whether a connection that is returned while no caller waits is kept; null pools close it.
    keep: bool = True
    #: Whether leases limit the number of connections in the whole cluster.
    lease_enabled: bool = False
    #: The URL of the lease store, as for `moored.leases.connect`; the rate limit is kept there too.
    lease_url: str | None = None
    #: The maximum number of connections in the whole cluster.
    lease_limit: int = 10_000
    #: After how long the lease of a process that died expires.
    lease_ttl: float = 180.0

    def __post_init__(self) -> None:
        refuse("ReservoirConfig", self._mistakes())

    @property
    def target(self) -> int:
        """How many connections to keep; 0 if the reservoir is not enabled."""
        if not self.enabled:
            return 0
        return self.max_size if self.target_ready is None else self.target_ready

    @property
    def watermark(self) -> int:
        """The low watermark; 0 if the reservoir is not enabled."""
        if not self.enabled:
            return 0
        return self.target if self.low_watermark is None else self.low_watermark

    @property
    def usable_lifetime(self) -> float:
        """The shortest time from a connection's opening to its guard window."""
        return self.base_lifetime - self.guard_window

    @property
    def stagger(self) -> float:
        """The longest random delay after the first connection, in seconds."""
        return self.target / self.rate if self.start_stagger is None else self.start_stagger

    def but(self, **changes: Any) -> Self:
        """Return a copy with some settings changed, validated again."""
        return replace(self, **changes)

    @classmethod
    def for_lifetime(cls, longest: float, **settings: Any) -> Self:
        """Return settings with which no connection gets older than `longest` seconds.

        The jitter is 5 % of that, and the guard window 10 %, but at most 45 s.
        """
        return cls(**{**_lifetimes(longest), **settings})

    @classmethod
    def from_env(
        cls,
        prefix: str = "MOORED_",
        *,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Self:
        """Return settings from environment variables; settings passed by name take precedence.

        Without `…RESERVOIR_ENABLED` the reservoir is off and the pool connects on demand, so that
        one variable turns it on and off in a rollout. Durations are written like `11m`, `45s` or
        `660`.

        :param prefix: the prefix of the variables; with `DSQL_`, for example, the first one is
            `DSQL_RESERVOIR_ENABLED`.
        :param environ: the variables; `os.environ` by default.
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
        # Checked even if not enabled, so that a mistake shows before the reservoir is turned on.
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
                f"base_lifetime={self.base_lifetime:g} s, or no connection could be handed out"
            ]
        needed = self.max_size / self.usable_lifetime
        if needed <= self.rate:
            return []
        most = math.floor(self.usable_lifetime * self.rate)
        fewer = f"lower max_size to {most}, or " if most else ""
        return [
            f"max_size={self.max_size} connections that can be used for {self.usable_lifetime:g} s "
            f"each (base_lifetime - guard_window) need {needed:.3g} new ones per second, but "
            f"rate={self.rate:g} allows fewer: {fewer}raise base_lifetime to "
            f"{self.max_size / self.rate + self.guard_window:.3g} s, or raise rate"
        ]

    def _wrong_leases(self) -> list[str]:
        if self.lease_enabled and self.lease_limit < self.target:
            return [
                f"lease_limit={self.lease_limit} for the whole cluster must be at least "
                f"target_ready={self.target} of this process"
            ]
        return []

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"ReservoirConfig({', '.join(changed)})"


def config_of(
    config: ReservoirConfig | None,
    *,
    min_size: int | None,
    max_size: int | None,
    max_lifetime: float | None,
    **settings: Any,
) -> ReservoirConfig:
    """Return settings, changed by those parameters of a pool that are not None."""
    if max_size is None and config is None:
        max_size = min_size
    settings |= {"max_size": max_size, "target_ready": min_size}
    if max_lifetime is not None:
        settings |= _lifetimes(max_lifetime)
    changes = {name: value for name, value in settings.items() if value is not None}
    return ReservoirConfig(**changes) if config is None else config.but(**changes)


def _lifetimes(longest: float) -> dict[str, float]:
    if longest == math.inf:
        return {"base_lifetime": math.inf, "lifetime_jitter": 0.0}
    jitter, guard = 0.05 * longest, min(45.0, 0.1 * longest)
    life = longest - jitter
    return {"base_lifetime": life, "lifetime_jitter": jitter, "guard_window": guard}
