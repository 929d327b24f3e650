"""Who is in a cluster of clusters: the answer read, the member chosen, and when to move."""

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
    """Milvus's answer, as it was seen."""
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


def test_the_answer_of_milvus_is_read() -> None:
    found = parse_topology(answer())
    assert found.version == 7
    assert [each.cluster_id for each in found.members] == ["in01", "in02"]
    assert found.primary.cluster_id == "in02"
    assert [address_of(each) for each in found.members] == [
        "in01.example.com:443",
        "in02.example.com:1234",
    ]


def test_a_version_may_be_a_number_and_more_may_be_said() -> None:
    assert parse_topology({**answer(version=8), "cost": 1}).version == 8
    assert parse_topology({"data": answer()["data"]}).version == 7, "no code is no failure"


def test_the_bits_are_those_of_milvus() -> None:
    assert (int(READABLE), int(WRITABLE), int(PRIMARY)) == (1, 2, 3)
    assert [member("a", bits).readable for bits in range(5)] == [False, True, False, True, False]
    assert [member("a", bits).writable for bits in range(5)] == [False, False, True, True, False]
    assert member("a", 7).writable, "bits that are not known yet change nothing"


def test_a_code_that_is_not_0_is_a_refusal() -> None:
    with pytest.raises(TopologyError, match=r"refused .*: not yours \(code 1800\)"):
        parse_topology({"code": 1800, "message": "not yours"})
    with pytest.raises(TopologyError, match="no reason was given"):
        parse_topology({"code": 1800})
    with pytest.raises(TopologyError) as caught:
        parse_topology({"code": 1, "message": "x" * 100_000})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("body", "said"),
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
def test_an_answer_of_another_shape_is_told_by_its_part(body: Any, said: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(body)
    assert said in str(caught.value)


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
def test_any_answer_is_read_or_refused(body: Any) -> None:
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
def test_an_endpoint_has_the_ports_of_a_uri(endpoint: str, address: str) -> None:
    assert address_of(Member("a", endpoint)) == address


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://a", "a:b", "::1", "a b"])
def test_a_wrong_endpoint_is_told_with_its_member(endpoint: str) -> None:
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
def test_how_a_member_is_connected_to(
    uri: str, endpoint: str, given: dict[str, Any], secure: bool
) -> None:
    config = ConnectionConfig.from_uri(uri, token="t", db_name="d", **given)
    found = config_for(config, Member("a", endpoint))
    assert found.secure is secure
    assert found.address.startswith("a:")
    assert (found.uri, found.token, found.db_name) == (config.uri, "t", "d")


def test_the_name_in_the_certificate_is_that_of_the_member_unless_the_user_gave_one() -> None:
    found = Member("10.0.0.1", "10.0.0.1:5", server_name="db.example.com")
    config = ConnectionConfig.from_uri("https://db.example.com")
    assert config_for(config, found).options["server_name"] == "db.example.com"
    config = ConnectionConfig.from_uri("https://db.example.com", server_name="mine")
    assert config_for(config, found).options["server_name"] == "mine"


# -- the choice ------------------------------------------------------------------------------------


def test_the_primary_is_the_first_that_takes_writes() -> None:
    found = topology(1, member("a", READABLE), member("b", WRITABLE), member("c"))
    assert found.primary.cluster_id == "b"
    assert pick(found).cluster_id == "b"
    assert pick(found, "primary", {"c:1": 0.0}, avoid={"b:1"}).cluster_id == "b"


def test_without_a_primary_the_error_says_so() -> None:
    with pytest.raises(TopologyError, match="version 3 of the topology has no primary: none is"):
        _ = topology(3, member("a", READABLE), member("b", 4)).primary
    with pytest.raises(TopologyError, match="no primary: it has no members"):
        pick(topology(3))


def test_the_nearest_replica_is_the_one_with_the_lowest_latency() -> None:
    found = topology(
        1, member("w", WRITABLE), member("a", READABLE), member("b", READABLE), member("c")
    )
    assert pick(found, "any").cluster_id == "a", "nothing was measured: the first readable"
    assert pick(found, "any", {}).cluster_id == "a"
    assert pick(found, "any", {"b:1": 0.3, "c:1": 0.1}).cluster_id == "c"
    assert pick(found, "any", {"b:1": 9.0}).cluster_id == "b", "measured goes before unknown"
    assert pick(found, "any", {"w:1": 0.0, "gone:1": 0.0}).cluster_id == "a"


def test_a_replica_that_was_tried_comes_last() -> None:
    found = topology(1, member("a"), member("b"), member("c"))
    near = {"a:1": 0.1, "b:1": 0.3, "c:1": 0.2}
    assert pick(found, "any", near, avoid={"a:1"}).cluster_id == "c"
    assert pick(found, "any", near, avoid={"a:1", "c:1"}).cluster_id == "b"
    assert pick(found, "any", near, avoid={"a:1", "b:1", "c:1"}).cluster_id == "a"


def test_nobody_readable_is_an_error() -> None:
    with pytest.raises(TopologyError, match="has no readable member"):
        pick(topology(1, member("a", WRITABLE)), "any")


# -- what is known ---------------------------------------------------------------------------------


def test_only_a_newer_version_is_taken_in() -> None:
    known = TopologyMixin()
    second = topology(2, member("b"))
    assert known.accept(second)
    assert not known.accept(topology(1, member("a")))
    assert not known.accept(topology(2, member("c"))), "an equal one is nothing new"
    assert not known.accept(topology(1)), "an old one is not even looked at"
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
def test_one_that_cannot_be_used_changes_nothing(unusable: Topology) -> None:
    known = TopologyMixin()
    with pytest.raises(TopologyError):
        known.accept(unusable)
    assert known.advise("a:1") is Advice.UNKNOWN
    first = topology(1, member("a"))
    known.accept(first)
    with pytest.raises(TopologyError):
        known.accept(unusable)
    assert known.topology is first
    assert known.accept(topology(5, member("b"))), "its number is not used up"


def test_whether_to_move_depends_on_the_address_in_use() -> None:
    known = TopologyMixin()
    assert known.advise("a:1") is Advice.UNKNOWN
    known.accept(topology(1, member("a")))
    assert known.advise("a:1") is Advice.RECONNECT
    # Somebody else has learned of the new primary first; the connection is still at the old one.
    known.accept(topology(2, member("a", READABLE), member("b")))
    assert known.advise("a:1") is Advice.MOVE
    assert known.advise("b:1") is Advice.RECONNECT


def test_any_readable_member_is_good_for_any() -> None:
    known = TopologyMixin("any")
    known.accept(topology(1, member("a", READABLE), member("b", READABLE), member("w", WRITABLE)))
    assert known.advise("a:1") is Advice.RECONNECT
    assert known.advise("b:1") is Advice.RECONNECT
    assert known.advise("w:1") is Advice.MOVE


def test_a_role_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="role='secondary'"):
        TopologyMixin("secondary")  # type: ignore[arg-type]


def test_of_many_threads_the_newest_wins() -> None:
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
    """The rule, in other words."""
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
def test_whatever_comes_the_newest_usable_is_kept(found: list[Topology]) -> None:
    assert bring_all(found) == newest_usable(found)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://in02.example.com", "in02.example.com:19530"),
        ("in02.example.com", "in02.example.com:19530"),
        ("http://[::1]/", "[::1]:19530"),
        ("https://in02.example.com", "in02.example.com:443"),
        ("http://in02.example.com:5", "in02.example.com:5"),
    ],
)
def test_a_member_that_milvus_names_without_a_port_has_the_port_of_milvus(
    endpoint: str, address: str
) -> None:
    member = {"clusterId": "one", "endpoint": endpoint, "capability": 3}
    found = parse_topology({"code": 0, "data": {"version": "1", "clusters": [member]}})
    assert address_of(found.primary) == address
