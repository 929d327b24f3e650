"""Sessions in the simulator under random faults: every send gets one, correct outcome."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.reached import assert_reached

from moored.kernel import Backoff
from moored.sessions import (
    Acked,
    CloseClass,
    Incoming,
    NotSent,
    Outcome,
    Outgoing,
    Rejected,
    SenderCrashed,
    Session,
    Sessions,
    SessionStopped,
    StepFailed,
    Tcp,
    Unknown,
)
from moored.sessions.events._event_queue import EventQueue
from moored.sessions.events._sink import Sink
from moored.sessions.link._link import Link
from moored.sessions.sending._acks import AckTable
from moored.sessions.sending._senders import Senders
from moored.sessions.transport._transport import Receiver, Transport
from moored.testing import Mutant, Sim, assert_caught, mutant, scaled, simulate
from moored.testing.demo import Demo, DemoServer
from moored.testing.demo._world import Denied

TROUBLE = 12.0
#: How much later than its timeout, or than the loss of its link, a send may end.
LATE = 0.5
PROFILES = ("ann", "ben")
#: All combinations of the protocol's options.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"cumulative": True},
    {"resume": True},
    {"cumulative": True, "resume": True},
)


@dataclass
class Sent:
    """One send, and its outcome."""

    profile: str
    recipient: str
    id: str
    began: float
    timeout: float
    #: Whether it may outlive its link.
    lives_on: bool
    cancelled: bool = False
    ended: float | None = None
    outcomes: list[Outcome] = field(default_factory=list)


class Server(DemoServer):
    """A server that records the ids that it has refused."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.refused_ids: set[str] = set()

    def _take(self, link: Any, sender: str, recipient: str, id: str, content: Any) -> Any:
        try:
            return super()._take(link, sender, recipient, id, content)
        except Denied:
            self.refused_ids.add(id)
            raise


class Inbox:
    """The messages posted to an account, and what its slow handler did with them."""

    def __init__(self, world: World, profile: str) -> None:
        self._world = world
        self._profile = profile
        self.posted: list[str] = []
        #: Each with the link over which it was begun.
        self.begun: list[tuple[Any, str]] = []
        self.handled: list[str] = []
        self.decrypted: list[str] = []
        self.decrypted_twice: list[str] = []
        #: The link over which the current message was begun.
        self.begun_over: Any = None
        #: Messages set aside before the handler saw them: they arrive out of order.
        self.set_aside: set[str] = set()
        #: The message at which the handler hangs, the first time.
        self.hangs_at = ""
        #: Whether the handler raises at random, and how often it has.
        self.fails = False
        self.failed = 0

    def post(self) -> None:
        id = f"in-{len(self.posted):03}"
        self.posted.append(id)
        self._world.server.deliver(self._profile, b"x", id=id)

    def _link(self) -> Any:
        session = self._world.sessions.whereis(self._profile)
        connection = None if session is None else session._runtime.connection
        return None if connection is None else connection.link

    async def decrypt(self, event: Incoming, session: Any) -> Incoming:
        if event.type == "messages_upsert":
            self.begun_over = self._link()
            await asyncio.sleep(self._world.chance.choice([0.0, 0.0, 0.1]))
            if self._world.chance.random() < 0.02:
                self.set_aside.add(event.data.id)
                self.begun_over = None
                raise RuntimeError("the ratchet is out of step")
            # (A message may be decrypted again only if its acknowledgement was lost.)
            if self.decrypted.count(event.data.id) > self.handled.count(event.data.id):
                self.decrypted_twice.append(event.data.id)
            self.decrypted.append(event.data.id)
        return event

    async def handle(self, event: Incoming) -> None:
        if event.type != "messages_upsert":
            return
        id = event.data.id
        self.begun.append((self.begun_over or self._link(), id))
        self.begun_over = None
        if id == self.hangs_at:
            self.hangs_at = ""
            await asyncio.sleep(1000.0)
        await asyncio.sleep(self._world.chance.choice([0.0, 0.0, 0.05, 0.4]))
        if self.fails and self._world.chance.random() < 0.03:
            self.failed += 1
            raise RuntimeError("a defect of the handler")
        self.handled.append(id)

    def check(self) -> None:
        """A queued message belongs to its link: each is begun at most once per link, in order."""
        assert not self.decrypted_twice, "a message that was not handled was decrypted twice"
        assert not [id for link, id in self.begun if link is None], (
            "a message was begun without a link"
        )
        again = {each: self.begun.count(each) for each in self.begun}
        assert set(again.values()) <= {1}, f"twice on one link: {again}"
        order = list(dict.fromkeys(id for _, id in self.begun if id not in self.set_aside))
        assert order == sorted(order), f"out of order: {order}"

    def check_complete(self) -> None:
        assert sorted(set(self.handled)) == self.posted, "a message was lost"
        assert self._world.server.mail(self._profile) == 0, "a message was not acknowledged"


