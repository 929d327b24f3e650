"""A report in words: what it is doing, why it is not further, and what a person can do about it.

::

    waiting: acquiring the lock for 14 s
      because  the lock of moored_slot_default is held by backend 4711 (application "api-7f9c", …)
      because  another instance is active: its slot is streaming
      so       this one waits as a standby; nothing is broken; it takes over when 4711 lets go
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moored.kernel import counted, duration

from ._health import Health
from ._phases import CLIENT, POOL, RUNNING, STREAM, WORDS

__all__ = ["EXPLAINED", "explain", "lock_words"]

Report = Mapping[str, Any]


class Words(NamedTuple):
    """Why it is so, and what that means for the reader."""

    because: list[str]
    so: str


def explain(now: Report) -> str:
    """What a report says, in the words of `moored explain`."""
    words = _words(now)
    lines = [f"{now['health']}: {WORDS[now['step']]} for {duration(now['for'])}"]
    lines += [f"  because  {each}" for each in words.because]
    lines += [f"  before   {each}" for each in _outage_before(now)]
    lines.append(f"  so       {words.so}")
    return "\n".join(lines)


def lock_words(holder: Mapping[str, Any], slot: str) -> tuple[str, str]:
    """Who has the lock, and what that means."""
    doing = "its slot is streaming" if holder["streaming"] else "its slot is not being read"
    who = f'application "{holder["application"]}", {_origin(holder)}, for {duration(holder["age"])}'
    return (
        f"the lock of {slot} is held by backend {holder['pid']} ({who})",
        f"another instance is active: {doing}",
    )


def _origin(holder: Mapping[str, Any]) -> str:
    address = holder["address"]
    return "on the server's machine" if address == "local" else f"from {address}"


def _words(now: Report) -> Words:
    health = Health(now["health"])
    if health is Health.FAILED:
        why = now["fatal"] or "it is closed"
        return Words([why], "it does not try again: change what the text says, and start it again")
    if health is Health.SLEEPING:
        return Words(
            ["all connections were closed for lack of use"],
            "nothing is broken; the next use opens them, and the slot keeps what is committed "
            "meanwhile",
        )
    if health is Health.DEGRADED and _short_pools(now):
        return Words(
            _short_pools(now),
            "changes are streamed all the same; who wants a connection of that pool may wait; it "
            "opens others by itself",
        )
    return EXPLAINED[now["step"]](now)


def _between_tries(now: Report) -> Words:
    outage = now["outage"]
    if outage is None:
        return Words(_cause(now), "it goes on by itself")
    return Words(_failures(now), f"it tries again by itself, in {duration(outage['next_try'])}")


def _connecting(now: Report) -> Words:
    return Words(
        ["the server has not answered yet", *_failures(now)],
        "it waits for an answer, and tries again by itself; if none comes, see whether the server "
        "runs, and whether the URL leads to it",
    )


def _locking(now: Report) -> Words:
    slot, holder = now["slot"]["name"], now["lock"]["holder"]
    if holder is None:
        return Words(
            [f"it asked for the lock of {slot}, and does not have it yet"],
            "who has it is looked at every 10 s; only one instance streams, the others wait",
        )
    return Words(
        list(lock_words(holder, slot)),
        "this one waits as a standby; nothing is broken; it takes over when "
        f"{holder['pid']} lets go. To stream beside it, choose another stream_id",
    )


def _configuring(now: Report) -> Words:
    blockers = now["slot_blockers"]
    if not blockers:
        return Words(
            ["publication and slot are looked at, or made"],
            "it goes on by itself; a new slot waits for all transactions that are under way, and "
            "after 10 s they are named here",
        )
    named = [
        f"the new slot waits for a transaction of backend {each['pid']}, open for "
        f"{duration(each['age'])}" + (f": {each['query']}" if each["query"] else "")
        for each in blockers
    ]
    return Words(
        named,
        "it goes on when they have ended; one that was forgotten is ended by "
        f"SELECT pg_terminate_backend({blockers[0]['pid']})",
    )


def _filling(now: Report) -> Words:
    return Words(
        _short_pools(now) or ["the pools are being opened"],
        "it goes on when all connections of both pools are there; max_connections must have room "
        "for them",
    )


def _checking(now: Report) -> Words:
    return Words(
        ["the history and the slot are compared with what was kept, and tables are published"],
        "it goes on by itself; a table that is locked by others is waited for",
    )


def _beginning(now: Report) -> Words:
    return Words(["it told the server to stream"], "it goes on with the server's first message")


def _streaming(now: Report) -> Words:
    lag = now["lag"] or {"bytes": 0, "seconds": 0.0}
    because = [f"it streams, and everything up to {now['flushed']} is safe"]
    if lag["seconds"]:
        because.append(
            f"{lag['bytes']} bytes are not acknowledged yet, the oldest for "
            f"{duration(lag['seconds'])}"
        )
    behind = [
        f"the consumer {name!r} has {counted(each['outstanding'], 'transaction')} to acknowledge"
        for name, each in now["consumers"].items()
        if each["outstanding"]
    ]
    behind += _absent(now) + _pending_resets(now)
    full = [name for name, each in now["consumers"].items() if each["full"]]
    if full:
        named = " and ".join(map(repr, full))
        return Words(
            [f"reading is paused: what is queued for {named} is not taken", *because, *behind],
            f"look why {named} does not go on: everybody else waits, too",
        )
    return Words([*because, *behind], "there is nothing to do")


def _absent(now: Report) -> list[str]:
    """The consumers that are away while the server keeps its log for them."""
    return [
        f"the consumer {name!r} is away, and the server keeps the log from {each['acknowledged']} "
        f"on for it: start it again, or give it up with drop_consumer({name!r})"
        for name, each in now["consumers"].items()
        if not each["attached"] and each["behind"]
    ]


def _pending_resets(now: Report) -> list[str]:
    """The consumers that have not heard, or not understood, that they must begin anew."""
    return [
        f"the consumer {name!r} must begin anew, and has not taken its Reset yet: {each['reset']}"
        for name, each in now["consumers"].items()
        if each["reset"]
    ]


#: What is said of each step, unless the health says more.
EXPLAINED: Mapping[str, Callable[[Report], Words]] = {
    CLIENT: _between_tries,
    f"{CLIENT}:connecting": _connecting,
    f"{CLIENT}:acquiring_lock": _locking,
    f"{CLIENT}:configuring_connection": _configuring,
    POOL: _between_tries,
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
    """What failed last, and for how long it has been failing."""
    outage = now["outage"]
    if outage is None:
        return []
    tries = counted(outage["failures"], "failure")
    first = "" if outage["last"] == outage["cause"] else f"; it began with: {outage['cause']}"
    return [f"{outage['last']} ({tries} in {duration(outage['took'])}){first}"]


def _outage_before(now: Report) -> list[str]:
    """The last outage that has ended, unless there is one now."""
    outage = now["last_outage"]
    if outage is None or now["outage"] is not None:
        return []
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(outage["began"]))
    tries = counted(outage["failures"], "failure")
    return [f"from {began} it was down for {duration(outage['took'])}, {tries}: {outage['cause']}"]


def _cause(now: Report) -> list[str]:
    return [now["cause"]] if now["cause"] else []
