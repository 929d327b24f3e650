"""The settings from the environment: eleven variables, with their defaults."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.reservoir import ReservoirConfig
from moored.reservoir._environment import parse_duration

ALL = {
    "RESERVOIR_ENABLED": "true",
    "RESERVOIR_TARGET_READY": "40",
    "RESERVOIR_LOW_WATERMARK": "30",
    "RESERVOIR_BASE_LIFETIME": "50m",
    "RESERVOIR_LIFETIME_JITTER": "5m",
    "RESERVOIR_GUARD_WINDOW": "30s",
    "RESERVOIR_RATE": "20",
    "RESERVOIR_BURST": "7",
    "DISTRIBUTED_CONN_LEASE_ENABLED": "yes",
    "DISTRIBUTED_CONN_LEASE_TABLE": "leases",
    "DISTRIBUTED_CONN_LIMIT": "500",
}


def from_env(prefix: str = "MOORED_", **variables: str) -> ReservoirConfig:
    environ = {prefix + name: text for name, text in variables.items()}
    return ReservoirConfig.from_env(prefix, environ=environ, max_size=50)


@pytest.mark.parametrize("prefix", ["MOORED_", "DSQL_"])
def test_all_variables(prefix: str) -> None:
    assert from_env(prefix, **ALL) == ReservoirConfig(
        enabled=True,
        max_size=50,
        target_ready=40,
        low_watermark=30,
        base_lifetime=3000.0,
        lifetime_jitter=300.0,
        guard_window=30.0,
        rate=20.0,
        burst=7,
        lease_enabled=True,
        lease_url="dynamodb://leases",
        lease_limit=500,
    )


@pytest.mark.parametrize("prefix", ["MOORED_", "DSQL_"])
def test_without_variables_the_defaults_apply(prefix: str) -> None:
    config = from_env(prefix)
    assert config == ReservoirConfig(enabled=False, max_size=50)
    assert config.but(enabled=True) == ReservoirConfig(max_size=50)


@pytest.mark.parametrize("name", ALL)
def test_each_variable_is_read_alone(name: str) -> None:
    assert from_env(**{name: ALL[name]}) != from_env()


def test_the_names_of_another_prefix_are_not_read() -> None:
    environ = {f"MOORED_{name}": text for name, text in ALL.items()}
    assert ReservoirConfig.from_env("DSQL_", environ=environ) == ReservoirConfig(enabled=False)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORED_RESERVOIR_RATE", "12.5")
    monkeypatch.setenv("DSQL_RESERVOIR_RATE", "99")
    assert ReservoirConfig.from_env().rate == 12.5
    assert ReservoirConfig.from_env("DSQL_").rate == 99.0


@pytest.mark.parametrize(
    ("text", "on"),
    [
        *((text, True) for text in ("true", "1", "YES", "On", " yes ")),
        *((text, False) for text in ("false", "0", "No", "off", "", "  ")),
    ],
)
def test_one_variable_turns_the_reservoir_on_and_off(text: str, on: bool) -> None:
    assert from_env(RESERVOIR_ENABLED=text).enabled is on


def test_arguments_take_precedence_over_the_environment() -> None:
    environ = {"MOORED_RESERVOIR_RATE": "20", "MOORED_RESERVOIR_ENABLED": "false"}
    config = ReservoirConfig.from_env(environ=environ, rate=50.0, enabled=True)
    assert (config.rate, config.enabled) == (50.0, True)


def test_a_store_of_leases_by_its_url() -> None:
    config = from_env(DISTRIBUTED_CONN_LEASE_URL="redis://cache/0")
    assert config.lease_url == "redis://cache/0"


def test_a_url_and_a_table_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MOORED_DISTRIBUTED_CONN_LEASE_URL and …_TABLE are"):
        from_env(DISTRIBUTED_CONN_LEASE_URL="redis://cache", DISTRIBUTED_CONN_LEASE_TABLE="t")


def test_a_rate_may_say_per_second() -> None:
    assert from_env(RESERVOIR_RATE="2.5/s").rate == 2.5


def test_all_mistakes_are_reported_with_the_names_of_their_variables() -> None:
    wrong = {
        "RESERVOIR_ENABLED": "perhaps",
        "RESERVOIR_TARGET_READY": "-1",
        "RESERVOIR_LOW_WATERMARK": "2.5",
        "RESERVOIR_BASE_LIFETIME": "soon",
        "RESERVOIR_LIFETIME_JITTER": "5 minutes",
        "RESERVOIR_GUARD_WINDOW": "-3s",
        "RESERVOIR_RATE": "0",
        "RESERVOIR_BURST": "1",
        "DISTRIBUTED_CONN_LEASE_ENABLED": "2",
        "DISTRIBUTED_CONN_LIMIT": "many",
    }
    with pytest.raises(ValueError, match=r"^environment: ") as caught:
        from_env("DSQL_", **wrong)
    for name, text in wrong.items():
        assert f"DSQL_{name}: {text!r} is " in str(caught.value)


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "fast", "1e400"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number per second: write for example 100"):
        from_env(RESERVOIR_RATE=text)


@pytest.mark.parametrize("text", ["²", "0x10", "1_000", "+5", "1.0"])
def test_a_count_that_is_not_a_positive_integer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"MOORED_DISTRIBUTED_CONN_LIMIT: .* integer"):
        from_env(DISTRIBUTED_CONN_LIMIT=text)


# -- durations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("11m", 660.0),
        ("45s", 45.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("660", 660.0),
        ("0.5", 0.5),
        ("1.5h", 5400.0),
        ("1h1m1s1ms", 3661.001),
        (" 2M ", 120.0),
        ("0", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "m", "5x", "1h 30m", "-5s", "1e3", "5 s", "inf", "nan", "1d"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a duration: write 11m, 45s")):
        parse_duration(text)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_the_parts_of_a_duration_are_added(
    hours: int, minutes: int, seconds: int, millis: int
) -> None:
    text = f"{hours}h{minutes}m{seconds}s{millis}ms"
    expected = 3600 * hours + 60 * minutes + seconds + millis / 1000
    assert parse_duration(text) == pytest.approx(expected, rel=1e-12)
