"""The pages about `moored.sessions` agree with the code, and their programs run."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from tests.docs.pages import ROOT, Names, block_with, blocks, page, run
from tests.leases.virtual import ScriptedStore, in_virtual_time
from tests.postgres.certificates import Authority
from tests.programs import Program
from tests.servers import free_port, require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.support import LIMIT, until

import moored.sessions as package
from moored.leases import Leases
from moored.sessions import (
    Acked,
    AlreadyRunning,
    Msg,
    NotSent,
    Rejected,
    Session,
    Sessions,
    Text,
    _sessions,
)
from moored.sessions._runtime import SESSION_STATES
from moored.sessions.events._sink import CLOSE_TIMEOUT
from moored.sessions.link import _connection, _core
from moored.sessions.mqtt import Mqtt
from moored.sessions.sending import _senders
from moored.testing import FaultProxy, Sim
from moored.testing.demo import MAX_FRAME, Demo, DemoServer

BOT = ROOT / "examples" / "mqtt_bot.py"
BROKER = "mqtt://127.0.0.1:1883"


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    """A broker that all tests share."""
    with Mosquitto(require_server("mosquitto")) as server:
        yield server


# -- the tutorial ----------------------------------------------------------------------------------


class RunningBot:
    """The bot of the tutorial in its own process, and the lines that it prints."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.lines: list[str] = []

    async def prints(self, beginning: str) -> str:
        """Wait for a line with this beginning, and return it."""
        async with asyncio.timeout(LIMIT):
            while line := (await asyncio.to_thread(self._program.stdout.readline)).rstrip():
                self.lines.append(line)
                if line.startswith(beginning):
                    return line
        raise AssertionError(f"it has ended, and printed {self.lines}")

    async def stop(self) -> int:
        """Press Ctrl-C."""
        self._program.send_signal(signal.SIGINT)
        return await asyncio.to_thread(self._program.wait, LIMIT)


@contextlib.asynccontextmanager
async def bot_at(url: str) -> AsyncIterator[RunningBot]:
    with Program(str(BOT), url) as program:
        try:
            yield RunningBot(program)
        finally:
            program.kill()


async def ask(broker: Mosquitto, words: bytes) -> bytes:
    """Send words to the bot and wait for its echo, as `mosquitto_pub` and `mosquitto_sub` do."""
    version = aiomqtt.ProtocolVersion.V5
    async with asyncio.timeout(LIMIT):
        async with aiomqtt.Client("127.0.0.1", broker.port, protocol=version) as ann:
            await ann.subscribe("from-bot/ann", qos=1)
            await ann.publish("to-bot/ann", words, qos=1)
            async for answer in ann.messages:
                # At least once: an earlier answer may arrive again before it.
                if answer.payload == words:
                    return words
    raise AssertionError("the broker has closed the link")


def test_bot_of_the_tutorial_has_at_most_25_lines() -> None:
    tree = ast.parse(BOT.read_text())
    first = tree.body[1].lineno
    program = BOT.read_text().splitlines()[first - 1 :]
    assert len([line for line in program if line.strip()]) <= 25


async def test_bot_survives_the_faults_of_the_tutorial() -> None:
    with Mosquitto(require_server("mosquitto")) as broker:
        async with (
            FaultProxy("127.0.0.1", broker.port) as proxy,
            bot_at(f"mqtt://127.0.0.1:{proxy.port}") as bot,
        ):
            await bot.prints("online")
            assert await ask(broker, b"hello") == b"hello"
            assert (await bot.prints("to ann")).startswith("to ann: Acked(id='")
            broker.kill()
            await bot.prints("connecting/waiting")
            broker.start()
            await bot.prints("online")
            assert await ask(broker, b"again") == b"again"
            await bot.prints("to ann: Acked")
            proxy.reset()
            await bot.prints("connecting/waiting")
            assert await ask(broker, b"while it was away") == b"while it was away"
            await bot.prints("to ann: Acked")
            assert await bot.stop() == 0
        assert "Received DISCONNECT from bot" in broker.log


async def test_bot_waits_for_a_broker_that_starts_later() -> None:
    broker = Mosquitto(require_server("mosquitto"))
    try:
        async with bot_at(broker.url()) as bot:
            line = await bot.prints("connecting/waiting")
            assert "Connection refused" in line
            broker.start()
            await bot.prints("online")
            assert await ask(broker, b"hello") == b"hello"
    finally:
        broker.stop()


