"""One private event loop in a thread of its own, for users who have threads and no loop.

Background work (refilling, renewing, refreshing) is written once, async. Under asyncio it runs on
the user's loop; for users of threads it runs here. The thread is a daemon, so it never keeps a
program alive, and it is stopped in order when the interpreter ends.

A fork copies memory but no threads: in the child process the shared loop thread is a new one, and
one that was inherited refuses to be used instead of waiting for ever.

The garbage collector runs anywhere, so work may also be submitted by a finalizer in the middle of
a submit of the same thread: the locks are reentrant, and nothing is made twice.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, ClassVar, TypeVar

from ._at_fork import at_fork
from ._errors import DeadlineExceeded
from ._words import counted

__all__ = ["LoopThread"]

log = logging.getLogger("moored.kernel")

T = TypeVar("T")

#: How long the end of the interpreter waits for background work to tidy up.
EXIT_TIMEOUT = 5.0
#: How many stuck tasks an error names.
MAX_NAMES = 5


class LoopThread:
    """An event loop in a daemon thread, started by the first use.

    `LoopThread.shared()` is the one of the process, and almost always the right one. Coroutines
    run there with the loop thread's own context variables, not the caller's.
    """

    _shared: ClassVar[LoopThread | None] = None
    _sharing: ClassVar[threading.RLock] = threading.RLock()
    _started: ClassVar[weakref.WeakSet[LoopThread]] = weakref.WeakSet()
    # What a fork brought along is kept: to collect a loop is to complain that it was not closed.
    _inherited: ClassVar[list[LoopThread]] = []

    def __init__(self, name: str = "moored-loop") -> None:
        self.name = name
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._starting = False
        self._stopped = False
        # Kept until they end: asyncio itself holds on to tasks only weakly.
        self._work: set[Future[Any]] = set()

    @classmethod
    def shared(cls) -> LoopThread:
        """The loop thread of this process; a new one if the last was stopped, or after a fork."""
        with cls._sharing:
            if cls._shared is None or cls._shared._stopped:
                made = cls()
                if cls._shared is None or cls._shared._stopped:  # still so
                    cls._shared = made
            return cls._shared

    @property
    def alive(self) -> bool:
        """Whether the thread runs, in this process."""
        thread = self._thread
        return thread is not None and thread.is_alive() and self._pid == os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in its thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait here for its outcome.

        After the timeout, or if the waiting is interrupted (Ctrl-C), the coroutine is cancelled.
        From the loop's own thread this would wait for itself for ever, and is refused.
        """
        if self.is_current:
            work.close()
            raise RuntimeError(
                f"{self.name}: run() was called from the loop's own thread and would wait for "
                "itself for ever; await the coroutine instead"
            )
        future = self.submit(work)
        try:
            return future.result(timeout)
        except CancelledError:
            raise CancelledError(
                f"{self.name} was stopped, or the work was cancelled, before it ended"
            ) from None
        except TimeoutError:
            # Either the waiting took too long, or this is the outcome of the work itself.
            if not future.cancel():
                return future.result()
            raise DeadlineExceeded(
                f"{self.name}: the work did not end within {timeout} s and has been cancelled; "
                "allow more time, or look at what took so long"
            ) from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; returns the future of its outcome.

        Cancelling the future cancels the coroutine.
        """
        try:
            self._refuse_other_process()
            self._refuse_unready()
            # Within the lock, so that no work can slip in behind the end of the loop.
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            work.close()
            raise
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return future

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> Future[T]:
        """Start background work without a waiter: a failure is logged."""

        async def watched() -> T:
            task = asyncio.current_task()
            if name is not None and task is not None:
                task.set_name(name)
            try:
                return await work
            except Exception as error:
                log.error("background work %r failed", name or work, exc_info=error)
                raise

        try:
            return self.submit(watched())
        except BaseException:
            work.close()
            raise

    def stop(self, timeout: float | None = 5.0) -> None:
        """Cancel all work, wait until it has ended, and end the thread.

        Raises `DeadlineExceeded` with the names of the tasks that would not end in time; the
        thread is then left behind (a daemon, so it does not keep the program alive).
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopped = True
            thread = self._thread
            if thread is None:
                return
            self._ready.wait()
            if self._loop is not None and self._stopping is not None:
                # A closed loop refuses: then its thread is about to end anyway.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is thread:
            return
        thread.join(timeout)
        if thread.is_alive():
            raise DeadlineExceeded(self._stuck(timeout))

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.alive else "not started"
        if self._pid != os.getpid():
            state = f"of process {self._pid}"
        elif self._stopped:
            state = "stopping" if self.alive else "stopped"
        return f"<LoopThread {self.name}: {state}, {len(self._work)} at work>"

    def _refuse_other_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{self.name} belongs to process {self._pid}, from which this one was forked; "
                "threads do not survive a fork: take LoopThread.shared() again"
            )

    def _refuse_unready(self) -> None:
        """Start the loop, in its own thread; the starter holds the lock and waits."""
        if self._ready.is_set() or (thread := self._thread) is None:
            return
        if thread.ident == threading.get_ident():  # it has that before it is the current one
            raise self._unready()

    def _unready(self) -> RuntimeError:
        return RuntimeError(f"{self.name} is about to start, and a finalizer cannot wait for it")

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise RuntimeError(f"{self.name} has been stopped: take LoopThread.shared() again")
        if self._thread is None:
            self._start()
        if self._starting:
            raise self._unready()
        self._ready.wait()
        if self._loop is None:
            raise RuntimeError(
                f"{self.name} could not start its event loop; see the thread's error"
            )
        return self._loop

    def _start(self) -> None:
        self._started.add(self)
        thread = threading.Thread(target=self._thread_main, name=self.name, daemon=True)
        if self._thread is None:  # still so
            self._thread, self._starting = thread, True
            try:
                thread.start()
            except Exception:
                self._thread = None  # the next one may have more luck
                raise
            finally:
                self._starting = False

    def _thread_main(self) -> None:
        try:
            # The runner cancels what is left at the end, and closes the loop.
            with asyncio.Runner() as runner:
                try:
                    runner.run(self._main())
                finally:
                    self._stopped = True
        finally:
            self._stopped = True  # also if there is no loop: the next one may have more luck
            self._ready.set()
            # Nobody may wait for ever, not even if work has broken the loop with a SystemExit.
            for future in list(self._work):
                future.cancel()

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._stopping.wait()

    def _stuck(self, timeout: float | None) -> str:
        tasks = [] if self._loop is None else asyncio.all_tasks(self._loop)
        names = sorted(task.get_name() for task in tasks)
        shown = ", ".join(names[:MAX_NAMES]) or "a call that blocks"
        return (
            f"{self.name} did not end within {timeout} s: {counted(len(names), 'task')} left "
            f"({shown}); work must end soon after it is cancelled"
        )

    @classmethod
    def _after_fork(cls) -> None:
        # The lock may have been held by a thread that does not exist here.
        cls._sharing = threading.RLock()
        cls._shared = None
        cls._inherited.extend(cls._started)
        cls._started = weakref.WeakSet()

    @classmethod
    def _at_exit(cls) -> None:
        for each in list(cls._started):
            try:
                each.stop(EXIT_TIMEOUT)
            except DeadlineExceeded as error:
                log.error("%s", error)


at_fork(after_in_child=LoopThread._after_fork)
atexit.register(LoopThread._at_exit)
