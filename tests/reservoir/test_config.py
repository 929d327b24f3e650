"""The settings: their defaults, and errors that report all mistakes together."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moored.reservoir import ReservoirConfig

pytestmark = pytest.mark.pure

# -- the table of defaults, line by line -----------------------------------------------------------


def test_in_code_the_reservoir_is_on() -> None:
    assert ReservoirConfig().enabled is True


def test_target_ready_is_the_maximum() -> None:
    assert ReservoirConfig(max_size=37).target == 37
    assert ReservoirConfig(max_size=37, target_ready=5).target == 5


def test_low_watermark_is_the_target_which_is_the_maximum() -> None:
    assert ReservoirConfig(max_size=37).watermark == 37
    assert ReservoirConfig(max_size=37, target_ready=5).watermark == 5
    assert ReservoirConfig(max_size=37, low_watermark=3).watermark == 3


def test_base_lifetime_is_11_minutes() -> None:
    assert ReservoirConfig().base_lifetime == 11 * 60


def test_lifetime_jitter_is_2_minutes() -> None:
    assert ReservoirConfig().lifetime_jitter == 2 * 60


def test_guard_window_is_45_seconds() -> None:
    assert ReservoirConfig().guard_window == 45


def test_conn_leases_are_off() -> None:
    assert ReservoirConfig().lease_enabled is False


def test_lease_url_is_none_by_default() -> None:
    assert ReservoirConfig().lease_url is None


def test_the_global_limit_is_10000() -> None:
    assert ReservoirConfig().lease_limit == 10_000


# -- the other defaults ----------------------------------------------------------------------------


def test_the_other_defaults() -> None:
    config = ReservoirConfig()
    assert (config.rate, config.burst) == (100.0, None)
    assert (config.batch, config.max_in_flight) == (5, 8)
    assert (config.lease_ttl, config.connect_timeout, config.scan_every) == (180.0, 30.0, 1.0)
    assert (config.max_size, config.max_idle) == (10, 600.0)


def test_each_can_be_handed_out_until_its_guard_window() -> None:
    assert ReservoirConfig().usable_lifetime == 660 - 45


def test_the_start_is_staggered_by_the_time_that_filling_takes() -> None:
    assert ReservoirConfig(max_size=50, rate=20.0).stagger == 2.5
    assert ReservoirConfig(start_stagger=7.0).stagger == 7.0
    assert ReservoirConfig(start_stagger=0.0).stagger == 0.0


def test_a_disabled_reservoir_opens_nothing_in_advance() -> None:
    config = ReservoirConfig(enabled=False, max_size=50, target_ready=40, low_watermark=30)
    assert (config.target, config.watermark, config.max_size) == (0, 0, 50)


def test_the_config_is_immutable_and_but_returns_a_changed_copy() -> None:
    config = ReservoirConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_size = 20  # type: ignore[misc]
    other = config.but(max_size=20)
    assert (config.max_size, other.max_size) == (10, 20)
    with pytest.raises(ValueError, match="max_size=0 must be at least 1"):
        config.but(max_size=0)


def test_repr_shows_only_changed_settings() -> None:
    assert repr(ReservoirConfig()) == "ReservoirConfig()"
    config = ReservoirConfig(max_size=50, guard_window=10.0)
    assert repr(config) == "ReservoirConfig(max_size=50, guard_window=10.0)"


# -- mistakes --------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"^ReservoirConfig: ") as caught:
        ReservoirConfig(max_size=0, base_lifetime=-1.0, rate=0.0, guard_window=-1.0, burst=1)
    text = str(caught.value)
    for name in ("max_size=0", "base_lifetime=-1.0", "rate=0.0", "guard_window=-1.0", "burst=1"):
        assert name in text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_size": 0}, "max_size=0 must be at least 1"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"max_in_flight": 0}, "max_in_flight=0 must be at least 1"),
        ({"lease_limit": 0}, "lease_limit=0 must be at least 1"),
        ({"base_lifetime": 0.0}, "base_lifetime=0.0 must be more than 0 seconds"),
        ({"base_lifetime": math.nan}, "base_lifetime=nan must be more than 0 seconds"),
        ({"rate": math.nan}, "rate=nan must be more than 0, and finite"),
        ({"connect_timeout": 0.0}, "connect_timeout=0.0 must be more than 0"),
        ({"scan_every": 0.0}, "scan_every=0.0 must be more than 0"),
        ({"lease_ttl": -1.0}, "lease_ttl=-1.0 must be more than 0"),
        ({"lifetime_jitter": -1.0}, "lifetime_jitter=-1.0 must be at least 0 seconds"),
        ({"guard_window": math.nan}, "guard_window=nan must be at least 0 seconds"),
        ({"start_stagger": -1.0}, "start_stagger=-1.0 must be at least 0 seconds"),
        ({"max_idle": math.nan}, "max_idle=nan must be at least 0 seconds"),
        ({"burst": 1}, "burst=1 must be at least 2"),
        ({"target_ready": 11}, "target_ready=11 must be between 0 and max_size=10"),
        ({"target_ready": -1}, "target_ready=-1 must be between 0 and max_size=10"),
        ({"low_watermark": 11}, "low_watermark=11 must be between 0 and target_ready=10"),
        (
            {"target_ready": 4, "low_watermark": 5},
            "low_watermark=5 must be between 0 and target_ready=4",
        ),
        (
            {"guard_window": 660.0},
            "guard_window=660 s must be less than base_lifetime=660 s, or no connection could",
        ),
        (
            {"lease_enabled": True, "lease_limit": 9},
            "lease_limit=9 for the whole cluster must be at least target_ready=10 of this process",
        ),
    ],
)
def test_each_invalid_setting_is_reported(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        ReservoirConfig(**settings)


# -- can the rate keep so many alive? --------------------------------------------------------------


def test_sizes_that_the_rate_cannot_sustain_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="need") as caught:
        ReservoirConfig(max_size=50, base_lifetime=8.0, guard_window=0.0, rate=5.0)
    assert str(caught.value) == (
        "ReservoirConfig: max_size=50 connections that can be used for 8 s each (base_lifetime - "
        "guard_window) need 6.25 new ones per second, but rate=5 allows fewer: lower max_size to "
        "40, or raise base_lifetime to 10 s, or raise rate"
    )


def test_sizes_that_the_rate_can_sustain_are_accepted() -> None:
    ReservoirConfig(max_size=50, base_lifetime=8.0, guard_window=0.0, rate=20.0)
    ReservoirConfig(max_size=40, base_lifetime=8.0, guard_window=0.0, rate=5.0)
    ReservoirConfig(max_size=50, base_lifetime=10.0, guard_window=0.0, rate=5.0)


def test_the_guard_window_is_subtracted_from_the_lifetime() -> None:
    ReservoirConfig(max_size=500, base_lifetime=50.0, guard_window=45.0, rate=100.0)
    with pytest.raises(ValueError, match=r"used for 5 s each .* need 100 new ones per second"):
        ReservoirConfig(max_size=501, base_lifetime=50.0, guard_window=45.0, rate=100.0)


@given(
    st.integers(1, 5000),
    st.floats(1.0, 1000.0),
    st.floats(0.0, 1.0, exclude_max=True),
    st.floats(0.1, 100.0),
)
def test_settings_changed_as_the_error_advises_are_accepted(
    size: int, life: float, guard: float, rate: float
) -> None:
    """Whatever is refused for its rate is taken with what the message says."""
    settings: dict[str, Any] = {"base_lifetime": life, "guard_window": guard, "rate": rate}
    assume(size > (life - guard) * rate)
    with pytest.raises(ValueError, match="need") as caught:
        ReservoirConfig(max_size=size, **settings)
    fewer = re.search(r"lower max_size to (\d+), or ", str(caught.value))
    assert (fewer is None) == ((life - guard) * rate < 1)
    if fewer is not None:
        ReservoirConfig(max_size=int(fewer[1]), **settings)
    longer = re.search(r"raise base_lifetime to ([\d.e+]+) s", str(caught.value))
    assert longer is not None
    # Its last digit is rounded.
    ReservoirConfig(max_size=size, **{**settings, "base_lifetime": 1.01 * float(longer[1])})


# -- for a server's limit --------------------------------------------------------------------------


def test_for_lifetime_sets_lifetime_jitter_and_guard_window() -> None:
    config = ReservoirConfig.for_lifetime(3600.0, max_size=20)
    assert (config.base_lifetime, config.lifetime_jitter) == (3420.0, 180.0)
    assert (config.guard_window, config.max_size) == (45.0, 20)
    assert ReservoirConfig.for_lifetime(60.0).guard_window == 6.0


def test_settings_passed_by_name_override_those_of_for_lifetime() -> None:
    config = ReservoirConfig.for_lifetime(3600.0, guard_window=5.0, lifetime_jitter=0.0)
    assert (config.guard_window, config.lifetime_jitter) == (5.0, 0.0)


@given(st.floats(1.0, 1e6))
def test_for_lifetime_limits_the_age_of_every_connection(longest: float) -> None:
    config = ReservoirConfig.for_lifetime(longest, max_size=1, rate=1000.0)
    assert config.base_lifetime + config.lifetime_jitter <= longest * (1 + 1e-12)
    assert config.usable_lifetime > 0.8 * longest
