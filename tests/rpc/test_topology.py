"""Topologies: parsing the answer, choosing a member, and deciding when to move."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.rpc._config import ConnectionConfig
from moored.rpc._errors import ConfigError, TopologyError
from moored.rpc.topology._topology import (
    Advice,
    Capability,
    Member,
    Topology,
    TopologyMixin,
    address_of,
    config_for,
    parse_topology,
    pick,
)

pytestmark = pytest.mark.pure

READABLE, WRITABLE, PRIMARY = Capability.READABLE, Capability.WRITABLE, Capability.PRIMARY


def member(name: str, capability: int = PRIMARY) -> Member:
    return Member(name, f"http://{name}:1", capability)


def topology(version: int, *members: Member) -> Topology:
    return Topology(version, members)


def answer(**changes: Any) -> dict[str, Any]:
    """Return an answer of Milvus."""
    data = {
        "version": "7",
        "clusters": [
            {"clusterId": "in01", "endpoint": "https://in01.example.com", "capability": 1},
            {"clusterId": "in02", "endpoint": "https://in02.example.com:1234", "capability": 3},
        ],
        **changes,
    }
    return {"code": 0, "data": data}


# -- reading ---------------------------------------------------------------------------------------


def test_answer_of_milvus_is_parsed() -> None:
    found = parse_topology(answer())
    assert found.version == 7
    assert [each.cluster_id for each in found.members] == ["in01", "in02"]
    assert found.primary.cluster_id == "in02"
    assert [address_of(each) for each in found.members] == [
        "in01.example.com:443",
        "in02.example.com:1234",
    ]


def test_version_may_be_a_number_and_extra_fields_are_ignored() -> None:
    assert parse_topology({**answer(version=8), "cost": 1}).version == 8
    assert parse_topology({"data": answer()["data"]}).version == 7, (
        "a missing code was taken for a failure"
    )


def test_capability_bits_are_those_of_milvus() -> None:
    assert (int(READABLE), int(WRITABLE), int(PRIMARY)) == (1, 2, 3)
    assert [member("a", bits).readable for bits in range(5)] == [False, True, False, True, False]
    assert [member("a", bits).writable for bits in range(5)] == [False, False, True, True, False]
    assert member("a", 7).writable, "unknown bits must be ignored"


def test_nonzero_code_is_a_refusal() -> None:
    with pytest.raises(TopologyError, match=r"topology: not yours \(code 1800\)"):
        parse_topology({"code": 1800, "message": "not yours"})
    with pytest.raises(TopologyError, match="no reason was given"):
        parse_topology({"code": 1800})
    with pytest.raises(TopologyError) as caught:
        parse_topology({"code": 1, "message": "x" * 100_000})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "the answer must be an object, not NoneType"),
        ([], "the answer must be an object, not list"),
        ("text", "the answer must be an object"),
        ({}, "data must be an object"),
        ({"code": 0, "data": []}, "data must be an object, not list"),
        (answer(clusters=None), "data.clusters must be a list"),
        (answer(clusters={}), "data.clusters must be a list, not dict"),
        (answer(clusters=["a"]), "data.clusters[0] must be an object"),
        (answer(clusters=[{}]), "data.clusters[0].clusterId must be a string"),
        (answer(clusters=[{"clusterId": "a"}]), "data.clusters[0].endpoint must be a string"),
        (
            answer(clusters=[{"clusterId": "a", "endpoint": "b"}]),
            "data.clusters[0].capability must be a number",
        ),
        (
            answer(clusters=[{"clusterId": "a", "endpoint": "b", "capability": True}]),
            "capability must be a number, not bool",
        ),
        (answer(version=None), "data.version must be a number"),
        (answer(version="new"), "data.version must be a number, not str"),
        (answer(version="٣"), "data.version must be a number"),
        (answer(version=1.5), "data.version must be a number, not float"),
        (answer(version="9" * 5000), "data.version must be a number"),
    ],
)
def test_malformed_answer_is_refused_with_the_field(body: Any, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(body)
    assert message in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["code", "data", "version", "clusters", "clusterId", "endpoint"]), inner
        )
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_json_is_parsed_or_refused(body: Any) -> None:
    for each in (body, {"code": 0, "data": body}, answer(clusters=body)):
        try:
            found = parse_topology(each)
        except TopologyError:
            continue
        assert isinstance(found.version, int)


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("https://in02.example.com", "in02.example.com:443"),
        ("http://in02.example.com", "in02.example.com:80"),
        ("tcp://in02.example.com", "in02.example.com:80"),
        ("in02.example.com", "in02.example.com:80"),
        ("in02.example.com:443", "in02.example.com:443"),
        ("https://in02.example.com:19530/", "in02.example.com:19530"),
        ("[::1]:5", "[::1]:5"),
        (" 10.0.0.1:5 ", "10.0.0.1:5"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
    ],
)
def test_endpoint_has_the_default_ports_of_a_uri(endpoint: str, address: str) -> None:
    assert address_of(Member("a", endpoint)) == address


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://a", "a:b", "::1", "a b"])
def test_invalid_endpoint_is_refused_with_its_member(endpoint: str) -> None:
    with pytest.raises(TopologyError, match="the endpoint of in07 is wrong"):
        address_of(Member("in07", endpoint))


@pytest.mark.parametrize(
    ("uri", "endpoint", "given", "secure"),
    [
        ("https://g", "https://a", {}, True),
        ("http://g", "http://a", {}, False),
        ("http://g", "https://a", {}, True),
        ("https://g", "http://a", {}, True),  # an answer never turns TLS off
        ("https://g", "a:1", {}, True),
        ("http://g", "a:1", {}, False),
        ("https://g", "https://a", {"secure": False}, False),
        ("http://g", "http://a", {"secure": True}, True),
        ("http://g", "https://a", {"secure": None}, True),
    ],
)
def test_encryption_of_a_member_follows_uri_endpoint_and_option(
    uri: str, endpoint: str, given: dict[str, Any], secure: bool
) -> None:
    config = ConnectionConfig.from_uri(uri, token="t", **given)
    found = config_for(config, Member("a", endpoint))
    assert found.secure is secure
    assert found.address.startswith("a:")
    assert (found.uri, found.token) == (config.uri, "t")


def test_certificate_name_is_that_of_the_member_unless_given() -> None:
    found = Member("10.0.0.1", "10.0.0.1:5", server_name="db.example.com")
    config = ConnectionConfig.from_uri("https://db.example.com")
    assert config_for(config, found).options["server_name"] == "db.example.com"
    config = ConnectionConfig.from_uri("https://db.example.com", server_name="mine")
    assert config_for(config, found).options["server_name"] == "mine"


# -- the choice ------------------------------------------------------------------------------------


def test_primary_is_the_first_writable_member() -> None:
    found = topology(1, member("a", READABLE), member("b", WRITABLE), member("c"))
    assert found.primary.cluster_id == "b"
    assert pick(found).cluster_id == "b"
    assert pick(found, "primary", {"c:1": 0.0}, avoid={"b:1"}).cluster_id == "b"


def test_topology_without_a_primary_is_an_error() -> None:
    with pytest.raises(TopologyError, match="version 3 of the topology has no primary: none is"):
        _ = topology(3, member("a", READABLE), member("b", 4)).primary
    with pytest.raises(TopologyError, match="no primary: none is writable among its 0 members"):
        pick(topology(3))


def test_nearest_replica_has_the_lowest_latency() -> None:
    found = topology(
        1, member("w", WRITABLE), member("a", READABLE), member("b", READABLE), member("c")
    )
    assert pick(found, "any").cluster_id == "a", "without latencies, take the first readable member"
    assert pick(found, "any", {}).cluster_id == "a"
    assert pick(found, "any", {"b:1": 0.3, "c:1": 0.1}).cluster_id == "c"
    assert pick(found, "any", {"b:1": 9.0}).cluster_id == "b", "prefer a measured member"
    assert pick(found, "any", {"w:1": 0.0, "gone:1": 0.0}).cluster_id == "a"


def test_avoided_replica_is_selected_last() -> None:
    found = topology(1, member("a"), member("b"), member("c"))
    near = {"a:1": 0.1, "b:1": 0.3, "c:1": 0.2}
    assert pick(found, "any", near, avoid={"a:1"}).cluster_id == "c"
    assert pick(found, "any", near, avoid={"a:1", "c:1"}).cluster_id == "b"
    assert pick(found, "any", near, avoid={"a:1", "b:1", "c:1"}).cluster_id == "a"


def test_topology_without_a_readable_member_is_an_error() -> None:
    with pytest.raises(TopologyError, match="has no readable member"):
        pick(topology(1, member("a", WRITABLE)), "any")


# -- what is known ---------------------------------------------------------------------------------


def test_only_a_newer_version_is_accepted() -> None:
    known = TopologyMixin()
    second = topology(2, member("b"))
    assert known.accept(second)
    assert not known.accept(topology(1, member("a")))
    assert not known.accept(topology(2, member("c"))), "an equal version was accepted"
    assert not known.accept(topology(1)), "an old version was checked"
    assert known.topology is second
    assert known.accept(topology(3, member("c")))


@pytest.mark.parametrize(
    "unusable",
    [
        topology(5),
        topology(5, member("a", READABLE)),
        topology(5, Member("a", "http://")),
    ],
)
def test_unusable_topology_changes_nothing(unusable: Topology) -> None:
    known = TopologyMixin()
    with pytest.raises(TopologyError):
        known.accept(unusable)
    assert known.advise("a:1") is Advice.UNKNOWN
    first = topology(1, member("a"))
    known.accept(first)
    with pytest.raises(TopologyError):
        known.accept(unusable)
    assert known.topology is first
    assert known.accept(topology(5, member("b"))), "its version must stay acceptable"


def test_advice_depends_on_the_address_in_use() -> None:
    known = TopologyMixin()
    assert known.advise("a:1") is Advice.UNKNOWN
    known.accept(topology(1, member("a")))
    assert known.advise("a:1") is Advice.RECONNECT
    # The new primary is known, while this connection is still at the old one.
    known.accept(topology(2, member("a", READABLE), member("b")))
    assert known.advise("a:1") is Advice.MOVE
    assert known.advise("b:1") is Advice.RECONNECT


def test_role_any_stays_with_any_readable_member() -> None:
    known = TopologyMixin("any")
    known.accept(topology(1, member("a", READABLE), member("b", READABLE), member("w", WRITABLE)))
    assert known.advise("a:1") is Advice.RECONNECT
    assert known.advise("b:1") is Advice.RECONNECT
    assert known.advise("w:1") is Advice.MOVE


def test_unknown_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="role='secondary'"):
        TopologyMixin("secondary")  # type: ignore[arg-type]


def test_newest_version_wins_among_threads() -> None:
    known = TopologyMixin()
    taken: list[int] = []

    def bring(numbers: range) -> None:
        taken.extend(n for n in numbers if known.accept(topology(n, member(f"m{n}"))))

    threads = [threading.Thread(target=bring, args=(range(n, 2000, 4),)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert known.topology is not None
    assert known.topology.version == 1999 == max(taken)
    assert len(set(taken)) == len(taken)


numbers = st.integers(1, 8)
drawn = st.builds(
    lambda version, bits: topology(
        version, *(member(f"m{version}{n}", each) for n, each in enumerate(bits))
    ),
    numbers,
    st.lists(st.integers(0, 3), max_size=3),
)


def newest_usable(found: list[Topology]) -> Topology | None:
    """A model of the rule."""
    best: Topology | None = None
    for each in found:
        if any(one.writable for one in each.members) and (
            best is None or each.version > best.version
        ):
            best = each
    return best


def bring_all(found: list[Topology]) -> Topology | None:
    known = TopologyMixin()
    for each in found:
        try:
            known.accept(each)
        except TopologyError:
            continue
    return known.topology


@given(st.lists(drawn, max_size=12))
def test_newest_usable_topology_is_kept(found: list[Topology]) -> None:
    assert bring_all(found) == newest_usable(found)
