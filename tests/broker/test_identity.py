"""Who a subscriber is: API keys and tickets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.broker.serving import ACME, OTHER
from tests.kernel.fake_clock import FakeClock

from moored.broker import ApiKeys, Identity, _identity
from moored.broker._identity import Tickets

pytestmark = pytest.mark.pure


def write(path: Path, text: str, at: int) -> None:
    """Write a file, with a time of change of its own."""
    path.write_text(text)
    os.utime(path, (at, at))


def test_file_of_keys_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, f"# keys\n\none {ACME}\n", 1)
    keys = ApiKeys(path)
    assert keys("one") == Identity(ACME)
    assert keys("two") is None
    write(path, f"two {OTHER}\n", 2)
    assert keys("one") is None, "the key was removed"
    assert keys("two") == Identity(OTHER)


@pytest.mark.parametrize("mistake", ["one", f"one {ACME}\none {OTHER}", "one two three", None])
def test_keys_stay_valid_while_the_file_has_a_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mistake: str | None
) -> None:
    path = tmp_path / "keys"
    write(path, f"one {ACME}\n", 1)
    keys = ApiKeys(path)
    if mistake is None:
        path.unlink()
    else:
        write(path, mistake, 2)
        with pytest.raises(ValueError, match="line"):
            ApiKeys(path)
    for _ in range(3):
        assert keys("one") == Identity(ACME)
    assert len(caplog.records) == 1, "it is reported once"
    write(path, f"two {OTHER}\n", 3)
    assert (keys("one"), keys("two")) == (None, Identity(OTHER))


def test_ticket_is_valid_once_and_for_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_identity, "MAX_TICKETS", 2)
    clock = FakeClock()
    tickets = Tickets(30.0, clock)
    first, second = tickets.issue(Identity(ACME)), tickets.issue(Identity(OTHER))
    assert first is not None
    assert second is not None
    assert tickets.issue(Identity(ACME)) is None, "there are too many"
    assert tickets.redeem(first) == Identity(ACME)
    assert tickets.redeem(first) is None
    clock.advance(30.0)
    assert tickets.redeem(second) is None
    assert tickets.issue(Identity(ACME)) is not None
