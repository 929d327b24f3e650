"""Which tenant an event belongs to."""

from __future__ import annotations

import json
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.broker import SourceEvent, canonical_tenant, canonical_uuid
from moored.broker._tenants import Tenants, Untold
from moored.testing import scaled

pytestmark = pytest.mark.pure

ORG = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
OTHER = "00000000-0000-0000-0000-000000000000"
TENANTS = Tenants("org_id", canonical_tenant)
STRICT = Tenants("org_id", canonical_uuid)


def reason(payload: str, tenant: str | None = None, tenants: Tenants = TENANTS) -> str:
    with pytest.raises(Untold) as caught:
        tenants.of(SourceEvent("orders", payload, tenant))
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("acme", "acme"),
        ("Acme", "Acme"),
        (" 東京 ", " 東京 "),
        ("x" * 200, "x" * 200),
        (7, "7"),
        (0, "0"),
        (-(2**63), str(-(2**63))),
        (f"urn:uuid:{ORG}", f"urn:uuid:{ORG}"),
        (ORG.replace("-", "").upper(), ORG),
    ],
)
def test_any_text_and_any_integer_names_a_tenant(value: str | int, expected: str) -> None:
    assert TENANTS.of(SourceEvent("orders", json.dumps({"org_id": value}))) == expected


@pytest.mark.parametrize(
    "value", ["", "x" * 201, "a\nb", "a\x00", "\x7f", "\x85", "\ud800", True, 7.0, None, [], {}]
)
def test_name_that_cannot_be_stored_or_logged_is_refused(value: object) -> None:
    assert reason(json.dumps({"org_id": value})) == "bad_tenant"
    with pytest.raises(ValueError, match="tenant"):
        canonical_tenant(value)


@pytest.mark.parametrize(
    "text", ["acme", "7", f" {ORG}", f"urn:uuid:{ORG}", ORG.replace("f", "_", 1)]
)
def test_tenants_that_must_be_uuids_are_refused_otherwise(text: str) -> None:
    assert reason(json.dumps({"org_id": text}), tenants=STRICT) == "bad_tenant"
    assert reason("{}", text, tenants=STRICT) == "bad_tenant"
    assert reason(json.dumps({"org_id": 7}), tenants=STRICT) == "bad_tenant"


@pytest.mark.parametrize("text", [ORG, ORG.upper(), ORG.replace("-", "")])
def test_payload_names_the_tenant_in_any_spelling_of_a_uuid(text: str) -> None:
    assert TENANTS.of(SourceEvent("orders", json.dumps({"org_id": text}))) == ORG


def test_zero_uuid_is_a_tenant() -> None:
    assert TENANTS.of(SourceEvent("orders", json.dumps({"org_id": OTHER}))) == OTHER


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("", "not_an_object"),
        ("{", "not_an_object"),
        ("[" * 100_000, "not_an_object"),
        (json.dumps([{"org_id": ORG}]), "not_an_object"),
        (json.dumps(ORG), "not_an_object"),
        ("{}", "no_tenant"),
        (json.dumps({"nested": {"org_id": ORG}}), "no_tenant"),
        (json.dumps({"ORG_ID": ORG}), "no_tenant"),
        (json.dumps({"org_id": None}), "bad_tenant"),
        (json.dumps({"org_id": [ORG]}), "bad_tenant"),
        (f'{{"org_id": "{ORG}", "org_id": "{OTHER}"}}', "tenant_twice"),
        (f'{{"org_id": "{ORG}", "\\u006frg_id": "{OTHER}"}}', "tenant_twice"),
    ],
)
def test_event_without_a_certain_tenant_is_refused(payload: str, expected: str) -> None:
    assert reason(payload) == expected


def test_tenant_of_the_source_wins_and_a_payload_must_not_name_another() -> None:
    assert TENANTS.of(SourceEvent("orders", "plain text", ORG)) == ORG
    assert TENANTS.of(SourceEvent("orders", json.dumps({"org_id": ORG.upper()}), ORG)) == ORG
    assert reason(json.dumps({"org_id": OTHER}), ORG) == "other_tenant"
    assert reason(json.dumps({"org_id": ""}), ORG) == "bad_tenant"
    assert reason("{}", "two\nlines") == "bad_tenant"
    assert reason("{}", ORG.upper()) == "tenant_not_canonical"


def test_event_whose_source_knows_no_tenant_is_refused_whatever_its_payload_names() -> None:
    assert reason(json.dumps({"org_id": ORG}), "") == "no_tenant"


def test_uuid_object_is_a_tenant() -> None:
    assert canonical_uuid(uuid.UUID(ORG)) == canonical_tenant(uuid.UUID(ORG)) == ORG


def test_function_names_the_tenant() -> None:
    tenants = Tenants(lambda event: event.payload.partition(":")[0] or None, str.lower)
    assert tenants.of(SourceEvent("orders", "Acme:7")) == "acme"
    with pytest.raises(Untold, match="no_tenant"):
        tenants.of(SourceEvent("orders", ":7"))


@settings(max_examples=scaled(200, least=20))
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("org_id"), inner),
        max_leaves=8,
    )
)
def test_any_json_has_a_canonical_tenant_or_a_reason(value: object) -> None:
    found = ""
    try:
        found = TENANTS.of(SourceEvent("orders", json.dumps(value)))
    except Untold as error:
        found = str(error)
    reasons = ("not_an_object", "no_tenant", "bad_tenant")
    assert found in reasons or found == canonical_tenant(dict(value)["org_id"])  # type: ignore[call-overload]
