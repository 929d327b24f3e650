"""Values in a store's URL, read with all mistakes told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ._errors import StoreMisconfigured
from ._url import StoreUrl

__all__ = ["UrlParameters"]

T = TypeVar("T")

_YES = ("1", "yes", "true", "on")
_NO = ("0", "no", "false", "off")


class UrlParameters:
    """Reads parameters of a URL; `done()` raises one error that names all that are wrong."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._mistakes: list[str] = []

    def text(self, name: str, default: str) -> str:
        """A text that is not empty."""
        value = self._url.parameters.get(name, default)
        if not value:
            self._mistakes.append(f"{name} is empty")
        return value

    def seconds(self, name: str, default: float) -> float:
        """A length of time."""
        return self._read(name, default, float, lambda v: 0 < v < float("inf"), "seconds above 0")

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number."""
        wanted = f"a whole number from {least}"
        return self._read(name, default, int, lambda v: v >= least, wanted)

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no."""
        value = self._url.parameters.get(name, "").lower()
        if value and value not in (*_YES, *_NO):
            self._mistakes.append(f"{name}={value!r} must be yes or no")
        return value in _YES if value else default

    def wrong(self, mistake: str) -> None:
        """A mistake that was found elsewhere."""
        self._mistakes.append(mistake)

    def done(self) -> None:
        """Raise `StoreMisconfigured` if anything was wrong."""
        if self._mistakes:
            raise StoreMisconfigured(f"{self._url.text}: {'; '.join(self._mistakes)}")

    def _read(
        self,
        name: str,
        default: T,
        kind: Callable[[str], T],
        allowed: Callable[[T], bool],
        wanted: str,
    ) -> T:
        text = self._url.parameters.get(name)
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