async def test_client_of_the_tutorial_gets_the_echo_of_the_bot(broker: Mosquitto) -> None:
    printed: list[Any] = []
    (block,) = blocks(page("tutorial/bot"))
    async with bot_at(broker.url()) as bot:
        await bot.prints("online")
        program = block.replace(BROKER, broker.url())
        assert program != block
        names: dict[str, Any] = {"print": printed.append}
        await asyncio.to_thread(exec, program, names)
        # Each answer is acknowledged, so the next client does not get it again.
        for words in (b"second", b"third"):
            assert await names["ask"](broker.url(), words) == words
    assert printed == [b"hello"]


# -- the four outcomes -----------------------------------------------------------------------------


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions() as opened:
        yield opened


async def test_deliver_of_the_page_sends_until_the_outcome_is_certain(sessions: Sessions) -> None:
    names = dict(vars(package))
    await run(blocks(page("topics/four-outcomes"))[0], names)
    server = DemoServer()
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    delivery = asyncio.create_task(names["deliver"](alice, "bob", b"hello", "1"))
    await until(lambda: server.received)
    server.cut("alice")
    async with asyncio.timeout(LIMIT):
        await delivery
    assert [(each.id, each.duplicates) for each in server.received] == [("1", 1)]
    server.reject("eve", 463)
    with pytest.raises(ValueError, match="463"):
        await names["deliver"](alice, "eve", b"hello", "2")
    with pytest.raises(ValueError, match="cannot be sent"):
        await names["deliver"](alice, "bob", bytes(MAX_FRAME), "3")


# -- the topic -------------------------------------------------------------------------------------

TOPIC = page("topics/sessions")


