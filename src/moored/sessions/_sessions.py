"""All accounts of a process: each with a tree of its own, none linked to whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from moored.kernel import (
    Backoff,
    Child,
    Clock,
    Context,
    NotRunning,
    Recorder,
    Registry,
    RestartIntensityExceeded,
    StartFailed,
    SupervisionError,
    Supervisor,
    Tree,
    counted,
    describe,
    patiently,
    refuse,
)
from moored.leases import LeaseRefused, Leases
from moored.leases import connect as connect_leases

from ._checks import check_loop, check_protocol, check_steps, check_texts
from ._connection import Connection
from ._content import Event
from ._errors import AlreadyRunning, SessionError, SessionStopped
from ._leasing import Leasing
from ._protocol import Protocol, Step
from ._records import Corruption, Records
from ._retry_cache import MemoryRetryCache, RetryCache
from ._session import Session
from ._sink import Handler
from ._storage import Keys, Storage, open_storage
from ._via import SessionVia

__all__ = ["Sessions"]

#: How often a session's parts may crash before it is given up.
INTENSITY = (5, 60.0)
#: How long what is under way may take when a session ends: its start, changes of its records.
CLOSING = 5.0


class Sessions:
    """The accounts of a process.

    :param storage: where credentials and records are kept: a `Storage`, or the path of a SQLite
        file, `files:DIRECTORY`, or `memory:`, which forgets everything.
    :param storage_key: encrypts what is stored: 32 bytes, or a passphrase; of several, the first
        one writes, and all of them read.
    :param retry_cache: makes the memory of recent sends, for protocols whose peers may ask for one
        again; the last 512 of 5 minutes, if it is not given.
    :param leases: with a client or a URL of `moored.leases`, a profile has one session in the
        whole cluster; without, one in this object.
    :param lease_ttl: after so long without a sign of life of its holder, a profile is free.
    :param connect_rate: how many links are made in a second, at most, over all sessions.
    :param connect_burst: how many of them at once.
    :param connect_timeout: how long making a link may take, its handshake included.
    :param backoff: the pauses between attempts; from 1 s to 60 s with full jitter, if not given.
    :param events: how many events of a session may wait for somebody to take them; as many again
        of those that are acknowledged to the server.
    """

    def __init__(
        self,
        *,
        storage: Storage | str | Path = "memory:",
        storage_key: Keys | None = None,
        leases: Leases | str | None = None,
        lease_ttl: float = 30.0,
        connect_rate: float = 50.0,
        connect_burst: int = 50,
        connect_timeout: float = 30.0,
        backoff: Backoff | None = None,
        events: int = 1000,
        retry_cache: Callable[[], RetryCache] = MemoryRetryCache,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        name: str = "sessions",
    ) -> None:
        refuse(
            "Sessions",
            [
                f"{what}={value!r} must be more than 0"
                for what, value in (
                    ("lease_ttl", lease_ttl),
                    ("connect_rate", connect_rate),
                    ("connect_burst", connect_burst),
                    ("connect_timeout", connect_timeout),
                    ("events", events),
                )
                if not value > 0
            ],
        )
        self.name = name
        self._clock = clock or Clock.current()
        self.recorder = recorder or Recorder(clock=self._clock)
        self._storage = open_storage(storage, key=storage_key)
        # Whether it has to be said yet that credentials are gone with the process.
        self._forgetful = not self._storage.durable
        self._leasing = Leasing(leases, name=name, ttl=lease_ttl, clock=self._clock)
        self._connect_timeout = connect_timeout
        self._backoff = backoff or Backoff(1.0, 60.0, jitter="full", clock=self._clock)
        self._events = events
        self._retry_cache = retry_cache
        self._rates = connect_leases("memory://", clock=self._clock, name=f"{name}/rates")
        self._rate = self._rates.rate_limit("links", rate=connect_rate, burst=connect_burst)
        self._registry: Registry[str, Session] = Registry(name)
        self._starting: dict[str, Session] = {}
        # Starts that are under way, by profile; done with the start, whatever comes of it.
        self._starts: dict[str, asyncio.Future[None]] = {}
        self._root = Supervisor(name, recorder=self.recorder, clock=self._clock)
        self._tasks: set[asyncio.Task[None]] = set()
        # What the sessions that are over have counted.
        self._past: dict[str, Counter[str]] = {}
        self._state = "new"
        # Where all of it happens, once it is open.
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the storage and the leases; `async with` does it."""
        if self._state != "new":
            raise SessionError(f"{self!r} has been opened before: make a new one")
        self._state = "open"
        self._loop = asyncio.get_running_loop()
        try:
            await self._storage.open()
            await self._rates.open()
            await self._leasing.open(self.recorder)
            await self._root.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop all sessions side by side, and let go of everything.

        It takes as long as the slowest of them. Being cancelled does not cut it short: the
        cancellation is raised afterwards.
        """
        if self._state != "open":
            return
        self._state = "closed"
        caller = asyncio.current_task()
        closing = asyncio.get_running_loop().create_task(self._close(caller))
        await patiently(closing)
        closing.result()

    async def _close(self, caller: asyncio.Task[Any] | None) -> None:
        ends = [self._end(each, "everything is closed", caller) for each in self]
        await asyncio.gather(*ends, return_exceptions=True)  # the supervisor has told what failed
        try:
            await self._root.stop()
        finally:
            async with contextlib.AsyncExitStack() as rest:
                rest.push_async_callback(self._storage.close)
                rest.push_async_callback(self._rates.close)
                rest.push_async_callback(self._leasing.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- sessions ------------------------------------------------------------------------------

    async def start(
        self,
        profile: str,
        protocol: Protocol,
        *,
        steps: Sequence[tuple[str, Step]] = (),
        on_event: Handler | asyncio.Queue[Event] | None = None,
        offline: bool = False,
    ) -> Session:
        """Start the session of a profile, which then connects by itself, and return at once.

        Raises `AlreadyRunning` if the profile has one, here or, with leases, anywhere.

        :param steps: what a send goes through after the steps of the protocol.
        :param on_event: a handler or a queue for its events; more can be attached later.
        :param offline: without a server: sends answer as a confirmed one would, nothing is sent.
        """
        if self._state != "open":
            raise SessionError(f"{self!r} is not open: use it with async with")
        check_loop(asyncio.get_running_loop(), self._loop)
        check_texts(profile=profile)
        check_protocol(protocol)
        check_steps(steps)
        if not profile:
            raise SessionError("a profile must have a name")
        if (current := self._starting.get(profile)) is not None:
            raise AlreadyRunning(f"{profile!r} has a session already: {current!r}", current)
        if protocol.inbound_window is not None and protocol.inbound_window > self._events:
            raise SessionError(
                f"the server may send {protocol.inbound_window} messages at once, and events="
                f"{self._events} leaves no room for them: raise events, or lower the protocol's"
            )
        name = quote(profile, safe="@+~ ")
        records = Records(
            self._storage,
            profile,
            on_corrupt=partial(self._corrupt, profile),
            may_write=partial(self._has_lease, profile) if self._leasing.needed else None,
        )
        session = Session(
            self,
            profile,
            protocol,
            name=f"{self._root.path}/{name}",
            records=records,
            steps=steps,
            backoff=self._backoff.fresh(),
            clock=self._clock,
            recorder=self.recorder,
            connect_timeout=self._connect_timeout,
            events=self._events,
            offline=offline,
        )
        session.attach(on_event)
        self._starting[profile] = session
        under_way = self._starts[profile] = asyncio.get_running_loop().create_future()
        try:
            await self._storage.new(profile)
            await self._leasing.renew(session)
            # The one before may have freed its profile and not quite be gone.
            await self._root.stop_child(name)
            session._tree = await self._root.start_child(self._tree(session, name))
        except BaseException as error:
            stop_asked = session._stop_asked
            await self._over(session, describe(error))
            if stop_asked and isinstance(error, Exception):
                raise SessionStopped(session._why_offline()) from error
            if isinstance(error, LeaseRefused):
                raise AlreadyRunning(str(error), str(error)) from error
            cause: BaseException = error
            while isinstance(cause, StartFailed) and cause.__cause__ is not None:
                cause = cause.__cause__  # each supervisor on the way has wrapped it
            if cause is not error:
                raise cause from cause.__cause__
            raise
        finally:
            if self._starts.get(profile) is under_way:
                del self._starts[profile]
            under_way.set_result(None)
        return session

    async def connect(
        self, profile: str, protocol: Protocol, *, timeout: float = 30.0, **options: Any
    ) -> Session:
        """Start the session of a profile, and wait until it is online; all or nothing."""
        session = await self.start(profile, protocol, **options)
        try:
            await session.online(timeout)
        except BaseException:
            await self.stop(session)
            raise
        return session

    async def stop(self, session: Session | SessionVia | str) -> None:
        """End a session, and free its profile; harmless if there is none.

        One that is being started is not started: whoever started it gets `SessionStopped`.
        """
        profile = session if isinstance(session, str) else session.profile
        found = self._starting.get(profile)
        if found is None or (type(session) is Session and found is not session):
            return
        check_loop(asyncio.get_running_loop(), self._loop)
        end = self._end(found, "it was stopped", asyncio.current_task())
        ending = asyncio.get_running_loop().create_task(end)
        self._tasks.add(ending)
        ending.add_done_callback(self._tasks.discard)
        await asyncio.shield(ending)  # it ends, even if whoever asked for it has gone
        if profile not in self._starting:
            # Once more, and only now: the last that is recorded of it is that it has stopped.
            for part in ("", "/connection", "/senders"):
                self.recorder.forget(found._name + part)

    async def _end(self, session: Session, why: str, caller: asyncio.Task[Any] | None) -> None:
        session._sink.closes(caller)
        # While it is online: what a handler has in hand is finished, answered and acknowledged.
        await session._sink.finish()
        if self._starting.get(session.profile) is not session:
            return  # somebody else has ended it meanwhile
        if not session._core.stopped:
            session._stop_asked = True
            session._core.stop(why)
        under_way = self._starts.get(session.profile)
        with contextlib.suppress(NotRunning):
            await self._root.stop_child(session._name.rpartition("/")[2])
        if under_way is not None:
            # There was nothing to stop yet, perhaps: the start sees it, and cleans up.
            await asyncio.wait((under_way,), timeout=CLOSING)

    def whereis(self, profile: str) -> Session | None:
        """The session of a profile, if it has one in this process."""
        return self._registry.whereis(profile)

    def via(self, profile: str) -> SessionVia:
        """The session of a profile, looked up at each use, so that it survives a new start."""
        return SessionVia(self, profile)

    def status(self) -> list[dict[str, Any]]:
        """All sessions, each as its `status()`."""
        return [session.status() for session in self]

    def totals(self) -> dict[str, Counter[str]]:
        """What has been counted so far, by protocol, over all sessions that are and were."""
        found = {protocol: Counter(past) for protocol, past in self._past.items()}
        for session in self:
            found.setdefault(session.protocol.name, Counter()).update(session._totals())
        return found

    def tree(self) -> Tree:
        """The supervision tree, for people."""
        return self._root.tree()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._starting.values()))

    def __len__(self) -> int:
        return len(self._starting)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        online = sum(session._core.online for session in self._starting.values())
        many = counted(len(self._starting), "session")
        return f"<Sessions {self.name}: {self._state}, {many}, {online} online>"

    # -- a tree --------------------------------------------------------------------------------

    def _tree(self, session: Session, name: str) -> Child:
        tree = Supervisor.child(
            name,
            children=[Child("connection", partial(_run_connection, session))],
            strategy="rest_for_one",
            intensity=INTENSITY,
            restart="temporary",
        )
        return dataclasses.replace(tree, run=partial(self._run_tree, session, tree.run))

    async def _run_tree(
        self, session: Session, run: Callable[[Context], Awaitable[None]], ctx: Context
    ) -> None:
        reason = "it was stopped"
        try:
            session._check_running()  # it may have been stopped before there was anything to stop
            ctx.register(self._registry, session.profile, session)
            session._begins()
            await run(ctx)
        except asyncio.CancelledError:
            raise
        except RestartIntensityExceeded as error:
            # Not the words of the crashes: they may be a message's, and this is logged.
            reason = f"it has crashed too often: {type(error.__cause__ or error).__name__}"
            raise
        except BaseException as error:
            reason = describe(error)
            raise
        finally:
            await self._over(session, reason)

    def _start_senders(self, session: Session) -> None:
        """The senders have work that takes time: from now on they are a part of the tree."""

        async def start() -> None:
            if session._tree is not None:
                with contextlib.suppress(SupervisionError):  # it has ended in the meantime
                    await session._tree.start_child(Child("senders", session._senders.run))

        task = asyncio.get_running_loop().create_task(start())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _over(self, session: Session, reason: str) -> None:
        """The tree of a session is gone: everybody is told, and its profile is free."""
        session._ended(reason)
        try:
            # Before the profile is free: whoever has it next must find what was changed last.
            until = asyncio.get_running_loop().time() + CLOSING
            if (saving := session._saving) is not None:
                await asyncio.wait((saving,), timeout=CLOSING)
            await session._records.close(max(0.0, until - asyncio.get_running_loop().time()))
            await session._parting.gone(CLOSING)
        finally:
            session._parting.abort()
            try:
                lease, session._lease = session._lease, None
                if lease is not None:
                    await lease.release()
            finally:
                self._free(session)
        await session._sink.close()
        self.recorder.forget(session._name)

    def _free(self, session: Session) -> None:
        if self._starting.get(session.profile) is session:
            del self._starting[session.profile]
            self._past.setdefault(session.protocol.name, Counter()).update(session._totals())
            self._registry.unregister(session.profile)

    def _corrupt(self, profile: str, found: Corruption) -> None:
        if (session := self._starting.get(profile)) is not None:
            session._emit("record_corrupt", found)
            text = f"a record in {found.namespace} counts as missing: {found.reason}"
            session._record(text, kind="failure")

    # -- what sessions ask for -----------------------------------------------------------------

    def _has_lease(self, profile: str) -> bool:
        """Whether this process may change what is stored for a profile."""
        session = self._starting.get(profile)
        return session is not None and session._lease is not None and session._lease.live

    async def _may_dial(self) -> None:
        """Not too many at once."""
        await self._rate.wait()


def _run_connection(session: Session, ctx: Context) -> Awaitable[None]:
    return Connection(session).run(ctx)
