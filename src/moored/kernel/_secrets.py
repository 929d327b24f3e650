"""The secrets that this process was given, and their removal from strings.

A driver or a server may quote what it was sent: libpq prints a password whose percent sign is not
escaped as an invalid token, and a part of one that contains an "@" as a host name. So code that
receives a connection string or a token adds it to `SECRETS` first; `describe` and the logs then
remove the known values, in all their encodings, from the texts of others.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import traceback
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote

__all__ = ["HIDDEN", "SECRETS", "Secrets", "redacted", "unescaped_password"]

HIDDEN = "***"

#: Values shorter than this are parts of many words: they are hidden only as whole words.
_SHORT = 4
#: How many values are kept, the newest: some passwords are tokens that change every minute.
_KEPT = 256

_SECRET_NAME = re.compile(r"passwo?r?d|secret|token|scram_(client|server)_key", re.IGNORECASE)
_QUERY = re.compile(r"\?[^@/=&?]+=")
_PORT_AND_QUERY = re.compile(r"\d{0,5}[/?][^@?]*\??[^@/=&?]+=")
_WORD = re.compile(
    r"(?P<name>[^=\s]+)(?:\s*=\s*(?P<value>'(?:\\.|[^'\\])*'?|(?:\\.|[^\s\\])*\\?))?", re.DOTALL
)
_KEYWORD = re.compile(r"\s*\w+\s*=")
_SPLIT = re.compile(r"[@/:?&=%,#\s]+")
#: A password that contains one of these without percent-encoding is split by URL parsers.
_DELIMITERS = frozenset("@/?#")
_CUT = re.compile(r"[@/?#]+")


def redacted(text: str) -> str:
    """Return a URL, or a libpq `key=value` string, with its secrets hidden."""
    for start, end in sorted(_spans(text), reverse=True):
        text = text[:start] + HIDDEN + text[end:]
    return text


def unescaped_password(url: str) -> bool:
    """Whether the password of a URL contains an "@" or "/" that is not percent-encoded.

    Parsers disagree about such a URL: a part of the password may become the host.
    """
    place = _password_in(url) if "://" in url else None
    return place is not None and any(mark in url[slice(*place)] for mark in "@/")


class Secrets:
    """Secret values to remove from strings; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, None] = {}
        self._forms: tuple[str, ...] = ()

    def add(self, *values: str) -> None:
        """Add values that `hide` removes."""
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
        """Add the secrets of a URL or of a libpq `key=value` string.

        A password that equals the user, the host or the database is not added: those are shown, and
        a reader cannot see that one of them is also the password.
        """
        public = set(_SPLIT.split(redacted(connection_string)))
        self.add(*(each for each in _values_in(connection_string) if each not in public))

    def hide(self, text: str) -> str:
        """Return the text with all known secrets replaced by `***`."""
        for form in self._forms:
            if form not in text:
                continue
            if len(form) < _SHORT:
                text = re.sub(rf"(?<![^\W_]){re.escape(form)}(?![^\W_])", HIDDEN, text)
            else:
                text = text.replace(form, HIDDEN)
        return text

    def hide_in_traceback(self, record: logging.LogRecord) -> bool:
        """Format the traceback of a log record without secrets: a filter for a logger."""
        if record.exc_info and record.exc_info[1] is not None:
            lines = traceback.format_exception(record.exc_info[1])
            record.exc_text = self.hide("".join(lines)).rstrip()
        return True

    def clear(self) -> None:
        """Remove all values, for example between two tests."""
        with self._lock:
            self._values, self._forms = {}, ()

    def __repr__(self) -> str:
        return f"<Secrets: {len(self._values)}>"


#: The secrets of this process; `describe` hides them.
SECRETS = Secrets()


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of the secrets in a connection string."""
    yield from _in_url(text) if _is_url(text) else _in_words(text)


def _is_url(text: str) -> bool:
    """Whether the text is a URL, also one whose "://" is mistyped or missing."""
    return not _KEYWORD.match(text) and ("://" in text or "@" in text)


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
            # A parameter without "=" is the rest of a secret that contains an unescaped "&".
            yield end - len(value if mark else name), end
        begin = end if end < len(url) else -1


def _password_in(url: str) -> tuple[int, int] | None:
    """Return the position of the password in the user part of a URL.

    The password reaches to the last "@": an unescaped one may contain any delimiter.
    """
    if "://" not in url:
        colon, at = url.find(":"), url.rfind("@")
        return (colon + 1, at) if 0 <= colon < at else None
    start = url.index("://") + 3
    colon = url.find(":", start)
    first = url.find("@", start)
    if colon < 0 or first < 0:
        return None
    if "/" in url[start:first]:  # the user part cannot contain "/": is this "@" a delimiter?
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
        # A word without a value is the rest of a password that contains an unquoted space.
        yield from (word.span() for word in words if word["value"] is None)


def _values_in(text: str) -> Iterator[str]:
    is_url = _is_url(text)
    for start, end in _spans(text):
        written = text[start:end]
        yield written
        meant = unquote(written) if is_url else _unquoted(written)
        yield meant
        if is_url and ("://" not in text or _DELIMITERS & set(written)):
            # Short pieces and numbers are not added: they occur in lines, times and versions.
            pieces = (p for mark in (_CUT, _SPLIT) for v in (written, meant) for p in mark.split(v))
            yield from (each for each in pieces if len(each) >= _SHORT and not each.isdigit())


def _unquoted(word: str) -> str:
    """Return the value of a word in a libpq `key=value` string, without its quotes."""
    inner = word[1:].removesuffix("'") if word.startswith("'") else word
    return re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL)


def _forms(value: str) -> Iterable[str]:
    """Return the value in all encodings in which a text may contain it."""
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
