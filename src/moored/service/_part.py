"""The seam between the service and the systems: what one brings, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from moored.kernel import Child, Clock, Machine, MooredError, Recorder, StatusMonitor, Tree

from ._health import Status

__all__ = ["Part", "System", "Wiring"]

StrategyName = Literal["one_for_one", "one_for_all", "rest_for_one"]


class System(Protocol):
    """What a running part shows: its numbers, its explanation and its tree."""

    def statistics(self) -> Mapping[str, Any]:
        """Its whole state as JSON-serializable data, for `/v1/status`."""

    def explain(self) -> str:
        """Why it is in its present state, as text, for `/v1/explain/<part>`."""

    def tree(self) -> Tree:
        """Its own supervision tree, to be shown below the child that runs it."""


@dataclass(frozen=True)
class Wiring:
    """What the service gives to each part when it builds it."""

    #: Where conditions are set; the part's own are known to it.
    monitor: StatusMonitor[Status]
    #: Where everything that happens is recorded.
    recorder: Recorder
    clock: Clock
    #: Print a notice on stdout.
    say: Callable[[str], None]
    #: End the start of the service with this error; no effect once it has been active.
    give_up: Callable[[MooredError], None]
    #: End the service with this error, at any time: exit code 2, and the text on stderr.
    fail: Callable[[MooredError], None]
    #: Set the health of a part, with the reason. Its conditions are met while `/v1/health` answers
    #: 200 for that health.
    health: Callable[[str, Status, str], None]
    #: The machines that `/v1/status` and the page show; a part appends its own.
    machines: list[Machine] = field(default_factory=list)
    #: What parts show of themselves, by the path of the child that runs it; a part adds its own.
    systems: dict[str, System] = field(default_factory=dict)
    #: What `/metrics` shows besides; a part appends its own while it is built.
    collectors: list[Collector] = field(default_factory=list)
    #: Called when a stop is forced: end what would outlive this process, without waiting.
    last_resorts: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What a system brings to the service.

    The service runs its children under a supervisor of the part's name, which is started before
    the HTTP service and stopped after it. A child should call `ctx.started()` as soon as it is
    under way rather than when it is ready: the HTTP service starts after it, and shows by the
    conditions what is missing.
    """

    #: Unique; the children's paths are "moored/<name>/…".
    name: str
    #: Makes the children.
    build: Callable[[Wiring], Sequence[Child]]
    #: What must hold before the service is active. A part with more than two states of health
    #: reports them through `Wiring.health`.
    conditions: tuple[str, ...] = ()
    #: HTTP apps by their path, such as "/v1/shape"; they stand behind the same door as all routes.
    mounts: Mapping[str, ASGIApp] = field(default_factory=dict)
    #: Which children are restarted together.
    strategy: StrategyName = "rest_for_one"
    #: How many restarts in how many seconds are allowed before the whole part, and HTTP behind it,
    #: is restarted; None for a part whose children wait for something that may be away for days.
    intensity: tuple[int, float] | None = (3, 5.0)
