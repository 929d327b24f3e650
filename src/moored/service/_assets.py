"""The files of the live page; all are part of the package, none is loaded from another host."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import PurePath

from starlette.responses import Response

__all__ = ["asset", "login_page", "page"]

_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def page(*, logout: bool, text: str) -> Response:
    """Return the live page, with a logout button if there is a login.

    Browsers without JavaScript show the text.
    """
    hidden = "" if logout else "hidden"
    return _html("page.html", _PAGE_POLICY, logout=hidden, text=escape(text))


def login_page(*, wrong: bool = False) -> Response:
    """Return the form for the token, with its style inside: all other files need the token."""
    text = _text("login.html")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = hashlib.sha256((style[1] if style else "").encode()).digest()
    policy = (
        f"default-src 'none'; style-src 'sha256-{base64.b64encode(digest).decode()}'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    note = "That is not the token of this service." if wrong else ""
    return _html("login.html", policy, status=401, note=note)


def asset(name: str) -> Response | None:
    """Return a file that the page loads, or None if the name is unknown."""
    found = _assets().get(name)
    if found is None:
        return None
    # The browser revalidates at each load, so that an upgrade is visible at once.
    return Response(_text(name), media_type=found, headers={"Cache-Control": "no-cache"})


@cache
def _assets() -> dict[str, str]:
    """Return the files that the page loads, each with its media type."""
    names = [each.name for each in (files("moored.service") / "static").iterdir()]
    return {name: _TYPES[end] for name in names if (end := PurePath(name).suffix) in _TYPES}


def _html(name: str, policy: str, *, status: int = 200, **words: str) -> Response:
    text = _text(name)
    for word, value in words.items():
        text = text.replace(f"{{{{{word}}}}}", value)
    return Response(
        text,
        status_code=status,
        media_type="text/html",
        headers={"Content-Security-Policy": policy},
    )


@cache
def _text(name: str) -> str:
    return (files("moored.service") / "static" / name).read_text(encoding="utf-8")
