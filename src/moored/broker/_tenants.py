"""Which tenant an event belongs to, and which user of it.

An event without a certain tenant is dropped, never sent; so is one whose user is not certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

from moored.kernel import describe

from ._events import SourceEvent

__all__ = ["Tenants", "Untold", "canonical_tenant", "canonical_uuid"]

_UUID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}")
#: What cannot be stored, or would break a line of a log: control characters, half characters.
_UNUSABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")
#: The most characters of a tenant's name.
LONGEST = 200
_ABSENT = object()


class Untold(ValueError):
    """The tenant or user of an event is not certain; its text is the label of a metric."""


def canonical_tenant(value: Any) -> str:
    """Return the one form of a tenant's name, which is text; raises `ValueError`.

    An integer is its digits, and a UUID has its canonical form; other text is kept as it is.
    """
    if isinstance(value, UUID) or (isinstance(value, int) and not isinstance(value, bool)):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not the name of a tenant: it must be text or an integer")
    if len(value) > LONGEST:
        raise ValueError(f"a tenant's name of {len(value)} characters: at most {LONGEST} are used")
    if _UNUSABLE.search(value):
        raise ValueError(f"{value!r} is not the name of a tenant: it has a control character")
    return canonical_uuid(value) if _UUID.fullmatch(value.lower()) else value


def canonical_uuid(value: Any) -> str:
    """Return a UUID in its canonical form; raises `ValueError` for anything else."""
    text = str(value).lower() if isinstance(value, str | UUID) else ""
    if _UUID.fullmatch(text) is None:
        raise ValueError(f"{value!r} is not a UUID")
    digits = text.replace("-", "")
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class Tenants:
    """Finds the tenant of an event.

    :param field: the field of the payload that names the tenant, or a function of the event.
    :param canonical: returns the one form of a tenant's name, or raises `ValueError`.
    :param user: the field of the payload that names the only user who gets the event, or None.
    """

    def __init__(
        self,
        field: str | Callable[[SourceEvent], str | None],
        canonical: Callable[[Any], str],
        user: str | None = None,
    ) -> None:
        self._field = field
        self._canonical = canonical
        self._user = user

    def canonical(self, value: Any) -> str:
        """Return the one form of a tenant's name; raises `ValueError`."""
        try:
            found = self._canonical(value)
        except Exception as error:  # code of the user, and values of strangers
            raise ValueError(describe(error)) from None
        if not isinstance(found, str) or not found:
            raise ValueError(f"{value!r} is not the name of a tenant")
        return found

    def of(self, event: SourceEvent) -> str:
        """Return the tenant of an event; raises `Untold`.

        If the source has named the tenant, a payload that names another one is refused, and a name
        in another form, too: the history is searched for the canonical one.
        """
        named = self._named(event)
        if not event.tenant:
            if named is _ABSENT or event.tenant is not None:
                raise Untold("no_tenant")
            return self._checked(named)
        tenant = self._checked(event.tenant)
        if tenant != event.tenant:
            raise Untold("tenant_not_canonical")
        if named is not _ABSENT and self._checked(named) != tenant:
            raise Untold("other_tenant")
        return tenant

    def user_of(self, event: SourceEvent) -> str:
        """Return the only user who gets an event, or an empty string for all; raises `Untold`."""
        pairs = None if self._user is None else _pairs(event.payload)
        values = [value for name, value in pairs or () if name == self._user]
        if len(values) > 1:
            raise Untold("user_twice")
        if not values:
            return ""
        value = values[0]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise Untold("bad_user")  # null, for example: not for all
        return str(value)

    def _named(self, event: SourceEvent) -> Any:
        """Return what the payload names as its tenant."""
        if callable(self._field):
            try:
                found = self._field(event)
            except Exception:  # code of the user, and a payload of a stranger
                raise Untold("bad_tenant") from None
            return _ABSENT if found is None else found
        if (pairs := _pairs(event.payload)) is None:
            if event.tenant is None:
                raise Untold("not_an_object")
            return _ABSENT
        values = [value for name, value in pairs if name == self._field]
        if len(values) > 1:
            raise Untold("tenant_twice")  # which of them a reader takes differs between parsers
        return values[0] if values else _ABSENT

    def _checked(self, value: Any) -> str:
        try:
            return self.canonical(value)
        except ValueError:
            raise Untold("bad_tenant") from None


def _pairs(payload: str) -> _Pairs | None:
    """Return the fields of a payload; None if it is not an object of JSON."""
    try:
        found = json.loads(payload, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, _Pairs) else None


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON, with the fields that occur twice."""
