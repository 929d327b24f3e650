"""How a browser signs in: it exchanges a token, from a form or a link, for a session cookie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from . import _auth
from ._assets import login_page

__all__ = ["MAX_FORM", "Login", "token_in_link"]

#: Bytes of a login form, which holds only a token.
MAX_FORM = 8192
#: Seconds within which the whole form must arrive.
FORM_TIMEOUT = 10.0


class Login:
    """Issues and deletes the session cookies of browsers."""

    def __init__(self, tokens: _auth.Tokens, wall: Callable[[], float]) -> None:
        self._tokens = tokens
        self._wall = wall

    async def by_form(self, request: Request) -> Response:
        """Answer a form with a token."""
        return self.by_token(request, await _token_in_form(request))

    def by_token(self, request: Request, given: str | None) -> Response:
        """Redirect to the page with a session, or show the form again.

        The redirect takes a token from the address bar, from the history and from Referer headers.
        """
        token = self._tokens.equal_to(given)
        if token is None and self._tokens:
            return login_page(wrong=True)
        answer = RedirectResponse("./", status_code=303)
        if token is not None:
            answer.set_cookie(
                _auth.cookie_name(request.headers.get("host")),
                _auth.issue_session(token, now=self._wall()),
                max_age=int(_auth.LIFETIME),
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",
            )
        return answer

    async def logout(self, request: Request) -> Response:
        """End the session of a browser."""
        answer = RedirectResponse("./", status_code=303)
        cookie = _auth.cookie_name(request.headers.get("host"))
        answer.delete_cookie(cookie, httponly=True, samesite="strict")
        return answer


def token_in_link(scope: Scope) -> str | None:
    """Return the token in the query of a request, and hide it there, where access logs read it."""
    given = _token_in(scope["query_string"])
    if given is not None:
        scope["query_string"] = b"token=***"
    return given


async def _token_in_form(request: Request) -> str | None:
    body = b""
    try:
        async with asyncio.timeout(FORM_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM:
                    raise HTTPException(413)
    except TimeoutError:
        raise HTTPException(408, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise HTTPException(400) from None  # the client has gone
    return _token_in(body)


def _token_in(query: bytes) -> str | None:
    values = parse_qs(query.decode("ascii", errors="replace")).get("token")
    return values[0].strip() if values else None
