"""The pool for threads behaves like psycopg_pool's, for operations that hypothesis chooses.

Intended differences are excluded, each with its reason, and are listed in the documentation.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg_pool.base import AttemptWithBackoff
from tests.reservoir.endings import ENDINGS
from tests.reservoir.pair import PATIENCE, SHORT, Pair, Plan, Side

from moored.testing import scaled

#: The statistics that are equal in both pools whenever nothing is in progress.
SAME = (
    "pool_min",
    "pool_max",
    "requests_num",
    "requests_waiting",
    "requests_errors",
    "returns_bad",
    "warnings",
)
#: Those that are also equal if the number of connections is fixed: if it is not, our pool does not
#: replace a broken connection that is not needed.
SAME_IF_FIXED = (
    "pool_size",
    "pool_available",
    "requests_queued",
    "connections_num",
    "connections_lost",
)

which_one = st.integers(0, 3)
# In both pools a pipeline that was left open stays open for the next caller; the number of failed
# checks that follow differs.
endings = st.sampled_from([name for name in ENDINGS if "pipeline_left_open" not in name])


def run_block(pair: Pair, ending: str, value: int) -> object:
    """Run a block that writes a row and then ends in the given way."""

    def run(side: Side) -> None:
        with side.pool.connection() as conn:
            assert side.welcome(conn) == side.fresh
            side.insert(conn, value)
            ENDINGS[ending](side, conn, value)

    return pair.both(run)


def assert_same(pair: Pair, names: Collection[str]) -> None:
    """Wait until nothing is in progress; then these statistics and all rows must be equal."""
    pair.theirs.settle()
    pair.theirs.catch_up()
    theirs, ours = (side.settle() for side in pair.sides)
    found = {n: (ours[n], theirs.get(n, 0)) for n in names if ours[n] != theirs.get(n, 0)}
    assert not found, f"ours and theirs: {found}"
    assert ours["pool_size"] <= max(ours["pool_max"], len(pair.ours.out))
    pair.both(Side.rows)


class Machine(RuleBasedStateMachine):
    """Two pools side by side."""

    url = ""

    # -- the beginning and the end -------------------------------------------------------------

    @initialize(
        size=st.integers(1, 3),
        extra=st.sampled_from([0, 0, 1]),
        close_returns=st.booleans(),
        callbacks=st.sampled_from([frozenset(), {"reset"}, {"configure", "reset", "check"}]),
        callable_conninfo=st.booleans(),
        callable_kwargs=st.booleans(),
    )
    def begin(self, size: int, extra: int, callbacks: Collection[str], **options: bool) -> None:
        self.observer = psycopg.connect(self.url, autocommit=True)
        self.plan = Plan(
            self.url,
            min_size=size,
            max_size=size + extra,
            callbacks=frozenset(callbacks),
            **options,
        )
        self.pair = Pair(self.plan, self.observer)
        self.most = size + extra
        self.differing = set() if extra == 0 else set(SAME_IF_FIXED)
        self.value = 0

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        try:
            self.close_for_good()
        finally:
            self.pair.close()
            self.observer.close()

    def close_for_good(self) -> None:
        """Close both pools with connections in use and, if none is left, with a waiter."""
        waiting = [] if self.some_left else self.begin_to_wait()
        self.pair.both(lambda side: side.pool.close())
        for thread in waiting:
            thread.join()
        assert self.pair.both(lambda side: side.found) == ("raised PoolClosed" if waiting else None)
        assert self.pair.both(lambda side: side.pool.closed) is True
        assert self.pair.both(lambda side: side.pool.close()) is None
        assert self.pair.both(lambda side: side.pool.getconn()) == "raised PoolClosed"
        assert self.pair.both(lambda side: side.pool.open()) == "raised PoolClosed"
        assert self.pair.both(lambda side: side.pool.wait()) == "raised PoolClosed"
        while self.some_out:
            assert self.pair.both(lambda side: side.put(0)) is None
        self.pair.both(Side.rows)

    # -- invariants ----------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pair"):
            return
        assert_same(self.pair, {*SAME, *SAME_IF_FIXED} - self.differing)

    @property
    def some_out(self) -> bool:
        return bool(self.pair.ours.out)

    @property
    def some_left(self) -> bool:
        return len(self.pair.ours.out) < self.most

    def next_value(self) -> int:
        self.value += 1
        return self.value

    # -- getconn and putconn -------------------------------------------------------------------

    @rule()
    def getconn(self) -> None:
        timeout = PATIENCE if self.some_left else SHORT
        found = self.pair.both(lambda side: side.take(timeout))
        assert (found == "raised PoolTimeout") == (timeout == SHORT)

    @precondition(lambda self: self.some_out)
    @rule(which=which_one)
    def putconn(self, which: int) -> None:
        assert self.pair.both(lambda side: side.put(which)) is None

    @precondition(lambda self: self.some_left)
    @rule()
    def putconn_twice(self) -> None:
        def twice(side: Side) -> None:
            conn = side.pool.getconn(PATIENCE)
            side.pool.putconn(conn)
            side.settle()
            side.pool.putconn(conn)

        assert self.pair.both(twice) == "raised ValueError"

    # -- operations on a connection ------------------------------------------------------------

    @precondition(lambda self: self.some_out)
    @rule(
        which=which_one,
        several=st.lists(
            st.sampled_from(["insert", "fail", "commit", "rollback", "with"]), min_size=1
        ),
    )
    def use(self, which: int, several: list[str]) -> None:
        for what in several:
            value = self.next_value()
            self.pair.both(partial(self.do, which=which, what=what, value=value))

    def do(self, side: Side, which: int, what: str, value: int) -> object:
        conn = side.out[which % len(side.out)]
        if what == "insert":
            side.insert(conn, value)
        elif what == "fail":
            conn.execute("select 1/0")
        elif what == "with":
            with conn:
                side.insert(conn, value)
        else:
            getattr(conn, what)()
        return side.state(conn)

    @precondition(lambda self: self.some_out)
    @rule(which=which_one)
    def close_connection(self, which: int) -> None:
        """With `close_returns` this returns the connection, unless it is broken."""

        def close(side: Side) -> None:
            place = which % len(side.out)
            conn = side.out[place]
            if self.plan.close_returns and not conn.closed:
                del side.out[place]
            conn.close()

        assert self.pair.both(close) is None

    @precondition(lambda self: self.some_out)
    @rule(which=which_one)
    def terminate_one_in_use(self, which: int) -> None:
        def end(side: Side) -> None:
            conn = side.out[which % len(side.out)]
            if not conn.closed:
                side.terminate(conn)
            conn.execute("select 1")

        self.pair.both(end)

    # -- blocks --------------------------------------------------------------------------------

    @precondition(lambda self: self.some_left)
    @rule(several=st.lists(endings, min_size=1, max_size=4))
    def blocks(self, several: list[str]) -> None:
        for ending in several:
            self.block(ending)
            self.same()

    def block(self, ending: str) -> None:
        if self.plan.close_returns and ending.startswith("closed"):
            ending = "normal"  # an error in psycopg_pool, ignored by our pool
        run_block(self.pair, ending, self.next_value())

    @precondition(lambda self: not self.some_left)
    @rule(timeout=st.sampled_from([SHORT, 0.0]))
    def block_without_a_connection(self, timeout: float) -> None:
        def run(side: Side) -> None:
            with side.pool.connection(timeout=timeout):
                raise AssertionError("there is none")

        assert self.pair.both(run) == "raised PoolTimeout"
        if timeout == 0.0:
            self.pair.theirs.not_counted += 1  # psycopg_pool does not count it as an error

    # -- callbacks -----------------------------------------------------------------------------

    @precondition(lambda self: "reset" in self.plan.callbacks and self.some_left)
    @rule(mood=st.sampled_from(["raise", "transaction"]), ending=endings)
    def bad_reset(self, mood: str, ending: str) -> None:
        self.pair.set_mood("reset", mood)
        self.block(ending)
        self.same()
        self.pair.set_mood("reset", "good")

    @precondition(lambda self: "check" in self.plan.callbacks and self.some_left)
    @rule()
    def bad_check(self) -> None:
        """psycopg_pool keeps a working connection that failed its check; our pool closes it."""
        self.pair.set_mood("check", "raise")
        self.getconn()
        self.differing |= {"connections_num", "connections_lost", "requests_queued"}

    @precondition(lambda self: "configure" in self.plan.callbacks)
    @rule(mood=st.sampled_from(["raise", "transaction"]))
    def bad_configure(self, mood: str) -> None:
        self.pair.set_mood("configure", mood)
        self.drain()
        self.same()
        self.pair.set_mood("configure", "good")

    # -- the pool as a whole -------------------------------------------------------------------

    @rule(what=st.sampled_from(["drain", "check", "terminate_idle", "pop_stats", "stranger"]))
    def administer(self, what: str) -> None:
        """Run one operation on the pool; one rule for all of them, so that they stay rare."""
        getattr(self, what)()

    def drain(self) -> None:
        assert self.pair.both(lambda side: side.pool.drain()) is None

    def check(self) -> None:
        assert self.pair.both(lambda side: side.pool.check()) is None

    def terminate_idle(self) -> None:
        """Terminate idle backends; without `check()`, psycopg_pool would hand them out."""

        def end(side: Side) -> None:
            side.terminate_idle()
            side.pool.check()

        assert self.pair.both(end) is None

    def pop_stats(self) -> None:
        def pop(side: Side) -> None:
            side.pool.pop_stats()
            side.not_counted = 0

        self.pair.each(pop)

    def stranger(self) -> None:
        """Return a connection that belongs to another pool, or to none."""
        observer: Any = self.observer
        for pool in (type("Pool", (), {"name": "other"})(), None):
            observer._pool = pool
            assert self.pair.both(lambda side: side.pool.putconn(observer)) == "raised ValueError"

    @rule(size=st.integers(-1, 3), extra=st.integers(-1, 1))
    def resize(self, size: int, extra: int) -> None:
        """psycopg_pool closes surplus connections after `max_idle`, and `catch_up` does it now."""
        found = self.pair.both(lambda side: side.pool.resize(size, size + extra))
        if found == "raised ValueError":
            return
        self.most = size + extra
        if size < len(self.pair.ours.out):
            # When `min_size` is raised again, psycopg_pool opens as many connections as it was
            # raised by, even if enough of them are in use; ours opens those that are missing.
            self.differing.add("connections_num")
        if extra:
            self.differing |= set(SAME_IF_FIXED)

    @precondition(lambda self: len(self.pair.ours.out) <= self.most)
    @rule()
    def too_many_waiting(self) -> None:
        while self.some_left:
            self.getconn()
        waiting = self.begin_to_wait()
        assert self.pair.both(lambda side: side.pool.getconn()) == "raised TooManyRequests"
        assert self.pair.both(lambda side: side.put(0)) is None
        for thread in waiting:
            thread.join()
        assert self.pair.both(lambda side: side.found) == self.pair.ours.fresh
        self.pair.each(lambda side: setattr(side, "found", None))

    def begin_to_wait(self) -> list[Any]:
        return self.pair.in_threads(lambda side: side.wait_for_one(PATIENCE))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the reconnect delay of psycopg_pool, which is a second."""
    monkeypatch.setattr(AttemptWithBackoff, "INITIAL_DELAY", 0.01)


@pytest.mark.usefixtures("impatient")
def test_the_same_operations_have_the_same_outcome(module_url: str) -> None:
    machine = type("Machine", (Machine,), {"url": module_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=scaled(250, least=8),
            stateful_step_count=15,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # shrinking would take minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_end_of_a_block_has_the_same_outcome(
    ending: str, module_url: str, observer: psycopg.Connection[Any]
) -> None:
    pair = Pair(Plan(module_url, min_size=1, max_size=1), observer)
    try:
        assert_same(pair, {*SAME, *SAME_IF_FIXED})
        run_block(pair, ending, 1)
        assert_same(pair, {*SAME, *SAME_IF_FIXED})
        run_block(pair, "normal", 2)
        assert_same(pair, {*SAME, *SAME_IF_FIXED})
    finally:
        pair.close()
