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
    """Who has signed the certificates of the servers."""
    directory = tmp_path_factory.mktemp("authority")
    return Authority(require_server("openssl"), directory, "authority")


@pytest.fixture(scope="session")
def broker(authority: Authority) -> Iterator[Mosquitto]:
    """A running broker for tests that do not harm it, over TCP, TLS and WebSocket."""
    certificate = authority.sign("broker", "localhost")
    with Mosquitto(require_server("mosquitto"), certificate=certificate) as server:
        yield server


@pytest.fixture(scope="session")
def ejabberd() -> Iterator[Ejabberd]:
    """A second broker, by other people, for tests that do not harm it."""
    require_server("ejabberd")
    with Ejabberd() as server:
        yield server


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedBroker]:
    """A broker that does what its test says."""
    async with ScriptedBroker() as opened:
        yield opened


@pytest.fixture
async def elsewhere() -> AsyncIterator[ScriptedBroker]:
    """A second one, to be sent to."""
    async with ScriptedBroker() as opened:
        yield opened
