"""All accounts of a process, each with a supervision tree of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from moored.kernel import (
    Backoff,
    Child,
    Clock,
    Context,
    Machine,
    NotRunning,
    Recorder,
    Registry,
    RestartIntensityExceeded,
    StartFailed,
    Supervisor,
    Tasks,
    Timers,
    Tree,
    counted,
    describe,
    patiently,
    refuse,
    unmet,
)
from moored.leases import LeaseRefused, Leases
from moored.leases import connect as connect_leases

from ._checks import check_drain, check_loop, check_protocol, check_steps, check_texts
from ._content import Incoming
from ._errors import AlreadyRunning, SessionError, SessionStopped
from ._leasing import Leasing
from ._protocol import InboundStep, Protocol, Step
from ._runtime import SessionRuntime
from ._session import Session
from ._session_via import SessionVia
from .events import Handler
from .link import Connection, CredentialsProvider
from .sending import MemoryRetryCache, RetryCache
from .storage import Keys, Storage, open_storage

__all__ = ["Sessions"]

#: A session ends when its connection crashes more often than this: a number, and seconds.
INTENSITY = (5, 60.0)
#: Seconds to wait for unfinished work when a session ends: its start, changes of its records.
CLOSING = 5.0


class Sessions:
    """The accounts of a process.

    :param storage: the storage of credentials and records: a `Storage`, the path of a SQLite file,
        `files:DIRECTORY`, or `memory:`, which is lost with the process.
    :param storage_key: encrypts the records: 32 bytes; of several such keys, the first one
        encrypts, and all of them decrypt.
    :param retry_cache: creates the cache of recent sends, for protocols whose peers may request one
        again; by default, it keeps the last 512 sends of 5 minutes.
    :param leases: with a client or a URL of `moored.leases`, a profile has one session in the
        whole cluster; without, one in this object.
    :param lease_ttl: the seconds after which a lease expires if its holder does not renew it.
    :param connect_rate: the most links per second, over all sessions.
    :param connect_burst: the most links at once.
    :param connect_timeout: the seconds for making a link, including its handshake.
    :param send_timeout: the seconds in which a send must be confirmed, unless it has a `timeout`.
    :param backoff: the pauses between attempts; by default, from 1 s to 60 s with full jitter.
    :param events: the most events in a session's queue, and, counted separately, the most messages
        that must be acknowledged. When the queue is full, new events are dropped.
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
        send_timeout: float = 30.0,
        backoff: Backoff | None = None,
        events: int = 1000,
        retry_cache: Callable[[], RetryCache] = MemoryRetryCache,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        name: str = "sessions",
    ) -> None:
        positive = {
            "lease_ttl": lease_ttl,
            "connect_rate": connect_rate,
            "connect_burst": connect_burst,
            "connect_timeout": connect_timeout,
            "send_timeout": send_timeout,
            "events": events,
        }
        checks = [(name, value, value > 0, "more than 0") for name, value in positive.items()]
        refuse("Sessions", unmet(*checks))
        self.name = name
        self._clock = clock or Clock.current()
        self.recorder = recorder or Recorder(clock=self._clock)
        self._storage = open_storage(storage, key=storage_key)
        # Whether to warn when the server issues credentials that the storage will lose.
        self._forgetful = not self._storage.durable
        self._leasing = Leasing(leases, name=name, ttl=lease_ttl, clock=self._clock)
        self._connect_timeout = connect_timeout
        self._send_timeout = send_timeout
        self._backoff = backoff or Backoff(1.0, 60.0, jitter="full", clock=self._clock)
        self._events = events
        self._retry_cache = retry_cache
        self._rates = connect_leases("memory://", clock=self._clock, name=f"{name}/rates")
        self._rate = self._rates.rate_limit("links", rate=connect_rate, burst=connect_burst)
        self._registry: Registry[str, Session] = Registry(name)
        # By profile, from the beginning of the start until the profile is free again.
        self._runtimes: dict[str, SessionRuntime] = {}
        # Starts in progress, by profile; each future is done when its start ends.
        self._starts: dict[str, asyncio.Future[None]] = {}
        self._root = Supervisor(name, recorder=self.recorder, clock=self._clock)
        self._tasks = Tasks()
        # Of all sessions, by runtime and name: most sessions have none.
        self._timers = Timers(self._clock)
        # The counters of ended sessions, by protocol.
        self._past: dict[str, Counter[str]] = {}
        self._state = "new"
        self._closing: asyncio.Task[None] | None = None
        # The loop that all sessions run on, once opened.
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the storage and the leases; `async with` calls it."""
        if self._state != "new":
            raise SessionError(f"{self!r} was opened before: create a new one")
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

    async def close(self, *, drain: float = 0.0) -> None:
        """Stop all sessions concurrently, and close the storage and the leases.

        It takes as long as the slowest session. A cancellation does not interrupt it, and is raised
        afterwards. A further call waits for the end of the first one.

        :param drain: the seconds to wait for the outcomes of sends: see `Session.stop`.
        """
        check_drain(drain)
        for each in self._running():
            each.sink.closes(asyncio.current_task())
        if self._closing is not None:
            await patiently(self._closing)
        elif self._state == "open":
            self._state = "closed"
            self._closing = asyncio.get_running_loop().create_task(self._close(drain))
            await patiently(self._closing)
            self._closing.result()

    async def _close(self, drain: float) -> None:
        ends = [self._end(each, "Sessions was closed", drain) for each in self._running()]
        await asyncio.gather(*ends, return_exceptions=True)  # the supervisor reports failures
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- sessions ------------------------------------------------------------------------------

    async def start(
        self,
        profile: str,
        protocol: Protocol,
        *,
        steps: Sequence[tuple[str, Step]] = (),
        inbound_steps: Sequence[tuple[str, InboundStep]] = (),
        on_event: Handler | asyncio.Queue[Incoming] | None = None,
        credentials: CredentialsProvider | None = None,
        offline: bool = False,
    ) -> Session:
        """Start the session of a profile, which connects in the background, and return it.

        Raises `AlreadyRunning` if the profile has one, here or, with leases, in the cluster.

        :param steps: the steps of a send, after those of the protocol.
        :param inbound_steps: the steps of a message before a consumer gets it, after those of the
            protocol.
        :param on_event: a handler or a queue for its events; `attach` can replace it later.
        :param credentials: a plain or async function that returns the credentials of a profile,
            such as a token that expires; called for each link, in place of the storage. If the
            server refuses them, it is called once more before the session stops.
        :param offline: use no server: sends are confirmed, and nothing leaves the process.
        """
        if self._state != "open":
            raise SessionError(f"{self!r} is not open: use it with async with")
        check_loop(asyncio.get_running_loop(), self._loop)
        check_texts(profile=profile)
        check_protocol(protocol)
        check_steps(steps)
        check_steps(inbound_steps)
        if not profile:
            raise SessionError("the name of a profile must not be empty")
        if (current := self._runtimes.get(profile)) is not None:
            raise AlreadyRunning(
                f"{profile!r} has a session already: {current.session!r}", current.session
            )
        if protocol.inbound_window is not None and protocol.inbound_window > self._events:
            raise SessionError(
                f"the server may send {protocol.inbound_window} messages before the first is "
                f"acknowledged, but events={self._events}: raise events, or lower the protocol's "
                "window"
            )
        name = quote(profile, safe="@+~ ")
        path = f"{self._root.path}/{name}"
        runtime = SessionRuntime(
            self, profile, protocol, path, steps, inbound_steps, credentials, offline
        )
        runtime.session.attach(on_event)
        self._runtimes[profile] = runtime
        under_way = self._starts[profile] = asyncio.get_running_loop().create_future()
        try:
            await self._storage.new(profile)
            await self._leasing.renew(runtime)
            await runtime.recall()
            # The tree of the last session may not have ended completely.
            await self._root.stop_child(name)
            run = partial(self._run_tree, runtime)
            tree = Child(name, run, restart="temporary", start_timeout=math.inf, shutdown=math.inf)
            runtime.tree = await self._root.start_child(tree)
        except BaseException as error:
            stop_requested = runtime.stop_requested
            await self._clean_up(runtime, describe(error))
            if stop_requested and isinstance(error, Exception):
                raise SessionStopped(runtime.why_offline) from error
            if isinstance(error, LeaseRefused):
                raise AlreadyRunning(str(error), str(error)) from error
            cause: BaseException = error
            while isinstance(cause, StartFailed) and cause.__cause__ is not None:
                cause = cause.__cause__  # each supervisor has wrapped it
            if cause is not error:
                raise cause from cause.__cause__
            raise
        finally:
            if self._starts.get(profile) is under_way:
                del self._starts[profile]
            under_way.set_result(None)
        return runtime.session

    async def connect(
        self, profile: str, protocol: Protocol, *, timeout: float = 30.0, **options: Any
    ) -> Session:
        """Start the session of a profile, and wait until it is online; stop it if that fails."""
        session = await self.start(profile, protocol, **options)
        try:
            await session.online(timeout)
        except BaseException:
            await self.stop(session)
            raise
        return session

    async def stop(self, session: Session | SessionVia | str, *, drain: float = 0.0) -> None:
        """Stop a session, and free its profile; does nothing if there is none.

        If the session is being started, the call that starts it raises `SessionStopped`.

        :param drain: the seconds to wait for the outcomes of sends: see `Session.stop`.
        """
        check_drain(drain)
        profile = session if isinstance(session, str) else session.profile
        found = self._runtimes.get(profile)
        if found is None or (type(session) is Session and found.session is not session):
            return
        check_loop(asyncio.get_running_loop(), self._loop)
        found.sink.closes(asyncio.current_task())
        end = self._end(found, "it was stopped", drain)
        await asyncio.shield(self._tasks.start(end))  # completes, even if the caller is cancelled
        if profile not in self._runtimes:
            # Again, because the supervisor has recorded the end of the tree meanwhile.
            for part in ("", "/connection"):
                self.recorder.forget(found.name + part)

    async def _end(self, runtime: SessionRuntime, why: str, drain: float) -> None:
        # While it is online, so that the handler can finish, reply and acknowledge.
        await runtime.sink.finish()
        if drain:
            await runtime.sends.drain(drain)
        if self._runtimes.get(runtime.profile) is not runtime:
            return  # another call has ended it meanwhile
        if not runtime.core.stopped:
            runtime.stop_requested = True
            runtime.core.stop(why)
        under_way = self._starts.get(runtime.profile)
        with contextlib.suppress(NotRunning):
            await self._root.stop_child(runtime.name.rpartition("/")[2])
        if under_way is not None:
            # The tree may not have been started yet: then the start cleans up.
            await asyncio.wait((under_way,), timeout=CLOSING)

    def whereis(self, profile: str) -> Session | None:
        """Return the session of a profile in this process, or None."""
        return self._registry.whereis(profile)

    def via(self, profile: str) -> SessionVia:
        """Return a proxy that looks up the session of a profile at each use."""
        return SessionVia(self, profile)

    def status(self) -> list[dict[str, Any]]:
        """Return the `status()` of all sessions."""
        return [session.status() for session in self]

    def totals(self) -> dict[str, Counter[str]]:
        """Return the counters by protocol, summed over all current and ended sessions."""
        found = {protocol: Counter(past) for protocol, past in self._past.items()}
        for each in self._running():
            found.setdefault(each.protocol.name, Counter()).update(each.totals())
        return found

    def tree(self) -> Tree:
        """Return the supervision tree, for display."""
        return self._root.tree()

    def __iter__(self) -> Iterator[Session]:
        return (each.session for each in self._running())

    def link_machines(self) -> Iterator[tuple[str, str, Machine]]:
        """Yield the protocol and the state machine of each link, for `LinksCollector`."""
        for each in self._running():
            yield "sessions", each.protocol.name, each.core.link.machine

    def _running(self) -> list[SessionRuntime]:
        return list(self._runtimes.values())

    def __len__(self) -> int:
        return len(self._runtimes)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        online = sum(each.core.online for each in self._running())
        many = counted(len(self._runtimes), "session")
        return f"<Sessions {self.name}: {self._state}, {many}, {online} online>"

    # -- a tree --------------------------------------------------------------------------------

    async def _run_tree(self, runtime: SessionRuntime, ctx: Context) -> None:
        reason = "it was stopped"
        try:
            if runtime.core.stopped:  # before the tree was started
                raise SessionStopped(runtime.why_offline)
            ctx.register(self._registry, runtime.profile, runtime.session)
            runtime.begins()
            connection = Child("connection", lambda ctx: Connection(runtime).run(ctx))
            await Supervisor.child("session", children=[connection], intensity=INTENSITY).run(ctx)
        except asyncio.CancelledError:
            raise
        except RestartIntensityExceeded as error:
            # Without the errors' texts, which may quote a message: this is logged.
            reason = f"it has crashed too often: {type(error.__cause__ or error).__name__}"
            raise
        except BaseException as error:
            reason = describe(error)
            raise
        finally:
            await self._clean_up(runtime, reason)

    async def _clean_up(self, runtime: SessionRuntime, reason: str) -> None:
        """Settle the sends of a session whose tree has ended, and free its profile."""
        runtime.ended(reason)
        try:
            # Before the profile is free: the next session must find the last changes.
            until = asyncio.get_running_loop().time() + CLOSING
            if (saving := runtime.credentials.saving) is not None:
                await asyncio.wait((saving,), timeout=CLOSING)
            await runtime.records.close(max(0.0, until - asyncio.get_running_loop().time()))
            await runtime.closing_links.gone(CLOSING)
        finally:
            runtime.closing_links.abort()
            try:
                lease, runtime.lease = runtime.lease, None
                if lease is not None:
                    await lease.release()
            finally:
                self._free(runtime)
        await runtime.sink.close()
        self.recorder.forget(runtime.name)

    def _free(self, runtime: SessionRuntime) -> None:
        if self._runtimes.get(runtime.profile) is runtime:
            del self._runtimes[runtime.profile]
            self._past.setdefault(runtime.protocol.name, Counter()).update(runtime.totals())
            self._registry.unregister(runtime.profile)