class SlowTransport:
    """A transport that closes after a delay, and still receives until then."""

    keeps_bounds = False

    def __init__(self, inner: Transport, delay: float) -> None:
        self._inner = inner
        self._delay = delay

    def write(self, data: bytes) -> None:
        self._inner.write(data)

    @property
    def pending(self) -> int:
        return self._inner.pending

    def close(self) -> None:
        asyncio.get_running_loop().call_later(self._delay, self._inner.close)

    def abort(self) -> None:
        asyncio.get_running_loop().call_later(self._delay, self._inner.abort)


class SlowlyClosing:
    """An endpoint whose transports close slowly."""

    def __init__(self, inner: Tcp, sim: Sim) -> None:
        self._inner = inner
        self._sim = sim

    async def dial(self, receiver: Receiver) -> Transport:
        return SlowTransport(await self._inner.dial(receiver), self._sim.random(0.0, 3.0))

    def __str__(self) -> str:
        return str(self._inner)


class World:
    """A server, sessions, and their senders."""

    def __init__(self, sim: Sim, server: Server) -> None:
        self.sim = sim
        self.chance = sim.rng
        self.server = server
        self.sessions = Sessions(
            backoff=Backoff(0.1, 2.0, jitter="full"),
            connect_timeout=5.0,
            connect_rate=100.0,
            connect_burst=100,
        )
        self.sends: list[Sent] = []
        self.numbers = itertools.count()
        self.losses: dict[str, list[float]] = defaultdict(list)
        self.finals: dict[str, int] = {}
        self.inboxes = {profile: Inbox(self, profile) for profile in PROFILES}
        self.over = False
        #: How often each condition of the checks below was reached.
        self.reached: Counter[str] = Counter()

    @classmethod
    async def begin(cls, sim: Sim, **how: Any) -> World:
        server = Server(rng=sim.rng, **how)
        listening = asyncio.get_running_loop().create_future()

        async def main() -> None:
            await server.serve("server", 7)
            listening.set_result(None)
            await asyncio.get_running_loop().create_future()

        sim.host("server", main)
        await listening
        return cls(sim, server)

    def protocol(self, **how: Any) -> Demo:
        endpoint = SlowlyClosing(Tcp("server", 7), self.sim)
        protocol = Demo(endpoint, keepalive=4.0, patience=2.0, **how)
        protocol.redelivery = 1.0
        return protocol

    async def start(self, profile: str, protocol: Demo) -> Session:
        session = await self.sessions.start(
            profile,
            protocol,
            steps=[("encrypt", self._encrypt)],
            inbound_steps=[("decrypt", self.inboxes[profile].decrypt)],
            on_event=self.inboxes[profile].handle,
        )
        machine = session._runtime.core.link.machine

        def moved(move: Any) -> None:
            if machine.chart.at(move.source, "up"):
                self.losses[profile].append(self.sim.now)
            if machine.chart.at(move.target, "off/refused"):
                self.finals[profile] = session.generation

        machine.observe(moved)
        return session

    def _encrypt(self, outgoing: Outgoing, session: Any) -> Any:
        luck = self.chance.random()
        if luck < 0.02:
            raise StepFailed("no key for one device")
        if luck < 0.03:
            raise RuntimeError("the ratchet is out of step")
        return outgoing if luck < 0.6 else self._slowly(outgoing)

    async def _slowly(self, outgoing: Outgoing) -> Outgoing:
        await asyncio.sleep(self.chance.uniform(0.0, 0.3))
        luck = self.chance.random()
        if luck < 0.02:
            raise StepFailed("no answer from the key server")
        if luck < 0.03:
            raise RuntimeError("the ratchet is out of step")
        return outgoing

    async def sender(self, session: Session, recipient: str) -> None:
        """Send repeatedly, not always waiting for the outcome."""
        under_way: set[asyncio.Task[None]] = set()
        while not self.over:
            await asyncio.sleep(self.chance.uniform(0.0, 1.0))
            under_way.add(asyncio.create_task(self.send(session, recipient)))
            if self.chance.random() < 0.5:
                await asyncio.wait(under_way)
            under_way = {each for each in under_way if not each.done()}
        if under_way:
            await asyncio.wait(under_way)

    async def send(self, session: Session, recipient: str) -> None:
        chance = self.chance
        timeout = chance.choice([0.3, 3.0, 8.0])
        idempotent, hold = chance.random() < 0.3, chance.random() < 0.2
        sent = Sent(
            session.profile,
            recipient,
            f"{next(self.numbers)}",
            self.sim.now,
            timeout,
            idempotent or hold or session.protocol.resumes,
        )
        self.sends.append(sent)
        work = asyncio.ensure_future(
            session.send(
                recipient,
                b"x",
                id=sent.id,
                timeout=timeout,
                outcome=True,
                idempotent=idempotent,
                hold=hold,
            )
        )
        if chance.random() < 0.05:
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            sent.cancelled = work.cancel()
        await asyncio.wait({work})
        sent.ended = self.sim.now
        if not work.cancelled():
            sent.outcomes.append(work.result())

    async def writer(self, inbox: Inbox) -> None:
        """Post messages to an account, online or not."""
        while self.sim.now < TROUBLE:
            await asyncio.sleep(self.chance.choice([0.0, 0.2, 1.5]))
            inbox.post()

    async def trouble(self) -> None:
        sim, server, chance = self.sim, self.server, self.chance
        while sim.now < TROUBLE:
            await asyncio.sleep(chance.uniform(0.1, 2.0))
            profile = chance.choice(PROFILES)
            what = chance.randrange(12)
            if what == 0:
                server.cut(profile)
            elif what == 1:
                server.cut()
            elif what == 2:
                server.drop_acks = chance.randint(1, 5)
            elif what in (3, 4):
                server.duplicate_acks = not server.duplicate_acks
            elif what == 5:
                server.delay = chance.choice([0.0, 0.05, 1.0])
            elif what == 6:
                server.reject(chance.choice("xy"), chance.choice([463, None]))
            elif what == 7 and profile in server.online:
                server.restart(profile)
            elif what == 8 and profile in server.online:
                server.hang_up(profile, retry_after=chance.choice([None, 3.0]))
            elif what == 9:
                self.crash(profile)
            elif what == 10 and profile in server.online and chance.random() < 0.3:
                server.take_over(profile)
            elif what == 11 and chance.random() < 0.3:
                server.forget()
        server.delay, server.drop_acks = 0.0, 0
        for recipient in "xy":
            server.reject(recipient, None)

    def crash(self, profile: str) -> None:
        session = self.sessions.whereis(profile)
        if session is not None and session._runtime.connection is not None:
            session._runtime.connection.crash(RuntimeError("a defect"))

    # -- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        received = {each.id: each for each in self.server.received}
        for sent in self.sends:
            self._check_one(sent, received)
        self._check_order(received)
        for inbox in self.inboxes.values():
            inbox.check()
        for profile, generation in self.finals.items():
            self.reached["a session that must not reconnect"] += 1
            session = self.sessions.whereis(profile)
            assert session is None or session.generation == generation, "it reconnected by itself"

    def _check_one(self, sent: Sent, received: dict[str, Any]) -> None:
        assert sent.ended is not None, f"{sent} has no outcome"
        took = sent.ended - sent.began
        assert took <= sent.timeout + LATE, f"{sent} took {took} s"
        if sent.cancelled:
            self.reached["cancelled"] += 1
            return
        (outcome,) = sent.outcomes
        assert outcome.id == sent.id
        self.reached[type(outcome).__name__] += 1
        match outcome:
            case Acked():
                assert sent.id in received, f"{sent} was confirmed and never arrived"
            case NotSent() | Rejected():
                assert sent.id not in received, f"{sent} arrived: {received.get(sent.id)}"
            case Unknown():
                pass
        if not sent.lives_on:
            for lost in self.losses[sent.profile]:
                self.reached["in flight when its link was lost"] += sent.began < lost <= sent.ended
                spans = sent.began < lost < sent.ended - LATE
                assert not spans, (
                    f"{sent}: its link was lost at {lost}, and it was not settled then"
                )

    def _check_order(self, received: dict[str, Any]) -> None:
        lines: dict[tuple[str, str], list[int]] = defaultdict(list)
        for each in received.values():
            # A refused send whose refusal was lost may be accepted when it is written again, later.
            if each.id not in self.server.refused_ids:
                lines[each.profile, each.recipient].append(int(each.id))
        for line, ids in lines.items():
            assert ids == sorted(ids), f"{line} got {ids}"

    def check_idle(self) -> None:
        for session in self.sessions:
            assert len(session._runtime.sends.table) == 0
            assert len(session._runtime.sends.senders) == 0
            assert not session._runtime.sends.outbox
            connection = session._runtime.connection
            assert connection is None or len(connection.queries) == 0


