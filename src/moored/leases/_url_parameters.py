"""Reading the parameters of a store's URL, with one error for all mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TypeVar

from ._errors import StoreMisconfigured
from ._url import StoreUrl

__all__ = ["UrlParameters"]

T = TypeVar("T")

_YES = ("1", "yes", "true", "on")
_NO = ("0", "no", "false", "off")


class UrlParameters:
    """Reads parameters of a URL; `done()` raises one error that lists all mistakes.

    A parameter that was not read is unknown.
    """

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._mistakes: list[str] = []
        self._known: set[str] = set()

    def given(self, name: str) -> str | None:
        """Read a string; None if the URL does not have the parameter."""
        self._known.add(name)
        return self._url.parameters.get(name)

    def text(self, name: str, default: str) -> str:
        """Read a string that is not empty."""
        value = self.given(name)
        if value == "":
            self._mistakes.append(f"{name} is empty")
        return value or default

    def seconds(self, name: str, default: float) -> float:
        """Read a duration above 0."""
        return self._read(name, default, float, lambda v: 0 < v < float("inf"), "seconds above 0")

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """Read an integer of at least `least`."""
        wanted = f"an integer of at least {least}"
        return self._read(name, default, int, lambda v: v >= least, wanted)

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean."""
        value = (self.given(name) or "").lower()
        if value and value not in (*_YES, *_NO):
            self._mistakes.append(f"{name}={value!r} must be yes or no")
        return value in _YES if value else default

    def wrong(self, mistake: str) -> None:
        """Add a mistake that the caller found."""
        self._mistakes.append(mistake)

    def done(self, *, others: bool = False) -> None:
        """Raise `StoreMisconfigured` if there were mistakes, or unknown parameters.

        :param others: whether the driver reads the parameters that were not read here.
        """
        unknown = [name for name in self._url.parameters if name not in self._known and not others]
        if mistakes := [*map(self._hint, unknown), *self._mistakes]:
            raise StoreMisconfigured(f"{self._url.text}: {'; '.join(mistakes)}")

    def _hint(self, wrong: str) -> str:
        known = sorted(self._known)
        near = difflib.get_close_matches(wrong, known, n=1)
        if near:
            return f"unknown parameter {wrong!r}; did you mean {near[0]!r}?"
        return f"unknown parameter {wrong!r}; known parameters: {', '.join(known) or 'none'}"

    def _read(
        self,
        name: str,
        default: T,
        kind: Callable[[str], T],
        allowed: Callable[[T], bool],
        wanted: str,
    ) -> T:
        text = self.given(name)
        if text is None:
            return default
        try:
            value = kind(text)
        except ValueError:
            pass
        else:
            if allowed(value):
                return value
        self._mistakes.append(f"{name}={text!r} must be {wanted}")
        return default
