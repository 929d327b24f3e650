"""Connection configurations: the URI grammar, precedence, errors, keys, and hidden tokens."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.kernel import MooredError
from moored.rpc._config import ConnectionConfig, redacted
from moored.rpc._errors import ChannelError, ConfigError

SECRET = "s3cr3t"


def parsed(uri: str, **given: Any) -> tuple[str, str, str]:
    config = ConnectionConfig.from_uri(uri, **given)
    return config.address, config.token, config.path


# -- the examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "address", "token", "path"),
    [
        # The defaults.
        ("http://localhost:19530", "localhost:19530", "", ""),
        ("https://host:19530/mydb", "host:19530", "", "/mydb"),
        ("https://user:pass@host:19530", "host:19530", "user:pass", ""),
        ("https://user:pass@host:19530/mydb", "host:19530", "user:pass", "/mydb"),
        # Default ports.
        ("http://localhost", "localhost:80", "", ""),
        ("tcp://localhost", "localhost:80", "", ""),
        ("https://localhost", "localhost:443", "", ""),
        ("https://localhost:", "localhost:443", "", ""),
        ("http://localhost:/db", "localhost:80", "", "/db"),
        ("HTTPS://localhost", "localhost:443", "", ""),
        # Tokens.
        ("https://token@host", "host:443", "token", ""),
        ("https://user:@host", "host:443", "user:", ""),
        ("https://:pass@host", "host:443", ":pass", ""),
        ("https://@host", "host:443", "", ""),
        ("https://user:a:b@host", "host:443", "user:a:b", ""),
        ("https://user:p@ss@host", "host:443", "user:p@ss", ""),
        # Percent-decoding of each part.
        ("http://us%40er:p%3Ass@host", "host:80", "us@er:p:ss", ""),
        ("http://a%2Fb:c%3Fd%23e@host", "host:80", "a/b:c?d#e", ""),
        ("http://host/my%20db", "host:80", "", "/my%20db"),
        ("http://host/my%2Fdb", "host:80", "", "/my%2Fdb"),
        ("http://host/%E2%82%AC", "host:80", "", "/%E2%82%AC"),
        # The path.
        ("http://host/", "host:80", "", "/"),
        ("http://host//db/", "host:80", "", "//db/"),
        ("http://host/db/more", "host:80", "", "/db/more"),
        # IPv6.
        ("http://[::1]:19530", "[::1]:19530", "", ""),
        ("http://[::1]", "[::1]:80", "", ""),
        ("https://t@[2001:db8::1]/db", "[2001:db8::1]:443", "t", "/db"),
        ("http://127.0.0.1:65535", "127.0.0.1:65535", "", ""),
        ("http://127.0.0.1:1", "127.0.0.1:1", "", ""),
        # Unix sockets.
        ("unix:/run/app.sock", "unix:/run/app.sock", "", ""),
        ("unix:///run/app.sock", "unix:///run/app.sock", "", ""),
        ("unix:app@x.sock", "unix:app@x.sock", "", ""),
        ("UNIX:///run/app.sock", "UNIX:///run/app.sock", "", ""),
        # Surrounding white space.
        ("  http://host:1  ", "host:1", "", ""),
    ],
)
def test_uri_is_parsed_into_address_token_and_path(
    uri: str, address: str, token: str, path: str
) -> None:
    config = ConnectionConfig.from_uri(uri)
    assert (config.address, config.token, config.path) == (address, token, path)
    assert config.uri == uri.strip(), "the URI was changed"


@pytest.mark.parametrize(
    ("uri", "given", "token"),
    [
        ("https://user:pass@host", {"token": "other"}, "other"),
        ("https://user:pass@host/db1", {"token": ""}, "user:pass"),
        ("https://user:pass@host/db1", {"token": None}, "user:pass"),
        ("unix:/a", {"token": "t"}, "t"),
        # Arguments beside the URI are not decoded.
        ("https://host", {"token": "a%40b"}, "a%40b"),
    ],
)
def test_token_argument_overrides_the_uri(uri: str, given: dict[str, Any], token: str) -> None:
    assert ConnectionConfig.from_uri(uri, **given).token == token


@pytest.mark.parametrize(
    ("uri", "given", "expected"),
    [
        ("http://h", {}, False),
        ("tcp://h", {}, False),
        ("https://h", {}, True),
        ("HTTPS://h", {}, True),
        ("https://h", {"secure": False}, False),
        ("http://h", {"secure": True}, True),
        ("https://h", {"secure": None}, True),
        ("unix:/a", {}, False),
    ],
)
def test_https_is_encrypted_unless_disabled(
    uri: str, given: dict[str, Any], expected: bool
) -> None:
    assert ConnectionConfig.from_uri(uri, **given).secure is expected


# -- errors ------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "URI is empty"),
        ("   ", "URI is empty"),
        (None, "URI is empty"),
        (5, "URI must be a str, not int"),
        ("localhost:19530", "has no scheme: write it as in http://localhost:19530"),
        ("localhost", "has no scheme"),
        ("://localhost", "has no scheme"),
        ("1http://localhost", "has no scheme"),
        ("ftp://localhost", "scheme 'ftp'"),
        ("httpss://localhost", "use one of http, https, tcp, unix"),
        ("http://", "names no host"),
        ("http://:19530", "names no host"),
        ("http:///db", "names no host"),
        ("http://token@", "names no host"),
        ("http://host:port", "the port of 'http://host:***' is wrong"),
        ("http://host:0", "the port of 'http://host:0' is wrong"),
        ("http://host:65536", "the port of 'http://host:65536' is wrong: a port is a number"),
        ("http://host:-1", "the port of 'http://host:***' is wrong"),
        ("http://host:1.5", "a port is a number from 1 to 65535"),
        ("http://host:+1", "port"),
        ("http://host:\u0661", "port"),
        ("http://host:" + "9" * 5000, "port"),
        ("http://[::1]x", "the port of 'http://[::1]:***'"),
        ("http://[::1]:x", "the port of 'http://[::1]:***'"),
        ("http://::1", "put an IPv6 address in [ ]"),
        ("http://::1:19530", "put an IPv6 address in [ ]"),
        ("http://[::1", "host of"),
        ("http://::1]", "host of"),
        ("http://[]", "host of"),
        ("http://[nonsense]:1", "host of"),
        ("http://a b", "space or a control character at 8"),
        ("http://host/my db", "%20"),
        ("http://ho\nst", "control character"),
        ("http://host?timeout=3", "has a query"),
        ("http://host/db#part", "has a fragment"),
        ("unix:", "names no socket"),
        ("unix://", "names no socket"),
        ("unix:///", "names no socket"),
    ],
)
def test_invalid_uri_is_refused_with_the_part(uri: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig.from_uri(uri)
    assert message in str(caught.value)
    assert isinstance(caught.value, ChannelError)
    assert isinstance(caught.value, MooredError)
    assert not isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scure": True}, "'scure' is not known: there are ca, certificate"),
        ({"secure": "yes"}, "secure must be bool, not str"),
        ({"ca": 5}, "ca must be bytes or str or Path, not int"),
        ({"channel_options": "x"}, "channel_options must be"),
        ({"channel_options": [1]}, "channel_options must have pairs"),
        ({"channel_options": ["ab"]}, "pairs of a name and a value"),
        ({"channel_options": [("a", 1, 2)]}, "not tuple"),
        ({"channel_options": {5: 1}}, "channel_options must have pairs of a name and a value"),
        ({"channel_options": {"grpc.a": 1.5}}, "'grpc.a' in the option channel_options must be"),
        ({"channel_options": [("grpc.a", None)]}, "int, str or bytes, not NoneType"),
        ({"channel_options": {"grpc.a": 2**31}}, "'grpc.a' in the option channel_options must fit"),
        ({"certificate": b"x"}, "go together"),
        ({"private_key": b"x"}, "go together"),
        ({"token": 5}, "token must be a str, not int"),
        ({"token": b"x"}, "token must be a str, not bytes"),
        ({"token": "x\n"}, "the token has a control character in it"),
    ],
)
def test_invalid_option_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig.from_uri("http://host", **given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "https://user:hunter2",
        "https://user:hunter2/db",
        "https://user:hunter2/part/of/it",
        "https://user:first:hunter2",
        "https://user:12345678",
        "user:hunter2",
        "ftp://user:hunter2",
        "https://[::1]:hunter2",
        "https://user:first@second:hunter2",
    ],
)
def test_password_in_a_uri_without_a_host_is_hidden(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig.from_uri(uri)
    text = str(caught.value)
    assert not any(part in text for part in ("hunter2", "12345678", "first", "part"))
    assert "***" in text


# -- the key ---------------------------------------------------------------------------------------


def key(uri: str = "http://host:1", **given: Any) -> str:
    return ConnectionConfig.from_uri(uri, **given).key


def test_equal_address_and_identity_have_one_key() -> None:
    assert key() == key()
    assert key("http://host:1/db1") == key("http://host:1/db2"), "the path changed the key"
    assert key("http://u:p@host:1") == key("http://host:1", token="u:p")
    assert key("http://host") == key("http://host:80")
    assert key("http://host:1") == key("tcp://host:1")
    assert key("http://host:1/") == key()
    assert key("https://host:1") == key("http://host:1", secure=True)


def test_equivalent_options_have_one_key() -> None:
    assert key(secure=None, ca=None) == key()
    assert key("https://host:1", secure=True) == key("https://host:1")
    written = {"grpc.a": 1, "grpc.b": "x"}
    turned = {"grpc.b": "x", "grpc.a": 1}
    assert key(channel_options=written) == key(channel_options=turned)
    assert key(channel_options=written) == key(channel_options=list(written.items()))
    assert key(channel_options=tuple(written.items())) == key(channel_options=written)
    assert key(channel_options=[["grpc.a", 1]]) == key(channel_options={"grpc.a": 1})
    assert key(channel_options={}) == key(channel_options=()) == key()
    turned_list = [("grpc.b", "x"), ("grpc.a", 1)]
    assert key(channel_options=turned_list) == key(channel_options=written)
    assert key(channel_options=turned_list) == key(channel_options=turned_list[::-1])


def test_options_that_change_the_connection_change_the_key() -> None:
    keys = [
        key("http://host:1"),
        key("http://host:2"),
        key("http://other:1"),
        key("https://host:1"),
        key("http://host:1", token="a"),
        key("http://host:1", token="b"),
        key("https://host:1", ca=b"x"),
        key("https://host:1", ca=b"y"),
        key("https://host:1", certificate=b"c", private_key=b"k"),
        key("https://host:1", certificate=b"c", private_key=b"l"),
        key("https://host:1", server_name="a"),
        key(channel_options={"grpc.a": 1}),
        key(channel_options={"grpc.a": "1"}),
        key(channel_options={"grpc.b": 1}),
    ]
    assert len(set(keys)) == len(keys)


def test_parts_of_a_key_cannot_be_confused() -> None:
    assert key("http://host:1", token="a', True") != key("https://host:1", token="a")
    assert key(token="|") != key()


def test_key_differs_between_processes() -> None:
    code = (
        "from moored.rpc._config import ConnectionConfig;"
        "print(ConnectionConfig.from_uri('http://u:p@host:1').key)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert other.startswith("host:1|")
    assert other != key("http://u:p@host:1")


# -- as an object ----------------------------------------------------------------------------------


def test_configuration_is_immutable() -> None:
    config = ConnectionConfig.from_uri("http://host")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.address = "x"  # type: ignore[misc]


def test_equal_configurations_compare_and_hash_equal() -> None:
    one = ConnectionConfig.from_uri("http://host", channel_options={"a": 1})
    two = ConnectionConfig.from_uri("http://host", channel_options={"a": 1})
    assert one == two
    assert {one: "found"}[two] == "found"


def test_copied_or_pickled_configuration_makes_a_new_key() -> None:
    config = ConnectionConfig.from_uri("http://u:p@host/db", secure=True)
    assert config.key
    assert copy.deepcopy(config) == config
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert "key" not in vars(again), "the key was pickled"
    assert again.key == config.key


# -- arbitrary strings ------------------------------------------------------------

hosts = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{1,5})?", fullmatch=True) | st.just(
    "[::1]"
)
#: Without control characters, which a token cannot have.
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20)
ports = st.none() | st.integers(1, 65535)


@given(st.sampled_from(["http", "https", "tcp"]), hosts, ports, words, words, words)
def test_percent_encoded_parts_are_decoded(
    scheme: str, host: str, port: int | None, user: str, password: str, path: str
) -> None:
    uri = f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{host}"
    uri += "" if port is None else f":{port}"
    config = ConnectionConfig.from_uri(f"{uri}/{quote(path, safe='')}")
    assert config.address == f"{host}:{port or (443 if scheme == 'https' else 80)}"
    assert config.token == f"{user}:{password}"
    assert unquote(config.path) == f"/{path}"


@given(words.filter(bool), hosts)
def test_user_without_a_password_is_a_token(token: str, host: str) -> None:
    assert ConnectionConfig.from_uri(f"https://{quote(token, safe='')}@{host}").token == token


@given(st.text(max_size=60))
def test_any_string_is_parsed_or_refused(uri: str) -> None:
    try:
        config = ConnectionConfig.from_uri(uri)
    except ConfigError:
        return
    assert config.address


@given(st.text(st.sampled_from("hatp:/@[]%?#. 1s\n"), max_size=30))
def test_any_string_after_a_scheme_is_parsed_or_refused(rest: str) -> None:
    for uri in (rest, f"http://{rest}", f"unix:{rest}"):
        try:
            config = ConnectionConfig.from_uri(uri)
        except ConfigError:
            continue
        assert config.address


# -- hidden tokens ------------------------------------------------------------


def shown(config: ConnectionConfig, caplog: pytest.LogCaptureFixture) -> str:
    logging.getLogger("moored.rpc").warning("with %s and %r", config, config)
    moved = dataclasses.replace(config, address="other:1")
    own = [repr(config), str(config), f"{config}", config.key, config.shown, config.address]
    return "\n".join([*own, caplog.text, repr({config.key: config}), repr(moved)])


@pytest.mark.parametrize(
    "uri",
    [
        f"http://user:{SECRET}@host/db",
        f"https://{SECRET}@host",
        f"http://u:{SECRET}@[::1]:1/db",
        f"http://u:a@{SECRET}@host",
        f"http://u:a:{SECRET}@host",
    ],
)
def test_token_of_a_uri_is_hidden(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    config = ConnectionConfig.from_uri(uri)
    assert SECRET in config.token
    text = shown(config, caplog)
    assert SECRET not in text
    assert "***" in text


def test_given_token_and_key_are_hidden(caplog: pytest.LogCaptureFixture) -> None:
    config = ConnectionConfig.from_uri(
        "https://host", token=SECRET, certificate=b"c", private_key=SECRET.encode(), ca=Path("/ca")
    )
    assert SECRET not in shown(config, caplog)
    assert "private_key" in repr(config), "the names of options may be shown"


@pytest.mark.parametrize(
    "uri",
    [
        f"user:{SECRET}@host:19530",
        f"{SECRET}@host",
        f"ftp://{SECRET}@host",
        f"u:{SECRET}@host/a://b",
        f"{SECRET}@host://b",
        f"http://u:{SECRET}@host:port",
        f"http://u:{SECRET}@",
        f"http://u:{SECRET}@::1",
        f"http://u:{SECRET}@[::1",
        f"http://u:[{SECRET}]@host",
        f"http://u:{SECRET}]@host",
        f"http://u:{SECRET}/x@host",
        f"http://u:x/{SECRET}@host",
        f"http://u:x?{SECRET}@host",
        f"http://u:x#{SECRET}@host",
        f"http://u:{SECRET}@host?a=b",
        f"http://u:{SECRET} x@host",
        f"http://u:{SECRET}@ho st",
        f"http://u:{SECRET}@ho\u2100st",  # urlsplit quotes the account in its complaint
        f"http://{SECRET}:x@host:99999",
        f"\thttp://u:{SECRET}@host\x00",
    ],
)
def test_errors_hide_the_token(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig.from_uri(uri)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error) + repr(error)
        error = error.__cause__ or error.__context__


@given(st.text(max_size=20), st.text(max_size=20))
def test_account_is_hidden_in_any_surrounding_text(before: str, after: str) -> None:
    assert SECRET not in redacted(f"{before}{SECRET}@{after}")
    assert SECRET not in redacted(f"http://{before}{SECRET}@{after}")
