"""The keys of an issuer of tokens, read from a URL."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from moored.kernel import SECRETS, Clock, describe, redacted, start_task

from ._identity import TokenRefused

__all__ = ["RemoteKeys"]

log = logging.getLogger("moored.broker")

#: Seconds between two reads of the URL, and after which known keys are read again, in the
#: background: a key that the issuer has removed must not stay valid.
AGAIN, STALE = 30.0, 600.0
#: The limits of a read: seconds, and bytes.
TIMEOUT, LARGEST = 5.0, 1024 * 1024


class RemoteKeys:
    """The keys at a URL (a JWK set), by their ids; the last ones stay while it cannot be read."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        SECRETS.add_from(url)
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"jwks={redacted(url)!r}: must begin with https:// (or http://)")
        self._url = url
        self._clock = clock or Clock.current()
        self._keys: dict[str | None, Any] = {}
        self._read_at = self._tried_at = -float("inf")
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    async def key(self, id: str | None) -> Any:
        """Return the key with an id, or the only key; raise `TokenRefused`."""
        now = self._clock.monotonic()
        found = self._find(id)
        missing = found is None
        if (missing or now - self._read_at >= STALE) and now - self._tried_at >= AGAIN:
            self._tried_at = now
            self._task = start_task(self._read(), name="keys of JSON web tokens")
        if missing and self._task is not None and not self._task.done():
            await asyncio.wait({self._task})  # which goes on if this caller is cancelled
            found = self._find(id)
        if found is not None:
            return found
        if self._read_at < now:  # the id may be that of a key which is newer than what was read
            wait = max(1.0, self._tried_at + AGAIN - self._clock.monotonic())
            text = "the key of the token cannot be read at the moment: try again"
            raise TokenRefused("keys_unavailable", text, retry_after=wait)
        raise TokenRefused("key", "the token is signed with a key that is not known")

    def _find(self, id: str | None) -> Any:
        if id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(id)

    async def _read(self) -> None:
        from jwt import PyJWKSet

        try:
            async with asyncio.timeout(TIMEOUT):
                text = await asyncio.to_thread(_get, self._url)
            found = PyJWKSet.from_dict(json.loads(text)).keys
        except Exception as error:  # of the network, and of what a stranger answers
            failure = f"the keys of JSON web tokens cannot be read from {redacted(self._url)}: "
            failure += describe(error)
            if failure != self._failure:  # once for a cause
                log.warning("%s; those that were read last stay valid", failure)
            self._failure = failure
            return
        self._failure = ""
        self._keys = {each.key_id: each.key for each in found if each.public_key_use != "enc"}
        self._read_at = self._clock.monotonic()


def _get(url: str) -> bytes:
    with urlopen(Request(url, headers={"Accept": "application/json"}), timeout=TIMEOUT) as answer:
        text: bytes = answer.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST:,} bytes")
    return text
