"""A private event loop in a thread of its own, for programs that use threads and have no loop.

Background work (refilling, renewing, refreshing) is written once, async. Under asyncio it runs on
the user's loop; for users of threads it runs here. The thread is a daemon, so it never keeps a
program alive, and it is stopped in order when the interpreter exits.

A fork copies memory but no threads: in the child process the shared loop thread is a new one, and
an inherited one raises an error instead of waiting for ever.

The garbage collector can run at any point, so a finalizer may submit work in the middle of a submit
of the same thread: the locks are reentrant, and a step checks again before it creates an object.
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

#: How long the exit of the interpreter waits for the end of background work.
EXIT_TIMEOUT = 5.0
#: How many stuck tasks an error names.
MAX_NAMES = 5


class LoopThread:
    """An event loop in a daemon thread, started at the first use.

    Most code uses `LoopThread.shared()`, the one of the process. Coroutines run with the context
    variables of the loop thread, not of the caller.
    """

    _shared: ClassVar[LoopThread | None] = None
    _sharing: ClassVar[threading.RLock] = threading.RLock()
    _started: ClassVar[weakref.WeakSet[LoopThread]] = weakref.WeakSet()
    # Loop threads that a fork copied, kept because collecting their unclosed loops would warn.
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
        # Kept until they end: asyncio references tasks only weakly.
        self._work: set[Future[Any]] = set()

    @classmethod
    def shared(cls) -> LoopThread:
        """Return the loop thread of this process; a new one after a stop or a fork."""
        with cls._sharing:
            if cls._shared is None or cls._shared._stopped:
                made = cls()  # which may run a finalizer that calls shared()
                if cls._shared is None or cls._shared._stopped:
                    cls._shared = made
            return cls._shared

    @property
    def alive(self) -> bool:
        """Whether the thread is running, in this process."""
        thread = self._thread
        return thread is not None and thread.is_alive() and self._pid == os.getpid()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, started if need be."""
        self._refuse_other_process()
        with self._lock:
            return self._running()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop, block until it ends, and return its result.

        After the timeout, or if the wait is interrupted (Ctrl-C), the coroutine is cancelled. A
        call from the loop's own thread, which would wait for itself, raises `RuntimeError`.
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
                f"{self.name} was stopped, or the coroutine was cancelled, before it ended"
            ) from None
        except TimeoutError:
            # Either the wait timed out, or the coroutine itself raised TimeoutError.
            if not future.cancel():
                return future.result()
            raise DeadlineExceeded(
                f"{self.name}: the coroutine did not end within {timeout} s and was cancelled; "
                "allow more time, or find out what took so long"
            ) from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; returns its future, which also cancels it."""
        try:
            self._refuse_other_process()
            self._refuse_unready()
            # Under the lock, so that nothing is submitted after the end of the loop.
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            work.close()
            raise
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return future

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> Future[T]:
        """Start a coroutine whose failure is logged, because no caller waits for it."""

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

        Raises `DeadlineExceeded` with the names of the tasks that did not end in time; the thread
        then continues (a daemon does not keep the program alive).
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
                # A closed loop raises: its thread is about to end anyway.
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
                "threads do not survive a fork: call LoopThread.shared() again"
            )

    def _refuse_unready(self) -> None:
        """Raise if a finalizer runs in the new thread before its loop does: the thread that starts
        it holds the lock and waits for it."""
        if self._ready.is_set() or (thread := self._thread) is None:
            return
        if thread.ident == threading.get_ident():  # set before `is_current` is true
            raise self._unready()

    def _unready(self) -> RuntimeError:
        return RuntimeError(f"{self.name} is still starting, and a finalizer cannot wait for it")

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise RuntimeError(f"{self.name} was stopped: call LoopThread.shared() again")
        if self._thread is None:
            self._start()
        if self._starting:
            raise self._unready()
        self._ready.wait()
        if self._loop is None:
            raise RuntimeError(
                f"{self.name} could not start its event loop; see the error of that thread"
            )
        return self._loop

    def _start(self) -> None:
        self._started.add(self)
        thread = threading.Thread(target=self._thread_main, name=self.name, daemon=True)
        if self._thread is None:  # a finalizer may have started it meanwhile
            self._thread, self._starting = thread, True
            try:
                thread.start()
            except Exception:
                self._thread = None  # the next call tries again
                raise
            finally:
                self._starting = False

    def _thread_main(self) -> None:
        try:
            # The runner cancels the remaining tasks at the end, and closes the loop.
            with asyncio.Runner() as runner:
                try:
                    runner.run(self._main())
                finally:
                    self._stopped = True
        finally:
            self._stopped = True  # also if the loop could not be made: shared() then makes another
            self._ready.set()
            # No caller may wait for ever, not even if a coroutine ended the loop with SystemExit.
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
            f"({shown}); a coroutine must end soon after it is cancelled"
        )

    @classmethod
    def _after_fork(cls) -> None:
        # The lock may have been held by a thread that does not exist in this process.
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
