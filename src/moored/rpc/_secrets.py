"""Texts and errors without the secrets that are known: a server may repeat what it was sent.

An error of gRPC's goes to its caller as it came. What is kept of it here, in logs, records and the
errors that this package raises later, goes through this.
"""

from __future__ import annotations

import base64
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from moored.kernel import HIDDEN, describe

from ._errors import ChannelError, ConfigError, ConnectFailed, TopologyError, TopologyRefused

__all__ = ["Sent", "hidden", "safe_text", "same_kind", "secrets_of", "trace", "without_secrets"]

#: Shorter words are no secrets, and stand in many texts.
SHORTEST = 4
#: So many sets of credentials are remembered: a call may have begun before they were replaced, and
#: some have new ones for each call.
KEPT = 256
#: What is decided by the kind of an error; the nearest first.
KINDS = (ConfigError, TopologyRefused, TopologyError)


class Sent:
    """What calls were lately made with."""

    __slots__ = ("_last", "_sets")

    def __init__(self) -> None:
        self._last: Any = ()
        self._sets: deque[Any] = deque(maxlen=KEPT)

    def add(self, metadata: Any) -> None:
        """A call is made with this; it is called for each, in any thread, so it is short."""
        if metadata == self._last:
            return
        if isinstance(metadata, list):
            metadata = tuple(metadata)  # theirs may change
        if metadata not in self.lately:
            self._sets.append(metadata)
        self._last = metadata

    @property
    def lately(self) -> tuple[Any, ...]:
        """All that are remembered, each once."""
        return tuple(self._sets)


def secrets_of(token: str, *sent: Any) -> list[str]:
    """The words that must not be shown, in the forms in which they may come back.

    :param sent: metadata, as somebody's program has given it: what is none is passed over.
    """
    found = {token, *token.split(":")}
    for metadata in sent:
        for text in _values(metadata):
            found.update((text, *text.split()))
    forms = {form for word in found if len(word) >= SHORTEST for form in _forms(word)}
    # A secret may be a part of another.
    return sorted(forms, key=len, reverse=True)


def _values(metadata: Any) -> Iterator[str]:
    pairs: list[Any] = []
    with suppress(Exception):
        pairs = list(metadata)
    for pair in pairs:
        match pair:
            case (_, str() as text):
                yield text
            case (_, bytes() as raw):
                yield raw.decode("latin-1")


def _forms(word: str) -> Iterator[str]:
    raw = word.encode(errors="replace")
    yield word
    yield (quoted := quote(raw))
    yield quoted.replace("/", "%2F")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw).decode().rstrip("=")


def hidden(text: str, secrets: Iterable[str]) -> str:
    """The string without the secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def without_secrets(error: BaseException, secrets: list[str]) -> BaseException:
    """Return the error, or a redacted one if it shows a secret anywhere."""
    try:
        if not any(secret in text for text in _told(error) for secret in secrets):
            return error
    except Exception:  # it cannot even be shown
        return same_kind(error, safe_text(error, secrets))
    if isinstance(error, KINDS):
        return same_kind(error, hidden(str(error), secrets))
    return ConnectFailed(hidden(describe(error), secrets))


def same_kind(error: BaseException, text: str) -> ChannelError:
    """An error with this text that is handled the same way."""
    return next((kind for kind in KINDS if isinstance(error, kind)), ConnectFailed)(text)


def safe_text(error: BaseException, secrets: Iterable[str]) -> str:
    """The error in one line, without the secrets; its kind, if it fails to tell more."""
    try:
        return hidden(describe(error), secrets)
    except Exception:
        return type(error).__name__


def trace(error: BaseException, secrets: Iterable[str]) -> str:
    """Where the error comes from, without the secrets, and without those that it came from."""
    try:
        return hidden("".join(traceback.format_exception(error, chain=False)), secrets)
    except Exception:
        return type(error).__name__


def _told(error: BaseException) -> Iterator[str]:
    """All that can be read of an error, and of those that it came from.

    It raises what their own texts raise.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield f"{found} {found!r} {found.args!r} {getattr(found, '__notes__', '')}"
        for name in ("details", "debug_error_string"):
            told = ""
            with suppress(Exception):  # others may mean something else by these names
                if callable(tell := getattr(found, name, None)):
                    told = str(tell())
            yield told
        todo += [found.__cause__, found.__context__]
