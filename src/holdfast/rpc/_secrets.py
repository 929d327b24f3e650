"""Texts and errors without the secrets that are known: a server may repeat what it was sent.

An error of gRPC's goes to its caller as it came. What is kept of it here, in logs, records and the
errors that this package raises later, goes through this.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from holdfast.kernel import describe

from ._config import HIDDEN
from ._errors import ConnectFailed

__all__ = ["Sent", "harmless", "hidden", "secrets_of"]

#: Shorter words are no secrets, and stand in many texts.
SHORTEST = 4
#: So many sets of credentials are remembered: a call may have begun before they were replaced.
KEPT = 3

Metadata = Iterable[tuple[str, str | bytes]]


class Sent:
    """What calls were lately made with."""

    __slots__ = ("lately",)

    def __init__(self) -> None:
        self.lately: tuple[Any, ...] = ((),)

    def add(self, metadata: Any) -> None:
        """A call is made with this; it is called for each, so it is short."""
        if metadata != self.lately[0]:
            self.lately = (metadata, *self.lately[: KEPT - 1])


def secrets_of(token: str, *sent: Metadata) -> list[str]:
    """The words that must not be shown, in the forms in which they may come back."""
    found = {token, *token.split(":")}
    for metadata in sent:
        for _, value in metadata:
            text = value if isinstance(value, str) else value.decode("latin-1")
            found.update((text, *text.split()))
    forms = {form for word in found if len(word) >= SHORTEST for form in _forms(word)}
    # A secret may be a part of another.
    return sorted(forms, key=len, reverse=True)


def _forms(word: str) -> Iterator[str]:
    yield word
    yield quote(word)
    yield quote(word, safe="")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(word.encode()).decode().rstrip("=")


def hidden(text: str, secrets: Iterable[str]) -> str:
    """The text without them."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def harmless(error: BaseException, secrets: list[str]) -> BaseException:
    """The error; or, if it shows a secret anywhere, another that says the same without it."""
    if not any(secret in text for text in _told(error) for secret in secrets):
        return error
    return ConnectFailed(hidden(describe(error), secrets))


def _told(error: BaseException) -> Iterator[str]:
    """All that can be read of an error, and of those that it came from."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield f"{found} {found!r} {found.args!r} {getattr(found, '__notes__', '')}"
        for name in ("details", "debug_error_string"):
            if callable(tell := getattr(found, name, None)):
                yield str(tell())
        todo += [found.__cause__, found.__context__]
