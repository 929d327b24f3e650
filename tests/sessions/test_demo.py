"""The demo protocol against its server: everything that a protocol may have, and bad input."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.sessions._content import Media, Msg, Poll, Presence, Receipt, Text
from moored.sessions._errors import ProtocolError, QueryFailed, StepFailed
from moored.sessions._protocol import (
    Accepted,
    Answered,
    CloseClass,
    Closing,
    Confirmed,
    ConfirmedUpTo,
    DialogueEvent,
    Feature,
    Greeting,
    Happening,
    Ignored,
    LoginStep,
    Outgoing,
    Ready,
    Refused,
    Unhandled,
)
from moored.sessions.transport._transport import Transport
from moored.testing import Sim, scaled, simulate
from moored.testing.demo import MAX_FRAME, Demo, DemoDialogue, DemoMemory, DemoServer
from moored.testing.demo._frames import DemoFrames, content_of, encode, wire_form

T = TypeVar("T")


class Client:
    """A dialogue over a transport; collects the events that it returns."""

    transport: Transport

    def __init__(
        self,
        protocol: Demo,
        profile: str,
        *,
        credentials: bytes | None = None,
        memory: DemoMemory | None = None,
    ) -> None:
        self.protocol = protocol
        self.memory = memory or protocol.remember()
        self.dialogue = protocol.begin(profile, credentials, self.memory)
        self.events: list[DialogueEvent] = []
        self.end: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()

    async def connect(self) -> Client:
        self.transport = await self.protocol.endpoint.dial(self)
        self.transport.write(self.dialogue.hello())
        return self

    async def log_in(self) -> Client:
        await self.connect()
        await self.next(Ready)
        return self

    def received(self, data: bytes) -> None:
        for event in self.dialogue.feed(data):
            if isinstance(event, Greeting):
                self.transport.write(event.data)
            self.events.append(event)
        self._news.set()

    def lost(self, error: BaseException | None) -> None:
        self.end.set_result(error)

    async def next(self, kind: type[T]) -> T:
        """Wait for an event of a kind; those before it are dropped."""
        async with asyncio.timeout(30):
            while True:
                while self.events:
                    event = self.events.pop(0)
                    if isinstance(event, kind):
                        return event
                self._news.clear()
                await self._news.wait()

    async def events_until_pong(self) -> list[DialogueEvent]:
        """Send a ping, and return the events that arrived before its answer."""
        self.transport.write(self.dialogue.ping())
        events: list[DialogueEvent] = []
        async with asyncio.timeout(30):
            while not events or not isinstance(events[-1], Ignored):
                while self.events:
                    events.append(self.events.pop(0))
                self._news.clear()
                if not events or not isinstance(events[-1], Ignored):
                    await self._news.wait()
        return events[:-1]

    def send(self, id: str, recipient: str, content: Any) -> None:
        self.transport.write(self.dialogue.write(Outgoing(id, recipient, content)))

    async def ask(self, do: str, **question: Any) -> Answered:
        self.transport.write(self.dialogue.query("q", {"do": do, **question}))
        return await self.next(Answered)

    async def message(self) -> tuple[Msg, Any]:
        event = await self.next(Happening)
        assert self.protocol.route(event.frame) == "message"
        return self.protocol.interpret("message", event.frame), event.token

    async def happening(self) -> Any:
        event = await self.next(Happening)
        return self.protocol.interpret(self.protocol.route(event.frame), event.frame)


@pytest.fixture
def server() -> DemoServer:
    return DemoServer()


async def join(server: DemoServer, profile: str, **options: Any) -> Client:
    return await Client(Demo(server, **options), profile).log_in()


# -- logging in ------------------------------------------------------------------------------------


async def test_login_without_pairing_needs_no_credentials(server: DemoServer) -> None:
    client = await Client(Demo(server), "alice").connect()
    assert await client.next(Ready) == Ready(False, None)
    assert server.online == ["alice"]
    client.transport.write(client.dialogue.goodbye())
    assert await client.end is None
    assert server.online == []
    assert client.protocol.features == frozenset(Feature) - {Feature.SUBSCRIPTIONS}


async def test_pairing_returns_credentials_and_requires_a_new_link() -> None:
    server = DemoServer(pairing=True, window=5)
    protocol = Demo(server)
    client = await Client(protocol, "alice").connect()
    step = await client.next(LoginStep)
    assert step.kind == "pairing code"
    assert str(step.data) not in repr(step)
    assert server.waiting == ["alice"]
    server.confirm("alice")
    accepted = await client.next(Accepted)
    assert (await client.next(Closing)).kind is CloseClass.RESTART
    assert await client.end is None

    again = await Client(protocol, "alice", credentials=accepted.credentials).connect()
    assert await again.next(Ready) == Ready(False, 5)

    wrong = await Client(protocol, "alice", credentials=b"wrong").connect()
    assert (await wrong.next(Closing)).kind is CloseClass.AUTHENTICATION
    assert server.online == ["alice"], "a failed login must not evict the account's link"
    stranger = await Client(protocol, "bob", credentials=b"x").connect()
    assert (await stranger.next(Closing)).kind is CloseClass.AUTHENTICATION


async def test_pairing_by_entering_the_code() -> None:
    server = DemoServer(pairing=True)
    client = await Client(Demo(server), "alice").connect()
    step = await client.next(LoginStep)
    client.transport.write(client.dialogue.login(step.data))
    assert isinstance(await client.next(Accepted), Accepted)
    client = await Client(Demo(server), "alice").connect()
    await client.next(LoginStep)
    client.transport.write(client.dialogue.login("0000"))
    assert (await client.next(Closing)).kind is CloseClass.AUTHENTICATION
    assert server.waiting == []


async def test_server_close_has_the_class_and_code_of_its_cause(server: DemoServer) -> None:
    async def closing_after(act: Any, *args: Any, **options: Any) -> Closing:
        client = await join(server, "alice")
        act(*args, **options)
        closing = await client.next(Closing)
        assert await client.end is None
        assert server.online == []
        return closing

    def kind_and_code(closing: Closing) -> tuple[CloseClass, object]:
        return closing.kind, closing.code

    assert kind_and_code(await closing_after(server.restart, "alice")) == (CloseClass.RESTART, 515)
    assert kind_and_code(await closing_after(server.take_over, "alice")) == (
        CloseClass.TAKEOVER,
        440,
    )
    closing = await closing_after(server.hang_up, "alice", retry_after=7.5)
    assert (closing.kind, closing.retry_after) == (CloseClass.TRANSIENT, 7.5)
    assert kind_and_code(await closing_after(server.ban, "alice")) == (CloseClass.BANNED, 403)
    client = await Client(Demo(server), "alice").connect()
    assert (await client.next(Closing)).kind is CloseClass.BANNED
    server.ban("alice", False)
    closing = await closing_after(server.revoke, "alice")
    assert kind_and_code(closing) == (CloseClass.AUTHENTICATION, 401)


async def test_outdated_version_is_refused(server: DemoServer) -> None:
    server.minimum_version = 2
    client = await Client(Demo(server), "alice").connect()
    assert (await client.next(Closing)).kind is CloseClass.OUTDATED


async def test_second_link_of_an_account_takes_over(server: DemoServer) -> None:
    first, second = await join(server, "alice"), await join(server, "alice")
    assert (await first.next(Closing)).kind is CloseClass.TAKEOVER
    assert await first.end is None
    assert server.online == ["alice"]
    second.send("1", "bob", b"x")
    await second.next(Confirmed)


async def test_cut_resets_the_link(server: DemoServer) -> None:
    client = await join(server, "alice")
    assert server.cut("alice") == 1
    assert isinstance(await client.end, ConnectionResetError)
    assert server.cut("alice") == 0
    server.refusing = True
    with pytest.raises(ConnectionRefusedError):
        await Client(Demo(server), "alice").connect()


async def test_both_sides_answer_pings_and_a_deaf_server_answers_none(server: DemoServer) -> None:
    client = await join(server, "alice")
    client.transport.write(client.dialogue.ping())
    await client.next(Ignored)
    server.say("alice", {"k": "ping"})
    await client.next(Greeting)
    server.deaf = True
    client.transport.write(client.dialogue.ping())
    client.send("1", "bob", b"x")
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.events == []
    assert server.received == []


# -- sending ---------------------------------------------------------------------------------------


async def test_acks_may_be_plain_refused_duplicate_or_lost(server: DemoServer) -> None:
    client = await join(server, "alice")
    client.send("1", "bob", Text("hello"))
    assert await client.events_until_pong() == [Confirmed("1")]

    server.reject("eve", 486, "busy")
    client.send("2", "eve", b"x")
    assert await client.events_until_pong() == [Refused("2", 486, "busy")]
    server.reject("eve", None)
    client.send("3", "eve", b"x")
    assert await client.events_until_pong() == [Confirmed("3")]

    server.duplicate_acks = True
    client.send("4", "bob", b"x")
    assert await client.events_until_pong() == [Confirmed("4")] * 2
    server.duplicate_acks = False

    server.drop_acks = 1
    client.send("5", "bob", b"x")
    client.send("6", "bob", b"x")
    assert await client.events_until_pong() == [Confirmed("6")]
    server.say("alice", {"k": "ack", "id": "5"})
    assert await client.events_until_pong() == [Confirmed("5")], "a late ack"
    assert [each.id for each in server.received] == ["1", "3", "4", "5", "6"]
    assert server.dropped_acks == 1
    assert server.received[0].content == {"type": "text", "text": "hello"}


async def test_ack_of_a_poll_carries_a_secret(server: DemoServer) -> None:
    client = await join(server, "alice")
    client.send("1", "bob", Poll("Tea?", ("yes", "no")))
    first = await client.next(Confirmed)
    assert len(first.extra["secret"]) == 32
    client.send("1", "bob", Poll("Tea?", ("yes", "no")))
    assert await client.next(Confirmed) == first, "the same send has the same secret"
    assert server.received[0].duplicates == 1


async def test_cumulative_ack_confirms_a_count_of_writes(server: DemoServer) -> None:
    client = await join(server, "alice", cumulative=True)
    for number in range(5):
        client.transport.write(
            client.dialogue.write(Outgoing(str(number), "bob", b"x"))
            + client.dialogue.write(Outgoing(f"{number}+", "bob", b"x"))
        )
    assert await client.events_until_pong() == [ConfirmedUpTo(2)] * 5

    server.reject("eve", 486)
    server.drop_acks = 1
    client.send("a", "bob", b"x")
    client.send("b", "eve", b"x")
    client.send("c", "bob", b"x")
    events = await client.events_until_pong()
    assert events == [Refused("b", 486), ConfirmedUpTo(2), ConfirmedUpTo(1)]

    server.say("alice", {"k": "upto", "more": 1})
    with pytest.raises(ProtocolError, match="confirmed more sends than were written"):
        list(client.dialogue.feed(encode({"k": "upto", "more": 1})))


async def delayed(sim: Sim) -> list[DialogueEvent]:
    server = DemoServer(rng=random.Random(sim.seed))
    server.delay = lambda: sim.random(0, 3)
    plain = await join(server, "alice")
    counted = await join(server, "bob", cumulative=True)
    server.reject("eve", 1)
    for number in range(20):
        recipient = "eve" if number % 5 == 0 else "carol"
        plain.send(str(number), recipient, b"x")
        counted.send(str(number), recipient, b"x")
    await asyncio.sleep(5)
    refused = {event.id for event in counted.events if isinstance(event, Refused)}
    assert refused == {"0", "5", "10", "15"}
    # A refusal comes before the count that covers it.
    covered = 0
    for event in counted.events:
        if isinstance(event, ConfirmedUpTo):
            covered += event.count
        elif isinstance(event, Refused):
            assert covered <= int(event.id)
    assert covered == 20
    order = [event.id for event in plain.events if isinstance(event, Confirmed)]
    assert sorted(map(int, order)) == [n for n in range(20) if n % 5]
    assert order != sorted(order, key=int) or sim.seed != 1
    return plain.events


def test_delays_reorder_plain_acks_but_not_cumulative_ones() -> None:
    simulate(delayed, scaled(100, least=8))


async def test_oversized_or_unserializable_content_fails_before_it_is_written(
    server: DemoServer,
) -> None:
    client = await join(server, "alice", resume=True)
    with pytest.raises(StepFailed, match="a frame has"):
        client.send("1", "bob", bytes(MAX_FRAME))
    with pytest.raises(StepFailed, match="cannot be written as JSON"):
        client.send("1", "bob", {"type": "x", "value": object()})
    with pytest.raises(StepFailed, match="cannot send a set"):
        client.send("1", "bob", {1})
    assert client.memory is not None
    assert client.memory.unconfirmed == {}
    step = client.protocol.steps[0][1]
    assert step(Outgoing("1", "bob", "hi"), None).body == {"type": "text", "text": "hi"}


# -- resumption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cumulative", [False, True])
async def test_unconfirmed_sends_are_written_again_and_received_once(
    server: DemoServer, cumulative: bool
) -> None:
    bob = await join(server, "bob")
    protocol = Demo(server, resume=True, cumulative=cumulative)
    client = await Client(protocol, "alice").log_in()
    server.drop_acks = math.inf
    for number in range(3):
        client.send(str(number), "bob", Text(str(number)))
    await client.events_until_pong()
    server.drop_acks = 0
    server.cut("alice")
    await client.end
    assert client.memory is not None
    assert list(client.memory.unconfirmed) == ["0", "1", "2"]

    again = Client(protocol, "alice", memory=client.memory)
    await again.connect()
    assert await again.next(Ready) == Ready(True, None)
    for id, data in again.dialogue.resend("012"):
        again.transport.write(data)
        assert id in "012"
    events = await again.events_until_pong()
    if cumulative:
        assert sum(event.count for event in events if isinstance(event, ConfirmedUpTo)) == 3
    else:
        assert events == [Confirmed("0"), Confirmed("1"), Confirmed("2")]
    assert client.memory.unconfirmed == {}
    assert [(each.id, each.duplicates) for each in server.received] == [
        ("0", 1),
        ("1", 1),
        ("2", 1),
    ]
    heard = [await bob.message() for _ in range(3)]
    assert [msg.id for msg, _ in heard] == ["0", "1", "2"]
    assert await bob.events_until_pong() == []


async def test_server_that_lost_its_state_reports_no_resumption(server: DemoServer) -> None:
    protocol = Demo(server, resume=True)
    client = await Client(protocol, "alice").log_in()
    server.drop_acks = 1
    client.send("1", "bob", b"x")
    await client.events_until_pong()
    server.forget()
    server.cut()
    again = Client(protocol, "alice", memory=client.memory)
    await again.connect()
    assert await again.next(Ready) == Ready(False, None)
    assert list(again.dialogue.resend("1")) == []


async def test_without_resumption_a_repeated_send_arrives_twice(server: DemoServer) -> None:
    bob, alice = await join(server, "bob"), await join(server, "alice")
    assert list(alice.dialogue.resend("1")) == []
    alice.send("1", "bob", b"x")
    alice.send("1", "bob", b"x")
    assert await alice.events_until_pong() == [Confirmed("1"), Confirmed("1")]
    first, second = (await bob.message())[0], (await bob.message())[0]
    assert (first.id, first.duplicate) == ("1", False)
    assert (second.id, second.duplicate) == ("1", True)
    assert server.received[0].duplicates == 1


# -- receiving -------------------------------------------------------------------------------------


async def test_mail_is_redelivered_until_it_is_acknowledged(server: DemoServer) -> None:
    alice = await join(server, "alice")
    bob = await join(server, "bob")
    bob.transport.close()
    await bob.end
    for number in range(3):
        alice.send(str(number), "bob", Text(str(number)))
    assert len(await alice.events_until_pong()) == 3
    server.deliver("bob", b"from the server", id="s")
    assert server.mail("bob") == 4

    bob = await join(server, "bob")
    first, token = await bob.message()
    assert first == Msg("text", Text("0"), "0", "alice")
    bob.transport.write(bob.dialogue.acknowledge(token))
    await bob.events_until_pong()
    assert await alice.happening() == Receipt(("0",), "delivered", "bob")
    server.cut("bob")

    bob = await join(server, "bob")
    heard = [(await bob.message())[0] for _ in range(3)]
    assert [(msg.id, msg.duplicate) for msg in heard] == [("1", True), ("2", True), ("s", True)]
    assert heard[-1].content == b"from the server"
    assert server.mail("bob") == 3
    assert server.mail("nobody") == 0


async def test_no_mail_is_kept_for_unknown_recipients() -> None:
    server = DemoServer(history=10)
    alice = await join(server, "alice")
    for number in range(100):
        alice.send(str(number), f"stranger {number}", b"x")
    assert len(await alice.events_until_pong()) == 100
    assert len(server.world.accounts) == 1
    assert len(server.received) == 10
    server.strict = True
    alice.send("x", "stranger", b"x")
    assert (await alice.next(Refused)).code == 404


async def test_presence_and_read_markers_reach_the_other_client(server: DemoServer) -> None:
    alice, bob = await join(server, "alice"), await join(server, "bob")
    assert (await alice.ask("watch", who="bob")).code is None
    assert (await alice.ask("watch", who="nobody")).code == 404
    await bob.ask("presence", state="writing")
    assert await alice.happening() == Presence("bob", "writing")
    await bob.ask("read", of="alice", ids=["1", "2"])
    assert await alice.happening() == Receipt(("1", "2"), "read", "bob")
    server.cut("bob")
    assert await alice.happening() == Presence("bob", "unavailable")


async def test_group_messages_reach_members_only(server: DemoServer) -> None:
    alice, bob = await join(server, "alice"), await join(server, "bob")
    carol = await join(server, "carol")
    group = (await alice.ask("group_create", name="tea", members=["bob"])).value
    assert await bob.happening() == {"group": group, "name": "tea", "created": "alice"}
    alice.send("1", group, Text("hello"))
    assert (await bob.message())[0] == Msg("text", Text("hello"), "1", "alice", to=group)
    await alice.ask("group_add", group=group, who="carol")
    assert (await carol.happening())["added"] == "carol"
    assert (await carol.ask("group_info", group=group)).value["members"] == [
        "alice",
        "bob",
        "carol",
    ]
    await alice.ask("group_remove", group=group, who="bob")
    bob.send("2", group, b"x")
    assert (await bob.next(Refused)).code == 403
    assert (await bob.ask("group_info", group=group)).code == 404


async def test_uploaded_media_can_be_downloaded_by_its_recipient(server: DemoServer) -> None:
    alice, bob = await join(server, "alice"), await join(server, "bob")
    picture = random.Random(1).randbytes(10_000)
    up = await alice.ask("upload", data=base64.b64encode(picture).decode())
    media = Media("image", up.value, len(picture), "look", b"key")
    alice.send("1", "bob", media)
    assert (await bob.message())[0].content == media
    down = await bob.ask("download", location=media.location)
    assert base64.b64decode(down.value) == picture
    assert (await bob.ask("download", location="x")).code == 404


@pytest.mark.parametrize("size", [0, 1, 190_000])
async def test_media_are_uploaded_and_downloaded(server: DemoServer, size: int) -> None:
    client = await join(server, "alice")

    class Session:
        async def query(self, question: Any) -> Any:
            client.transport.write(client.dialogue.query("q", question))
            return (await client.next(Answered)).value

    data = random.Random(2).randbytes(size)
    media = await client.protocol.upload(Session(), "image", data, "look")
    assert media == Media("image", media.location, size, "look")
    assert await client.protocol.download(Session(), media) == data
    with pytest.raises(QueryFailed, match="a frame has"):
        client.dialogue.query("q", {"do": "upload", "data": "x" * MAX_FRAME})


async def test_queries_are_answered_or_refused_with_a_code(server: DemoServer) -> None:
    client = await join(server, "alice")
    assert await client.ask("echo", value=[1, {"a": None}]) == Answered("q", [1, {"a": None}])
    assert (await client.ask("devices", of="bob")).value == ["bob/1"]
    assert (await client.ask("fly")).code == 404
    client.transport.write(client.dialogue.query("q2", "not an object"))
    assert (await client.next(Answered)).code == 400


# -- over sockets, and in the simulation -----------------------------------------------------------


async def test_server_listens_on_tcp_and_in_memory() -> None:
    async with DemoServer() as server:
        assert str(server.endpoint) == "demo server"
        endpoint = await server.serve()
        assert server.endpoint is endpoint
        client = await join(server, "alice")
        client.send("1", "bob", Text("hello"))
        assert await client.next(Confirmed) == Confirmed("1")
        local = await Client(Demo(server.memory), "bob").log_in()
        assert (await join(server, "carol")).events == []
        assert server.online == ["alice", "bob", "carol"]
        assert repr(server) == f"<DemoServer at {endpoint}: 3 online, 1 sends received>"
    await client.end
    await local.end


async def test_refusing_server_closes_new_tcp_links() -> None:
    async with DemoServer() as server:
        await server.serve()
        server.refusing = True
        client = await Client(Demo(server), "alice").connect()
        await client.end
        assert client.events == []


async def kill_and_restart_the_host(sim: Sim) -> None:
    """Kill the server's host and restart it; the server object keeps its state."""
    server = DemoServer(rng=random.Random(sim.seed))
    listening = asyncio.Event()

    async def main() -> None:
        await server.serve("server", 7)
        listening.set()
        await asyncio.Event().wait()

    host = sim.host("server", main)
    await listening.wait()
    client = await join(server, "alice")
    client.send("1", "bob", b"x")
    await client.next(Confirmed)
    listening.clear()
    host.kill()
    await client.end
    host.restart()
    await listening.wait()
    again = await join(server, "alice")
    again.send("2", "bob", b"x")
    await again.next(Confirmed)
    assert [each.id for each in server.received] == ["1", "2"]