async def random_faults(sim: Sim) -> Counter[str]:
    """Inject all kinds of faults, then let everything recover."""
    chance = sim.rng
    world = await World.begin(sim, window=chance.choice([None, 2, 10]))
    async with world.sessions:
        tasks = []
        for profile in PROFILES:
            world.inboxes[profile].fails = True
            session = await world.start(profile, world.protocol(**chance.choice(KINDS)))
            tasks += [asyncio.create_task(world.sender(session, recipient)) for recipient in "xy"]
            tasks.append(asyncio.create_task(world.writer(world.inboxes[profile])))
        sim.storm("server", until=TROUBLE, faults=("reset", "blackhole", "pause"), every=(1.0, 5.0))
        await world.trouble()
        await asyncio.sleep(8.0)
        world.over = True
        await asyncio.gather(*tasks)
        world.check()
        await asyncio.sleep(10.0)  # longer than any timeout: all deadlines are swept
        world.check_idle()
        for profile in PROFILES:
            session_now = world.sessions.whereis(profile)
            if session_now is None or profile in world.finals:
                continue
            assert session_now.state == "online", f"{session_now!r} did not reconnect"
            world.inboxes[profile].check_complete()
            assert isinstance(await session_now.send("x", b"last", outcome=True), Acked | NotSent)
            world.reached["online again"] += 1
    await asyncio.sleep(5.0)  # sockets take their time to close
    assert world.server.online == []
    for inbox in world.inboxes.values():
        handled, aside, failed = len(inbox.handled), len(inbox.set_aside), inbox.failed
        world.reached.update({"handled": handled, "set aside": aside, "handler failed": failed})
    return world.reached


