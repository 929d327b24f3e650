"""The files of the page: their size, that they load nothing else, and the contrast of colours."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

STATIC = files("moored.service") / "static"
TEXTS = {
    each.name: each.read_text(encoding="utf-8")
    for each in STATIC.iterdir()
    if each.name.endswith((".html", ".css", ".js")) and each.name != "login.html"
}
#: Bytes of all of them together, as they are sent.
MAX_BYTES = 90_000
MAX_LINES = 300
#: The least contrast of text, and of glyphs: WCAG 2.2, level AA.
CONTRAST = 4.5
#: The inks of the states and of text, each with the grounds that it is written on.
INKS = {
    "works": ("card", "sunk"),
    "degraded": ("card", "sunk", "degraded-soft"),
    "down": ("card", "sunk", "down-soft"),
    "starting": ("card", "starting-soft"),
    "standby": ("card",),
    "unknown": ("card", "sunk"),
    "ink": ("ground", "card", "sunk", "down-soft", "degraded-soft"),
    "quiet": ("ground", "card", "sunk", "down-soft", "degraded-soft"),
    "faint": ("card",),
    "accent": ("ground", "card", "accent-soft"),
}


def test_the_files_are_small() -> None:
    assert sum(len(text.encode()) for text in TEXTS.values()) <= MAX_BYTES
    assert {name for name, text in TEXTS.items() if text.count("\n") > MAX_LINES} == set()


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_loaded_from_elsewhere_and_no_text_is_read_as_markup(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    # Refused by the policy of the page.
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"|<script(?! src=)", text)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_ink_has_enough_contrast_on_its_grounds(theme: str) -> None:
    found = {
        name: (light, dark)[theme == "dark"]
        for name, light, dark in re.findall(
            r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", TEXTS["page.css"]
        )
    }
    pairs = [(ink, ground) for ink, grounds in INKS.items() for ground in grounds]
    ratios = {pair: _contrast(found[pair[0]], found[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < CONTRAST} == {}


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(a + b for a, b in zip(digits, digits, strict=True))
    channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