def test_client_can_log_in_again_after_the_servers_host_was_killed() -> None:
    simulate(kill_and_restart_the_host, 20)


async def cut_links_repeatedly(sim: Sim) -> None:
    """Cut links at random moments; each send must be received once, in order."""
    server = DemoServer(rng=random.Random(sim.seed))
    listening = asyncio.Event()

    async def main() -> None:
        await server.serve("server", 7)
        listening.set()
        await asyncio.Event().wait()

    sim.host("server", main)
    await listening.wait()
    protocol = Demo(server, resume=True)
    memory = protocol.remember()
    written = 0
    while written < 30 or (memory and memory.unconfirmed):
        client = Client(protocol, "alice", memory=memory)
        try:
            ready = await asyncio.wait_for(client.log_in(), 5) and client
        except (OSError, TimeoutError):
            continue
        for _, data in ready.dialogue.resend({str(number) for number in range(written)}):
            ready.transport.write(data)
        for _ in range(sim.rng.randint(0, 5)):
            ready.send(str(written), "bob", b"x")
            written += 1
            await asyncio.sleep(sim.random(0, 0.01))
        if sim.rng.random() < 0.5:
            sim.network.reset("server")
        else:
            await asyncio.sleep(0.5)
            ready.transport.close()
        await ready.end
    assert [each.id for each in server.received] == [str(number) for number in range(written)]


