"""The files of the page, read once; all come with the package, none from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

__all__ = ["asset", "login_page", "page"]

_TYPES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def page(*, logout: bool) -> Response:
    """The live page, with a way to log out where there is a login."""
    return _html("page.html", _PAGE_POLICY, logout="" if logout else "hidden")


def login_page(*, wrong: bool = False) -> Response:
    """The form that asks for the token; it stands alone, because the rest needs the token."""
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
    """A file that the page asks for, or None."""
    if name not in _TYPES:
        return None
    # Checked again at each load, so that an upgrade is seen at once; it costs a few kilobytes.
    return Response(_text(name), media_type=_TYPES[name], headers={"Cache-Control": "no-cache"})


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
