"""The parameters of PyMilvus's clients mean the same here, compared with PyMilvus itself."""

from __future__ import annotations

import inspect
import itertools
import logging
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pymilvus  # type: ignore[import-untyped]
import pytest
from pymilvus.client.async_grpc_handler import AsyncGrpcHandler  # type: ignore[import-untyped]
from pymilvus.client.connection_manager import (  # type: ignore[import-untyped]
    ConnectionConfig as TheirConfig,
)
from pymilvus.client.grpc_handler import GrpcHandler  # type: ignore[import-untyped]

from moored.rpc import ConfigError, ConnectionConfig
from moored.rpc._config import _OPTIONS
from moored.rpc._dial import make_aio_channel, make_channel
from moored.rpc.milvus import (
    AsyncMilvusClient,
    AsyncMilvusManager,
    MilvusClient,
    MilvusConfigError,
    MilvusManager,
    MilvusRefused,
    MilvusTopology,
    MilvusUnreachable,
    milvus_config,
)
from moored.rpc.milvus import _config as _milvus_config
from moored.rpc.milvus._config import _PATHS, NEEDLESS, REFUSED, MilvusConfig
from moored.rpc.topology._topology import address_of
from moored.testing import scaled

from .milvus_service import Server
from .topology_server import TopologyServer, body_of

CLIENTS = [(MilvusClient, pymilvus.MilvusClient), (AsyncMilvusClient, pymilvus.AsyncMilvusClient)]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def nothing_was_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which one-time messages were logged."""
    monkeypatch.setattr(_milvus_config, "_mentioned", set())


# -- parameters ------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), CLIENTS)
def test_parameters_are_those_of_pymilvus(ours: Any, theirs: Any) -> None:
    def parameters(client: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(client.__init__).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    *wanted, (_, rest, _) = parameters(theirs)
    *given, (_, more, _) = parameters(ours)
    assert given[: len(wanted)] == wanted
    assert [name for name, *_ in given[len(wanted) :]] == ["manager", "dedicated"]
    assert rest is more is inspect.Parameter.VAR_KEYWORD


def test_every_keyword_that_pymilvus_reads_is_known() -> None:
    """PyMilvus passes keywords on to its handlers, which read those that they know."""
    readers = [
        *(pymilvus.MilvusClient.__init__, pymilvus.AsyncMilvusClient.__init__),
        *(TheirConfig.from_uri, GrpcHandler.__init__, AsyncGrpcHandler.__init__),
        *(GrpcHandler._set_authorization, AsyncGrpcHandler._set_authorization),
        AsyncGrpcHandler._build_stub,
    ]
    read = set[str]()
    for reader in readers:
        source = inspect.getsource(reader)
        read.update(re.findall(r"kwargs(?:\.(?:get|pop)\(|\[)\s*[\"'](\w+)[\"']", source))
        read.update(inspect.signature(reader).parameters)
    assert {"secure", "option", "server_pem_path", "host"} <= read, (
        "the sources of PyMilvus were not parsed"
    )
    named = set(inspect.signature(MilvusClient.__init__).parameters)
    mapped = {"host", "port", "option", "grpc_options", *_PATHS, *_OPTIONS}
    language = {"self", "cls", "kwargs"}
    assert not read - named - mapped - NEEDLESS - REFUSED.keys() - language


def test_keywords_with_another_name_are_translated() -> None:
    config = milvus_config(
        "https://vectors:19530/mydb",
        token="",
        user="u",
        password="p",
        ca_pem_path="ca.pem",
        client_pem_path="own.pem",
        client_key_path="own.key",
        server_name="vectors.example.com",
        grpc_options={"grpc.keepalive_time_ms": 1},
        server_pem_path="",
    )
    assert isinstance(config, ConnectionConfig)
    assert (config.token, config.db_name, config.secure) == ("u:p", "mydb", True)
    assert config.options == {
        "ca": "ca.pem",
        "certificate": "own.pem",
        "private_key": "own.key",
        "server_name": "vectors.example.com",
        "channel_options": {"grpc.keepalive_time_ms": 1},
    }


def test_keywords_without_effect_are_accepted_silently(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    plain = milvus_config("http://vectors")
    same = milvus_config(
        "http://vectors", alias="default", keep_alive=True, cluster_id="in01", option={}
    )
    assert (same, same.key) == (plain, plain.key)
    assert not caplog.records


def test_unknown_keywords_are_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        config = milvus_config("http://vectors", colour="crimson", shape="round")
    assert config == milvus_config("http://vectors")
    logged = [(each.levelname, each.getMessage().split()[0]) for each in caplog.records]
    assert logged == [("INFO", "colour"), ("INFO", "shape")]
    assert "crimson" not in caplog.text


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({"host": "vectors", "port": 1}, "vectors:1"),
        ({"host": "vectors", "port": "1"}, "vectors:1"),
        ({"host": "vectors"}, "vectors:19530"),
        ({"port": 1}, "localhost:1"),
        ({"host": "::1"}, "[::1]:19530"),
        ({"host": "vectors", "port": 1, "uri": "http://other:2"}, "other:2"),
        ({"host": "", "port": ""}, "localhost:19530"),
    ],
)
def test_host_and_port_are_used_without_a_uri(given: dict[str, Any], address: str) -> None:
    assert milvus_config(**given).address == address


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the certificates and names passed to gRPC."""
    seen: list[dict[str, Any]] = []
    credentials = grpc.ssl_channel_credentials

    def note(**given: Any) -> Any:
        seen.append(given)
        return credentials()

    def noting(opener: Any) -> Any:
        def opened(target: str, secret: Any, options: Any, **more: Any) -> Any:
            seen[-1]["name"] = dict(options).get("grpc.ssl_target_name_override")
            return opener(target, secret, options, **more)

        return opened

    monkeypatch.setattr(grpc, "ssl_channel_credentials", note)
    monkeypatch.setattr(grpc, "secure_channel", noting(grpc.secure_channel))
    monkeypatch.setattr(grpc.aio, "secure_channel", noting(grpc.aio.secure_channel))
    return seen