def test_each_send_is_received_once_and_in_order_however_links_are_cut() -> None:
    simulate(cut_links_repeatedly, scaled(200, least=8))


# -- bad input -------------------------------------------------------------------------------------

GREETED = encode({"k": "welcome", "token": "t"})

numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
KINDS = """
    welcome pair paired ack upto nack answer message receipt presence group ping pong close
    hello send query got login bye error nonsense
"""
FIELDS = """
    id code reason n from content window token resumed key more class retry_after extra partial
    profile v resume to question answer ids kind who state cumulative
"""
words = st.sampled_from(["", "1", "alice", "bob", "banned", "restart"])
frames = st.builds(
    lambda kind, fields: {"k": kind, **fields},
    st.sampled_from(KINDS.split()),
    st.dictionaries(st.sampled_from(FIELDS.split()), words | json_values, max_size=6),
)
wire = st.lists(
    st.one_of(
        frames.map(encode),
        st.binary(max_size=60),
        json_values.map(lambda value: _framed(json.dumps(value).encode())),
        st.binary(max_size=40).map(lambda body: _framed(body)),
    ),
    max_size=8,
).map(b"".join)


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def feed_all(dialogue: DemoDialogue, pieces: list[bytes]) -> tuple[list[DialogueEvent], str]:
    """Return the events of a dialogue, and the text of its error or an empty string."""
    events: list[DialogueEvent] = []
    try:
        for piece in pieces:
            for event in dialogue.feed(piece):
                events.append(event)  # noqa: PERF402 (kept when the next one raises)
            assert len(dialogue._frames._rest or b"") <= MAX_FRAME + 4
    except ProtocolError as error:
        farewell = error.farewell
        ending = str(error)
    else:
        return events, ""
    assert not farewell or list(DemoFrames().feed(farewell))
    return events, ending


