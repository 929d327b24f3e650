"""A session over the demo protocol, in this process: outcomes, steps, lifecycle, events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.sessions.support import LIMIT, Broken, collect, until

from moored.kernel import Backoff
from moored.sessions import (
    Acked,
    AlreadyRunning,
    CloseClass,
    Incoming,
    LinkLost,
    Msg,
    NotConnected,
    NotSent,
    Outgoing,
    Poll,
    QueryFailed,
    QueryTimeout,
    Rejected,
    Repeat,
    SenderCrashed,
    SendNotSent,
    SendRejected,
    SendUnknown,
    Session,
    SessionError,
    Sessions,
    SessionStopped,
    StepFailed,
    Tcp,
    Text,
    Unknown,
    Unsupported,
)
from moored.testing import FaultProxy
from moored.testing.demo import Demo, DemoServer

# -- outcomes -----------------------------------------------------------------------------------


async def test_send_returns_when_the_server_has_confirmed_it(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    outcome = await alice.send("bob", b"hello", id="first")
    assert outcome == Acked("first")
    (received,) = server.received
    assert (received.profile, received.recipient, received.id) == ("alice", "bob", "first")


async def test_rejected_send_is_raised_or_returned(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.reject("bob", 463, "no such account")
    with pytest.raises(SendRejected, match="463") as caught:
        await alice.send("bob", b"hello", id="1")
    assert caught.value.outcome == Rejected("1", 463, "no such account")
    assert await alice.send("bob", b"", id="2", outcome=True) == caught.value.outcome.__class__(
        "2", 463, "no such account"
    )


async def test_link_loss_settles_written_sends_immediately(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    sending = asyncio.create_task(alice.send("bob", b"hello", outcome=True, timeout=3600))
    await until(lambda: server.received)
    server.cut("alice")
    outcome = await asyncio.wait_for(sending, 30)
    assert isinstance(outcome, Unknown)
    assert isinstance(outcome.reason, LinkLost)
    await alice.online(30)
    assert await alice.send("bob", b"again")


async def test_send_without_a_link_fails_immediately_as_not_sent(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    with pytest.raises(SendNotSent, match="safe to send it again") as caught:
        await alice.send("bob", b"hello", timeout=3600)
    assert isinstance(caught.value.__cause__, NotConnected)
    assert server.received == []


async def test_held_send_waits_for_the_link(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.refusing = True
    server.cut("alice")
    await until(lambda: alice.state != "online")
    held = [
        asyncio.create_task(alice.send("bob", b"hello", id=str(number), hold=True))
        for number in range(3)
    ]
    await until(lambda: alice.status()["waiting"] == 3)
    server.refusing = False
    assert [outcome.id for outcome in await asyncio.gather(*held)] == ["0", "1", "2"]
    assert [each.id for each in server.received] == ["0", "1", "2"]


async def test_held_send_that_times_out_was_not_sent(
    sessions: Sessions, server: DemoServer
) -> None:
    server.refusing = True
    alice = await sessions.start("alice", Demo(server))
    outcome = await alice.send("bob", b"hello", hold=True, timeout=0.05, outcome=True)
    assert isinstance(outcome, NotSent)
    assert outcome.stage == "relay"


async def test_idempotent_send_is_written_again_with_its_id(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    sending = asyncio.create_task(alice.send("bob", b"hello", id="once", idempotent=True))
    await until(lambda: server.received)
    server.cut("alice")
    assert await asyncio.wait_for(sending, 30) == Acked("once")
    (received,) = server.received
    assert received.duplicates == 1


async def test_send_without_a_timeout_has_that_of_sessions(server: DemoServer) -> None:
    async with Sessions(send_timeout=0.05) as sessions:
        alice = await sessions.connect("alice", Demo(server))
        server.drop_acks = 1
        assert isinstance(await alice.send("bob", b"hello", outcome=True), Unknown)
        assert await alice.send("bob", b"next", timeout=LIMIT)
    with pytest.raises(ValueError, match="send_timeout"):
        Sessions(send_timeout=0)


async def test_send_that_is_not_confirmed_in_time_is_unknown(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    with pytest.raises(SendUnknown, match="only if a duplicate does no harm"):
        await alice.send("bob", b"hello", timeout=0.05)
    # A late ack must not settle the next send.
    assert await alice.send("bob", b"next")


async def test_duplicate_acks_change_nothing(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.duplicate_acks = True
    outcomes = [await alice.send("bob", b"", id=str(number)) for number in range(5)]
    assert outcomes == [Acked(str(number)) for number in range(5)]
    assert len(server.received) == 5
    assert all(each.duplicates == 0 for each in server.received)


async def test_cumulative_acks_settle_every_send(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server, cumulative=True))
    sends = [alice.send(f"to {number % 7}", b"", id=str(number)) for number in range(50)]
    assert len(await asyncio.gather(*sends)) == 50


async def test_send_window_of_the_server_is_respected(sessions: Sessions) -> None:
    server = DemoServer(window=3)
    server.drop_acks = float("inf")
    alice = await sessions.connect("alice", Demo(server))
    sends = [asyncio.create_task(alice.send("bob", b"", outcome=True)) for _ in range(10)]
    await until(lambda: len(server.received) == 3)
    assert alice.status()["waiting"] == 7
    server.cut("alice")
    outcomes = await asyncio.gather(*sends)
    assert [type(each) for each in outcomes] == [Unknown] * 3 + [NotSent] * 7
    assert len(server.received) == 3


async def test_duplicate_ack_frees_one_place_in_the_window(sessions: Sessions) -> None:
    server = DemoServer(window=2)
    server.duplicate_acks = True
    alice = await sessions.connect("alice", Demo(server))
    await asyncio.gather(*(alice.send("bob", b"") for _ in range(5)))
    server.drop_acks = float("inf")
    before = len(server.received)
    for _ in range(10):
        await alice.send("bob", b"", wait=False)
    await until(lambda: len(server.received) >= before + 2)
    await alice.query({"do": "echo"})  # answered after everything written before it
    assert len(server.received) == before + 2


async def test_cancelled_send_that_was_not_written_is_never_written(
    sessions: Sessions, server: DemoServer
) -> None:
    server.refusing = True
    alice = await sessions.start("alice", Demo(server))
    sending = asyncio.create_task(alice.send("bob", b"hello", hold=True))
    await until(lambda: alice.status()["sending"])
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert alice.status()["sending"] == 0
    server.refusing = False
    await alice.online(30)
    await alice.send("carol", b"after")
    assert [each.recipient for each in server.received] == ["carol"]


async def test_send_without_wait_returns_immediately_and_is_counted(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.send("bob", b"hello", wait=False)
    await until(lambda: alice.status()["acked"] == 1)


async def test_ack_of_a_poll_carries_its_secret(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    outcome = await alice.send_poll("bob", Poll("tea?", ("yes", "no")))
    assert outcome.extra["secret"]


async def test_peer_can_request_a_recent_send_again(sessions: Sessions, server: DemoServer) -> None:
    class Repeating(Demo):
        repeats = True

    alice = await sessions.connect("alice", Repeating(server))
    await alice.send("bob", b"hello", id="1")
    connection, link = alice._runtime.connection, alice._runtime.link
    assert connection is not None
    assert link is not None
    for id in ("1", "never sent"):
        link._on_repeat(Repeat(id))
    await until(lambda: server.received[0].duplicates == 1)
    status = alice.status()
    assert (status["repeated"], status["not_repeated"]) == (1, 1)
    # A crash discards the cache of recent sends.
    connection.crash(RuntimeError("a defect"))
    await until(lambda: alice.generation > 1 and alice.state == "online")
    assert alice._runtime.link is not None
    alice._runtime.link._on_repeat(Repeat("1"))
    assert alice.status()["not_repeated"] == 2


async def test_repeat_requests_do_not_fill_the_send_buffer(sessions: Sessions) -> None:
    class Repeating(Demo):
        repeats = True

    async with (
        DemoServer() as server,
        FaultProxy("127.0.0.1", (await server.serve()).port) as proxy,
    ):
        alice = await sessions.connect("alice", Repeating(Tcp("127.0.0.1", proxy.port)))
        await alice.send("bob", bytes(150_000), id="1")
        link = alice._runtime.link
        assert link is not None
        proxy.stall()
        for _ in range(200):
            link._on_repeat(Repeat("1"))
        assert alice.status()["not_repeated"] > 100
        assert link.pending < 1_000_000
        proxy.resume()


# -- steps and senders --------------------------------------------------------------------------


async def test_sends_to_one_recipient_keep_their_order_and_others_overtake_them(
    sessions: Sessions, server: DemoServer
) -> None:
    gate = asyncio.Event()

    async def slow(outgoing: Outgoing, session: Any) -> Outgoing:
        if outgoing.id == "slow":
            await gate.wait()
        else:
            await asyncio.sleep(0)
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", slow)])
    first = asyncio.create_task(alice.send("bob", b"", id="slow"))
    second = asyncio.create_task(alice.send("bob", b"", id="behind"))
    assert await alice.send("carol", b"", id="beside")
    assert not first.done()
    assert not second.done()
    gate.set()
    await asyncio.gather(first, second)
    assert [each.id for each in server.received] == ["beside", "slow", "behind"]
    assert len(alice._runtime.sends.senders) == 0


async def test_failed_step_fails_its_own_send_only(sessions: Sessions, server: DemoServer) -> None:
    async def bundle(outgoing: Outgoing, session: Any) -> Outgoing:
        await asyncio.sleep(0)
        if outgoing.id == "bad":
            raise StepFailed("no bundle for this device")
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("ensure_sessions", bundle)])
    bad, good = await asyncio.gather(
        alice.send("bob", b"", id="bad", outcome=True), alice.send("bob", b"", id="good")
    )
    assert isinstance(bad, NotSent)
    assert bad.stage == "ensure_sessions"
    assert good == Acked("good")


@pytest.mark.parametrize("is_async", [True, False])
async def test_crashed_sender_fails_the_sends_of_its_recipient_only(
    sessions: Sessions, server: DemoServer, is_async: bool
) -> None:
    async def later(outgoing: Outgoing) -> Outgoing:
        await asyncio.sleep(0)
        if outgoing.id == "poison":
            raise RuntimeError("ratchet out of step")
        return outgoing

    def encrypt(outgoing: Outgoing, session: Any) -> Any:
        if is_async:
            return later(outgoing)
        if outgoing.id == "poison":
            raise RuntimeError("ratchet out of step")
        return outgoing

    server.drop_acks = 1
    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", encrypt)])
    written = asyncio.create_task(alice.send("bob", b"", id="written", outcome=True))
    await until(lambda: server.received)
    poison = asyncio.create_task(alice.send("bob", b"", id="poison", outcome=True))
    behind = asyncio.create_task(alice.send("bob", b"", id="behind", outcome=True))
    other = asyncio.create_task(alice.send("carol", b"", id="other"))
    outcomes = await asyncio.gather(written, poison, behind)
    assert isinstance(outcomes[0], Unknown)
    assert isinstance(outcomes[1], NotSent)
    assert isinstance(outcomes[0].reason, SenderCrashed)
    assert isinstance(outcomes[1].reason, SenderCrashed)
    if is_async:
        assert isinstance(outcomes[2], NotSent)
        assert isinstance(outcomes[2].reason, SenderCrashed)
    assert await other == Acked("other")
    assert alice.state == "online"
    assert await alice.send("bob", b"", id="afterwards")
    assert alice.status()["sender_crashes"] == 1


async def test_send_that_ends_during_a_step_is_never_written(
    sessions: Sessions, server: DemoServer
) -> None:
    gate = asyncio.Event()

    async def slow(outgoing: Outgoing, session: Any) -> Outgoing:
        await gate.wait()
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", slow)])
    sending = asyncio.create_task(alice.send("bob", b"", outcome=True))
    await until(lambda: len(alice._runtime.sends.senders))
    server.cut("alice")
    outcome = await asyncio.wait_for(sending, 30)
    assert isinstance(outcome, NotSent)
    assert outcome.stage == "encrypt"
    await alice.online(30)
    gate.set()
    await until(lambda: not len(alice._runtime.sends.senders))
    assert await alice.send("carol", b"")
    assert [each.recipient for each in server.received] == ["carol"]


# -- the connection -----------------------------------------------------------------------------


async def test_session_crash_settles_its_sends_and_it_reconnects_by_itself(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    bob = await sessions.connect("bob", Demo(server))
    events = collect(alice)
    server.drop_acks = 1
    sending = asyncio.create_task(alice.send("bob", b"", outcome=True, timeout=3600))
    await until(lambda: server.received)
    assert alice._runtime.connection is not None
    alice._runtime.connection.crash(RuntimeError("a defect"))
    outcome = await asyncio.wait_for(sending, 30)
    assert isinstance(outcome, Unknown)
    assert "a defect" in str(outcome.reason)
    await until(lambda: alice.state == "online")
    assert sessions.whereis("alice") is alice
    assert await alice.send("bob", b"after")
    assert bob.generation == 1
    assert bob.state == "online"
    assert [each.type for each in events].count("session_crashed") == 1


async def test_session_that_crashes_too_often_ends_and_others_continue(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.start("alice", Broken(server))
    bob = await sessions.connect("bob", Demo(server))
    events = collect(alice)
    for number in range(10):
        server.deliver("alice", Text(str(number)))
    await until(lambda: sessions.whereis("alice") is None)
    assert alice.state == "stopped"
    with pytest.raises(SessionStopped):
        await alice.online(1)
    outcome = await alice.send("bob", b"", outcome=True)
    assert isinstance(outcome, NotSent)
    assert bob.state == "online"
    await until(lambda: getattr(events[-1].data, "state", "") == "stopped")
    assert await sessions.connect("alice", Demo(server))


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda server: server.take_over("alice"), CloseClass.TAKEOVER),
        (lambda server: server.ban("alice"), CloseClass.BANNED),
        (lambda server: server.revoke("alice"), CloseClass.AUTHENTICATION),
    ],
)
async def test_final_close_stops_the_session_with_an_event_and_is_not_retried(
    sessions: Sessions,
    server: DemoServer,
    break_it: Callable[[DemoServer], None],
    kind: CloseClass,
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    events = collect(alice)
    server.drop_acks = 1
    sending = asyncio.create_task(
        alice.send("bob", b"", outcome=True, timeout=3600, idempotent=True)
    )
    await until(lambda: server.received)
    break_it(server)
    assert isinstance(await asyncio.wait_for(sending, 30), Unknown)
    await until(lambda: alice.state == "offline/refused")
    await until(lambda: events and events[-1].data.state == "offline/refused")
    assert events[-1].data.kind is kind
    links = server.accepted_links
    await asyncio.sleep(0.2)  # the longest pause is 0.05 s: a retry would be seen
    assert server.accepted_links == links
    assert sessions.whereis("alice") is alice  # the profile is still taken


async def test_restart_requested_by_the_server_is_immediate(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.restart("alice")
    await until(lambda: alice.generation == 2 and alice.state == "online")
    assert alice._runtime.core.link.backoff.attempts == 0


async def test_disconnect_keeps_the_profile_and_connect_restores_the_link(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    assert alice.state == "offline/resting"
    await until(lambda: server.online == [])
    with pytest.raises(AlreadyRunning) as caught:
        await sessions.start("alice", Demo(server))
    assert caught.value.current is alice
    await alice.connect()
    assert server.online == ["alice"]


async def test_stop_frees_the_profile_and_via_finds_the_next_session(
    sessions: Sessions, server: DemoServer
) -> None:
    via = sessions.via("alice")
    with pytest.raises(SessionError, match="no session"):
        via.state  # noqa: B018
    first = await sessions.connect("alice", Demo(server))
    assert via.state == "online"
    await sessions.stop(via)
    assert sessions.whereis("alice") is None
    assert first.state == "stopped"
    second = await sessions.connect("alice", Demo(server))
    await via.send("bob", b"hello")
    assert second.status()["acked"] == 1
    await sessions.stop("alice")
    await sessions.stop("alice")


async def test_failed_connect_leaves_nothing_behind(sessions: Sessions, server: DemoServer) -> None:
    server.refusing = True
    with pytest.raises(NotConnected, match="not online within"):
        await sessions.connect("alice", Demo(server), timeout=0.05)
    assert len(sessions) == 0
    server.ban("bob")
    server.refusing = False
    with pytest.raises(NotConnected, match="banned"):
        await sessions.connect("bob", Demo(server))
    assert len(sessions) == 0


async def test_only_one_of_many_concurrent_starts_gets_the_profile(
    sessions: Sessions, server: DemoServer
) -> None:
    starts = [sessions.start("alice", Demo(server)) for _ in range(10)]
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    assert sum(isinstance(each, Session) for each in outcomes) == 1
    assert sum(isinstance(each, AlreadyRunning) for each in outcomes) == 9


async def test_leaving_the_sessions_block_settles_all_sends(server: DemoServer) -> None:
    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Demo(server))
        server.drop_acks = 1
        sending = asyncio.create_task(alice.send("bob", b"", outcome=True, timeout=3600))
        await until(lambda: server.received)
    assert isinstance(await sending, Unknown)
    assert server.online == []


# -- login, queries --- ------------------------------------------------------------------------


async def test_pairing_gives_credentials_that_the_next_login_uses() -> None:
    server = DemoServer(pairing=True)
    async with Sessions(backoff=Backoff(0.01, 0.05)) as sessions:
        alice = await sessions.start("alice", Demo(server))
        events = collect(alice)
        await until(lambda: [each for each in events if each.type == "login"])
        assert alice.state == "connecting/login"
        server.confirm("alice")
        await alice.online(30)
        assert await alice.send("bob", b"hello")
        await sessions.stop(alice)
        again = await sessions.connect("alice", Demo(server))
        assert again.generation == 1
        assert "login" not in [each.type for each in collect(again)]


async def test_concurrent_queries_get_their_own_answers(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    queries = [alice.query({"do": "echo", "value": number}) for number in range(20)]
    assert await asyncio.gather(*queries) == list(range(20))
    with pytest.raises(QueryFailed):
        await alice.query({"do": "nothing of the kind"})


async def test_query_fails_by_timeout_or_when_the_link_is_lost(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.delay = 3600
    with pytest.raises(QueryTimeout, match=r"within 0\.05 s"):
        await alice.query({"do": "echo"}, timeout=0.05)
    asking = asyncio.create_task(alice.query({"do": "echo"}, timeout=3600))
    assert alice._runtime.connection is not None
    pending = alice._runtime.connection.queries
    await until(lambda: len(pending) == 1)
    server.cut("alice")
    with pytest.raises(QueryFailed, match="link was lost"):
        await asyncio.wait_for(asking, 30)
    assert len(pending) == 0


async def test_missing_feature_of_a_protocol_is_reported(
    sessions: Sessions, server: DemoServer
) -> None:
    class Plain(Demo):
        features = frozenset()

    alice = await sessions.connect("alice", Plain(server))
    with pytest.raises(Unsupported, match="demo does not support polls"):
        await alice.send_poll("bob", Poll("tea?", ("yes", "no")))


async def test_presence_read_markers_groups_and_media_reach_the_other_session(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    bob = await sessions.connect("bob", Demo(server))
    seen = collect(bob)
    await bob.query({"do": "watch", "who": "alice"})
    await alice.set_presence("composing")
    group = await alice.group("create", name="tea", members=["bob"])
    media = await alice.upload("image", b"\x89PNG", caption="a cat")
    assert await alice.download(media) == b"\x89PNG"
    await alice.send_media("bob", media)
    await until(lambda: [each for each in seen if each.type == "messages_upsert"])
    (message,) = [each.data for each in seen if each.type == "messages_upsert"]
    assert isinstance(message, Msg)
    assert message.type == "media"
    assert await bob.download(message.content) == b"\x89PNG"
    await bob.mark_read("alice", message.id)
    assert {"presence_update", "group_update"} <= {each.type for each in seen}
    assert group


# -- receiving ----------------------------------------------------------------------------------


async def test_message_is_acknowledged_when_its_handler_has_returned(
    sessions: Sessions, server: DemoServer
) -> None:
    gate, got = asyncio.Event(), []

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            got.append(event.data)
            await gate.wait()

    await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", Text("hello"), sender="bob")
    await until(lambda: got)
    assert server.mail("alice") == 1
    gate.set()
    await until(lambda: server.mail("alice") == 0)
    (message,) = got
    assert (message.type, message.content, message.sender) == ("text", Text("hello"), "bob")


async def test_message_whose_handler_failed_is_redelivered_on_the_next_link(
    sessions: Sessions, server: DemoServer
) -> None:
    got: list[Msg] = []

    def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            got.append(event.data)
            if len(got) == 1:
                raise RuntimeError("a defect of the handler")

    alice = await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", Text("hello"))
    await until(lambda: alice.status()["handler_failures"] == 1)
    assert alice.state == "online"
    server.cut("alice")
    await until(lambda: len(got) == 2)
    assert got[0].id == got[1].id
    assert got[1].duplicate
    await until(lambda: server.mail("alice") == 0)


async def test_events_wait_for_a_consumer_and_dropped_ones_are_reported(server: DemoServer) -> None:
    async with Sessions(events=5) as sessions:
        alice = await sessions.connect("alice", Demo(server))
        for number in range(9):
            server.deliver("alice", Text(str(number)))
        await until(lambda: alice.status()["events_dropped"])
        got = []
        async for event in alice.events():
            got.append(event)
            if len(got) == 6:
                break
        assert got[0].type == "events_dropped"
        assert got[0].data == alice.status()["events_dropped"]
        # Dropped messages were not acknowledged: the server still has them.
        await until(lambda: server.mail("alice") <= 6)


async def test_event_of_a_consumer_that_left_is_delivered_again(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.deliver("alice", Text("hello"))
    async for event in alice.events():
        if event.type == "messages_upsert":
            first = event
            break
    assert server.mail("alice") == 1
    await until(lambda: len(alice._runtime.sink.queue) == 1)
    async for event in alice.events():
        if event is first:
            server.deliver("alice", Text("more"))
        elif event.type == "messages_upsert":
            break
    await until(lambda: server.mail("alice") == 1)


@pytest.mark.every_loop
async def test_leaving_the_events_block_acknowledges_the_last_event(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))

    async def take() -> Any:
        async with alice.events() as events:
            async for event in events:
                if event.type == "messages_upsert":
                    if event.data.content == Text("bad"):
                        raise ValueError("bad")
                    return event.data.content
        return None

    for text in ("one", "two", "bad"):
        server.deliver("alice", Text(text))
    assert await take() == Text("one")
    await until(lambda: server.mail("alice") == 2)
    assert await take() == Text("two")
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            await take()
    assert server.mail("alice") == 1


async def test_each_state_change_is_reported_once(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    events = collect(alice)
    server.cut("alice")
    await until(lambda: alice.generation == 2 and alice.state == "online")
    await alice.stop()
    states = [each.data.state for each in events if each.type == "connection_update"]
    assert states == ["online", "connecting/waiting", "online", "stopped"]
    assert [each.data.reason == "" for each in events] == [True, False, True, False]


async def test_second_consumer_replaces_the_first(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    first: list[str] = []

    async def consume() -> None:
        first.extend([event.type async for event in alice.events()])

    consumer = asyncio.create_task(consume())
    queue: asyncio.Queue[Incoming] = asyncio.Queue()
    await until(lambda: not len(alice._runtime.sink.queue))
    alice.attach(queue)
    await asyncio.wait_for(consumer, 30)
    server.deliver("alice", Text("hello"))
    event = await asyncio.wait_for(queue.get(), 30)
    assert event.type == "messages_upsert"
    assert "messages_upsert" not in first


async def test_malformed_bytes_close_one_link_and_the_session_reconnects(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    events = collect(alice)
    server.say("alice", b"\xff" * 64)
    await until(lambda: alice.generation == 2 and alice.state == "online")
    assert alice.status()["crashes"] == 0
    assert any("violated the protocol" in getattr(each.data, "reason", "") for each in events)


async def test_unhandled_frames_are_counted(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.say("alice", {"k": "nothing that we know"})
    await until(lambda: alice.status()["unhandled"] == 1)
    assert alice.state == "online"


async def test_sends_of_an_offline_session_are_confirmed_without_a_link(
    sessions: Sessions, server: DemoServer
) -> None:
    def never(outgoing: Outgoing, session: Any) -> Outgoing:
        raise AssertionError("nothing is encrypted offline")

    alice = await sessions.connect("alice", Demo(server), offline=True, steps=[("encrypt", never)])
    assert await alice.send("bob", b"hello", id="1") == Acked("1")
    outcome = await alice.send_poll("bob", Poll("tea?", ("yes", "no")))
    assert outcome.extra is not None
    assert server.accepted_links == 0


async def test_recorder_status_and_repr_hide_contents_and_recipients(
    sessions: Sessions, server: DemoServer
) -> None:
    def poison(outgoing: Outgoing, session: Any) -> Outgoing:
        if outgoing.id == "poison":
            raise RuntimeError("defect")
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", poison)])
    await alice.send("very-secret-recipient", b"very-secret-content")
    await alice.send("very-secret-recipient", b"very-secret-content", id="poison", outcome=True)
    server.cut("alice")
    await alice.online(30)
    shown = f"{sessions.recorder.events()} {sessions.status()} {alice!r} {sessions!r}"
    assert "very-secret" not in shown
