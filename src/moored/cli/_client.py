"""An HTTP client for a running service, with the standard library only."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from moored.kernel import SECRETS, MooredError, redacted

__all__ = ["Client", "CommandFailed", "UnknownComponent"]

#: Seconds; a running service responds within milliseconds.
TIMEOUT = 10.0


class CommandFailed(MooredError):
    """A command failed; the message is one line for stderr."""


class UnknownComponent(CommandFailed):
    """No component, or more than one, matches; `known` holds the candidates."""

    def __init__(self, message: str, known: list[str]) -> None:
        super().__init__(message)
        self.known = known


class Client:
    """A client of one service, by its URL and token."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = TIMEOUT) -> None:
        SECRETS.add_from(url)
        SECRETS.add(token or "")
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandFailed(
                f"{redacted(url)!r} is not an address of a service: write http://127.0.0.1:8089"
            )
        place = parts.netloc.rpartition("@")[2]
        #: The URL for messages, without a user and password, which are not sent either.
        self.url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}"
        self._parts = parts
        # The URL may be the link that `serve` has printed.
        self._token = token or parse_qs(parts.query).get("token", [None])[0]
        self._timeout = timeout

    def status(self) -> dict[str, Any]:
        """Return the whole state."""
        return self._call("/v1/status")

    def lanes(self) -> list[list[str]]:
        """Return the parts and servers in the order of the timeline, grouped by server."""
        found: list[list[str]] = self._call("/v1/map")["lanes"]
        return found

    def explain(self, component: str) -> dict[str, Any]:
        """Return why a component is in its present state; raises `UnknownComponent`."""
        return self._call(f"/v1/explain/{quote(component)}")

    def sessions(self, part: str) -> list[dict[str, Any]]:
        """Return the state of each session of a part."""
        found: list[dict[str, Any]] = self._call(f"/v1/sessions/{quote(part)}/")["sessions"]
        return found

    def stop_session(self, part: str, profile: str, drain: float) -> dict[str, Any]:
        """Stop a session, after its sends have had some seconds to get their outcomes."""
        path = f"/v1/sessions/{quote(part)}/{quote(profile, safe='')}?drain={drain:g}"
        return self._call(path, "DELETE", more=drain)

    def _call(self, path: str, method: str = "GET", *, more: float = 0.0) -> dict[str, Any]:
        code, body = self._request(path, method, self._timeout + more)
        answer = _parsed(body)
        if code == 200 and answer is not None:
            return answer
        detail = (answer or {}).get("detail", "the response is not the JSON of a Moored service")
        if code == 404 and answer is not None and "known" in answer:
            raise UnknownComponent(detail, answer["known"])
        if code == 401:
            raise CommandFailed(
                f"{self.url} requires a token, which `moored serve` prints unless one is set: "
                "set MOORED_ADMIN_TOKEN, or use --admin-token"
            )
        raise CommandFailed(f"{self.url} responded to {path} with {code}: {detail}")

    def _request(self, path: str, method: str, timeout: float) -> tuple[int, bytes]:
        # Without proxies and redirects: the token is sent to the given host only.
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout)
            try:
                connection.request(method, self._parts.path.rstrip("/") + path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CommandFailed(
                f"no service responds at {self.url} ({_reason(error)}). "
                "Start one with `moored serve`, or choose another with --url."
            ) from error


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
