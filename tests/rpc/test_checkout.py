"""The fast path of a checkout hands out exactly what the core would."""

from __future__ import annotations

import types
from typing import Any

import pytest

from moored.kernel import Clock, Recorder
from moored.rpc import ConnectionConfig, ManagedConnection
from moored.rpc._core import CHART, ConnectionCore

pytestmark = pytest.mark.pure

CONFIG = ConnectionConfig.from_uri("http://server")
STATES = [f"{phase}/{step}" for phase, steps in CHART.phases.items() for step in steps or (phase,)]
#: How long an unused connection is trusted without a probe.
IDLE = 30.0


class Client:
    """A client object, for `client=`."""


def managed_at(state: str, used_at: float = 0.0) -> ManagedConnection[Any]:
    managed = ManagedConnection[Any](
        types.SimpleNamespace(_used_at=used_at),
        CONFIG,
        None,
        ConnectionCore(CONFIG.address, Clock.system(), Recorder(), idle=IDLE),
        key=CONFIG.key,
        dedicated=False,
        connect_timeout=1.0,
    )
    found = CHART.find(state)
    assert found is not None
    managed.core.machine._state = found
    return managed


@pytest.mark.parametrize("state", STATES)
def test_fast_path_agrees_with_the_core_in_every_state(state: str) -> None:
    managed, client = managed_at(state), Client()
    assert managed.hand_out(client, 1.0) is managed.core.usable
    assert (client in managed.clients) is managed.core.usable


def test_two_states_are_usable() -> None:
    assert sum(managed_at(state).core.usable for state in STATES) == 2


def test_checkout_counts_as_use_and_as_a_client() -> None:
    managed = managed_at("ready/serving")
    vars(managed)["unused_since"] = 0.5
    assert managed.hand_out(None, 1.0)
    assert managed.statistics(1.0)["idle_time"] == 0.0
    assert not managed.has_no_clients
    assert managed.unused_since is None


def test_idle_connection_is_not_handed_out_without_a_probe() -> None:
    managed, client = managed_at("ready/serving"), Client()
    assert not managed.hand_out(client, IDLE + 1)
    assert (managed.last_used_at, len(managed.clients)) == (0.0, 0)


def test_call_counts_as_use() -> None:
    assert managed_at("ready/serving", used_at=2.0).hand_out(None, IDLE + 1)
    assert not managed_at("ready/serving", used_at=2.0).hand_out(None, IDLE + 3)
