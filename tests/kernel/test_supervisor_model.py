"""Random trees under random schedules behave like a small model of the OTP rules.

The model is a recursive, synchronous rewriting of the rules, without tasks, locks or time. Each
schedule is played twice: *in turn*, where each action has settled before the next, and the trace
of starts and ends must equal the model's exactly; and *in a heap*, where actions overlap
starts, stops and each other, and the invariants must hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from moored.kernel import (
    Child,
    Context,
    RestartIntensityExceeded,
    StartFailed,
    SupervisionError,
    Supervisor,
    _supervisor,
)
from moored.testing import base_seed, mutant, run_one, scaled

pytestmark = pytest.mark.pure

PERIOD = 250.0
STEP = 100.0  # virtual seconds between two actions, so that the intensity window matters
SLACK = 0.001  # timers are as inexact as uvloop's


@dataclass(frozen=True)
class Spec:
    """A leaf, or a supervisor when it has a strategy."""

    name: str
    restart: str
    significant: bool = False
    strategy: str | None = None
    intensity: int = 1
    auto: str = "never"
    children: tuple[Spec, ...] = ()


@dataclass(frozen=True)
class Action:
    """An action on the nth leaf: `poison` makes its next starts fail, then crashes it."""

    verb: str
    leaf: int
    at: float
    times: int = 0


# -- the model ---------------------------------------------------------------------------------


class GaveUp(Exception):
    pass


class Ended(Exception):
    pass


class CannotStart(Exception):
    pass


@dataclass
class Node:
    spec: Spec
    path: str
    running: bool = False
    finished: bool = False
    inner: Model | None = None


@dataclass
class World:
    trace: list[str] = field(default_factory=list)
    poison: Counter[str] = field(default_factory=Counter)


class Model:
    """One supervisor, by the rules: recursive calls where the real one has tasks."""

    def __init__(self, spec: Spec, path: str, world: World) -> None:
        self.spec, self.path, self.world = spec, path, world
        self.nodes: list[Node] = []
        self.window: list[float] = []

    def start(self, now: float) -> None:
        for spec in self.spec.children:
            node = Node(spec, f"{self.path}/{spec.name}")
            self.nodes.append(node)
            try:
                self.run(node, now)
            except CannotStart:
                self.nodes.remove(node)
                self.stop()
                raise

    def run(self, node: Node, now: float) -> None:
        node.finished = False
        if node.spec.strategy is not None:
            node.inner = Model(node.spec, node.path, self.world)
            node.inner.start(now)
        else:
            self.world.trace.append(f"+{node.path}")
            if self.world.poison[node.path] > 0:
                self.world.poison[node.path] -= 1
                self.world.trace.append(f"!{node.path}")
                raise CannotStart
        node.running = True

    def halt(self, node: Node) -> None:
        if not node.running:
            return
        node.running = False
        if node.inner is not None:
            node.inner.stop()
        else:
            self.world.trace.append(f"-{node.path}")

    def stop(self) -> None:
        for node in reversed(self.nodes):
            self.halt(node)
        self.nodes = []

    def leaf_ends(self, path: str, failed: bool, now: float) -> bool:
        """End a leaf somewhere below; return False if that leaf does not run."""
        for node in self.nodes:
            if node.inner is not None and node.running:
                try:
                    if node.inner.leaf_ends(path, failed, now):
                        return True
                except (GaveUp, Ended) as end:
                    node.running = False
                    self.ended(node, isinstance(end, GaveUp), now)
                    return True
            elif node.path == path and node.running:
                node.running = False
                self.world.trace.append(f"{'!' if failed else '.'}{path}")
                self.ended(node, failed, now)
                return True
        return False

    def ended(self, node: Node, failed: bool, now: float) -> None:
        restart = node.spec.restart
        if restart == "permanent" or (restart == "transient" and failed):
            self.restart(node, now)
            return
        node.finished = True
        if restart == "temporary":
            self.nodes.remove(node)
        if node.spec.significant and self.spec.auto != "never":
            left = any(n.spec.significant and not n.finished for n in self.nodes)
            if self.spec.auto == "any_significant" or not left:
                self.stop()
                raise Ended

    def restart(self, node: Node, now: float) -> None:
        while True:
            self.window = [at for at in self.window if now - at <= PERIOD] + [now]
            if len(self.window) > self.spec.intensity:
                self.stop()
                raise GaveUp
            index = self.nodes.index(node)
            group = {
                "one_for_one": [node],
                "one_for_all": list(self.nodes),
                "rest_for_one": self.nodes[index:],
            }[self.spec.strategy or ""]
            for member in reversed(group):
                self.halt(member)
                if member.spec.restart == "temporary":
                    self.nodes.remove(member)
            for member in group:
                if member in self.nodes:
                    try:
                        self.run(member, now)
                    except CannotStart:
                        node = member
                        break
            else:
                return


# -- the real thing ----------------------------------------------------------------------------


class Theatre:
    """Builds the tree of a spec out of real children, and makes them fail on demand."""

    def __init__(self, jitter: bool) -> None:
        self.trace: list[str] = []
        self.poison: Counter[str] = Counter()
        self.alive: Counter[str] = Counter()
        self.overlaps: list[str] = []
        self._orders: dict[str, asyncio.Future[None]] = {}
        self._jitter = jitter

    def child(self, spec: Spec) -> Child:
        if spec.strategy is None:
            return Child(
                spec.name,
                self._run,
                restart=spec.restart,  # type: ignore[arg-type]
                significant=spec.significant,
            )
        return Supervisor.child(
            spec.name,
            strategy=spec.strategy,  # type: ignore[arg-type]
            intensity=(spec.intensity, PERIOD),
            auto_shutdown=spec.auto,  # type: ignore[arg-type]
            children=[self.child(inner) for inner in spec.children],
            restart=spec.restart,  # type: ignore[arg-type]
            significant=spec.significant,
        )

    def root(self, spec: Spec) -> Supervisor:
        return Supervisor(
            "root",
            strategy=spec.strategy,  # type: ignore[arg-type]
            intensity=(spec.intensity, PERIOD),
            auto_shutdown=spec.auto,  # type: ignore[arg-type]
            children=[self.child(inner) for inner in spec.children],
        )

    async def _run(self, ctx: Context) -> None:
        path = ctx.path
        self.trace.append(f"+{path}")
        self.alive[path] += 1
        if self.alive[path] > 1:
            self.overlaps.append(path)
        try:
            if self._jitter:
                await asyncio.sleep(ctx.clock.random.random())
            if self.poison[path] > 0:
                self.poison[path] -= 1
                raise ValueError("poisoned")
            order = self._orders[path] = asyncio.get_running_loop().create_future()
            ctx.started()
            await order
            self.trace.append(f".{path}")
        except asyncio.CancelledError:
            if self._jitter:
                await asyncio.sleep(ctx.clock.random.random())
            self.trace.append(f"-{path}")
            raise
        except ValueError:
            self.trace.append(f"!{path}")
            raise
        finally:
            self.alive[path] -= 1

    def act(self, action: Action, path: str) -> None:
        order = self._orders.get(path)
        if order is None or order.done() or not self.alive[path]:
            return
        if action.verb == "finish":
            order.set_result(None)
        else:
            self.poison[path] += action.times
            order.set_exception(ValueError("told to fail"))


def leaves(spec: Spec, path: str = "root") -> Iterator[str]:
    for child in spec.children:
        below = f"{path}/{child.name}"
        if child.strategy is None:
            yield below
        else:
            yield from leaves(child, below)


def play_in_turn(spec: Spec, actions: list[Action]) -> tuple[list[str], str]:
    """Return the model's trace and how the root ended."""
    world = World()
    model = Model(spec, "root", world)
    paths = list(leaves(spec))
    model.start(0.0)
    for number, action in enumerate(actions):
        path = paths[action.leaf % len(paths)]
        before = len(world.trace)
        if action.times:
            world.poison[path] += action.times
        try:
            found = model.leaf_ends(path, action.verb == "crash", (number + 1) * STEP)
        except GaveUp:
            return world.trace, "gave up"
        except Ended:
            return world.trace, "ended"
        if not found:
            assert len(world.trace) == before
            world.poison[path] -= action.times
    model.stop()
    return world.trace, "stopped"