@given(wire, st.lists(st.integers(0, 200), max_size=10), st.booleans(), st.booleans())
def test_client_survives_arbitrary_bytes_from_the_server(
    data: bytes, cuts: list[int], resume: bool, cumulative: bool
) -> None:
    def dialogue() -> DemoDialogue:
        memory = DemoMemory() if resume else None
        fresh = DemoDialogue("alice", None, memory, cumulative=cumulative)
        fresh.hello()
        list(fresh.feed(GREETED))
        fresh.write(Outgoing("1", "bob", b"x"))
        return fresh

    whole = feed_all(dialogue(), [data])
    places = sorted({0, *cuts, len(data)} & set(range(len(data) + 1)))
    pieces = [data[a:b] for a, b in pairwise(places)]
    assert repr(feed_all(dialogue(), pieces)) == repr(whole), (
        "the result must not depend on how the bytes are split"
    )
    protocol = Demo(DemoServer())
    for event in whole[0]:
        if isinstance(event, Happening):
            protocol.interpret(protocol.route(event.frame), event.frame)


class DiscardingTransport:
    """A transport that checks the frames and discards them."""

    keeps_bounds = False
    pending = 0
    closed = False

    def write(self, data: bytes) -> None:
        list(DemoFrames().feed(data))

    def close(self) -> None:
        self.closed = True

    abort = close


