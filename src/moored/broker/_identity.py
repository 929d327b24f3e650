"""Who a subscriber is: API keys, JSON web tokens and one-time tickets.

An authenticator is a function of a token that returns an `Identity`, or None for a token that is
not valid. It may be async.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moored.kernel import Clock, describe, extra

__all__ = ["ApiKeys", "Authenticator", "Identity", "Jwt", "Tickets"]

log = logging.getLogger("moored.broker")

#: The most tickets that are valid at a time.
MAX_TICKETS = 100_000


class Identity(NamedTuple):
    """What a subscriber may see."""

    tenant: str
    #: The Unix time at which the stream ends; None for no end.
    expires: float | None = None
    #: The channels that it may have; None for all.
    channels: frozenset[str] | None = None


Authenticator = Callable[[str], "Identity | Awaitable[Identity | None] | None"]


class ApiKeys:
    """An authenticator for API keys.

    :param keys: the tenant of each key; or a file with a key and its tenant on each line, which is
        read again when it has changed. Empty lines and lines that begin with # are ignored. While
        the file is missing or has a mistake, the keys that were read last stay valid.
    """

    def __init__(self, keys: Mapping[str, str] | str | Path) -> None:
        self._path = None if isinstance(keys, Mapping) else Path(keys)
        self._changed = 0
        self._mistake = ""
        # By their hashes: a comparison of hashes does not reveal a key by the time that it takes.
        self._tenants: dict[bytes, str] = {}
        if isinstance(keys, Mapping):
            self._tenants = {_hash(key): tenant for key, tenant in keys.items()}
        else:
            self._read(Path(keys))

    def __call__(self, token: str) -> Identity | None:
        if self._path is not None:
            try:
                self._read(self._path)
                self._mistake = ""
            except (OSError, ValueError) as error:
                if (mistake := describe(error)) != self._mistake:
                    log.error("the API keys are not updated: %s", mistake)
                self._mistake = mistake
        tenant = self._tenants.get(_hash(token))
        return None if tenant is None else Identity(tenant)

    def _read(self, path: Path) -> None:
        if (changed := path.stat().st_mtime_ns) == self._changed:
            return
        found: dict[bytes, str] = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ValueError(f"{path}, line {number}: expected a key and a tenant")
            if found.setdefault(_hash(words[0]), words[1]) != words[1]:
                raise ValueError(f"{path}, line {number}: the key has another tenant above")
        self._tenants, self._changed = found, changed


class Jwt:
    """An authenticator for JSON web tokens; a stream ends when its token expires.

    :param key: the secret (HS256), or the public key as PEM (RS256, ES256).
    :param algorithms: the algorithms that are accepted; the token's own choice is not trusted.
    :param claim: the claim that names the tenant.
    :param audience: the expected `aud`.
    :param issuer: the expected `iss`.
    """

    def __init__(
        self,
        key: str | bytes,
        *,
        algorithms: Sequence[str] = ("HS256",),
        claim: str = "org_id",
        audience: str | None = None,
        issuer: str | None = None,
    ) -> None:
        with extra("jwt", "moored.broker.Jwt"):
            import jwt
        self._jwt = jwt
        self._key = key
        self._claim = claim
        self._expected: dict[str, Any] = {"algorithms": list(algorithms)}
        if issuer is not None:
            self._expected["issuer"] = issuer
        if audience is not None:
            self._expected["audience"] = audience

    def __call__(self, token: str) -> Identity | None:
        try:
            claims = self._jwt.decode(
                token, self._key, options={"require": ["exp"]}, **self._expected
            )
        except self._jwt.InvalidTokenError:
            return None
        tenant = claims.get(self._claim)
        if isinstance(tenant, bool) or not isinstance(tenant, str | int):
            return None
        return Identity(str(tenant), float(claims["exp"]))


class Tickets:
    """One-time tickets for clients that cannot send headers, such as the browser's `EventSource`.

    :param lifetime: seconds for which a ticket is valid.
    """

    def __init__(self, lifetime: float = 30.0, clock: Clock | None = None) -> None:
        self.lifetime = lifetime
        self._clock = clock or Clock.current()
        self._tickets: dict[str, tuple[float, Identity]] = {}

    def issue(self, identity: Identity) -> str | None:
        """Return a ticket for an identity; None if there are too many."""
        now = self._clock.monotonic()
        while self._tickets and (oldest := next(iter(self._tickets))):
            if self._tickets[oldest][0] > now:
                break
            del self._tickets[oldest]
        if len(self._tickets) >= MAX_TICKETS:
            return None
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = (now + self.lifetime, identity)
        return ticket

    def redeem(self, ticket: str) -> Identity | None:
        """Return the identity of a ticket, once; None if it is not valid."""
        until, identity = self._tickets.pop(ticket, (0.0, None))
        return identity if until > self._clock.monotonic() else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