CHOICES = [
    ("uri", ("http://vectors", "https://vectors")),
    ("secure", (None, False, True)),
    *((name, (None, name)) for name in (*_PATHS, "server_name")),
]


async def test_certificate_paths_are_combined_as_in_pymilvus(
    requested: list[dict[str, Any]], tmp_path: Path
) -> None:
    for name in _PATHS:
        (tmp_path / name).write_text(f"what {name} names")
    plain = 0
    combinations = list(itertools.product(*(values for _, values in CHOICES)))
    # Of all combinations, every seventh in `make test`: each choice is in many of them.
    for chosen in combinations if scaled(100) == 100 else combinations[::7]:
        given: dict[str, Any] = {
            name: str(tmp_path / name) if value in _PATHS else value
            for (name, _), value in zip(CHOICES, chosen, strict=True)
            if value is not None
        }
        theirs = TheirConfig.from_uri(**given)
        more = {"address": theirs.address, **theirs.get_handler_kwargs()}
        GrpcHandler(**more).close()
        await AsyncGrpcHandler(**more).close()
        ours = milvus_config(**given)
        make_channel(ours, 1).close()
        await make_aio_channel(ours, 1).close()
        assert len(requested) in (0, 4), given
        assert all(each == requested[0] for each in requested), given
        plain += not requested
        requested.clear()
    assert 0 < plain < len(combinations)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"secure": True, "ca_pem_path": "a"}, "ca_pem_path not used, as in PyMilvus"),
        ({"server_pem_path": "a"}, "the connection is not encrypted"),
    ],
)
def test_unused_certificate_paths_are_logged(
    given: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        milvus_config("http://vectors", **given)
    (record,) = caplog.records
    assert (record.levelno, message in record.getMessage()) == (logging.WARNING, True)


def test_own_option_names_have_no_such_rule() -> None:
    assert milvus_config("https://vectors", ca="a").options == {"ca": "a"}


# -- invalid parameters ------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"uri": "vectors:19530"},
        {"uri": "ftp://vectors"},
        {"uri": ""},
        {"uri": "no-such-folder/vectors.db"},
        {"uri": "http://vectors", "secure": 1},
        {"uri": "http://vectors", "secure": "true"},
        {"uri": "https://vectors", "secure": None},
    ],
    ids=str,
)
async def test_what_pymilvus_refuses_is_refused_with_its_own_error(given: dict[str, Any]) -> None:
    with pytest.raises(pymilvus.MilvusException) as theirs:
        pymilvus.MilvusClient(**given)
    kind = type(theirs.value)
    assert kind is not pymilvus.MilvusException
    for make in (milvus_config, MilvusClient):
        with pytest.raises(kind) as ours:
            make(**given)
        assert isinstance(ours.value, ConfigError)
        assert isinstance(ours.value, MilvusConfigError)
    with pytest.raises(kind):
        await AsyncMilvusClient(**given).list_collections()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grpc_options": 5}, "grpc_options"),
        ({"option": 5}, "option"),
        ({"option": {"a": 5}}, "option"),
        ({"option": {"host": "a"}}, "option"),
        ({"address": "vectors:1"}, "address"),
        ({"channel": object()}, "channel"),
        ({"ca": "a", "server_pem_path": "b"}, "ca means the same as server_pem_path"),
        ({"channel_options": {"a": 1}, "grpc_options": {"b": 1}}, "means the same as grpc_options"),
        ({"host": "http://vectors"}, "host"),
        ({"host": 5}, "host"),
        ({"port": 1.5}, "port"),
        ({"port": "many"}, "port"),
    ],
)
def test_invalid_parameter_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MilvusConfigError, match=message):
        milvus_config(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"uri": "ftp://root:hunter2@vectors"},
        {"uri": "https://root:hunter2@vectors:many"},
        {"host": "root:hunter2@vectors"},
        {"uri": "http://vectors", "secure": "hunter2"},
        {"uri": "http://vectors", "option": "hunter2"},
        {"uri": "http://vectors", "grpc_options": "hunter2"},
    ],
    ids=str,
)
def test_error_does_not_show_a_secret(given: dict[str, Any]) -> None:
    with pytest.raises(MilvusConfigError) as caught:
        milvus_config(**given)
    assert "hunter2" not in str(caught.value)