def test_table_of_states_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([a-z/]+)` \| `([a-z/]+)` \|", TOPIC, re.MULTILINE)
    assert {state: public for public, state in rows} == SESSION_STATES
    assert SESSION_STATES.keys() == {str(state) for state in _core.CHART.states}


NUMBER = re.compile(r"\d+(?:,\d{3})*")


def default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def test_table_of_numbers_matches_the_code() -> None:
    table = TOPIC.partition("## Numbers")[2].partition("##")[0]
    rows = {
        cells[1].strip(): [float(number.replace(",", "")) for number in NUMBER.findall(cells[2])]
        for line in table.splitlines()[4:]
        if len(cells := line.split("|")) == 5
    }
    made = Sessions()
    protocol = package.Protocol
    cache = package.MemoryRetryCache()
    assert rows == {
        "pauses between attempts": [made._backoff.start, made._backoff.max],
        "restarts that are not counted, in a row": [_core.RESTARTS],
        "a link is proven after": [_core.PAUSES.proven],
        "crashes that an account may have": list(_sessions.INTENSITY),
        "links in a second, at once": [
            default(Sessions, "connect_rate"),
            default(Sessions, "connect_burst"),
        ],
        "a link with its handshake": [default(Sessions, "connect_timeout")],
        "a login that needs a person": [_connection.LOGIN_TIMEOUT],
        "silence until a ping, and its answer": [protocol.keepalive, protocol.patience],
        "a send": [default(Sessions, "send_timeout")],
        "a question to the server": [default(Session.query, "timeout")],
        "sends without an outcome in a session": [_senders.LIMIT],
        "events that wait": [default(Sessions, "events")],
        "a handler, at the end of its session": [CLOSE_TIMEOUT],
        "a new link for messages that were set aside": [protocol.redelivery],
        "the lease of a profile": [default(Sessions, "lease_ttl")],
        "the retry cache": [cache.size, cache.seconds],
    }


async def test_table_of_status_keys_matches_the_code(sessions: Sessions) -> None:
    table = TOPIC.partition("| key | |")[2].partition("| the rest |")[0]
    cells = {key for line in table.splitlines() for key in re.findall(r"^\|(.*?)\|", line)}
    keys = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    alice = await sessions.start("alice", Demo(DemoServer()))
    assert keys | set(alice._runtime.totals()) == set(alice.status())


async def test_programs_of_the_topic_run(
    broker: Mosquitto, postgres_url: str, tmp_path: Path, sessions: Sessions
) -> None:
    first, steps = blocks(TOPIC)
    names: Names = {}
    await run(
        first,
        names,
        ("accounts.db", tmp_path / "accounts.db"),
        ("redis://cache", postgres_url),
        ("mqtts://broker", broker.url()),
    )
    assert names["alice"].status()["acked"] == 1
    mine: Names = {"sessions": sessions, "protocol": Mqtt(broker.url())}
    bob = await sessions.connect("topic-bob", Mqtt(broker.url()))
    await run(steps, mine, ('start("alice"', 'connect("topic-alice"'))
    await mine["alice"].send("topic-bob", b"hello")
    async with asyncio.timeout(LIMIT):
        async for event in bob.events():
            if isinstance(event.data, Msg):
                assert event.data.content == b"hello -- sent by topic-alice"
                break


# -- MQTT ------------------------------------------------------------------------------------------

MQTT = page("howto/mqtt")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    directory = tmp_path_factory.mktemp("authority")
    return Authority(require_server("openssl"), directory, "authority")


async def test_first_program_of_the_mqtt_page_runs(broker: Mosquitto, tmp_path: Path) -> None:
    names: Names = {}
    await run(
        blocks(MQTT)[0],
        names,
        ("mqtt://broker:1883", broker.url()),
        ("accounts.db", tmp_path / "accounts.db"),
    )
    assert names["alice"].status()["acked"] == 1


async def test_tls_program_of_the_mqtt_page_connects(
    authority: Authority, sessions: Sessions
) -> None:
    certificate = authority.sign("broker", "broker.internal")
    client = authority.sign("client")
    with Mosquitto(require_server("mosquitto"), certificate=certificate) as server:
        names: Names = {"Mqtt": Mqtt}
        await run(
            block_with(MQTT, "server_name="),
            names,
            ("10.0.0.7:8883", f"127.0.0.1:{server.ports['mqtts']}"),
            ("ca.pem", authority.root),
            ("client.pem", client.certificate),
            ("client.key", client.key),
        )
        alice = await sessions.connect("alice", names["private"])
        assert await alice.send("bob", b"hello")
        await alice.stop()


async def test_password_program_of_the_mqtt_page_stores_it_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_KEY", bytes(range(32)).hex())
    names: Names = {"Mqtt": Mqtt, "Sessions": Sessions}
    with Mosquitto(require_server("mosquitto"), users={"alice": "s3cret"}) as server:
        await run(
            block_with(MQTT, "Namespace.CREDS"),
            names,
            ("mqtt://broker:1883", server.url()),
            ("accounts.db", tmp_path / "accounts.db"),
        )
    assert names["alice"].status()["generation"] >= 1
    assert b"s3cret" not in (tmp_path / "accounts.db").read_bytes()


async def test_programs_for_topics_messages_wills_and_websockets_run(
    broker: Mosquitto, sessions: Sessions
) -> None:
    names: Names = {"Mqtt": Mqtt}
    address = ("mqtt://broker:1883", broker.url())
    await run(block_with(MQTT, 'client_id="gateway'), names, address)
    await run(block_with(MQTT, "Will("), names, address)
    web = broker.url("ws") + "/mqtt"
    await run(block_with(MQTT, "host_of="), names, ("mqtts://us.example.com", broker.url()))
    await run(block_with(MQTT, "wss://"), names, ("wss://broker.example.com/mqtt", web))
    bob = await sessions.connect("bob", Mqtt(broker.url(), subscribe="devices/{profile}/in"))
    for number, protocol in enumerate(
        (names["fleet"], names["watched"], names["web"], names["everywhere"])
    ):
        names["alice"] = await sessions.connect(f"alice-{number}", protocol)
        await run(block_with(MQTT, "Message("), names)
        assert names["alice"].status()["acked"] == 1
    async with asyncio.timeout(LIMIT):
        async for event in bob.events():
            if isinstance(event.data, Msg):
                break
    assert event.data.to == "devices/bob/in"
    assert event.data.content == Text('{"celsius": 21.5}')
    assert event.data.extra["content_type"] == "application/json"
    assert ("unit", "celsius") in event.data.extra["user_property"]


# -- a protocol of one's own -----------------------------------------------------------------------

PROTOCOL = page("howto/write-a-protocol")


async def test_line_protocol_of_the_page_works_and_reconnects() -> None:
    names: Names = {"Sessions": Sessions}
    whole, use, alone, server = blocks(PROTOCOL)
    await run(whole, names)
    await run(alone, names)
    await run(server, names)
    port = free_port()
    lines, listener = await names["start_server"](port)
    lines.mail["bob"] = {}
    await run(use, names, ("7000", port))
    assert [mail.split(b" ", 2)[2] for mail in lines.mail["bob"].values()] == [b"alice hello\n"]

    received: list[Msg] = []

    def collect(event: package.Incoming) -> None:
        if isinstance(event.data, Msg):
            received.append(event.data)

    async with Sessions() as sessions:
        protocol = names["Lines"]("127.0.0.1", port)
        await sessions.connect("bob", protocol, on_event=collect)
        alice = await sessions.connect("alice", protocol)
        await until(lambda: received and not lines.mail["bob"])  # it was handled and acknowledged
        assert (received[0].sender, received[0].content) == ("alice", Text("hello"))
        refused = await alice.send("nobody", Text("hello"), id="1", outcome=True)
        assert refused == Rejected("1", "404")
        unsent = await alice.send("bob", Text("two\nlines"), outcome=True)
        assert isinstance(unsent, NotSent)
        lines.writers["alice"].transport.abort()
        again = await alice.send("bob", Text("again"), hold=True, outcome=True)
        assert isinstance(again, Acked | package.Unknown)
        await alice.online(LIMIT)
        with pytest.raises(package.NotConnected, match="not wanted"):
            await sessions.connect("eve", protocol)
    listener.close()
    await listener.wait_closed()


def test_line_protocol_is_as_short_as_the_page_says() -> None:
    code = [line for line in blocks(PROTOCOL)[0].splitlines() if line.strip()]
    assert len(code) <= 75


# -- a cluster -------------------------------------------------------------------------------------

CLUSTER = page("howto/sessions-cluster")


async def test_cluster_programs_run_a_profile_once_and_move_it(
    broker: Mosquitto, postgres_url: str, tmp_path: Path
) -> None:
    names: Names = {}
    await run(
        blocks(CLUSTER)[0],
        names,
        ("accounts.db", tmp_path / "accounts.db"),
        ("redis://cache/0?prefix=bots", postgres_url),
        ("mqtts://broker", broker.url()),
    )
    handled: list[package.Incoming] = []

    async def handle(session: Session, event: package.Incoming) -> None:
        handled.append(event)

    names["handle"] = handle
    await run(block_with(CLUSTER, "async def keep"), names, ("sleep(5)", "sleep(0.05)"))
    await run(
        block_with(CLUSTER, "add_signal_handler"),
        names,
        ("redis://cache/0?prefix=bots", postgres_url),
        ("mqtts://broker", broker.url()),
        ('"alice", "bob"', '"cluster-a", "cluster-b"'),
    )
    async with Sessions(leases=postgres_url) as old:
        first = await old.connect("cluster-a", Mqtt(broker.url()))
        assert first.fence is not None
        main = asyncio.create_task(names["main"]())
        async with Sessions(leases=postgres_url) as third:
            with pytest.raises(AlreadyRunning, match="cluster-a"):
                await third.start("cluster-a", Mqtt(broker.url()))
        assert first.state == "online"
    # The old process has ended: the new one takes over by itself.
    async with aiomqtt.Client("127.0.0.1", broker.port) as peer, asyncio.timeout(LIMIT):
        while not any(event.type == "messages_upsert" for event in handled):
            await peer.publish("cluster-a", b"hello", qos=1)
            await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(LIMIT):
        await main
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def test_sigterm_lets_the_current_handler_finish() -> None:
    server = DemoServer()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(session: Session, event: package.Incoming) -> None:
        begun.set()
        await asyncio.sleep(0.2)
        ended.set()

    names: Names = {**vars(package), "handle": handle, "Demo": Demo, "server": server}
    await run(block_with(CLUSTER, "async def keep"), names)
    await run(
        block_with(CLUSTER, "add_signal_handler"),
        names,
        ("redis://cache/0?prefix=bots", "memory://"),
        ('Mqtt("mqtts://broker")', "Demo(server)"),
    )
    main = asyncio.create_task(names["main"]())
    async with asyncio.timeout(LIMIT):
        await until(lambda: server.online == ["alice", "bob"])
        server.deliver("alice", Text("hello"))
        await begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await main
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert ended.is_set()
    assert not server.mail("alice"), "the message was not acknowledged"
    assert all(task.done() for task in names["background"])


@in_virtual_time
async def test_keep_of_the_page_starts_the_account_once_the_store_is_up(sim: Sim) -> None:
    server, store = DemoServer(), ScriptedStore()
    names: Names = dict(vars(package))
    await run(block_with(CLUSTER, "async def keep"), names)
    store.break_down()
    async with Leases(store) as leases, Sessions(leases=leases) as opened:
        keeping = asyncio.create_task(names["keep"](opened, "alice", Demo(server)))
        await asyncio.sleep(60)
        assert not keeping.done()
        assert not server.online
        store.error = None
        await asyncio.sleep(60)
        assert server.online == ["alice"]
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


# -- testing a bot ---------------------------------------------------------------------------------


async def test_tests_of_the_page_pass() -> None:
    names: Names = {}
    for block in blocks(page("howto/test-a-bot")):
        await run(block, names)
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 4
    for name in tests:
        async with asyncio.timeout(LIMIT):
            await names[name]()
