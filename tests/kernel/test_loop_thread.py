"""Threads run async work on one private loop, and always get an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from moored.kernel import DeadlineExceeded, LoopThread, MooredError

LIMIT = 10.0


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread("test-loop") as thread:
        yield thread


class Stuck:
    """A coroutine that waits until it is cancelled, and records it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self) -> None:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def fails() -> None:
    raise LookupError("not there")


async def where() -> tuple[str, int]:
    return threading.current_thread().name, id(asyncio.get_running_loop())


def test_work_runs_on_the_loops_own_thread(loop_thread: LoopThread) -> None:
    assert repr(loop_thread) == "<LoopThread test-loop: not started, 0 at work>"
    name, loop = loop_thread.run(where())
    assert name == "test-loop"
    assert loop_thread.run(where()) == (name, loop)
    assert loop_thread.alive
    assert "running" in repr(loop_thread)


def test_an_error_of_the_coroutine_is_raised_to_the_caller(loop_thread: LoopThread) -> None:
    with pytest.raises(LookupError, match="not there"):
        loop_thread.run(fails())


def test_many_threads_share_one_loop_thread(loop_thread: LoopThread) -> None:
    results: list[tuple[str, int]] = []

    def work() -> None:
        results.extend([loop_thread.run(where(), LIMIT) for _ in range(50)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert len(results) == 400
    assert len(set(results)) == 1


def test_a_timeout_cancels_the_coroutine_and_the_error_has_the_number(
    loop_thread: LoopThread,
) -> None:
    stuck = Stuck()
    with pytest.raises(DeadlineExceeded, match=r"not end within 0\.01 s and was cancelled"):
        loop_thread.run(stuck(), timeout=0.01)
    assert stuck.cancelled.wait(LIMIT)


def test_a_timeout_of_the_work_itself_is_passed_on(loop_thread: LoopThread) -> None:
    async def driver() -> None:
        raise TimeoutError("of the driver")

    with pytest.raises(TimeoutError, match="of the driver") as caught:
        loop_thread.run(driver(), LIMIT)
    assert not isinstance(caught.value, MooredError)


def test_run_from_the_loops_own_thread_is_refused(loop_thread: LoopThread) -> None:
    async def deadlock() -> None:
        loop_thread.run(where())

    with pytest.raises(RuntimeError, match="would wait for itself for ever"):
        loop_thread.run(deadlock(), LIMIT)


def test_submit_returns_a_future_that_can_be_cancelled(loop_thread: LoopThread) -> None:
    assert loop_thread.submit(where()).result(LIMIT)[0] == "test-loop"
    stuck = Stuck()
    future = loop_thread.submit(stuck())
    assert stuck.entered.wait(LIMIT)
    assert future.cancel()
    assert stuck.cancelled.wait(LIMIT)


def test_work_whose_future_is_dropped_is_not_collected(loop_thread: LoopThread) -> None:
    stuck = Stuck()
    loop_thread.submit(stuck())
    assert stuck.entered.wait(LIMIT)
    gc.collect()
    loop_thread.run(asyncio.sleep(0))
    assert not stuck.cancelled.is_set()
    assert "1 at work" in repr(loop_thread)


def test_spawned_work_that_fails_is_logged(
    loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "moored.kernel"):
        future = loop_thread.spawn(fails(), name="refiller")
        assert isinstance(future.exception(LIMIT), LookupError)
    assert "background work 'refiller' failed" in caplog.text


def test_spawned_work_without_a_name_keeps_the_name_that_asyncio_gives(
    loop_thread: LoopThread,
) -> None:
    async def name() -> str:
        task = asyncio.current_task()
        assert task is not None
        return task.get_name()

    assert loop_thread.spawn(name()).result(LIMIT).startswith("Task-")


def test_work_is_submitted_from_the_loops_own_thread(loop_thread: LoopThread) -> None:
    async def submits() -> tuple[str, int]:
        return await asyncio.wrap_future(loop_thread.submit(where()))

    assert loop_thread.run(submits(), LIMIT)[0] == "test-loop"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_loop_that_could_not_start_the_shared_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_files_left(runner: asyncio.Runner) -> asyncio.Runner:
        raise OSError("too many open files")

    LoopThread.shared().stop()
    broken = LoopThread.shared()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Runner, "__enter__", no_files_left)
        with pytest.raises(RuntimeError, match="could not start its event loop"):
            broken.run(where(), LIMIT)
    assert LoopThread.shared().run(where(), LIMIT)[0] == "moored-loop"
    LoopThread.shared().stop()
    broken.stop(LIMIT)
    assert not broken.alive


def test_an_interrupt_cancels_the_work(loop_thread: LoopThread) -> None:
    stuck = Stuck()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        stuck.entered.wait(LIMIT)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop_thread.run(stuck(), LIMIT)
    thread.join(LIMIT)
    assert stuck.cancelled.wait(LIMIT)


def test_stop_cancels_the_work_and_fails_its_waiters() -> None:
    loop_thread = LoopThread("test-loop")
    stuck = Stuck()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            loop_thread.run(stuck(), LIMIT)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert stuck.entered.wait(LIMIT)
    loop_thread.stop()
    thread.join(LIMIT)
    assert stuck.cancelled.is_set()
    assert isinstance(outcome[0], CancelledError)
    assert "was stopped" in str(outcome[0])
    assert not loop_thread.alive
    assert repr(loop_thread) == "<LoopThread test-loop: stopped, 0 at work>"
    loop_thread.stop()


def test_submit_after_stop_is_refused() -> None:
    for start in (False, True):
        loop_thread = LoopThread("test-loop")
        if start:
            loop_thread.run(where())
        loop_thread.stop()
        for use in (loop_thread.run, loop_thread.submit, loop_thread.spawn):
            with pytest.raises(RuntimeError, match="test-loop was stopped"):
                use(where())


def test_stop_from_within_does_not_wait_for_itself() -> None:
    loop_thread = LoopThread("test-loop")

    async def stop() -> None:
        loop_thread.stop()

    loop_thread.run(stop(), LIMIT)
    loop_thread.stop(LIMIT)
    assert not loop_thread.alive


def test_stop_names_the_tasks_that_do_not_end() -> None:
    loop_thread = LoopThread("test-loop")
    entered, release = threading.Event(), threading.Event()

    async def stubborn() -> None:
        entered.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    loop_thread.spawn(stubborn(), name="stubborn work")
    assert entered.wait(LIMIT)
    with pytest.raises(DeadlineExceeded, match=r"did not end within 0.05 s: .*stubborn work.*"):
        loop_thread.stop(0.05)
    release.set()
    loop_thread.stop(LIMIT)
    assert not loop_thread.alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_system_exit_on_the_loop_settles_every_waiter() -> None:
    loop_thread = LoopThread("test-loop")

    async def gives_up() -> None:
        raise SystemExit(3)

    stuck = Stuck()
    waiting = loop_thread.submit(stuck())
    assert stuck.entered.wait(LIMIT)
    with pytest.raises((CancelledError, SystemExit)):
        loop_thread.run(gives_up(), LIMIT)
    with pytest.raises(CancelledError):
        waiting.result(LIMIT)
    with pytest.raises(RuntimeError, match="was stopped"):
        loop_thread.run(where())
    loop_thread.stop(LIMIT)
    assert not loop_thread.alive


def test_shared_returns_one_loop_thread_per_process() -> None:
    shared = LoopThread.shared()
    assert LoopThread.shared() is shared
    shared.stop()
    fresh = LoopThread.shared()
    assert fresh is not shared
    assert fresh.run(where(), LIMIT)[0] == "moored-loop"
    fresh.stop()


FORK = """
    import asyncio, os, signal, sys, threading, warnings
    from moored.kernel import LoopThread

    async def pid():
        return os.getpid()

    parent = LoopThread.shared()
    assert parent.run(pid()) == os.getpid()
    inherited = os.getpid()
    held, over = threading.Event(), threading.Event()

    def hold():
        with parent._lock:
            held.set()
            over.wait()

    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if child == 0:
        assert "of process" in repr(parent), repr(parent)
        try:
            parent.run(pid(), 5)
        except RuntimeError as error:
            assert f"belongs to process {inherited}" in str(error), error
        else:
            sys.exit("the inherited loop thread was used")
        signal.alarm(10)  # it would wait for a lock that a thread of the parent has
        parent.stop()
        signal.alarm(0)
        fresh = LoopThread.shared()
        assert fresh is not parent
        assert fresh.run(pid(), 5) == os.getpid()
        del parent
        print("child ok", flush=True)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    over.set()
    assert status == 0, status
    assert parent.run(pid(), 5) == os.getpid()
    print("parent ok", flush=True)
"""

EXIT = """
    import asyncio
    from moored.kernel import LoopThread

    started = asyncio.Event()

    async def background():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            print("tidied up", flush=True)

    LoopThread.shared().spawn(background())
    LoopThread.shared().run(started.wait())
"""


def run_script(script: str) -> str:
    """Run a script in another process, because pytest's must neither fork nor exit."""
    done = subprocess.run(
        # From Python 3.12 on, the fork of a process with threads is a warning.
        [
            sys.executable,
            *("-W", "error", "-W", "ignore:This process"),
            "-c",
            textwrap.dedent(script),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_after_a_fork_the_child_has_a_new_loop_thread() -> None:
    assert run_script(FORK).split("\n") == ["child ok", "parent ok", ""]


def test_work_is_cancelled_when_the_interpreter_exits() -> None:
    assert run_script(EXIT) == "tidied up\n"


# -- finalizers ------------------------------------------------------------------------------------


async def _nothing() -> None:
    pass


def test_a_finalizer_may_submit_during_a_submit(loop_thread: LoopThread) -> None:
    """A finalizer may be called by the garbage collector at any point."""
    done: list[None] = []

    def nested() -> None:
        with LoopThread._sharing, loop_thread._lock:
            assert LoopThread.shared() is LoopThread.shared()
            done.append(loop_thread.submit(_nothing()).result(LIMIT))

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert done == [None]


def test_submit_by_a_finalizer_during_the_start_is_refused(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def nested(thread: threading.Thread) -> None:
        with pytest.raises(RuntimeError, match="still starting"):
            loop_thread.submit(_nothing())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", nested)
    assert loop_thread.run(_nothing(), LIMIT) is None
    assert loop_thread.is_current is False


def test_submit_on_the_new_thread_before_its_loop_exists_is_refused(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = asyncio.Runner.__enter__
    refusals: list[str] = []

    def nested(runner: asyncio.Runner) -> asyncio.Runner:
        if loop_thread.is_current:
            with pytest.raises(RuntimeError, match="still starting") as caught:
                loop_thread.submit(_nothing())
            refusals.append(str(caught.value))
        return enter(runner)

    monkeypatch.setattr(asyncio.Runner, "__enter__", nested)
    done: list[None] = []
    user = threading.Thread(target=lambda: done.append(loop_thread.run(_nothing())), daemon=True)
    user.start()
    user.join(LIMIT)
    if not done:
        loop_thread._lock = threading.RLock()  # so that the fixture can end
        loop_thread._pid = 0
    assert done == [None], "they wait for each other"
    assert len(refusals) == 1


def test_a_thread_that_cannot_be_started_is_tried_again(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            loop_thread.submit(_nothing())
    done: list[None] = []
    user = threading.Thread(target=lambda: done.append(loop_thread.run(_nothing())), daemon=True)
    user.start()
    user.join(LIMIT)
    assert done == [None], "it waits for a thread that is not there"
