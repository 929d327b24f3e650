"""JSON web tokens: who sends one, and why one is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from moored.kernel import extra

from ._identity import Identity, TokenRefused
from ._jwks import RemoteKeys

__all__ = ["Jwt"]

#: The reason and the text of a refusal, by the name of PyJWT's error, the special ones first.
_REFUSALS = {
    "ExpiredSignatureError": ("expired", "the token has expired"),
    "ImmatureSignatureError": ("not_yet_valid", "the token is not valid yet"),
    "InvalidIssuedAtError": ("not_yet_valid", "the token is not valid yet"),
    "InvalidAudienceError": ("audience", "the token is for another audience (aud)"),
    "InvalidIssuerError": ("issuer", "the token is of another issuer (iss)"),
    "MissingRequiredClaimError": ("claim", "the token lacks a claim: exp, aud or iss"),
    "InvalidAlgorithmError": (
        "algorithm",
        "the token is signed with an algorithm not allowed here",
    ),
    "InvalidSignatureError": ("signature", "the token's signature is not valid"),
    "DecodeError": ("malformed", "this is not a JSON web token"),
}


class Jwt:
    """An authenticator for JSON web tokens; a stream ends when its token expires.

    A token that is not valid raises `TokenRefused`, with the reason.

    :param key: the secret (HS256), or the public key as PEM (RS256, ES256).
    :param jwks: in place of a key, the URL of the issuer's keys (a JWK set). They are read when the
        first token comes, again every ten minutes, and for an unknown key, at most every 30 s. The
        last ones stay valid while the URL cannot be read.
    :param algorithms: the algorithms that are accepted; the token's own choice is not trusted. By
        default HS256 for a key, RS256 and ES256 with `jwks`.
    :param claim: the claim that names the tenant.
    :param subject: the claim that names the user (`sub`), for events that are meant for one user of
        a tenant; by default the identity has no user.
    :param audience: the expected `aud`.
    :param issuer: the expected `iss`.
    """

    def __init__(
        self,
        key: str | bytes | None = None,
        *,
        jwks: str | None = None,
        algorithms: Sequence[str] | None = None,
        claim: str = "org_id",
        subject: str | None = None,
        audience: str | None = None,
        issuer: str | None = None,
    ) -> None:
        with extra("jwt", "moored.broker.Jwt"):
            import jwt
        if (key is None) == (jwks is None):
            raise ValueError("Jwt: give either a key or the URL of the keys, jwks=")
        accepted = [*(algorithms or (("RS256", "ES256") if jwks else ("HS256",)))]
        if jwks and (symmetric := [each for each in accepted if each.startswith("HS")]):
            raise ValueError(f"Jwt: keys that can be read at a URL cannot sign {symmetric[0]}")
        self._jwt = jwt
        self._key = key
        self._remote = RemoteKeys(jwks) if jwks else None
        self._claim = claim
        self._subject = subject
        self._expected: dict[str, Any] = {"algorithms": accepted}
        if issuer is not None:
            self._expected["issuer"] = issuer
        if audience is not None:
            self._expected["audience"] = audience

    def __call__(self, token: str) -> Identity | Awaitable[Identity]:
        """Return the identity; raise `TokenRefused`."""
        return self._identify(token, self._key) if self._remote is None else self._by_url(token)

    async def _by_url(self, token: str) -> Identity:
        assert self._remote is not None
        try:
            header = self._jwt.get_unverified_header(token)
        except self._jwt.InvalidTokenError as error:
            raise self._refusal(error) from error
        return self._identify(token, await self._remote.key(header.get("kid")))

    def _identify(self, token: str, key: Any) -> Identity:
        try:
            claims = self._jwt.decode(token, key, options={"require": ["exp"]}, **self._expected)
        except self._jwt.InvalidTokenError as error:
            raise self._refusal(error) from error
        except TypeError as error:  # a key of another kind than the algorithm of the token
            raise TokenRefused("signature", "the token's signature is not valid") from error
        user = None if self._subject is None else self._named(claims, self._subject)
        return Identity(self._named(claims, self._claim), float(claims["exp"]), user=user)

    def _named(self, claims: dict[str, Any], claim: str) -> str:
        value = claims.get(claim)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            found = "there is none" if value is None else f"it is a {type(value).__name__}"
            text = f"the token's claim {claim!r} must be text or an integer: {found}"
            raise TokenRefused("claim", text)
        return str(value)

    def _refusal(self, error: Exception) -> TokenRefused:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        reason, text = next((_REFUSALS[kind] for kind in kinds if kind in _REFUSALS), _OTHER)
        return TokenRefused(reason, text)


_OTHER = "invalid", "the token is not valid"
