"""Settings in force: names, defaults and texts come from the code that takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moored.kernel import SECRETS
from moored.service import fields_of, parameters_of, values_of

pytestmark = pytest.mark.pure


class Lamp:
    """A lamp.

    :param power: how bright it is, in watts; infinity
        for no limit.
    :param url: where it is.
    :param clock: a clock.
    """

    def __init__(
        self, url: str, *, power: float = 60.0, clock: object | None = None, inner: int = 3
    ) -> None: ...


@dataclass(frozen=True)
class Config:
    """A configuration."""

    #: How many lamps there
    #: are; 2 by default.
    lamps: int = 2
    hidden: int = 1
    #: Where to look.
    path: Path = Path("/tmp")


def test_documented_parameters_are_settings() -> None:
    found = {each.name: each for each in parameters_of(Lamp, {"power": math.inf, "url": "x:1"})}
    assert list(found) == ["url", "power", "clock"]
    assert found["power"]._asdict() == {
        "name": "power",
        "value": "no limit",
        "default": "60",
        "help": "How bright it is, in watts; infinity for no limit.",
        "own": True,
    }
    assert (found["clock"].value, found["clock"].own) == ("not set", False)
    assert [each.name for each in parameters_of(Lamp, {}, but=["url"])] == ["power", "clock"]


def test_documented_fields_are_settings() -> None:
    lamps, path = fields_of(Config(3))
    assert lamps == ("lamps", "3", "2", "How many lamps there are; 2 by default.", True)
    assert (path.value, path.own) == ("/tmp", False)
    assert values_of(Config(3)) == {"lamps": 3, "hidden": 1, "path": Path("/tmp")}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((True, "yes"), (None, "not set"), (0.25, "0.25"), (10_000, "10,000"), (b"key", "set")),
        *((["b", "a"], "a, b"), ((), "none"), (len, "len"), (math.inf, "no limit")),
        ({"password": "hunter2-hunter2"}, "password"),
        ("postgresql://app:hunter2-hunter2@db/orders", "postgresql://app:***@db/orders"),
    ],
)
def test_values_are_written_for_people_and_without_secrets(value: Any, text: str) -> None:
    (_, found, _) = parameters_of(Lamp, {"power": value})
    assert found.value == text


def test_a_secret_in_the_middle_of_a_text_is_hidden() -> None:
    SECRETS.add("orange-elephant")
    (found, *_) = parameters_of(Lamp, {"url": "see orange-elephant there"})
    assert "orange" not in found.value
