"""The report of a listener, and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moored.kernel import Clock, State, StatusMonitor, counted, duration

from ..report import Health, explained
from ._core import CHART, ListenerCore

__all__ = ["ListenerFigures", "explain", "report"]


@dataclass
class ListenerFigures:
    """What a listener has measured; times are monotonic seconds."""

    #: When the last heartbeat was answered, and how long that took.
    heartbeat_at: float | None = None
    heartbeat_latency: float | None = None
    #: Seconds from sending the last canary to its arrival.
    canary_latency: float | None = None
    canaries_lost: int = 0
    #: The share of the server's notification queue that is in use, and the last warned level.
    queue_usage: float | None = None
    queue_level: float = 0.0
    #: Whether the connection leads through a pooler.
    pooler: bool = False
    #: When the current outage began; None while the listener is up.
    down_since: float | None = None

    def heartbeat(self, now: float, began: float) -> None:
        """Record an answered heartbeat."""
        self.heartbeat_at, self.heartbeat_latency = now, now - began

    def outage(self, now: float) -> float | None:
        """Return how long the current outage has lasted; None while the listener is up."""
        return None if self.down_since is None else now - self.down_since


def report(
    name: str,
    core: ListenerCore,
    monitor: StatusMonitor[Health],
    figures: ListenerFigures,
    clock: Clock,
) -> dict[str, Any]:
    """Return the state of a listener, in types that JSON can represent."""
    link, machine, now = core.link, core.link.machine, clock.monotonic()
    subscriptions = core.subscribers
    return {
        "name": name,
        "health": monitor.status().value,
        "up": link.is_up,
        "phase": machine.phase,
        "step": machine.step,
        "doing": CHART.words[machine.state],
        "for": now - machine.since,
        "generation": link.dials,
        "reconnects": max(0, core.connects - 1),
        "failures": core.failures,
        "failed_series": core.failed_series,
        "failure": core.failure,
        "down_for": figures.outage(now),
        "next_attempt": None if link.next_dial_at is None else max(0.0, link.next_dial_at - now),
        "conditions": monitor.as_dict()["conditions"],
        "pooler": figures.pooler,
        "channels": core.channels,
        "subscriptions": len(subscriptions),
        "delivered": core.delivered,
        "dropped": core.dropped,
        "gaps": core.gaps,
        "heartbeat_age": None if figures.heartbeat_at is None else now - figures.heartbeat_at,
        "heartbeat_latency": figures.heartbeat_latency,
        "canary_latency": figures.canary_latency,
        "canaries_lost": figures.canaries_lost,
        "queue_usage": figures.queue_usage,
    }


def explain(now: Mapping[str, Any]) -> str:
    """Return a report as text: the state, the reasons, and what follows from them."""
    head = f"{now['health']}: {now['doing']} for {duration(now['for'])}"
    return explained(head, _reasons(now), _consequence(now))


def _reasons(now: Mapping[str, Any]) -> list[str]:
    if not now["up"]:
        failed = counted(now["failures"], "failed attempt")
        return [f"{now['failure']} ({failed} so far)"] if now["failure"] else []
    found = [
        f"{counted(len(now['channels']), 'channel')} and "
        f"{counted(now['subscriptions'], 'subscription')}; generation {now['generation']}"
    ]
    if now["heartbeat_age"] is not None:
        found.append(f"the server answered {duration(now['heartbeat_age'])} ago")
    canary = now["conditions"]["canary"]
    if not canary["met"] and canary["detail"]:
        found.append(str(canary["detail"]))
    if (now["queue_usage"] or 0.0) >= 0.1:
        found.append(f"the notification queue of the server is {now['queue_usage']:.0%} full")
    return found


def _consequence(now: Mapping[str, Any]) -> str:
    if now["up"]:
        return "there is nothing to do"
    state = State(now["phase"], now["step"])
    if CHART.at(state, "off/refused"):
        return "the listener does not retry: correct the cause, and open a new listener"
    if CHART.at(state, "off"):
        return "the listener is not open"
    due = now["next_attempt"]
    when = "an attempt is under way" if due is None else f"the next attempt is in {duration(due)}"
    return f"{when}; queries are not affected, and subscribers get a Gap when the listener is up"
