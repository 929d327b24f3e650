"""A child process never uses a connection of its parent.

Each test is a program of its own: a fork of this process, with its many threads, proves nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.programs import run_program
from tests.reservoir.support import PATIENCE

BEGIN = """
import asyncio, os, sys, threading, traceback, warnings
import psycopg
from moored.reservoir import AsyncConnectionPool, ConnectionPool, PoolClosed
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested
url = sys.argv[1]

def pid_of(conn):
    return conn.execute("select pg_backend_pid()").fetchone()[0]

def in_child(work):
    "Run it in a forked child, and fail if it does."
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the child failed with {code}"
"""


Run = Callable[[str], None]


@pytest.fixture
def run(module_url: str, tmp_path: Path) -> Run:
    """Runs a program in a new process with one thread."""

    def run_it(program: str) -> None:
        script = tmp_path / "program.py"
        script.write_text(BEGIN + textwrap.dedent(program))
        done = run_program(str(script), module_url, timeout=6 * PATIENCE)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr, done.stderr

    return run_it


def test_a_child_has_connections_of_its_own(run: Run) -> None:
    run(
        """
        with ConnectionPool(url, max_size=2) as pool:
            pool.wait()
            with pool.connection() as one, pool.connection() as two:
                parents = {pid_of(one), pid_of(two)}

            def child():
                with pool.connection() as one, pool.connection() as two:
                    assert not {pid_of(one), pid_of(two)} & parents
                assert pool.statistics().refills == 2
                pool.close()

            in_child(child)
            in_child(lambda: pool.close())
            with pool.connection() as one, pool.connection() as two:
                assert {pid_of(one), pid_of(two)} == parents
        """,
    )


def test_a_pool_opened_explicitly_opens_itself_in_a_child(run: Run) -> None:
    """Once, however many of the child's threads are the first to use it."""
    run(
        """
        pool = ConnectionPool(url, max_size=1, open=False)
        pool.open()
        with pool.connection() as conn:
            parents = pid_of(conn)

        def child():
            threads = [threading.Thread(target=use) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(seen) == 4 and parents not in seen, seen

        def use():
            with pool.connection() as conn:
                seen.append(pid_of(conn))

        seen = []
        in_child(child)
        pool.close()

        def closed():
            try:
                pool.getconn()
            except PoolClosed:
                return
            raise AssertionError("it was open")

        in_child(closed)
        """,
    )


def test_a_block_that_also_ends_in_a_child_leaves_the_connection_to_the_parent(run: Run) -> None:
    """The child neither ends the parent's transaction nor keeps its connection."""
    run(
        """
        def use(pool, end):
            global child, parents
            pool.wait()
            with pool.connection() as conn:
                parents = pid_of(conn)
                conn.execute("create temporary table mine (n int)")
                if end == "normally":
                    conn.commit()  # so that it comes back clean
                child = os.fork()
                if child == 0:
                    if end == "with an error":
                        raise ZeroDivisionError
                    return
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert code == 0, f"the child failed with {code}"
                conn.rollback()
                gone = conn.execute("select to_regclass('mine') is null").fetchone()[0]
                assert gone == (end != "normally")
                assert pid_of(conn) == parents

        def play(end):
            with ConnectionPool(url, max_size=1) as pool:
                try:
                    use(pool, end)
                except ZeroDivisionError:
                    assert child == 0
                with pool.connection() as conn:
                    assert (pid_of(conn) == parents) == (child != 0)
                assert pool.statistics().size == 1
            if child == 0:
                os._exit(0)

        for end in ("normally", "with an error", "with a transaction open"):
            play(end)
        """,
    )


def test_a_child_cannot_return_a_connection_of_its_parent(run: Run) -> None:
    run(
        """
        with ConnectionPool(url, max_size=1) as pool:
            pool.wait()
            conn = pool.getconn()
            conn.execute("create temporary table mine (n int)")

            def child():
                try:
                    pool.putconn(conn)
                except ValueError:
                    return
                raise AssertionError("it was taken")

            in_child(child)
            assert conn.execute("select count(*) from mine").fetchone() == (0,)
            pool.putconn(conn)
        """,
    )


def test_a_fork_while_other_threads_hold_locks_does_not_block_the_child(run: Run) -> None:
    """A lock that another thread holds at the fork is held for ever in the child.

    Our locks are new in the child; those of libpq are not, so this waits until no thread connects.
    """
    run(
        """
        stop = threading.Event()

        def hammer():
            while not stop.is_set():
                with pool.connection():
                    pass

        with ConnectionPool(url, max_size=2) as pool:
            pool.wait()
            threads = [threading.Thread(target=hammer) for _ in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(5):
                in_child(lambda: pool.putconn(pool.getconn(timeout=20.0)))
            stop.set()
            for thread in threads:
                thread.join()
        """,
    )


def test_a_pool_for_asyncio_refuses_in_a_child(run: Run) -> None:
    """Its event loop is the parent's, too."""
    run(
        """
        async def main():
            async with AsyncConnectionPool(url, max_size=1, name="shop") as pool:
                async with pool.connection() as conn:
                    parents = conn.info.backend_pid
                in_child(lambda: refused(pool))
                async with pool.connection() as conn:
                    await conn.execute("create temporary table mine (n int)")
                    in_child(lambda: leave(pool))
                    assert conn.info.backend_pid == parents
                    await conn.execute("select * from mine")

        def refused(pool):
            for use in (pool.getconn, lambda: pool.connection().__aenter__()):
                try:
                    # Driven by hand: the child must not run the parent's loop.
                    checkout = use()
                    for _ in range(2):  # a refused checkout yields to the loop once
                        checkout.send(None)
                except PoolClosed as error:
                    assert "from which this one was forked" in str(error), error
                else:
                    raise AssertionError("it was open")
            assert pool.closed

        def leave(pool):
            (item,) = pool.reservoir.core.items.values()
            try:
                pool._finish(item, ZeroDivisionError()).send(None)
            except StopIteration:
                return
            raise AssertionError("it waited for something")

        asyncio.run(main())
        """,
    )