async def perform_in_turn(spec: Spec, actions: list[Action]) -> tuple[list[str], str]:
    theatre = Theatre(jitter=True)
    paths = list(leaves(spec))
    root = theatre.root(spec)
    await root.start()
    begin = root.clock.monotonic()
    for number, action in enumerate(actions):
        await asyncio.sleep(begin + (number + 1) * STEP - root.clock.monotonic())
        theatre.act(action, paths[action.leaf % len(paths)])
    await asyncio.sleep(STEP)
    outcome = "stopped"
    if root.state in ("stopped", "failed"):
        outcome = "gave up" if isinstance(root.error, RestartIntensityExceeded) else "ended"
    await root.stop()
    assert +theatre.alive == Counter()
    assert not theatre.overlaps
    return theatre.trace, outcome


async def perform_in_a_heap(spec: Spec, actions: list[Action]) -> None:
    theatre = Theatre(jitter=True)
    paths = list(leaves(spec))
    root = theatre.root(spec)
    clock = root.clock
    starting = asyncio.create_task(root.start())
    begin = clock.monotonic()
    calls: list[asyncio.Task[Any]] = []
    ending: dict[asyncio.Task[Any], str] = {}
    for number, action in enumerate(sorted(actions, key=lambda a: a.at)):
        await asyncio.sleep(max(0.0, begin + action.at - clock.monotonic()))
        path = paths[action.leaf % len(paths)]
        name = path.split("/")[1]
        if action.verb == "restart":
            calls.append(asyncio.create_task(root.restart_child(name)))
            ending[calls[-1]] = f"root/{name}"
        elif action.verb == "stop":
            calls.append(asyncio.create_task(root.stop_child(name)))
            ending[calls[-1]] = f"root/{name}"
        elif action.verb == "add":
            extra = theatre.child(Spec(f"extra{number}", "permanent"))
            calls.append(asyncio.create_task(root.start_child(extra)))
        elif action.verb == "cancel" and calls:
            calls[action.leaf % len(calls)].cancel()
        else:
            theatre.act(action, path)
    theatre.trace.append("stop")
    # These have been cancelled already, and end when their clean-up is done.
    before = tuple(path for call, path in ending.items() if not call.done() or call.cancelled())
    await root.stop()
    for outcome in await asyncio.gather(starting, *calls, return_exceptions=True):
        allowed = SupervisionError | asyncio.CancelledError
        assert not isinstance(outcome, BaseException) or isinstance(outcome, allowed), outcome
    assert +theatre.alive == Counter(), "something runs after stop"
    assert not theatre.overlaps, f"ran twice at once: {theatre.overlaps}"
    assert root.abandoned == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    check_stop_order(theatre.trace, spec, before)


