"""Real and scripted brokers for the tests of MQTT."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.postgres.certificates import Authority
from tests.servers import require_server
from tests.sessions.ejabberd import Ejabberd
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.mqtt.scripted import ScriptedBroker


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that has signed the servers' certificates."""
    directory = tmp_path_factory.mktemp("authority")
    return Authority(require_server("openssl"), directory, "authority")


@pytest.fixture(scope="session")
def broker(authority: Authority) -> Iterator[Mosquitto]:
    """A broker that all tests share, over TCP, TLS and WebSocket."""
    certificate = authority.sign("broker", "localhost")
    with Mosquitto(require_server("mosquitto"), certificate=certificate) as server:
        yield server


@pytest.fixture(scope="session")
def ejabberd() -> Iterator[Ejabberd]:
    """Another implementation of MQTT, which all tests share."""
    require_server("ejabberd")
    with Ejabberd() as server:
        yield server


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedBroker]:
    """A scripted broker."""
    async with ScriptedBroker() as opened:
        yield opened


@pytest.fixture
async def elsewhere() -> AsyncIterator[ScriptedBroker]:
    """A second scripted broker, as the target of redirects."""
    async with ScriptedBroker() as opened:
        yield opened
