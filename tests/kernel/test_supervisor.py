"""The supervisor in virtual time: order, restarts, intensity, stuck children, cancellation."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from itertools import pairwise

import pytest
from tests.kernel.stage import Stage, settle, virtual
from tests.logs import silent

from moored.kernel import (
    Backoff,
    Child,
    Context,
    NotRunning,
    Registry,
    RestartIntensityExceeded,
    RestartRequested,
    StartFailed,
    SupervisionError,
    Supervisor,
)
from moored.testing import run_one

pytestmark = pytest.mark.pure


def test_children_start_in_order_and_stop_in_reverse() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a"), stage.child("b")]) as root:
            assert await root.start_child(stage.child("c")) == "c1"
            assert stage.take() == "+a1 +b1 +c1"
            assert root.value("b") == "b1"
        assert stage.take() == "-c1 -b1 -a1"
        assert root.state == "stopped"

    virtual(scenario)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("one_for_one", "+b2"),
        ("one_for_all", "-d1 -c1 -a1 +a2 +b2 +c2"),
        ("rest_for_one", "-d1 -c1 +b2 +c2"),
    ],
)
def test_a_failure_restarts_the_siblings_that_the_strategy_names(
    strategy: str, expected: str
) -> None:
    async def scenario() -> None:
        stage = Stage()
        children = [stage.child(n) for n in "abc"] + [stage.child("d", restart="temporary")]
        async with Supervisor(strategy=strategy, children=children) as root:  # type: ignore[arg-type]
            stage.take()
            stage.crash("b")
            await settle()
            assert stage.take() == expected
            # A temporary child that was stopped for a sibling's sake does not come back.
            assert (root.tree().children[-1].name == "d") is (strategy == "one_for_one")

    virtual(scenario)


@pytest.mark.parametrize(
    ("restart", "after_crash", "after_return"),
    [("permanent", "+a2", "+a2"), ("transient", "+a2", ""), ("temporary", "", "")],
)
def test_restart_types(restart: str, after_crash: str, after_return: str) -> None:
    async def scenario() -> None:
        for act, expected in (("crash", after_crash), ("finish", after_return)):
            stage = Stage()
            async with Supervisor(children=[stage.child("a", restart=restart)]):
                stage.take()
                getattr(stage, act)("a")
                await settle()
                assert stage.take() == expected

    virtual(scenario)


def test_a_finished_transient_child_can_be_started_again() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a", restart="transient")]) as root:
            stage.finish("a")
            await settle()
            assert root.tree().children[0].state == "finished"
            assert await root.restart_child("a") == "a2"
            assert root.tree().children[0].restarts == 0

    virtual(scenario)


def test_too_many_restarts_fail_the_supervisor_with_the_history_of_causes() -> None:
    async def scenario() -> None:
        stage = Stage()
        root = Supervisor(
            "root", children=[stage.child("z"), stage.child("a")], intensity=(2, 10.0)
        )
        await root.start()
        for _ in range(3):
            stage.crash("a")
            await settle()
        with pytest.raises(RestartIntensityExceeded) as caught:
            await root.wait()
        assert [f.what for f in caught.value.causes] == ["a broke (ValueError)"] * 3
        assert str(caught.value.__cause__) == "a broke"
        assert "3 failures within 10 s, where 2 restarts are allowed" in str(caught.value)
        assert stage.take() == "+z1 +a1 +a2 +a3 -z1"
        assert root.state == "failed"
        with pytest.raises(NotRunning):
            await root.start_child(stage.child("late"))

    virtual(scenario)


def test_intensity_forgets_what_is_older_than_its_period() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a")], intensity=(1, 10.0)) as root:
            for _ in range(5):
                stage.crash("a")
                await asyncio.sleep(10.5)
            assert root.state == "running"

    virtual(scenario)


def test_a_failed_supervisor_is_restarted_by_its_parent() -> None:
    async def scenario() -> None:
        stage = Stage()
        inner = Supervisor.child(
            "inner", children=[stage.child("a"), stage.child("b")], intensity=(0, 5.0)
        )
        async with Supervisor("root", children=[inner]) as root:
            stage.take()
            stage.crash("a")
            await settle()
            assert stage.take() == "-b1 +a1 +b1"
            node = root.tree().children[0]
            assert (node.restarts, node.generation) == (1, 2)
            assert node.last_failure is not None
            assert node.last_failure.startswith("root/inner gave up: 1 failures")

    virtual(scenario)


def test_a_failing_start_during_a_restart_counts_as_a_restart() -> None:
    async def scenario() -> None:
        starts = 0

        async def run(ctx: Context) -> None:
            nonlocal starts
            starts += 1
            if starts > 1:
                raise OSError("refused")
            ctx.started()
            await asyncio.sleep(1)
            raise ValueError("first")

        root = Supervisor(children=[Child("a", run)], intensity=(3, 60.0))
        await root.start()
        with pytest.raises(RestartIntensityExceeded) as caught:
            await root.wait()
        assert starts == 4
        assert [f.what.split()[0] for f in caught.value.causes] == ["first"] + ["root/a"] * 3
        assert isinstance(caught.value.__cause__, StartFailed)

    virtual(scenario)


def test_a_child_that_does_not_start_fails_the_caller_and_is_removed() -> None:
    async def scenario() -> None:
        async def broken(ctx: Context) -> None:
            raise OSError("no route")

        async def silent(ctx: Context) -> None:
            await asyncio.sleep(100)

        async with Supervisor() as root:
            with pytest.raises(
                StartFailed, match=r"root/broken failed to start: no route \(OSError\)"
            ):
                await root.start_child(Child("broken", broken))
            before = root.clock.monotonic()
            with pytest.raises(StartFailed, match=r"did not call ctx.started\(\) within 7 s"):
                await root.start_child(Child("silent", silent, start_timeout=7))
            assert root.clock.monotonic() - before == pytest.approx(7, abs=0.01)
            assert root.tree().children == ()

    virtual(scenario)


def test_a_start_that_fails_below_a_supervisor_is_reported_once() -> None:
    async def scenario() -> None:
        async def broken(ctx: Context) -> None:
            raise OSError("no route")

        root = Supervisor(children=[Supervisor.child("below", children=[Child("a", broken)])])
        with pytest.raises(StartFailed) as caught:
            await root.start()
        assert str(caught.value) == "root/below/a failed to start: no route (OSError)"
        failures = [event.component for event in root.recorder.events() if event.kind == "failure"]
        assert failures == ["root/below/a"]

    virtual(scenario)


def test_a_failing_initial_child_stops_those_before_it() -> None:
    async def scenario() -> None:
        async def broken(ctx: Context) -> None:
            raise OSError("no route")

        stage = Stage()
        with pytest.raises(StartFailed):
            async with Supervisor(
                children=[stage.child("a"), stage.child("b"), Child("c", broken)]
            ):
                pytest.fail("must not be entered")
        assert stage.take() == "+a1 +b1 -b1 -a1"

    virtual(scenario)


@pytest.mark.parametrize(
    ("auto", "ended_after"), [("any_significant", 1), ("all_significant", 2), ("never", None)]
)
def test_auto_shutdown(auto: str, ended_after: int | None) -> None:
    async def scenario() -> None:
        stage = Stage()
        significant = auto != "never"
        children = [
            stage.child("plain"),
            stage.child("x", restart="transient", significant=significant),
            stage.child("y", restart="temporary", significant=significant),
        ]
        root = Supervisor(children=children, auto_shutdown=auto)  # type: ignore[arg-type]
        await root.start()
        for number, (act, name) in enumerate([(stage.finish, "x"), (stage.crash, "y")], 1):
            act(name)
            await settle()
            assert (root.state == "stopped") is (ended_after is not None and number >= ended_after)
            if root.state == "stopped":
                break
        await root.stop()
        assert root.error is None

    virtual(scenario)


def test_significant_requires_auto_shutdown_and_a_child_that_is_not_permanent() -> None:
    async def run(ctx: Context) -> None: ...

    with pytest.raises(ValueError, match="auto_shutdown='never'"):
        Supervisor(children=[Child("a", run, restart="transient", significant=True)])
    with pytest.raises(ValueError, match="cannot be significant"):
        Child("a", run, significant=True)
    with pytest.raises(ValueError, match=r"start_timeout=0 must be.*; shutdown=-1 must be"):
        Child("a", run, start_timeout=0, shutdown=-1)


def test_stop_child_of_a_significant_child_does_not_end_the_supervisor() -> None:
    async def scenario() -> None:
        stage = Stage()
        child = stage.child("x", restart="temporary", significant=True)
        async with Supervisor(children=[child], auto_shutdown="any_significant") as root:
            await root.stop_child("x")
            await settle()
            assert root.state == "running"

    virtual(scenario)


def test_a_stuck_child_is_abandoned_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        registry: Registry[str, str] = Registry()
        release = asyncio.Event()

        async def stubborn(ctx: Context) -> None:
            ctx.register(registry, "name", "old")
            ctx.started()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    pass

        stage = Stage()
        root = Supervisor(children=[stage.child("a"), Child("s", stubborn, shutdown=3)])
        await root.start()
        before = root.clock.monotonic()
        await root.stop()
        assert root.clock.monotonic() - before == pytest.approx(3, abs=0.01)
        assert root.abandoned == 1
        assert stage.take() == "+a1 -a1"
        assert "name" not in registry
        assert [e.kind for e in root.recorder.events("root/s")][-1] == "abandoned"
        release.set()
        await settle()
        assert [e.kind for e in root.recorder.events("root/s")][-1] == "abandoned_ended"

    with caplog.at_level(logging.ERROR):
        virtual(scenario)
    assert "did not end within 3 s of being cancelled" in caplog.text


def test_a_stuck_child_does_not_keep_its_successor_from_starting() -> None:
    async def scenario() -> None:
        registry: Registry[str, int] = Registry()
        release = asyncio.Event()

        async def stubborn(ctx: Context) -> None:
            ctx.register(registry, "name", ctx.generation)
            ctx.started()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    if ctx.generation > 1:
                        raise
            if ctx.generation > 1:
                await asyncio.Event().wait()

        async with Supervisor(children=[Child("s", stubborn, shutdown=1)]) as root:
            await root.restart_child("s")
            assert registry.whereis("name") == 2
            release.set()
            await settle()

    virtual(scenario)


def test_cancelling_the_owner_twice_keeps_the_order() -> None:
    async def scenario() -> None:
        trace: list[str] = []

        def slow(name: str) -> Child:
            async def run(ctx: Context) -> None:
                ctx.started()
                try:
                    await asyncio.Event().wait()
                finally:
                    trace.append(f"{name} stopping")
                    await asyncio.sleep(2)
                    trace.append(f"{name} stopped")

            return Child(name, run)

        async def owner() -> None:
            async with Supervisor(children=[slow("a"), slow("b")]):
                await asyncio.Event().wait()

        task = asyncio.create_task(owner())
        await settle()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.5)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert trace == ["b stopping", "b stopped", "a stopping", "a stopped"]

    virtual(scenario)


def test_cancelling_start_child_stops_the_child_before_it_raises() -> None:
    async def scenario() -> None:
        trace: list[str] = []

        async def slow(ctx: Context) -> None:
            try:
                await asyncio.sleep(20)
            finally:
                trace.append("ended")

        async with Supervisor(strategy="rest_for_one") as root:
            starting = asyncio.create_task(root.start_child(Child("slow", slow)))
            await settle()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert trace == ["ended"]
            assert root.tree().children == ()

    virtual(scenario)


def test_stopping_while_a_child_starts_and_while_another_waits_is_prompt() -> None:
    async def scenario() -> None:
        stage = Stage()

        async def slow(ctx: Context) -> None:
            await asyncio.sleep(20)

        root = Supervisor(children=[stage.child("w", backoff=Backoff(1000, 1000))])
        await root.start()
        stage.crash("w")
        starting = asyncio.create_task(root.start_child(Child("slow", slow)))
        await settle()
        assert root.tree().children[0].state == "waiting"
        before = root.clock.monotonic()
        await root.stop()
        assert root.clock.monotonic() - before < 0.1
        with pytest.raises(NotRunning):
            await starting

    virtual(scenario)


def test_backoff_delays_each_restart_and_starts_over_after_healthy() -> None:
    async def scenario() -> None:
        starts: list[float] = []

        async def run(ctx: Context) -> None:
            starts.append(ctx.clock.monotonic())
            ctx.started()
            if len(starts) == 4:
                ctx.healthy()
            raise ValueError

        root = Supervisor(children=[Child("a", run, backoff=Backoff(1, 8))], intensity=None)
        await root.start()
        await asyncio.sleep(12)
        await root.stop()
        gaps = [b - a for a, b in pairwise(starts)]
        assert gaps == pytest.approx([1, 2, 4, 1, 2], abs=0.01)

    virtual(scenario)


def test_an_exhausted_backoff_fails_the_supervisor() -> None:
    async def scenario() -> None:
        async def run(ctx: Context) -> None:
            ctx.started()
            raise ValueError("always")

        root = Supervisor(
            children=[Child("a", run, backoff=Backoff(1, 8, max_attempts=2))], intensity=None
        )
        await root.start()
        with pytest.raises(Exception, match="2 failed attempts"):
            await root.wait()

    virtual(scenario)


def test_a_slow_start_delays_no_other_child_of_one_for_one() -> None:
    async def scenario() -> None:
        stage = Stage()

        async def slow(ctx: Context) -> None:
            await asyncio.sleep(20)
            ctx.started()
            await asyncio.Event().wait()

        async with Supervisor(children=[stage.child("a")]) as root:
            starting = asyncio.create_task(root.start_child(Child("slow", slow)))
            await settle()
            stage.take()
            stage.crash("a")
            await settle()
            assert stage.take() == "+a2"
            await starting

    virtual(scenario)


def test_stop_child_interrupts_a_pending_backoff() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a", backoff=Backoff(1000, 1000))]) as root:
            stage.crash("a")
            await settle()
            before = root.clock.monotonic()
            await asyncio.gather(
                root.stop_child("a"), root.stop_child("a"), root.stop_child("nobody")
            )
            assert root.clock.monotonic() - before < 0.1
            assert await root.start_child(stage.child("a")) == "a1"

    virtual(scenario)


def test_a_child_may_stop_its_own_supervisor_or_itself() -> None:
    async def scenario() -> None:
        async def ends_all(ctx: Context) -> None:
            ctx.started()
            await asyncio.sleep(1)
            await ctx.supervisor.stop()

        async def ends_itself(ctx: Context) -> None:
            ctx.started()
            await ctx.supervisor.stop_child(ctx.name)

        root = Supervisor(children=[Child("b", ends_itself), Child("a", ends_all)])
        await root.start()
        await asyncio.sleep(0.5)
        assert [c.name for c in root.tree().children] == ["a"]
        await root.wait()
        assert root.abandoned == 0

    virtual(scenario)


def test_a_child_that_starts_a_sibling_before_started_gets_an_error() -> None:
    async def scenario() -> None:
        stage = Stage()

        async def early(ctx: Context) -> None:
            await ctx.supervisor.start_child(stage.child("b"))

        async with Supervisor(strategy="rest_for_one") as root:
            with pytest.raises(StartFailed, match="before it starts or stops a sibling"):
                await root.start_child(Child("a", early))

    virtual(scenario)


def test_a_child_cancelled_by_other_code_has_failed() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a", restart="transient")]) as root:
            next(t for t in asyncio.all_tasks() if t.get_name() == "root/a").cancel()
            await asyncio.sleep(2)  # until it is sure that the loop has not ended
            assert stage.take() == "+a1 -a1 +a2"
            assert "was cancelled, and not by its supervisor" in str(root.tree())

    virtual(scenario)


def test_what_a_child_owned_is_free_before_its_next_start() -> None:
    async def scenario() -> None:
        registry: Registry[str, int] = Registry()

        async def run(ctx: Context) -> None:
            ctx.register(registry, "link", ctx.generation)
            ctx.started()
            await asyncio.sleep(0.1)
            raise ValueError

        async with Supervisor(children=[Child("a", run)], intensity=None):
            await asyncio.sleep(5.05)
            assert (registry.whereis("link") or 0) > 40

    virtual(scenario)


def test_the_same_name_twice_is_refused_and_unknown_names_are_listed() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a")]) as root:
            with pytest.raises(SupervisionError, match="already has a child 'a'"):
                await root.start_child(stage.child("a"))
            with pytest.raises(SupervisionError, match="has no child 'b'; it has: a"):
                await root.restart_child("b")

    virtual(scenario)


def test_the_tree_is_drawn_as_text() -> None:
    async def scenario() -> None:
        stage = Stage()
        inner = Supervisor.child("account", strategy="rest_for_one", children=[stage.child("link")])
        async with Supervisor("root", children=[stage.child("a"), inner]) as root:
            stage.crash("link")
            await asyncio.sleep(75)
            assert str(root.tree()).splitlines() == [
                "root        running for 1 m 15 s, one_for_one",
                "├─ a        running for 1 m 15 s, permanent",
                "└─ account  running for 1 m 15 s, rest_for_one, permanent",
                "   └─ link  running for 1 m 15 s, permanent, restarted once; "
                "last failure: link broke (ValueError)",
            ]
            assert repr(root) == "<Supervisor root: running, one_for_one, 2 of 2 children running>"
            data = root.tree().as_dict()
            assert data["children"][1]["children"][0]["generation"] == 2

    async def play(sim: object) -> None:
        await scenario()

    run_one(play, 1)


def test_explain_shows_the_failure_behind_a_restart() -> None:
    async def scenario() -> None:
        stage = Stage()
        async with Supervisor(
            "root", children=[stage.child("a", backoff=Backoff(100, 100))]
        ) as root:
            stage.crash("a")
            await settle()
            text = root.recorder.explain("root/a")
            assert "ValueError" in text
            assert "a broke" in text
            assert "1 m 40 s" in text

    virtual(scenario)


@pytest.mark.every_loop
async def test_no_task_is_left_and_every_exception_is_retrieved() -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def run(ctx: Context) -> None:
        ctx.started()
        await asyncio.sleep(0)
        raise ValueError

    async with Supervisor(
        intensity=None, children=[Child(f"c{i}", run) for i in range(10)]
    ) as root:
        for turn in range(20):
            await asyncio.sleep(0)
            if turn % 10 == 9:
                gc.collect()
        assert sum(node.restarts for _, node in root.tree().paths()) > 20
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_failed_tasks_are_not_kept_alive() -> None:
    """Not even if the traceback of the failure refers to the task."""
    failed: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()
    restarted = asyncio.Event()

    async def fail(ctx: Context) -> None:
        ctx.started()
        if ctx.generation > 3:
            restarted.set()
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        failed.add(task)
        raise ValueError

    # Log records contain tracebacks, and pytest keeps them.
    with silent("moored"):
        async with Supervisor(intensity=None, children=[Child("child", fail)]):
            await restarted.wait()
    gc.collect()
    assert not failed


async def test_restart_requested_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives: list[int] = []
    done = asyncio.Event()

    async def work(ctx: Context) -> None:
        ctx.started(None)
        lives.append(len(lives))
        if len(lives) == 1:
            raise RestartRequested("the link was lost")
        done.set()
        await asyncio.Event().wait()

    caplog.set_level(logging.INFO)
    async with Supervisor("root", children=[Child("a", work)]):
        await done.wait()
    assert lives == [0, 1]
    assert caplog.messages == []
