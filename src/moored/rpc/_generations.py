"""The generations of a handler: the current one, the retired ones, and when a call cannot wait.

It does no I/O and does not wait. `Handler` (threads, under its lock) and `AsyncHandler` (on its
loop) wait, notify waiters, and close channels. Invariants of both:

- a call belongs to the generation that was current when it began, and ends there;
- a replaced generation is closed when its last call has ended. When the grace period ends, its
  calls are aborted if its connection is lost, or leads to a server that is no longer wanted;
- a handler whose connection was closed because it seemed unused is asleep: a call over it opens a
  connection again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import Any, NoReturn, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Generation

from ._dial import CredentialProvider
from ._errors import ManagerClosed, closed, uncopied
from ._fork import keep
from ._grpc_internals import has_connection
from ._live_channel import LiveChannel
from ._refusals import Refusals
from ._secrets import Sent, secrets_of, trace
from .calls._unsent import AsyncCallUnsent, CallUnsent, cannot_connect, cut_off, unsent

__all__ = ["GRACE", "WAIT_LIMIT", "Generations", "nothing"]

log = logging.getLogger("moored.rpc")

#: Seconds that a call without a timeout waits for a connection.
WAIT_LIMIT = 10.0
#: Seconds that the calls of a replaced generation may still take.
GRACE = 30.0


class Generations:
    """The state of a handler; see `Handler` and `AsyncHandler` for the parameters."""

    #: The class of the error of a call that was not sent.
    _unsent_error: type[CallUnsent] | type[AsyncCallUnsent]

    _lock: AbstractContextManager[Any] = nullcontext()
    #: The current generation while a fork is in progress, so that no call begins.
    _parked: LiveChannel | None = None

    def __init__(
        self,
        *,
        address: str = "",
        credentials: CredentialProvider | None = None,
        wait_limit: float = WAIT_LIMIT,
        grace: float = GRACE,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._live: LiveChannel | None = None
        self._now = now
        self._used_at = now()
        self._credentials = credentials
        self._address = address
        self._wait_limit = wait_limit
        self._grace = grace
        self._last_error: BaseException | None = None
        #: How many times all waiting calls were failed, and the last reason.
        self._verdicts = 0
        self._verdict: BaseException | None = None
        self._sent = Sent()
        self._closed = False
        #: Whether the only client of a dedicated connection has released it.
        self._released = False
        #: The generations of a connection that was closed as unused; None while awake.
        self._asleep: Generation | None = None
        #: The key of a dedicated connection while the handler is asleep.
        self._own_key: str | None = None
        # Callbacks of the manager, which must not block: for the error of a call and its
        # generation; for +1 and -1 as calls begin and stop to wait; for `close()`, in place of
        # closing, because the handler may be shared; for a call that was not sent; and to refresh
        # the credentials.
        self._on_rpc_error: Callable[[grpc.RpcError, int], object] | None = None
        self._on_waiting: Callable[[int], object] | None = None
        self._on_close: Callable[[], Any] | None = None
        self._on_unsent: Callable[[BaseException], object] | None = None
        self._on_refused: Callable[[], object] | None = None
        #: Whether the topology still wants calls at an address; set by the manager.
        self._is_wanted: Callable[[str], bool] = _never
        self._refusals: Refusals | None = None
        #: The number of the current credentials: it grows with each refresh.
        self._credential = 0
        #: Replaced generations, each with the function that cancels its grace timer.
        self._retiring: dict[LiveChannel, Callable[[], object]] = {}

    # -- implemented by the two shells ---------------------------------------------------------

    def _notify(self) -> None:
        """Wake all waiters for a change."""
        raise NotImplementedError

    def _after(self, delay: float, act: Callable[[], None]) -> Callable[[], object]:
        """Call a function later; return a function that cancels it."""
        raise NotImplementedError

    def _close_soon(self, live: LiveChannel) -> None:
        """Begin to close a channel."""
        raise NotImplementedError

    def _call_ended(self, live: LiveChannel) -> None:
        """Called when a call of a watched generation has ended."""
        raise NotImplementedError

    def _closing_handler(self) -> Self:
        """Return a handler that takes over the generation of this one, to close it."""
        raise NotImplementedError

    def _put(self, live: LiveChannel) -> None:
        """Make this the current generation."""
        self._live = live

    def _follow(self, old: LiveChannel | None, new: LiveChannel | None) -> None:
        """Move the connectivity callbacks from one channel to the other."""

    def _credential_changed(self) -> None:
        """Called when the credentials for the next call have changed."""

    def _start_pending(self) -> None:
        """Start the pending futures and streams, if there is a generation."""

    def _fail_pending(self, verdict: BaseException) -> None:
        """Fail the pending futures and streams."""

    # -- for users -----------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of the current generation; 0 while there is none."""
        live = self._current
        return 0 if live is None else live.number

    @property
    def address(self) -> str:
        """The address of the current, or else of the last, connection."""
        return self._address

    @property
    def calls(self) -> int:
        """The number of calls in flight, over all generations."""
        with self._lock:
            return sum(len(live.calls) for live in self._lives())

    # -- for the manager -----------------------------------------------------------------------

    def _swap(self, live: LiveChannel) -> None:
        """Make this the current generation, and retire the one before."""
        with self._lock:
            if self._closed:
                self._retire(live, 0.0)
                return
            old = self._take()
            self._address = live.address
            self._last_error = None
            self._put(live)
            self._follow(old, live)
            self._notify()
            if old is not None:
                self._retire(old, self._grace)
        self._start_pending()

    def _lose(self, cause: BaseException | None = None) -> None:
        """Retire the current generation; calls wait until the next `_swap`."""
        with self._lock:
            self._last_error = cause
            if (old := self._take()) is not None:
                self._follow(old, None)
                self._notify()
                self._retire(old, self._grace)

    def _fail_waiting(self, verdict: BaseException) -> None:
        """Fail every waiting call: no connection can be made."""
        with self._lock:
            self._verdicts += 1
            self._verdict = verdict
            self._notify()
        self._fail_pending(verdict)

    def _detach(self, generations: Generation) -> Self | None:
        """Fall asleep; return a handler with the open channel, or None if calls are in flight."""
        closing = self._closing_handler()
        closing._sent = self._sent
        with self._lock:
            if (live := self._take()) is not None:
                if live.calls:
                    self._put(live)
                    self._notify()
                    return None
                self._follow(live, None)
                closing._live = live
            self._asleep = generations
            self._notify()
        return closing

    @property
    def _is_open(self) -> bool:
        return not self._closed and self._asleep is None

    def _open_soon(self) -> None:
        """Make the manager open a connection, without waiting for it."""
        self._waiting(+1)
        self._waiting(-1)

    def _shut(self, grace: float | None = None) -> None:
        """Refuse new calls; calls in flight may take as long as the grace."""
        with self._lock:
            # Only once: a second close does not shorten the time of the calls.
            ending = [] if self._closed else [each for each in self._lives() if not each.closed]
            self._take()
            self._closed = True
            self._asleep = None
            for live in ending:
                self._retire(live, self._grace if grace is None else grace)
            self._notify()
        self._start_pending()

    def reset(self) -> None:
        """Start anew in a forked child: inherited channels are neither used nor closed."""
        keep(self._lives())
        self._take()
        self._retiring = {}
        if self._refusals is not None:
            self._refusals.refreshing = False  # the refresh runs in the parent

    # -- calls ---------------------------------------------------------------------------------

    def _unsent_reason(
        self, verdicts: int, began: float, deadline: float, now: float, own: bool
    ) -> Exception | None:
        """Return the error of a call that cannot wait any longer; None if it can.

        :param verdicts: the value of `_verdicts` when the call began to wait.
        :param own: whether the deadline is the call's own timeout.
        """
        if self._closed or self._released:
            return self._closed_error()
        if verdicts != self._verdicts and self._verdict is not None:
            error = self._unsent_error(*cannot_connect(self._address, self._verdict))
            error.__cause__ = self._verdict
        elif now >= deadline:
            reason = unsent(self._address, now - began, own, self._last_error)
            error = self._unsent_error(*reason)
        else:
            return None
        self._unsent(error)
        return error

    def _closed_error(self) -> ManagerClosed:
        return closed(self._address)

    def _joined(self, metadata: Any, added: Any) -> Any:
        """Return the metadata of a call with those of the credentials."""
        self._sent.add(added)
        return (*metadata, *added) if metadata else tuple(added)

    def _waiting(self, change: int) -> None:
        self._tell(self._on_waiting, change)

    def _unsent(self, error: BaseException) -> None:
        self._tell(self._on_unsent, error)

    def _report(self, error: grpc.RpcError, live: LiveChannel, credential: int) -> None:
        """Report a failed call to the manager."""
        if self._refusals is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            self._refused(credential)
        self._tell(self._on_rpc_error, error, live.number)

    def _refused_elsewhere(self) -> None:
        """Report that the credentials were refused by the topology server, not in a call."""
        if self._refusals is not None:
            self._refused(self._credential)

    def _refused(self, credential: int) -> None:
        assert self._refusals is not None
        with self._lock:
            refresh = self._refusals.refuse(credential, self._now())
        if refresh:
            self._tell(self._on_refused)

    def _renewed(self, error: BaseException | None) -> None:
        """Note the outcome of a refresh of the credentials."""
        assert self._refusals is not None
        with self._lock:
            self._refusals.refreshed(error, self._now())
            self._credential = self._refusals.number
            self._credential_changed()
            self._notify()

    def _tell(self, callback: Callable[..., object] | None, *given: Any) -> None:
        """Call a callback; its exception is logged, and never reaches the caller of an RPC."""
        if callback is None:
            return
        try:
            callback(*given)
        except Exception as error:
            # Without the exception's context, the error of the call, which may repeat the token.
            log.error(
                "a callback for a call to %s failed\n%s",
                self._address,
                trace(error, secrets_of("", *self._sent.lately)),
            )

    # -- generations, under the lock -----------------------------------------------------------

    @property
    def _current(self) -> LiveChannel | None:
        return self._live or self._parked

    def _lives(self) -> list[LiveChannel]:
        current = self._current
        return [*self._retiring, *([] if current is None else [current])]

    def _take(self) -> LiveChannel | None:
        old = self._current
        self._live = self._parked = None
        return old

    def _retire(self, live: LiveChannel, grace: float) -> None:
        live.retired = True
        live.watcher = self._call_ended
        self._retiring.get(live, nothing)()
        waits = live.calls and grace > 0
        over = partial(self._grace_over, live)
        self._retiring[live] = self._after(grace, over) if waits else nothing
        if not waits:
            self._close_live(live)

    def _grace_over(self, live: LiveChannel) -> None:
        """Close a replaced generation, and abort its calls, unless `_may_stay` holds.

        A generation that was only replaced because of its age keeps its streams.
        """
        with self._lock:
            if not live.closed and self._may_stay(live):
                self._retire(live, self._grace)
                return
        self._close_live(live)

    def _may_stay(self, live: LiveChannel) -> bool:
        if self._closed or not has_connection(live.channel):
            return False
        return live.address == self._address or self._is_wanted(live.address)

    def _close_live(self, live: LiveChannel) -> None:
        with self._lock:
            if live.closed or live not in self._retiring:
                return
            live.closed = True
            self._retiring[live]()
        self._close_soon(live)

    @contextmanager
    def _closing_channel(self, live: LiveChannel) -> Iterator[str]:
        """Close a channel in this block, which gets the text for the calls that it aborts."""
        try:
            yield cut_off(live.address, self._closed)
        except Exception:
            log.exception("closing generation %d to %s failed", live.number, live.address)
        finally:
            with self._lock:
                self._retiring.pop(live, None)
                self._notify()

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        live = self._current
        state = "no connection" if live is None else f"generation {live.number}"
        state = "asleep" if self._asleep is not None else state
        state = "closed" if self._closed else state
        return f"<{type(self).__name__} to {self._address}: {state}, {self.calls} calls>"


def nothing() -> None:
    """Do nothing."""


def _never(address: str) -> bool:
    return False
