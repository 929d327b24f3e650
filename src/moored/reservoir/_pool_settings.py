"""Translates psycopg_pool's parameters into settings of a reservoir."""

from __future__ import annotations

from typing import Any

from ._config import ReservoirConfig

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
        lifetime = ReservoirConfig.for_lifetime(max_lifetime, max_size=1)
        for name in ("base_lifetime", "lifetime_jitter", "guard_window"):
            changes[name] = getattr(lifetime, name)
    return ReservoirConfig(**changes) if config is None else config.but(**changes)