@given(wire, st.booleans())
def test_server_survives_arbitrary_bytes_from_a_client(data: bytes, greeted: bool) -> None:
    server = DemoServer()
    transport = DiscardingTransport()
    link = server.accept(transport)
    if greeted:
        link.received(encode({"k": "hello", "v": 1, "profile": "alice"}))
        assert server.online == ["alice"]
    link.received(data)
    if server.protocol_errors:
        assert transport.closed
        assert server.online == []
    link.lost(None)
    assert server.online == []


def test_oversized_frame_is_refused_by_its_length_prefix() -> None:
    frames = DemoFrames()
    with pytest.raises(ProtocolError, match=f"is longer than {MAX_FRAME}"):
        list(frames.feed((MAX_FRAME + 1).to_bytes(4, "big")))
    frames = DemoFrames()
    assert list(frames.feed(b"\x00\x04")) == []
    with pytest.raises(ProtocolError, match="is longer"):
        list(frames.feed(b"\x00\x01"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b"{",
        b"[]",
        b"{}",
        b'{"k":1}',
        b"\xff",
        b'"\\ud800"',
    ],
)
def test_malformed_frame_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a frame is not"):
        list(DemoFrames().feed(_framed(body)))


async def test_deeply_nested_frame_ends_only_its_own_link(server: DemoServer) -> None:
    alice, bob = await join(server, "alice"), await join(server, "bob")
    for depth in range(100, 1000, 9):
        nested = b"[" * depth + b"]" * depth
        alice.transport.write(
            _framed(b'{"k":"send","id":"%d","to":"bob","content":%b}' % (depth, nested))
        )
        await asyncio.sleep(0)
        if "alice" not in server.online:
            break
    assert await bob.ask("echo", value=1) == Answered("q", 1)


