"""What a caller may give; told before anything is done with it."""

from __future__ import annotations

__all__ = ["check_texts", "check_timeout"]


def check_texts(**texts: object) -> None:
    """Raise `TypeError` for what is no text, by its name."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, and not {type(value).__name__}")


def check_timeout(timeout: object) -> None:
    """Raise for what is no time to wait: one that is not a number would be waited for for ever."""
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r} must be more than 0 seconds")
