"""The interface between the service and its parts: `Part`, and the `Wiring` that it gets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from moored.kernel import Child, Clock, Machine, MooredError, Recorder, StatusMonitor, Tree
from moored.kernel.prometheus import LinksCollector

from ._declared import Declared
from ._health import Status

if TYPE_CHECKING:
    from ._truth import Truth

__all__ = ["Part", "System", "Wiring", "cost_words", "costs_of"]

StrategyName = Literal["one_for_one", "one_for_all", "rest_for_one"]


class System(Protocol):
    """The interface by which the service shows a running part.

    Of further methods, a system has those that it needs: `links()` returns what it knows about its
    connections to servers, `hanging()` the callers that wait for it, `fact()` what is shown while
    it works, and `costs()` what failures have cost callers so far, by name.
    """

    def statistics(self) -> Mapping[str, Any]:
        """Return the state of the system as JSON-serializable data, for `/v1/status`."""

    def explain(self) -> str:
        """Return why the system is in its present state, as text, for `/v1/explain/<part>`.

        Lines that begin with a space, or none, follow the health of the part and its reason.
        """

    def tree(self) -> Tree:
        """Return the system's own supervision tree, shown below the child that runs it."""


def cost_words(costs: Mapping[str, int]) -> str:
    """Return costs as text: "3 calls failed, 1 caller waited"."""
    # The names begin with a plural.
    words = {
        name: re.sub(r"s\b", "", name, count=1) if n == 1 else name for name, n in costs.items()
    }
    return ", ".join(f"{number} {words[name]}" for name, number in costs.items())


def costs_of(systems: Iterable[System]) -> Counter[str]:
    """Return the counts of failures that callers have noticed, by name, such as "calls failed".

    Only systems with a method `costs()` are counted.
    """
    found: Counter[str] = Counter()
    for each in systems:
        if (costs := getattr(each, "costs", None)) is not None:
            found.update(costs())
    return found


@dataclass(frozen=True)
class Wiring:
    """The objects of the service that each part gets when it is built."""

    #: The monitor of all conditions, including the part's own.
    monitor: StatusMonitor[Status]
    #: The recorder of the service's events.
    recorder: Recorder
    clock: Clock
    #: Print a notice on stdout.
    say: Callable[[str], None]
    #: Abort the start of the service with this error; no effect once the service was ready, or if
    #: the part is not required.
    give_up: Callable[[MooredError], None]
    #: End the service with this error, at any time: exit code 2, and the message on stderr. No
    #: effect if the part is not required.
    fail: Callable[[MooredError], None]
    #: Set the health of a part, with the reason. Its conditions are met while `/v1/health?ready`
    #: returns 200 for that health.
    health: Callable[[str, Status, str], None]
    #: Wait until the worst health of these parts is one of these states, and return it.
    until: Callable[[Sequence[str], Collection[Status]], Awaitable[Status]]
    #: The machines that `/v1/status` and the page show, each with its part.
    machines: dict[Machine, str] = field(default_factory=dict)
    #: The systems to show, by the path of the child that runs each; a part adds its own.
    systems: dict[str, System] = field(default_factory=dict)
    #: The links of all parts, for `/metrics`; a part adds what holds its own.
    links: LinksCollector = field(default_factory=LinksCollector)
    #: Further collectors for `/metrics`; a part appends its own while it is built.
    collectors: list[Collector] = field(default_factory=list)
    #: The judgement of all parts and servers, and the incidents; set by the service.
    truth: Truth | None = None
    #: Called when a stop is forced, to kill processes that would outlive this one, without waiting.
    last_resorts: list[Callable[[], None]] = field(default_factory=list)
    #: Called before HTTP is stopped, and awaited: a part ends the streams of its clients.
    before_stop: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """A system that the service runs and shows.

    The service runs its children under a supervisor with the part's name, which is started before
    HTTP and stopped after it. A child should call `ctx.started()` when its start has begun, not
    when it is ready: HTTP starts after it, and shows the conditions that are not met yet.
    """

    #: The unique name of the part; the paths of its children are "<service>/<name>/…".
    name: str
    #: Returns the children.
    build: Callable[[Wiring], Sequence[Child]]
    #: The conditions that must be met before the service is active. A part with more than two
    #: states of health reports them through `Wiring.health`.
    conditions: tuple[str, ...] = ()
    #: HTTP apps by their path, such as "/v1/shape"; they have the same access checks as all routes.
    mounts: Mapping[str, ASGIApp] = field(default_factory=dict)
    #: HTTP apps by their exact path that check tokens of their own: the admin token is not needed.
    public: Mapping[str, ASGIApp] = field(default_factory=dict)
    #: The most streams that clients of these apps hold open: connections besides those for pages.
    streams: int = 0
    #: Which children are restarted together.
    strategy: StrategyName = "rest_for_one"
    #: How many restarts within how many seconds are allowed, before the whole part and HTTP are
    #: restarted; None for a part whose children wait for a server that may be down for days.
    intensity: tuple[int, float] | None = (3, 5.0)
    #: Whether the service is not ready while this part is not: it cannot serve requests. Without
    #: it the service is degraded instead, and `/v1/health` still returns 200.
    required: bool = True
    #: The parts that this one depends on, and its servers as "host:port": while one of them is
    #: down, this part waits for it.
    ties: Collection[str] = ()
    #: What it is: one of `KINDS`, or a word for a component, such as "importer".
    kind: str = "component"
    #: What its servers are, in words, such as "PostgreSQL".
    server: str = "server"
    #: The servers, as "host:port", that this part runs: on the map, it stands for them.
    runs: Collection[str] = ()
    #: Whether the map and the timeline show it.
    shown: bool = True
    #: Returns its settings in force.
    settings: Callable[[], Iterable[Declared]] = tuple
