"""The size and the random seed of fault, load and simulation tests, from the environment."""

from __future__ import annotations

import os

__all__ = ["base_seed", "scaled"]


def scaled(full: int, *, least: int = 1) -> int:
    """Return the size for this run of a test whose size is `full` at MOORED_SCALE=1.

    The default scale is 0.1, so that `pytest` without it is quick.
    """
    return max(least, round(full * _number("MOORED_SCALE", "0.1")))


def base_seed() -> int:
    """Return the first seed: MOORED_SEED, or a fixed number, so that runs are reproducible."""
    return int(_number("MOORED_SEED", "20261115"))


def _number(variable: str, default: str) -> float:
    text = os.environ.get(variable) or default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{variable}={text} must be a number, such as {default}") from None
