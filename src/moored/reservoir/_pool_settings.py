"""Translates psycopg_pool's parameters into settings of a reservoir."""

from __future__ import annotations

from typing import Any

from ._config import SIZE, ReservoirConfig

__all__ = ["config_of"]


def config_of(
    config: ReservoirConfig | None,
    *,
    min_size: int | None,
    max_size: int | None,
    max_lifetime: float | None,
    **settings: Any,
) -> ReservoirConfig:
    """Return the settings, changed by the parameters that were passed to the pool."""
    if max_size is None and min_size is not None and config is None:
        max_size = min_size
    sizes = {"max_size": max_size, "target_ready": min_size}
    changes = {k: v for k, v in {**sizes, **settings}.items() if v is not None}
    if max_lifetime is not None:
        lived = ReservoirConfig.for_lifetime(max_lifetime, max_size=1)
        changes["base_lifetime"] = lived.base_lifetime
        changes["lifetime_jitter"] = lived.lifetime_jitter
        changes["guard_window"] = lived.guard_window
    return (
        config or ReservoirConfig(max_size=max(1, changes.get("max_size", SIZE)), rate=1e9)
    ).but(**{"rate": ReservoirConfig.rate, **changes} if config is None else changes)
