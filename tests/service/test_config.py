"""The configuration: three sources, one order, all mistakes at once, secrets hidden."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import pq

from moored.service import Config, ConfigError, knobs, load

pytestmark = pytest.mark.pure

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def mistakes(
    cli: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    toml: str | None = None,
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(cli or {}, environ or {}, toml)
    return list(caught.value.mistakes)


def test_the_default_config_is_local_and_embedded() -> None:
    config = load({}, {})
    assert (config.host, config.port) == ("127.0.0.1", 8089)
    assert config.is_local
    assert config.is_embedded
    assert config.admin_token is None
    assert repr(config) == "<Config defaults>"


def test_the_command_line_goes_before_the_environment_and_that_before_the_file() -> None:
    environ = {"MOORED_PORT": "2", "MOORED_LOG_LEVEL": "error"}
    toml = 'port = 3\nlog_level = "debug"\nlog_format = "json"'
    config = load({"port": "1", "host": None}, environ, toml)
    assert (config.port, config.log_level, config.log_format) == (1, "error", "json")
    assert config.sources == {
        "port": "--port",
        "log_level": "MOORED_LOG_LEVEL",
        "log_format": "moored.toml",
    }


def test_the_database_url_is_read_from_database_url() -> None:
    config = load({}, {"DATABASE_URL": "postgresql://app@db/orders"})
    assert config.database_url == "postgresql://app@db/orders"
    assert not config.is_embedded


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load({}, {"MOORED_PORT": "", "DATABASE_URL": ""}) == Config()


def test_all_mistakes_of_all_sources_are_reported_at_once() -> None:
    found = mistakes(
        {"port": "abc"},
        {"MOORED_LOG_LEVEL": "loud", "MOORED_PROT": "1"},
        'database_wait = -1\ndata_dri = "x"\nhost = "0.0.0.0"',
    )
    assert found == [
        "data_dri in moored.toml: there is no such setting; did you mean data_dir?",
        "MOORED_PROT: there is no such variable; did you mean MOORED_PORT?",
        "--port: 'abc' is not a port: give a number from 0 to 65535",
        "database_wait in moored.toml: -1 must be more than 0 seconds, and finite",
        "MOORED_LOG_LEVEL: 'loud' is not known: choose debug, info, warning or error",
        "host in moored.toml: other machines can reach 0.0.0.0, which requires an admin "
        "token: set MOORED_ADMIN_TOKEN, or listen on 127.0.0.1",
    ]


def test_unknown_variables_with_the_same_prefix_are_ignored() -> None:
    environ = {"MOORED_SCALE": "1", "MOORED_SERVICE_HOST": "x", "MOORED_PORT_8089_TCP": "y"}
    assert load({}, environ) == Config()


def test_the_port_that_kubernetes_sets_is_explained() -> None:
    (found,) = mistakes(environ={"MOORED_PORT": "tcp://10.0.0.1:8089"})
    assert "enableServiceLinks: false" in found


def test_a_broken_file_is_one_mistake() -> None:
    (found,) = mistakes(toml="port = ")
    assert found.startswith("moored.toml: it is not valid TOML: ")


def test_an_unknown_setting_without_a_near_match_lists_all_settings() -> None:
    (found,) = mistakes(toml="[zzz]\nx = 1")
    assert found.startswith("zzz in moored.toml: there is no such setting; there are: host, port,")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"]
)
def test_a_loopback_address_needs_no_token(host: str) -> None:
    assert load({"host": host}, {}).is_local


@pytest.mark.parametrize(
    ("value", "meant"),
    [(True, True), ("1", True), ("Yes", True), ("false", False), ("0", False), (False, False)],
)
def test_a_flag_is_a_bool_or_a_word_for_one(value: object, meant: bool) -> None:
    assert load({"no_token": value}, {}).no_token is meant


def test_tokens_that_contradict_each_other_are_refused() -> None:
    (found,) = mistakes({"no_token": True}, {"MOORED_READ_TOKEN": "reader"})
    assert found.startswith("--no-token: a token is set too: leave out one of them")
    (found,) = mistakes(environ={"MOORED_READ_TOKEN": "same", "MOORED_ADMIN_TOKEN": "same"})
    assert found.startswith("MOORED_READ_TOKEN: it is the admin token, which may do everything")
    (found,) = mistakes(environ={"MOORED_NO_TOKEN": "maybe"})
    assert found.startswith("MOORED_NO_TOKEN: 'maybe' is neither true nor false: write one of 1,")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "db.example", "localhost.org"])
def test_an_address_that_is_not_loopback_needs_a_token(host: str) -> None:
    (found,) = mistakes({"host": host})
    assert found.startswith("--host: other machines can reach")
    assert not load({"host": host, "admin_token": "t0ken"}, {}).is_local


def test_an_empty_notify_url_is_a_value() -> None:
    url = "postgresql://app@db/orders"
    assert load({}, {"DATABASE_URL": url}).notify_url is None
    assert load({}, {"DATABASE_URL": url, "NOTIFY_URL": ""}).notify_url == ""
    assert load({}, {"DATABASE_URL": url}, 'notify_url = ""').notify_url == ""
    assert load({}, {"DATABASE_URL": url, "NOTIFY_URL": url}).notify_url == url
    (found,) = mistakes({"notify_url": url})
    assert found == "--notify-url: it requires a database URL: set DATABASE_URL"


def test_a_replication_url_belongs_to_a_database_url() -> None:
    url = "postgresql://app@db/orders"
    (found,) = mistakes({"replication_url": url})
    assert found == ("--replication-url: it requires a database URL: set DATABASE_URL")
    both = load({"replication_url": url}, {"DATABASE_URL": url})
    assert both.replication_url == url


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("host", "http://127.0.0.1", "without a scheme or port"),
        ("host", "127.0.0.1:80", "without a scheme or port"),
        ("host", " ", "it is empty"),
        ("port", "65536", "65536 is not a port"),
        ("port", "1.5", "'1.5' is not a port"),
        ("port", True, "True is not a port"),
        ("postgres_port", "-1", "-1 is not a port"),
        ("database_wait", "0", "more than 0 seconds"),
        ("database_wait", "inf", "and finite"),
        ("database_wait", "soon", "not a number of seconds"),
        ("stream_id", "Orders", "use 1 to 40 lower-case letters"),
        ("pool_size", "0", "0 is too few"),
        ("pool_size", "many", "'many' is not a number"),
        ("pool_size", 2.5, "2.5 is not a number"),
        ("sleep_after", "0", "more than 0 seconds"),
        ("admin_token", "two words", "no spaces"),
        ("admin_token", "schlüssel", "visible ASCII"),
        ("admin_token", "", "it is empty"),
        ("allowed_hosts", 7, "not a list of names"),
        ("allowed_hosts", "a,http://b", "not an address"),
        ("log_format", 1, "not a str"),
        ("log_format", "xml", "choose text or json"),
        ("database_url", "mysql://db/x", "not PostgreSQL's scheme: write postgresql://…"),
        ("database_url", "postgresql+psycopg://u:pw@db/x", "write postgresql://…@db/x"),
        ("database_url", "db", "write postgresql://user@host:5432/name"),
        ("database_url", "postgresql://db/x?nonsense=1", "libpq"),
    ],
)
def test_each_mistake_names_the_fix(name: str, value: object, complaint: str) -> None:
    (found,) = mistakes({name: value})
    assert found.startswith(f"--{name.replace('_', '-')}: ")
    assert complaint in found
    assert "pw" not in found


def test_a_mistake_never_shows_a_secret() -> None:
    found = mistakes(environ={"MOORED_ADMIN_TOKEN": "hunter2 x", "DATABASE_URL": "x://a:hunter2@b"})
    assert len(found) == 2
    assert "hunter2" not in "".join(found)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:s3%crt@db/orders",
        "postgresql://app:s3@crt-pw@db/orders",
        "postgresql://app:s3/crt-pw@db/orders",
        "postgresql://db/orders?password=s3%crt",
        "host=db password=s3 crt-pw",
        "host=db password=s3 crt=pw",
        "postgres+x://app:s3crt-pw@db/orders",
        "app:s3=crt-pw@db/orders",
        "postgresql//app:s3?x=crt@db/orders",
    ],
)
def test_no_part_of_a_password_is_quoted_from_libpq(url: str) -> None:
    (found,) = mistakes(environ={"DATABASE_URL": url})
    assert "s3" not in found
    assert "crt" not in found


LIBPQ_18 = (
    "host=db oauth_client_secret=s3crt",
    "host=db scram_client_key=s3crt scram_server_key=s3crt",
)


@pytest.mark.parametrize(
    "url",
    [
        r"host=db password=s3\ crt user=app",
        "postgresql://app@db/orders?passw%6Frd=s3crt",
        "postgresql://app@db/orders?sslpassword=s3crt",
        *(LIBPQ_18 if pq.version() >= 180_000 else ()),
    ],
)
def test_every_secret_word_of_libpq_is_hidden(url: str) -> None:
    config = load({}, {"DATABASE_URL": url})
    shown = " ".join(str(setting.value) for setting in config.settings()) + repr(config)
    assert "s3" not in shown
    assert "crt" not in shown


def test_a_token_that_is_a_number_is_refused_without_showing_it() -> None:
    (found,) = mistakes(toml="admin_token = 1234567")
    assert found == "admin_token in moored.toml: a int is not a str: put it in quotes"


def test_settings_and_repr_hide_secrets() -> None:
    url = "postgresql://app:hunter2@db/orders"
    config = load({}, {"DATABASE_URL": url, "MOORED_ADMIN_TOKEN": "hunter2"})
    shown = {setting.name: setting for setting in config.settings()}
    assert shown["database_url"].value == "postgresql://app:***@db/orders"
    assert shown["admin_token"] == ("admin_token", "***", "MOORED_ADMIN_TOKEN")
    assert shown["port"] == ("port", 8089, "default")
    assert "hunter2" not in repr(config)


def test_a_config_is_validated_on_construction_and_immutable() -> None:
    with pytest.raises(ConfigError, match=r"^port: 70000 is not a port"):
        Config(port=70000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_lists_are_strings_with_commas_or_toml_lists() -> None:
    by_text = load({"allowed_hosts": "a.example, B.example"}, {})
    by_list = load({}, {}, 'allowed_hosts = ["a.example", "B.example"]')
    assert by_text.allowed_hosts == by_list.allowed_hosts == ("a.example", "b.example")


@given(
    st.sampled_from([knob.name for knob in knobs()]),
    st.one_of(st.text(), st.integers(), st.booleans(), st.none()),
)
def test_any_input_gives_a_config_or_a_config_error(name: str, value: object) -> None:
    try:
        config = load({name: value}, {})
    except ConfigError:
        return
    assert load({name: getattr(config, name)}, {}) == config  # a value is read as itself again


def test_every_knob_has_a_sentence_and_the_docs_have_it_too() -> None:
    text = re.sub(r"\s+", " ", DOCS.read_text(encoding="utf-8"))
    for knob in knobs():
        assert knob.help.endswith("."), knob.name
        assert f"`{knob.option}`" in text, knob.name
        assert f"`{knob.variable}`" in text, knob.name
        assert knob.help in text, knob.name
