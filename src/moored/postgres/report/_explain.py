"""The text of `explain()`: what the manager is doing, what it waits for, and what to do about it.

::

    waiting: standby of backend 4711 (application "api-7f9c", from 10.0.0.7, for 3 d)
      because  the lock of moored_slot_default is held by backend 4711 (application "api-7f9c", …)
      because  another instance is active: its slot is streaming
      so       connections, outbox and listener work here, and changes are streamed there; …
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moored.kernel import counted, duration

from ._health import Health
from ._phases import CLIENT, LOCKING, POOL, RUNNING, STREAM, WORDS

__all__ = ["EXPLAINED", "explain", "explained", "lock_words", "reasons", "who"]

Report = Mapping[str, Any]


class Words(NamedTuple):
    """The reasons for the current state, and what follows for the reader."""

    because: list[str]
    so: str


def explain(now: Report) -> str:
    """Return a report as the text of `moored explain`."""
    holder = now["lock"]["holder"]
    doing = f"{WORDS[now['step']]} for {duration(now['for'])}"
    head = f"{now['health']}: {doing if holder is None else f'standby of {who(holder)}'}"
    words = _words(now)
    return explained(head, words.because, words.so, _outage_before(now))


def reasons(now: Report) -> list[str]:
    """Return why the state of a report is as it is."""
    return _words(now).because


def explained(head: str, because: Sequence[str], so: str, before: Sequence[str] = ()) -> str:
    """Return the lines of an explanation: the state, its reasons, and what follows from them."""
    reasons = [f"  because  {each}" for each in because]
    reasons += [f"  before   {each}" for each in before]
    return "\n".join([head, *reasons, f"  so       {so}"])


def lock_words(holder: Mapping[str, Any], slot: str) -> tuple[str, str]:
    """Return who holds the lock, and what that means."""
    doing = "its slot is streaming" if holder["streaming"] else "its slot is not active"
    return (
        f"the lock of {slot} is held by {who(holder)}",
        f"another instance is active: {doing}",
    )


def who(holder: Mapping[str, Any]) -> str:
    """Return the holder of a lock: "backend 4711 (application …)"."""
    what = f'application "{holder["application"]}", {_origin(holder)}'
    return f"backend {holder['pid']} ({what}, for {duration(holder['age'])})"


def _origin(holder: Mapping[str, Any]) -> str:
    address = holder["address"]
    return "on the server's machine" if address == "local" else f"from {address}"


def _words(now: Report) -> Words:
    health = Health(now["health"])
    if health is Health.FAILED:
        why = now["fatal"] or "the manager was closed"
        return Words([why], "nothing is retried: correct the cause, and create a new Postgres")
    if health is Health.SLEEPING:
        return Words(
            ["all connections were closed after a time without use"],
            "nothing is broken; the next use opens them, and the slot retains the WAL of later "
            "commits",
        )
    if health is Health.DEGRADED and now["silence"]:
        return Words(
            [now["silence"]],
            "the connections are kept, and callers keep their timeouts; find out whether the "
            "server, its machine or the network has stopped",
        )
    if health is Health.DEGRADED and _short_pools(now) and now["step"] != LOCKING:
        return Words(
            _short_pools(now),
            "changes are still streamed; callers of that pool may have to wait; it opens new "
            "connections by itself",
        )
    return EXPLAINED[now["step"]](now)


def _between_attempts(now: Report) -> Words:
    outage = now["outage"]
    if outage is None:
        return Words([now["cause"]] if now["cause"] else [], "the manager continues by itself")
    return Words(_failures(now), f"the next try is in {duration(outage['next_try'])}")


def _connecting(now: Report) -> Words:
    return Words(
        ["the server has not answered yet", *_failures(now)],
        "the manager waits for an answer, and retries; if this persists, check that the server "
        "runs, and that the URL leads to it",
    )


def _locking(now: Report) -> Words:
    slot, holder = now["slot"]["name"], now["lock"]["holder"]
    if holder is None:
        return Words(
            [f"the lock of {slot} was requested, and is not granted yet"],
            "its holder is queried every 10 s; only one instance streams, the others wait",
        )
    return Words(
        [*_short_pools(now), *lock_words(holder, slot)],
        "connections, outbox and listener work here, and changes are streamed there; this instance "
        f"takes over when backend {holder['pid']} releases the lock. To stream in parallel, choose "
        "another stream_id",
    )


def _configuring(now: Report) -> Words:
    blockers = now["slot_blockers"]
    if not blockers:
        return Words(
            ["publication and slot are being checked or created"],
            "the manager continues by itself; a new slot waits for all running transactions; after "
            "10 s they are listed here",
        )
    named = [
        f"the new slot waits for a transaction of backend {each['pid']}, open for "
        f"{duration(each['age'])}" + (f": {each['query']}" if each["query"] else "")
        for each in blockers
    ]
    return Words(
        named,
        "it continues when they have ended; to end a forgotten one, run "
        f"SELECT pg_terminate_backend({blockers[0]['pid']})",
    )


def _filling(now: Report) -> Words:
    return Words(
        _short_pools(now) or ["the pools are being opened"],
        "it continues when all connections of both pools are open; max_connections must have room "
        "for them",
    )


def _checking(now: Report) -> Words:
    return Words(
        ["the server's history and slot are compared with the stored state, and tables published"],
        "the manager continues by itself; it waits for tables that other sessions have locked",
    )


def _beginning(now: Report) -> Words:
    return Words(["streaming was requested"], "it continues with the server's first message")


def _streaming(now: Report) -> Words:
    lag = now["lag"] or {"bytes": 0, "seconds": 0.0}
    because = [f"changes are streamed; everything up to {now['flushed']} is acknowledged"]
    if lag["seconds"]:
        because.append(
            f"{lag['bytes']} bytes are not acknowledged yet, the oldest for "
            f"{duration(lag['seconds'])}"
        )
    behind = [text for item in now["consumers"].items() for text in _about_consumer(*item)]
    full = [name for name, each in now["consumers"].items() if each["full"]]
    if full:
        named = " and ".join(map(repr, full))
        return Words(
            [f"reading is paused: the queue of {named} is full", *because, *behind],
            f"find out why {named} takes no transactions: all other consumers wait as well",
        )
    if silent := now["silent"]:
        return Words(
            [f"nothing has arrived for {duration(silent)}; more may wait to be read", *because],
            "the stream is opened again if the server stays silent: look at the path to it",
        )
    if any(each["unpublished"] for each in now["consumers"].values()):
        return Words(
            [*because, *behind],
            "create or rename the table; one that is locked is published when the lock is released",
        )
    return Words([*because, *behind], "there is nothing to do")


def _about_consumer(name: str, now: Report) -> Iterator[str]:
    """Describe what a consumer still has to do, or waits for."""
    if now["outstanding"]:
        number = counted(now["outstanding"], "transaction")
        yield f"the consumer {name!r} has {number} to acknowledge"
    if not now["attached"] and now["behind"]:
        yield (
            f"the consumer {name!r} is not attached, and the server retains the WAL from "
            f"{now['acknowledged']} on for it: start it again, or remove it with "
            f"drop_consumer({name!r})"
        )
    if now["reset"]:
        yield f"the consumer {name!r} has a Reset that it has not handled yet: {now['reset']}"
    if now["unpublished"]:
        yield (
            f"the consumer {name!r} waits for {', '.join(now['unpublished'])}: locked by other "
            "sessions, dropped or renamed"
        )


#: The explanation of each step, for a health that does not need one of its own.
EXPLAINED: Mapping[str, Callable[[Report], Words]] = {
    CLIENT: _between_attempts,
    f"{CLIENT}:connecting": _connecting,
    LOCKING: _locking,
    f"{CLIENT}:configuring_connection": _configuring,
    POOL: _between_attempts,
    f"{POOL}:connecting": _filling,
    "start_shapes_supervisor": _checking,
    STREAM: _beginning,
    RUNNING[0]: _beginning,
    RUNNING[1]: _streaming,
}


def _short_pools(now: Report) -> list[str]:
    return [
        f"the {role} pool has {each['connected']} of {each['max_size']} connections"
        + (f": {each['error']}" if each["error"] else "")
        for role, each in now["pools"].items()
        if each["state"] != "ready"
    ]


def _failures(now: Report) -> list[str]:
    """Describe the last failure, and how long the outage has lasted."""
    outage = now["outage"]
    if outage is None:
        return []
    tries = counted(outage["failures"], "failure")
    first = "" if outage["last"] == outage["cause"] else f"; the first failure: {outage['cause']}"
    return [f"{outage['last']} ({tries} in {duration(outage['took'])}){first}"]


def _outage_before(now: Report) -> list[str]:
    """Describe the last outage that has ended, unless there is one now."""
    outage = now["last_outage"]
    if outage is None or now["outage"] is not None:
        return []
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(outage["began"]))
    tries = counted(outage["failures"], "failure")
    took = duration(outage["took"])
    return [f"an outage of {took} from {began} on, {tries}: {outage['cause']}"]
