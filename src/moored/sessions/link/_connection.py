"""The connection of a session: the child of its tree that makes one link after another.

It does what `SessionCore` decides: dial, wait, and dial again. A defect, in the protocol or here,
crashes the connection: all sends in flight are settled at once, and the supervisor starts a new
connection, which dials again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moored.kernel import At, Context, Dial, describe, start_task
from moored.leases import LeaseRefused, StoreUnavailable

from .._errors import (
    LinkLost,
    NotConnected,
    ProtocolError,
    QueryFailed,
    QueryTimeout,
    SessionError,
    StorageError,
)
from .._protocol import CloseClass
from ..sending import RetryCache
from ._link import MOST_ANSWERS, Link
from ._queries import Queries

if TYPE_CHECKING:
    from .._runtime import SessionRuntime

__all__ = ["Connection"]

#: Seconds that a person has to answer a login step.
LOGIN_TIMEOUT = 300.0


@dataclass(slots=True, eq=False, repr=False)
class Connection:
    """The connection of a session, until it crashes or is stopped."""

    _runtime: SessionRuntime
    queries: Queries = field(default_factory=Queries)
    #: Recent sends, for peers that request one again; a crash discards them.
    recent: RetryCache | None = None
    #: The current link, once its socket is open.
    link: Link | None = None
    #: The endpoint of the last dial.
    endpoint: Any = None
    _poke: asyncio.Future[None] | None = None
    _dialing: asyncio.Task[None] | None = None
    # The reports to the dial: several may come in one read.
    _greetings: asyncio.Queue[bool | None] | None = None
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        if self._runtime.protocol.repeats:
            self.recent = self._runtime.owner._retry_cache()

    # -- run and crash -------------------------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Keep a link open while the core wants one, until cancelled."""
        runtime = self._runtime
        core, loop = runtime.core, asyncio.get_running_loop()
        runtime.connection = self
        ctx.started(runtime.session)
        try:
            while True:
                self._poke = loop.create_future()
                match core.link.due(self._now()):
                    case Dial(number=generation):
                        self._dialing = start_task(self._dial(generation))
                    case At(time=until):
                        runtime.owner._timers.set((runtime, "retry"), until, self.poke)
                await self._poke
                if self._error is not None:
                    raise self._error
        except asyncio.CancelledError:
            core.crashed("the connection was stopped", self._now())
            self.disconnect("the connection was stopped")
            if self._error is not None:
                runtime.record("crashed while it was stopped", kind="failure", cause=self._error)
            raise
        except BaseException as error:
            self._end_link(abort=True)
            runtime.crashed(error)
            self.queries.lost(f"the session has crashed: {describe(error)}")
            raise
        finally:
            self._stop_dialing()
            runtime.connection = None

    def poke(self) -> None:
        """Wake `run` to query the core again."""
        if self._poke is not None and not self._poke.done():
            self._poke.set_result(None)

    def crash(self, error: BaseException) -> None:
        """Crash the connection with this error."""
        self._error = error
        self.poke()

    def _now(self) -> float:
        return self._runtime.clock.monotonic()

    # -- making a link -------------------------------------------------------------------------

    async def _dial(self, generation: int) -> None:
        runtime, loop = self._runtime, asyncio.get_running_loop()
        try:
            # Without the timeout: waiting for the rate limit is not the server's fault.
            await runtime.before_dial()
            async with asyncio.timeout(runtime.owner._connect_timeout) as limit:
                greetings = self._greetings = asyncio.Queue()
                await self._open(generation)
                while not (done := await greetings.get()):
                    if done is None:
                        await self._secure()
                    else:
                        # A person must answer the login step.
                        limit.reschedule(loop.time() + LOGIN_TIMEOUT)
        except TimeoutError:
            waited = f"{runtime.owner._connect_timeout:g} s"
            self._failed(generation, f"{self.endpoint} has not answered in time ({waited})")
        except LeaseRefused as error:
            self._refuse(CloseClass.TAKEOVER, str(error))
        except (OSError, StoreUnavailable, StorageError, ProtocolError) as error:
            self._failed(generation, describe(error))
        except SessionError as error:
            self._refuse(CloseClass.MISCONFIGURED, describe(error))
        except Exception as error:
            self.crash(error)
        finally:
            if self._dialing is asyncio.current_task():
                self._dialing = self._greetings = None

    async def _open(self, generation: int) -> None:
        runtime = self._runtime
        if runtime.offline is not None:
            runtime.offline.open(generation)
            self.greet(True)
            return
        # There is never more than one link: abort the last one if it is still closing.
        runtime.closing_links.abort()
        who = (runtime.profile, runtime.credentials.value, runtime.memory)
        link = Link(runtime, self, generation, runtime.protocol.begin(*who))
        self.endpoint = runtime.protocol.locate(*who)
        link.transport = await self.endpoint.dial(link)
        if not runtime.core.dialed(generation):
            link.transport.abort()
            self.greet(True)
            return
        self.link = link
        runtime.sends.table.linked(cumulative=runtime.protocol.cumulative)
        link.say(link.dialogue.hello())
        link.listen()

    async def _secure(self) -> None:
        """Upgrade the link to TLS (STARTTLS)."""
        link = self.link
        if link is None or link.transport is None:
            return
        link.push()
        link.transport = await self.endpoint.secure(link.transport, link)
        if not link.ended:
            link.say(link.dialogue.secured())

    def greet(self, done: bool | None) -> None:
        """Report to the dial that it is complete, needs a person (False), or needs TLS (None)."""
        if self._greetings is not None:
            self._greetings.put_nowait(done)

    def _failed(self, generation: int, reason: str) -> None:
        core, reason = self._runtime.core, self._runtime.credentials.hide(reason)
        if core.lost(generation, CloseClass.TRANSIENT, reason, self._now()):
            self._end_link(abort=True)
            self._settle(LinkLost(reason))

    def _refuse(self, kind: CloseClass, reason: str) -> None:
        self._runtime.core.refuse(kind, reason)
        self.abandon(reason)

    def _stop_dialing(self) -> None:
        if self._dialing is not None:
            self._dialing.cancel()

    # -- queries -------------------------------------------------------------------------------

    async def ask(self, question: Any, timeout: float) -> Any:
        """Send a query, and return the server's answer."""
        link = self._linked()
        id, future = self.queries.ask(link.generation)
        try:
            link.say(link.dialogue.query(id, question))
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise QueryTimeout(f"the server has not answered within {timeout:g} s") from None
        finally:
            self.queries.forget(id)

    def tell(self, data: Any) -> None:
        """Send a notice, which the server does not answer."""
        link = self._linked()
        if link.pending > MOST_ANSWERS:
            raise QueryFailed("the send buffer is full: the server is not reading; retry later")
        link.say(link.dialogue.notice(data))

    def answer_login(self, answer: Any) -> None:
        """Send the user's answer to a login step."""
        if not self._runtime.core.link.machine.at("login") or self.link is None:
            raise NotConnected("the server has not requested a login step, or the link is lost")
        self.link.say(self.link.dialogue.login(answer))

    def _linked(self) -> Link:
        if self.link is None or not self._runtime.core.online:
            raise NotConnected(self._runtime.why_offline)
        return self.link

    # -- the end of a link ---------------------------------------------------------------------

    def close(self, kind: CloseClass, reason: str, retry_after: float | None = None) -> None:
        """Close the link and settle its sends; the class decides whether another one is made."""
        link = self.link
        if link is None:
            return
        link.push()
        core, reason = self._runtime.core, self._runtime.credentials.hide(reason)
        current = core.lost(link.generation, kind, reason, self._now(), retry_after)
        self._end_link()
        if current:
            lost = LinkLost(f"the link was lost: {reason}")
            self._settle(lost, final=kind.final, keeps=link.keeps)

    def disconnect(self, reason: str) -> None:
        """Send the protocol's goodbye, and close the link."""
        self._stop_dialing()
        if (link := self.link) is not None:
            try:
                link.say(link.dialogue.goodbye())
            except Exception as error:
                self.crash(error)
            link.push()
        self._end_link()
        self._settle(LinkLost(reason), final=True)

    def abandon(self, reason: str) -> None:
        """Abort the link without flushing its buffer."""
        if self._dialing is not asyncio.current_task():
            self._stop_dialing()
        self._end_link(abort=True)
        self._settle(LinkLost(reason), final=True)

    def _end_link(self, *, abort: bool = False) -> None:
        link, self.link = self.link, None
        self._runtime.owner._timers.cancel((self._runtime, "retry"))
        if link is not None:
            self._runtime.sink.queue.link_lost()
            link.end(abort=abort)
        self.greet(True)

    def _settle(self, reason: LinkLost, *, final: bool = False, keeps: bool = True) -> None:
        """Settle the sends and queries of the link."""
        runtime = self._runtime
        sends = runtime.sends
        if final or runtime.core.link.machine.at("off"):
            sends.table.over(reason)
        else:
            sends.table.lost(reason, resumes=runtime.protocol.resumes and keeps)
        sends.sweep()
        self.queries.lost(str(reason))
        runtime.changed()
        self.poke()