async def one_cut(sim: Sim) -> None:
    """Cut the link once, with a socket that closes slowly: its events must change nothing."""
    world = await World.begin(sim)
    cumulative = sim.rng.random() < 0.5
    async with world.sessions:
        session = await world.sessions.connect("ann", world.protocol(cumulative=cumulative))
        world.server.delay = lambda: sim.random(0.0, 0.2)
        first = [asyncio.create_task(_outcome(session, f"a{each}")) for each in range(10)]
        await asyncio.sleep(sim.random(0.0, 0.3))
        connection = session._runtime.connection
        assert connection is not None
        # The server does not notice: its answers still arrive over the old socket.
        connection.close(CloseClass.TRANSIENT, "the network is gone, as far as we know")
        outcomes = await asyncio.gather(*first)
        received = {each.id for each in world.server.received}
        assert all(isinstance(each, Acked | Unknown | NotSent) for each in outcomes)
        assert all(each.id in received for each in outcomes if isinstance(each, Acked))
        await session.online(10.0)
        world.server.delay = 100.0
        later = [asyncio.create_task(_outcome(session, f"b{each}")) for each in range(3)]
        await asyncio.sleep(6.0)
        assert session.generation == 2, "an old socket has ended the new link"
        assert not any(each.done() for each in later), "confirmed by an old socket"
        for each in later:
            each.cancel()
        await asyncio.wait(later)


async def _outcome(session: Session, id: str) -> Outcome:
    return await session.send("x", b"", id=id, timeout=60.0, outcome=True)