async def test_unusable_certificates_are_reported(server: Server, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with (
        MilvusManager() as manager,
        pytest.raises(MilvusConfigError, match="each must be PEM"),
    ):
        MilvusClient(server.uri, secure=True, server_pem_path=str(wrong), manager=manager)
    async with AsyncMilvusManager() as coroutines:
        client = AsyncMilvusClient(
            server.uri, secure=True, server_pem_path=str(wrong), manager=coroutines
        )
        with pytest.raises(MilvusConfigError, match="each must be PEM"):
            await client.list_collections()


@pytest.mark.parametrize("kind", [MilvusConfigError, MilvusRefused, MilvusUnreachable])
def test_errors_can_be_pickled(kind: Any) -> None:
    error = kind("the port is wrong")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- option= --------------------------------------------------------------------------------------


async def test_option_is_sent_with_the_greeting(server: Server) -> None:
    option = {"tenant": "blue"}
    with MilvusManager() as manager:
        MilvusClient(server.uri, option=option, manager=manager)
        MilvusClient(server.uri, option=option, manager=manager)
        MilvusClient(server.uri, manager=manager)
    async with AsyncMilvusManager() as coroutines:
        await AsyncMilvusClient(server.uri, option=option, manager=coroutines)._connect()
    assert server.service.client_options == [option, {}, option]


def test_option_is_part_of_the_connection_key() -> None:
    plain, logged = milvus_config(), milvus_config(option={"tenant": "blue"})
    assert logged.key != plain.key == ConnectionConfig.from_uri("http://localhost:19530").key
    assert logged.key == milvus_config(option={"tenant": "blue"}).key
    assert "blue" not in logged.key
    for same in (replace(logged, address=logged.address), pickle.loads(pickle.dumps(logged))):
        assert (same, same.key) == (logged, logged.key)
    assert replace(logged, address="other:1").key != replace(plain, address="other:1").key


# -- the path of a URI -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "database"),
    [
        ("", ""),
        ("/", ""),
        ("/db", "db"),
        ("//db/", "db"),
        ("/db/more", "db"),
        ("/my%20db", "my db"),
        ("/my%2Fdb", "my/db"),
        ("/%E2%82%AC", "€"),
    ],
)
def test_first_part_of_the_path_names_the_database(path: str, database: str) -> None:
    assert MilvusConfig.from_uri(f"http://user:pass@host{path}").db_name == database
    assert MilvusConfig.from_uri("unix:/run/db").db_name == ""