def check_stop_order(trace: list[str], spec: Spec, before: tuple[str, ...] = ()) -> None:
    """Once the root stops, the leaves of one supervisor end in the reverse of their order."""
    order = {
        path: index
        for index, path in enumerate(leaves(spec))
        if not any(path == each or path.startswith(f"{each}/") for each in before)
    }
    ends: dict[str, list[int]] = defaultdict(list)
    for entry in trace[trace.index("stop") :]:
        group = entry[1:].rpartition("/")[0]
        if entry[0] == "-" and entry[1:] in order:
            ends[group].append(order[entry[1:]])
        elif entry[0] == "+":
            ends[group] = []  # it was restarting when the stop began: another stop follows
    for path, indices in ends.items():
        assert indices == sorted(indices, reverse=True), f"{path} stopped out of order: {trace}"


# -- the schedules -----------------------------------------------------------------------------


def specs(depth: int) -> st.SearchStrategy[Spec]:
    def inner(auto: str) -> st.SearchStrategy[tuple[Spec, ...]]:
        options = leaf(auto)
        if depth > 0:
            options = st.one_of(leaf(auto), leaf(auto), nested(auto))
        return st.lists(options, min_size=1, max_size=4).map(rename)

    def nested(auto: str) -> st.SearchStrategy[Spec]:
        return st.tuples(specs(depth - 1), restarts(auto)).map(
            lambda pair: Spec(**{**pair[0].__dict__, **pair[1]})
        )

    return st.sampled_from(["never", "never", "any_significant", "all_significant"]).flatmap(
        lambda auto: st.builds(
            Spec,
            name=st.just("s"),
            restart=st.just("permanent"),
            strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
            intensity=st.integers(0, 4),
            auto=st.just(auto),
            children=inner(auto),
        )
    )