async def final_close(sim: Sim) -> None:
    """Take over, ban or revoke the account: the session must not reconnect."""
    world = await World.begin(sim)
    server = world.server
    async with world.sessions:
        session = await world.sessions.connect("ann", world.protocol())
        sends = [asyncio.create_task(_outcome(session, str(each))) for each in range(3)]
        await asyncio.sleep(sim.random(0.1, 1.0))
        sim.rng.choice([server.take_over, server.ban, server.revoke])("ann")
        outcomes = await asyncio.wait_for(asyncio.gather(*sends), 10.0)
        assert len(outcomes) == 3
        await asyncio.sleep(1.0)
        links = server.accepted_links
        await asyncio.sleep(120.0)
        assert server.accepted_links == links, "it reconnected by itself"
        assert session.state == "offline/refused"
        assert isinstance(await session.send("x", b"", hold=True, outcome=True), NotSent)


async def sender_crash(sim: Sim) -> None:
    """Crash one recipient's sender: exactly its sends are settled, immediately."""
    world = await World.begin(sim)
    poison = str(sim.rng.randrange(10))

    async def encrypt(outgoing: Outgoing, session: Any) -> Outgoing:
        await asyncio.sleep(sim.random(0.0, 0.5))
        if outgoing.id == poison:
            raise RuntimeError("the ratchet is out of step")
        return outgoing

    async with world.sessions:
        session = await world.sessions.connect(
            "ann", world.protocol(), steps=[("encrypt", encrypt)]
        )
        world.server.delay = 30.0
        sends = [asyncio.create_task(_outcome(session, str(each))) for each in range(10)]
        other = asyncio.create_task(session.send("y", b"", id="other", timeout=60.0))
        outcomes = await asyncio.wait_for(asyncio.gather(*sends), 10.0)
        for outcome in outcomes:
            assert isinstance(outcome, Unknown | NotSent)
            assert isinstance(outcome.reason, SenderCrashed)
        received = {each.id for each in world.server.received}
        assert not received & {each.id for each in outcomes if isinstance(each, NotSent)}
        assert await other == Acked("other")
        assert session.generation == 1
        assert len(session._runtime.sends.senders) == len(session._runtime.sends.table) == 0


async def stopped(sim: Sim) -> None:
    """Stop a session with sends in flight: all of them are settled."""
    world = await World.begin(sim)
    async with world.sessions:
        session = await world.sessions.connect("ann", world.protocol())
        world.server.drop_acks = float("inf")
        sends = [asyncio.create_task(_outcome(session, str(each))) for each in range(20)]
        await asyncio.sleep(sim.random(0.0, 0.1))
        await session.stop()
        outcomes = await asyncio.wait_for(asyncio.gather(*sends), 1.0)
        received = {each.id for each in world.server.received}
        for outcome in outcomes:
            assert isinstance(outcome, NotSent | Unknown)
            assert isinstance(outcome, Unknown) or outcome.id not in received
        with pytest.raises(SessionStopped):
            await session.online()


async def stopped_receiving(sim: Sim) -> None:
    """Stop while messages are queued: the current one is finished, the rest is redelivered."""
    world = await World.begin(sim)
    inbox = world.inboxes["ann"]
    async with world.sessions:
        session = await world.sessions.connect("ann", world.protocol(), on_event=inbox.handle)
        for _ in range(30):
            inbox.post()
        hangs = sim.rng.random() < 0.2
        if hangs:
            inbox.hangs_at = "in-005"
        await asyncio.sleep(sim.random(0.0, 4.0))
        begun, before = len(inbox.begun), sim.now
        await sim.rng.choice([session.stop, world.sessions.close])()
        took = sim.now - before
        hung = hangs and not inbox.hangs_at
        assert took <= (5.1 if hung else 0.5), f"it took {took} s"
        assert len(inbox.begun) == begun, "another message was begun"
        assert len(inbox.handled) == begun - hung, "the current message was not finished"
        await asyncio.sleep(1.0)
        left = [frame["id"] for frame in world.server.world.account("ann").mail.values()]
        assert left == inbox.posted[len(inbox.handled) :], (
            "not every handled message was acknowledged"
        )
    inbox.hangs_at = ""
    async with Sessions() as again:
        world.sessions = again
        await again.connect("ann", world.protocol(), on_event=inbox.handle)
        await asyncio.sleep(15.0)
        assert inbox.handled == inbox.posted, "a message was handled twice, or not at all"
        inbox.check_complete()