@pytest.mark.parametrize(
    ("uri", "given", "token", "db_name"),
    [
        ("https://host/db1", {"db_name": "db2"}, "", "db2"),
        ("https://user:pass@host", {"token": "other"}, "other", ""),
        ("https://user:pass@host/db1", {"token": "", "db_name": ""}, "user:pass", "db1"),
        ("https://user:pass@host/db1", {"token": None, "db_name": None}, "user:pass", "db1"),
        ("https://host", {"token": "t", "db_name": "d"}, "t", "d"),
        ("unix:/a", {"token": "t", "db_name": "d"}, "t", "d"),
        # Arguments beside the URI are not decoded.
        ("https://host", {"token": "a%40b", "db_name": "a%2Fb"}, "a%40b", "a%2Fb"),
    ],
)
def test_token_and_database_arguments_override_the_uri(
    uri: str, given: dict[str, Any], token: str, db_name: str
) -> None:
    config = MilvusConfig.from_uri(uri, **given)
    assert (config.token, config.db_name) == (token, db_name)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("https://a.global-cluster.example.com", True),
        ("https://a.GLOBAL-Cluster.example.com", True),
        ("https://host/global-cluster", True),
        ("https://host", False),
        ("https://global-cluster:pass@host", False),
        ("https://global-cluster@host/db", False),
        ("unix:/run/global-cluster.sock", True),
    ],
)
def test_global_cluster_is_recognized_by_its_uri(uri: str, expected: bool) -> None:
    assert MilvusConfig.from_uri(uri).is_global is expected


def key(uri: str) -> str:
    return MilvusConfig.from_uri(uri).key


@pytest.mark.parametrize(
    ("path", "root", "database"),
    [
        ("", "", ""),
        ("/global-cluster", "", ""),
        ("/global-cluster/my%20db/more", "", "my db"),
        ("/one/global-cluster", "/one", ""),
        ("//one//two%20x/Global-Cluster/db/", "/one/two%20x", "db"),
        ("/my-global-cluster/db", "", "my-global-cluster"),
        ("/db", "", "db"),
    ],
)
def test_path_around_a_global_cluster_is_root_and_database(
    path: str, root: str, database: str
) -> None:
    uri = f"https://global-cluster:pass@host{path}"
    config = MilvusConfig.from_uri(uri)
    assert config.db_name == database
    source = config.topology_source()
    if "global-cluster" not in path.lower():
        assert source is None
    else:
        assert repr(source) == f"<MilvusTopology https://host{root}/global-cluster/topology>"
    assert MilvusConfig.from_uri(uri, db_name="other").db_name == "other"


def test_root_of_a_global_cluster_changes_the_key() -> None:
    assert key("http://host/one/global-cluster") != key("http://host/two/global-cluster")
    assert key("http://host/one/global-cluster/a") == key("http://host/one/global-cluster/b")
    assert key("http://host/one") == key("http://host/two"), "a database changed the key"


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
def test_member_without_a_port_gets_the_default_port_of_milvus(endpoint: str, address: str) -> None:
    member = {"clusterId": "one", "endpoint": endpoint, "capability": 3}
    found = MilvusTopology("http://host").parse(
        {"code": 0, "data": {"version": "1", "clusters": [member]}}
    )
    assert address_of(found.primary) == address


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/global-cluster", ""),
        ("/global-cluster/mydb", ""),
        ("/tenants/seven/global-cluster", "/tenants/seven"),
        ("/tenants/seven/global-cluster/mydb", "/tenants/seven"),
    ],
)
async def test_topology_of_a_configuration_is_requested_below_its_root(
    path: str, asked: str
) -> None:
    with TopologyServer(body_of(7, ("one", "http://in01", 3))) as server:
        uri = f"http://user:pass@127.0.0.1:{server.port}{path}"
        source = MilvusConfig.from_uri(uri).topology_source()
        assert source is not None
        assert address_of((await source.fetch()).primary) == "in01:19530"
        [(found, headers)] = server.requests
    assert found == f"{asked}/global-cluster/topology"
    assert headers["Authorization"] == "Bearer user:pass"


@pytest.mark.parametrize("tail", ["", "/", "//"])
def test_topology_path_is_appended_to_the_uri(tail: str) -> None:
    source = MilvusTopology(f"tcp://user:pass@g.example.com:80/x{tail}")
    assert repr(source) == "<MilvusTopology http://g.example.com/x/global-cluster/topology>"


def test_fields_of_the_documented_example() -> None:
    """The table of docs/howto/milvus.md."""
    config = milvus_config("https://user:pass@in01.example.com/mydb")
    assert (config.address, config.token) == ("in01.example.com:443", "user:pass")
    assert (config.db_name, config.is_global) == ("mydb", False)
    assert config.key == milvus_config("https://user:pass@in01.example.com/other").key
    moving = milvus_config("https://t@h.example.com/global-cluster/mydb")
    assert (moving.is_global, moving.db_name) == (True, "mydb")