def test_frame_before_the_welcome_or_second_welcome_is_a_protocol_error() -> None:
    dialogue = DemoDialogue("alice", None, None)
    with pytest.raises(ProtocolError, match="before its welcome"):
        list(dialogue.feed(encode({"k": "ack", "id": "1"})))
    dialogue = DemoDialogue("alice", None, None)
    with pytest.raises(ProtocolError, match="second welcome"):
        list(dialogue.feed(GREETED + GREETED))
    dialogue = DemoDialogue("alice", None, None)
    assert list(dialogue.feed(encode({"k": "news"}))) == [Unhandled("news")]


contents = st.one_of(
    st.binary(max_size=50),
    st.text(max_size=50).map(Text),
    st.builds(Media, st.text(), st.text(), st.integers(0, 1 << 40), st.text(), st.binary()),
    st.builds(Poll, st.text(), st.lists(st.text()).map(tuple), st.integers(0, 9)),
)


@given(contents)
def test_content_survives_encoding_and_decoding(content: Any) -> None:
    body = json.loads(json.dumps(wire_form(content)))
    assert content_of(body)[1] == content


@given(json_values)
def test_content_from_other_clients_may_be_any_json(value: Any) -> None:
    kind, _ = content_of({"type": "media", "kind": "x", "location": "y", "size": value})
    assert kind == "media"
    content_of(value)
