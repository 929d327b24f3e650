"""The secrets that this process was given, and strings without them.

A driver or a server may quote what it was sent: libpq prints a password whose percent sign is not
escaped as an invalid token, and a part of one that holds an "@" as a host name. So whoever takes a
connection string or a token adds it to `SECRETS` first, and `describe` and the logs remove the
known values, in every form in which they may come back, from what others report.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote

__all__ = ["HIDDEN", "SECRETS", "Secrets", "redacted", "unescaped_password"]

HIDDEN = "***"

#: Shorter values are parts of many words: only a whole word is hidden.
_SHORT = 4
#: So many values are kept, the newest: some passwords are tokens that are replaced every minute.
_KEPT = 256

_SECRET_NAME = re.compile(r"passwo?r?d|secret|token|scram_(client|server)_key", re.IGNORECASE)
_QUERY = re.compile(r"\?[^@/=&?]+=")
_PORT_AND_QUERY = re.compile(r"\d{0,5}[/?][^@?]*\??[^@/=&?]+=")
_WORD = re.compile(
    r"(?P<name>[^=\s]+)(?:\s*=\s*(?P<value>'(?:\\.|[^'\\])*'?|(?:\\.|[^\s\\])*\\?))?", re.DOTALL
)
_KEYWORD = re.compile(r"\s*\w+\s*=")
_SPLIT = re.compile(r"[@/:?&=%,#\s]+")
#: A password with one of these, not percent-encoded, is cut apart by parsers of URLs.
_DELIMITERS = frozenset("@/?#")


def redacted(text: str) -> str:
    """Return a URL, or libpq's `key=value` words, with its secrets hidden."""
    for start, end in sorted(_spans(text), reverse=True):
        text = text[:start] + HIDDEN + text[end:]
    return text


def unescaped_password(url: str) -> bool:
    """Whether the password of a URL holds an "@" or "/" that is not percent-encoded.

    Such a URL means something else to every parser: a part of the password becomes the host.
    """
    place = _password_in(url) if "://" in url else None
    return place is not None and any(mark in url[slice(*place)] for mark in "@/")


class Secrets:
    """Secret values, to be removed from strings; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, None] = {}
        self._forms: tuple[str, ...] = ()

    def add(self, *values: str) -> None:
        """Hide these values from now on."""
        new = [value for value in values if value and value not in self._values]
        if not new:
            return
        with self._lock:
            self._values.update(dict.fromkeys(new))
            for old in list(self._values)[:-_KEPT]:
                del self._values[old]
            forms = {form for value in self._values for form in _forms(value)}
            # The longest first: a secret may be a part of another.
            self._forms = tuple(sorted(forms, key=len, reverse=True))

    def add_from(self, connection_string: str) -> None:
        """Hide the secrets of a URL or of libpq's `key=value` words from now on.

        A password that is also the user, the host or the database is not hidden by its value:
        these are shown, and nothing tells the reader that they are more than that.
        """
        public = set(_SPLIT.split(redacted(connection_string)))
        self.add(*(each for each in _values_in(connection_string) if each not in public))

    def hide(self, text: str) -> str:
        """Return the text without the secrets that are known."""
        for form in self._forms:
            if form not in text:
                continue
            if len(form) < _SHORT:
                text = re.sub(rf"(?<![^\W_]){re.escape(form)}(?![^\W_])", HIDDEN, text)
            else:
                text = text.replace(form, HIDDEN)
        return text

    def clear(self) -> None:
        """Forget all values, between two tests for example."""
        with self._lock:
            self._values, self._forms = {}, ()

    def __repr__(self) -> str:
        return f"<Secrets: {len(self._values)}>"


#: What this process was given; `describe` hides these.
SECRETS = Secrets()


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets of a connection string are written in it."""
    yield from _in_url(text) if _is_url(text) else _in_words(text)


def _is_url(text: str) -> bool:
    """Whether it is a URL, also one whose "://" was mistyped or left out."""
    return "://" in text or ("@" in text and not _KEYWORD.match(text))


def _in_url(url: str) -> Iterator[tuple[int, int]]:
    place = _password_in(url)
    if place is not None:
        yield place
    begin = url.find("?", place[1] if place is not None else 0)
    secret = False
    while begin >= 0:
        end = min(n for n in (url.find("&", begin + 1), len(url)) if n >= 0)
        name, mark, value = url[begin + 1 : end].partition("=")
        if mark:
            secret = _SECRET_NAME.search(unquote(name)) is not None
        if secret:
            # A parameter without a value is the rest of a secret whose "&" was not escaped.
            yield end - len(value if mark else name), end
        begin = end if end < len(url) else -1


def _password_in(url: str) -> tuple[int, int] | None:
    """Where the password before the host is, as its writer meant it.

    It reaches to the last "@", because one that was not escaped may hold any mark.
    """
    if "://" not in url:
        colon, at = url.find(":"), url.rfind("@")
        return (colon + 1, at) if 0 <= colon < at else None
    start = url.index("://") + 3
    colon = url.find(":", start)
    first = url.find("@", start)
    if colon < 0 or first < 0:
        return None
    if "/" in url[start:first]:  # no parser would take what is before that "@" for a user
        at = url.rfind("@")
        if at < colon or _PORT_AND_QUERY.match(url, colon + 1, at):
            return None
        return colon + 1, at
    query = _QUERY.search(url, first)
    at = url.rfind("@", start, query.start() if query else len(url))
    return (colon + 1, at) if at > colon else None


def _in_words(text: str) -> Iterator[tuple[int, int]]:
    words = list(_WORD.finditer(text))
    secret = [w for w in words if w["value"] is not None and _SECRET_NAME.search(w["name"])]
    yield from (word.span("value") for word in secret)
    if secret:
        # A word without a value is the rest of a password whose space was not quoted.
        yield from (word.span() for word in words if word["value"] is None)


def _values_in(text: str) -> Iterator[str]:
    is_url = _is_url(text)
    for start, end in _spans(text):
        written = text[start:end]
        yield written
        meant = unquote(written) if is_url else _unquoted(written)
        yield meant
        if is_url and ("://" not in text or _DELIMITERS & set(written) or "%" in meant):
            for each in (written, meant):
                yield from (part for part in _SPLIT.split(each) if len(part) > 1)


def _unquoted(word: str) -> str:
    """The value of one of libpq's words."""
    inner = word[1:].removesuffix("'") if word.startswith("'") else word
    return re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL)


def _forms(value: str) -> Iterable[str]:
    """The forms in which a value may be written in a text."""
    raw = value.encode(errors="surrogateescape")
    escaped = value.replace("\\", "\\\\")
    return (
        value,
        quote(raw),
        quote(raw, safe=""),
        escaped,
        escaped.replace("'", "\\'"),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
    )
