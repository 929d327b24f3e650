"""One knob for the size of fault, load and schedule tests, and one seed for their chance."""

from __future__ import annotations

import os

__all__ = ["base_seed", "scaled"]


def scaled(full: int, *, least: int = 1) -> int:
    """The size that a test should use here, where `full` is its size at MOORED_SCALE=1.

    The default scale is 0.1, so that a plain `pytest` is quick.
    """
    return max(least, round(full * _number("MOORED_SCALE", "0.1")))


def base_seed() -> int:
    """The first seed of a run: MOORED_SEED, or a fixed one, so that runs repeat themselves."""
    return int(_number("MOORED_SEED", "20261115"))


def _number(variable: str, default: str) -> float:
    text = os.environ.get(variable) or default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{variable}={text} must be a number, such as {default}") from None