async def _no_finish(self: Sink, timeout: float = 0.0) -> None:
    """Do not wait for the current message."""


def test_every_send_has_a_correct_outcome_under_random_faults() -> None:
    simulate(random_faults, seeds=scaled(2000, least=10))


def test_the_schedules_reach_every_condition_of_the_checks() -> None:
    wanted = {
        *("Acked", "Rejected", "NotSent", "Unknown", "cancelled"),
        *("in flight when its link was lost", "online again", "a session that must not reconnect"),
        *("handled", "set aside", "handler failed"),
    }
    assert_reached(random_faults, wanted, within=40)


def test_every_send_has_a_correct_outcome_with_inexact_timers() -> None:
    simulate(random_faults, seeds=scaled(400, least=4), timer_slack=0.001)


def test_old_socket_affects_no_send_of_the_new_link() -> None:
    simulate(one_cut, seeds=scaled(500, least=5))


def _stale_close(self: Link, error: BaseException | None) -> None:
    self._connection.close(CloseClass.TRANSIENT, "closed")


def _stale_bytes(self: Link, data: bytes) -> None:
    if self._connection.link is not None:
        ORIGINAL_RECEIVED(self._connection.link, data)


ORIGINAL_RECEIVED = Link.received


def _not_drained(self: AckTable, reason: Any, *, resumes: bool) -> None:
    """Settle nothing: every send waits for its timeout."""


async def _written_anyway(self: Senders, recipient: str, work: Any) -> None:
    parked, index, waiting = work
    try:
        while True:
            if waiting is None:
                if (found := self._walk(parked, index)) is None:
                    return
                index, waiting = found
            elif not await self._finish(parked, waiting):
                return
            else:
                index, waiting = index + 1, None
    except Exception as error:
        self.crashed(recipient, error)
        raise


def _unordered(self: Senders, parked: Any) -> None:
    try:
        if (waiting := self._walk(parked, 0)) is not None:
            self._submit(parked, *waiting)
    except Exception as error:
        self.crashed(parked.outgoing.recipient, error)


#: Each with the scenario that catches it; in `make test` those that the first schedules catch.
MUTANTS = [
    (
        one_cut,
        mutant(Link, "lost", _stale_close, name="the close of an old socket ends the new link"),
    ),
    (one_cut, mutant(Link, "received", _stale_bytes, name="an ack of an old socket is accepted")),
    (
        sender_crash,
        mutant(
            AckTable,
            "crashed",
            lambda self, recipient, reason: 0,
            name="a sender crash does not settle its sends",
        ),
    ),
    (
        stopped_receiving,
        mutant(Sink, "finish", _no_finish, name="stop does not wait for the current message"),
    ),
    (
        stopped_receiving,
        mutant(EventQueue, "refuse", lambda self: None, name="a stop begins every queued message"),
    ),
]
LATE_MUTANTS = [
    (
        random_faults,
        mutant(AckTable, "lost", _not_drained, name="a lost link does not settle its sends"),
    ),
    (
        final_close,
        mutant(CloseClass, "final", property(lambda self: False), name="a takeover is retried"),
    ),
    (random_faults, mutant(Senders, "_work", _written_anyway, name="a settled send is written")),
    (random_faults, mutant(Senders, "push", _unordered, name="sends overtake each other")),
    (
        random_faults,
        mutant(
            EventQueue, "link_lost", lambda self: None, name="queued messages outlive their link"
        ),
    ),
]


@pytest.mark.parametrize(
    ("scenario", "planted"),
    [*MUTANTS, *(pytest.param(*each, marks=pytest.mark.soak) for each in LATE_MUTANTS)],
    ids=lambda each: getattr(each, "name", ""),
)
def test_mutants_are_caught(scenario: Any, planted: Mutant) -> None:
    assert_caught(scenario, planted, within=200, clean=0)


def test_session_does_not_reconnect_after_a_final_close() -> None:
    simulate(final_close, seeds=scaled(200, least=4))


def test_sender_crash_settles_all_sends_of_its_recipient() -> None:
    simulate(sender_crash, seeds=scaled(200, least=4))


def test_stop_settles_all_sends() -> None:
    simulate(stopped, seeds=scaled(200, least=4))


def test_stop_leaves_queued_messages_to_the_next_session() -> None:
    simulate(stopped_receiving, seeds=scaled(200, least=4))