def restarts(auto: str) -> st.SearchStrategy[dict[str, Any]]:
    def significance(restart: str) -> st.SearchStrategy[dict[str, Any]]:
        allowed = auto != "never" and restart != "permanent"
        significant = st.booleans() if allowed else st.just(False)
        return significant.map(lambda mark: {"restart": restart, "significant": mark})

    names = ["permanent", "permanent", "transient", "temporary"]
    return st.sampled_from(names).flatmap(significance)


def leaf(auto: str) -> st.SearchStrategy[Spec]:
    return restarts(auto).map(lambda options: Spec(name="c", **options))


def rename(children: list[Spec]) -> tuple[Spec, ...]:
    return tuple(Spec(**{**c.__dict__, "name": f"{c.name}{i}"}) for i, c in enumerate(children))


def schedules(verbs: list[str]) -> st.SearchStrategy[list[Action]]:
    return st.lists(
        st.builds(
            Action,
            verb=st.sampled_from(verbs),
            leaf=st.integers(0, 11),
            at=st.floats(0, 20),
            times=st.integers(0, 1),
        ),
        max_size=8,
    )


SETTINGS = settings(
    max_examples=scaled(2000, least=25),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@seed(base_seed())
@SETTINGS
@given(specs(2), schedules(["crash", "crash", "finish"]), st.integers(0, 2**16))
def test_operations_in_turn_give_the_trace_of_the_model(
    spec: Spec, actions: list[Action], chance: int
) -> None:
    actions = [
        a if a.verb == "crash" else Action(a.verb, a.leaf, a.at) for a in actions
    ]  # only a crash is followed by starts that fail
    expected = play_in_turn(spec, actions)

    async def scenario(sim: object) -> None:
        assert await perform_in_turn(spec, actions) == expected

    run_one(scenario, chance, timer_slack=SLACK)


@seed(base_seed() + 1)
@SETTINGS
@given(
    specs(2),
    schedules(["crash", "crash", "finish", "restart", "stop", "add", "cancel"]),
    st.integers(0, 2**16),
)
def test_the_invariants_hold_for_concurrent_operations(
    spec: Spec, actions: list[Action], chance: int
) -> None:
    async def scenario(sim: object) -> None:
        await perform_in_a_heap(spec, actions)

    run_one(scenario, chance, timer_slack=SLACK)


def test_the_model_notices_a_supervisor_that_restarts_too_few() -> None:
    """A planted defect: the comparison must be able to fail."""
    children = (Spec("a", "permanent"), Spec("b", "permanent"))
    spec = Spec("s", "permanent", strategy="one_for_all", intensity=3, children=children)
    actions = [Action("crash", 0, 0.0)]
    expected = play_in_turn(spec, actions)

    async def scenario(sim: object) -> None:
        assert await perform_in_turn(spec, actions) == expected

    run_one(scenario, 1)
    defect = mutant(
        _supervisor, "affected", lambda strategy, names, failed: [failed], name="alone for all"
    )
    with defect, pytest.raises(AssertionError):
        run_one(scenario, 1)


def test_a_start_that_fails_at_first_leaves_nothing_running() -> None:
    spec = Spec("s", "permanent", strategy="rest_for_one", children=(Spec("a", "permanent"),) * 1)

    async def scenario(sim: object) -> None:
        theatre = Theatre(jitter=False)
        theatre.poison["root/a"] = 1
        try:
            await theatre.root(spec).start()
        except StartFailed:
            assert theatre.trace == ["+root/a", "!root/a"]
        else:
            raise AssertionError("it must not start")

    run_one(scenario, 0)
