"""Remove secrets from texts and errors: a server may repeat the metadata that it was sent.

The caller of an RPC gets gRPC's error unchanged. Errors that are kept, in logs, records and later
errors of this package, are redacted here.
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

#: Shorter words are not treated as secrets: they occur in many texts.
SHORTEST = 4
#: The number of sets of credentials to remember: a call may have begun before the credentials were
#: replaced, and some providers have new ones for each call.
KEPT = 256
#: The classes of errors that are handled differently; subclasses first.
KINDS = (ConfigError, TopologyRefused, TopologyError)


class Sent:
    """The metadata of the credentials of recent calls."""

    __slots__ = ("_last", "_sets")

    def __init__(self) -> None:
        self._last: Any = ()
        self._sets: deque[Any] = deque(maxlen=KEPT)

    def add(self, metadata: Any) -> None:
        """Remember the metadata of a call; every call runs this, in any thread, so it is short."""
        if metadata == self._last:
            return
        if isinstance(metadata, list):
            metadata = tuple(metadata)  # the provider may change its list
        if metadata not in self.lately:
            self._sets.append(metadata)
        self._last = metadata

    @property
    def lately(self) -> tuple[Any, ...]:
        """The remembered metadata, without duplicates."""
        return tuple(self._sets)


def secrets_of(token: str, *sent: Any) -> list[str]:
    """Return the secrets in a token and in metadata, in all encodings that may be repeated.

    :param sent: metadata from users' credential providers; invalid entries are ignored.
    """
    found = {token, *token.split(":")}
    for metadata in sent:
        for text in _values(metadata):
            found.update((text, *text.split()))
    forms = {form for word in found if len(word) >= SHORTEST for form in _forms(word)}
    # The longest first: a secret may be a part of another.
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
    """Return the string with the secrets hidden."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def without_secrets(error: BaseException, secrets: list[str]) -> BaseException:
    """Return the error, or a redacted one if it shows a secret anywhere."""
    try:
        if not any(secret in text for text in _texts_of(error) for secret in secrets):
            return error
    except Exception:  # the error cannot be printed
        return same_kind(error, safe_text(error, secrets))
    if isinstance(error, KINDS):
        return same_kind(error, hidden(str(error), secrets))
    return ConnectFailed(hidden(describe(error), secrets))


def same_kind(error: BaseException, text: str) -> ChannelError:
    """Return an error with this text that is handled like the given one."""
    return next((kind for kind in KINDS if isinstance(error, kind)), ConnectFailed)(text)


def safe_text(error: BaseException, secrets: Iterable[str]) -> str:
    """Return the error in one line, without the secrets."""
    return hidden(describe(error), secrets)


def trace(error: BaseException, secrets: Iterable[str]) -> str:
    """Return the error's traceback without the secrets, and without its causes."""
    return hidden("".join(traceback.format_exception(error, chain=False)), secrets)


def _texts_of(error: BaseException) -> Iterator[str]:
    """Yield all texts of an error and of its causes; raise if one cannot be printed."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield f"{found} {found!r} {found.args!r} {getattr(found, '__notes__', '')}"
        for name in ("details", "debug_error_string"):
            text = ""
            with suppress(Exception):  # other classes may use these names differently
                if callable(method := getattr(found, name, None)):
                    text = str(method())
            yield text
        todo += [found.__cause__, found.__context__]
