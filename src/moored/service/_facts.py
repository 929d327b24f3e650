"""The facts of a part in words, from its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from moored.kernel import counted, duration

__all__ = ["facts_of"]

Numbers: TypeAlias = Mapping[str, Any]
Facts: TypeAlias = Iterator[tuple[str, str]]


def _size(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1024 or unit == "GB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def _waits(it: Numbers) -> str:
    now = f"{it['waiting']} waiting now"
    if it["longest_wait"]:
        now += f", the first for {duration(it['longest_wait'])}"
    since = "none has waited" if not it["queued"] else f"{it['queued']} have waited"
    gave_up = it["timeouts"] + it["refused"]
    return f"{now}; since the start, {since}, {gave_up or 'none'} gave up"


def _pool(it: Numbers) -> Facts:
    ready, used = it["size"], it["in_use"]
    yield "Connections", f"{ready + used} open, {used} in use, most allowed {it['max_size']}"
    yield "Callers", _waits(it)
    yield "Checkouts", f"{it['checkouts']} since the start"
    closed = sum(it["discards"].values())
    yield "Opened and closed", f"{it['refills']} opened, {closed} closed since the start"
    for why, number in it["discards"].items():
        if number:
            yield f"Closed: {why.replace('_', ' ')}", str(number)
    yield "Opening", f"{it['in_flight']} now; may open {it['rate_tokens_left']:.0f} at once"


def _stream(it: Numbers) -> Facts:
    if (server := it["server"]) is not None:
        yield "Server", f"PostgreSQL {server['version']}"
    if (lag := it["lag"]) is not None:
        yield "Behind", f"{_size(lag['bytes'])}, {duration(lag['seconds'])}"
    elif it["silent"]:
        yield "Behind", f"unknown: nothing heard for {duration(it['silent'])}"
    for name, each in it["consumers"].items():
        left = each["outstanding"]
        text = "caught up" if lag is not None else "waits for the stream"
        text = f"{counted(left, 'transaction')} to handle" if left else text
        yield f"Consumer {name}", text if each["attached"] else f"{text}, not connected"
    if (kept := it["slot"]["retained"]) is not None:
        yield "Kept on the server", f"{_size(kept)} of its log for this stream"
    if (listener := it["listener"]) is not None:
        up = f"{counted(len(listener['channels']), 'channel')}"
        if listener["up"] and listener["heartbeat_age"] is not None:
            up += f", the server answered {duration(listener['heartbeat_age'])} ago"
        yield "Listener", up if listener["up"] else listener["failure"] or "not connected yet"
    for name, pool in it["pools"].items():
        yield f"Connections: {name}", f"{pool['connected']} of {pool['max_size']}"
    for table, copy in it["copies"].items():
        yield f"Copy of {table}", f"{copy['rows']} of about {copy['estimated']} rows"


def _broker(it: Numbers) -> Facts:
    streams, tenants = counted(it["subscribers"], "stream"), counted(it["tenants"], "tenant")
    yield "Streams", f"{streams} of {tenants}"
    yield "Events", f"{it['events']} read, {it['delivered']} delivered since the start"
    lost = sum(it["dropped"].values()) + sum(it["resets"].values())
    yield (
        "Lost",
        f"{lost} times a client may have missed events" if lost else "no event",
    )
    if refused := sum(it["refused"].values()):
        yield "Refused", counted(refused, "stream")


def _sessions(it: Numbers) -> Facts:
    yield "Accounts", f"{it['states'].get('online', 0)} of {sum(it['states'].values())} online"
    for state, number in it["states"].items():
        if state != "online":
            yield state.replace("/", ", ").capitalize(), str(number)
    for name, title in (
        *(("acked", "Sent"), ("received", "Received"), ("rejected", "Rejected")),
        *(("not_sent", "Not sent"), ("unknown", "Unknown outcome"), ("reconnects", "Reconnects")),
    ):
        number = sum(each.get(name, 0) for each in it["totals"].values())
        yield title, f"{number} since the start"


def _channel(it: Numbers) -> Facts:
    if "address" in it:
        yield "Connection", f"to {it['address']}, the {it['generation']}. since the start"
    yield "Calls", f"{it['calls']} since the start"


def _consumer(it: Numbers) -> Facts:
    noun = "transactions" if "transactions" in it else "events"
    yield "Handled", f"{it[noun]} {noun}, {counted(it['resets'], 'reset')}"
    if "outstanding" in it:
        yield "To handle", counted(it["outstanding"], "transaction")
    if "parked" in it:
        yield "Parked", counted(it["parked"], "item")


def _plain(it: Numbers) -> Facts:
    for name, value in it.items():
        if isinstance(value, (str, int, float)):
            yield name.replace("_", " ").capitalize(), str(value)
    for name, value in it.get("counters", {}).items():
        yield name.replace("_", " ").capitalize(), f"{value} since the start"


_FACTS: Mapping[str, Callable[[Numbers], Facts]] = {
    "pool": _pool,
    "stream": _stream,
    "broker": _broker,
    "sessions": _sessions,
    "channel": _channel,
    "consumer": _consumer,
}


def facts_of(kind: str, numbers: Numbers) -> Facts:
    """Yield what the numbers of a part of this kind mean, as label and text."""
    yield from _FACTS.get(kind, _plain)(numbers)
