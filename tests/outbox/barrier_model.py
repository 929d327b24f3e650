"""A model of publishers and a reader, which explores every order of their steps.

A publisher is a backend that runs transactions step by step, as PostgreSQL does: the lock, then the
ids, then the rows become visible, and only then is the lock released. A reader polls with the real
`Barrier`. Each backend's lock is looked at in a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from moored.postgres.outbox._barrier import Barrier

__all__ = ["SCRIPTS", "Look", "Reader", "explore"]

Look = Callable[[Barrier, int, Collection[str]], Barrier]

#: Steps of one backend. At its end a transaction is `visible`, or `dead`; its lock is then listed
#: as `B/0` for a moment, and so it is while a transaction is prepared.
COMMIT = ("visible", "unlock")
ABORT = ("dead", "end", "unlock")
PREPARE = ("end", "prepared")
COMMIT_PREPARED = ("appear", "unlock")
SCRIPTS = {
    "two transactions": ("lock", "insert", *COMMIT, "lock", "insert", *COMMIT),
    "two events": ("lock", "insert", "insert", *COMMIT),
    "rolled back": ("lock", "insert", *ABORT, "lock", "insert", *COMMIT),
    "savepoint": ("lock", "insert", "dead", "unlock", "lock", "insert", *COMMIT),
    "prepared": ("lock", "insert", *PREPARE, *COMMIT_PREPARED),
    "prepared, then another": ("lock", "insert", *PREPARE, "other", "lock", "insert", *COMMIT),
    "prepared, then a restart": ("lock", "insert", *PREPARE, "renamed", *COMMIT_PREPARED),
}


class Backend(NamedTuple):
    """Where a publisher is: its next step, its transaction, the name of its lock, its rows."""

    step: int = 0
    txn: int = 1
    name: str = ""
    #: The rows of the open transaction, as bits.
    rows: int = 0
    #: A prepared transaction of this backend: its name and its rows, until it is committed.
    left: tuple[str, int] = ("", 0)


class Reader(NamedTuple):
    """How a reader polls; the defaults are right."""

    look: Look = Barrier.look
    #: In which order a poll queries the highest id, the holders, and the rows.
    order: str = "mhr"
    #: Whether the process may restart between two polls, and forget everything but its cursor.
    restarts: bool = False


class State(NamedTuple):
    """Everything at one moment."""

    backends: tuple[Backend, ...]
    next_id: int = 1
    #: The visible rows, as bits.
    visible: int = 0
    barrier: Barrier = Barrier()
    cursor: int = 0
    #: Of the poll that is running: the step, the highest id, the holders, and the rows it has seen.
    step: int = 0
    highest: int = 0
    holders: frozenset[str] = frozenset()
    seen: int = -1
    polls: int = 0


def explore(scripts: Sequence[str], polls: int, reader: Reader = Reader()) -> tuple[int, str]:  # noqa: B008
    """Try every order; return the number of states, and what was missed ("" if nothing was)."""
    steps = [SCRIPTS[each] for each in scripts]
    first = State(tuple(Backend() for _ in scripts))
    found, left = {first}, [first]
    while left:
        state = left.pop()
        following = [
            _publish(state, number, steps[number])
            for number, backend in enumerate(state.backends)
            if backend.step < len(steps[number]) or backend.left[0]
        ]
        if state.polls < polls:
            following.append(_poll(state, reader))
            if reader.restarts and state.step == 0:
                following.append(state._replace(barrier=Barrier.at(state.cursor)))
        for each in following:
            if missed := _missed(state, each):
                return len(found), f"the row {missed.bit_length()} is missed: {each}"
            if each not in found:
                found.add(each)
                left.append(each)
    return len(found), ""


def _missed(before: State, after: State) -> int:
    """The rows that a step has put behind the cursor without being read."""
    late = after.visible & ~before.visible & _up_to(before.cursor)
    passed = after.visible & _up_to(after.cursor) & ~_up_to(before.cursor)
    return late | (passed & ~before.seen)


def _up_to(row: int) -> int:
    return (1 << row) - 1


def _publish(state: State, number: int, script: Sequence[str]) -> State:
    """Run the next step of a backend."""
    one = state.backends[number]
    visible, next_id = state.visible, state.next_id
    if one.step == len(script):  # someone commits what was left prepared
        after = one._replace(left=("", 0))
        visible |= one.left[1]
    else:
        after = one._replace(step=one.step + 1)
        match script[one.step]:
            case "lock":
                after = after._replace(name=f"{number}/{one.txn}")
            case "insert":
                after = after._replace(rows=one.rows | 1 << (next_id - 1))
                next_id += 1
            case "visible" | "appear" as step:
                visible |= one.rows
                name = f"{number}/0" if step == "visible" else one.name
                after = after._replace(rows=0, name=name)
            case "dead":
                after = after._replace(rows=0)
            case "end":
                after = after._replace(name=f"{number}/0")
            case "prepared":
                after = after._replace(name=f"{number}/{one.txn}")
            case "renamed":
                after = after._replace(name=f"-1/{number}")
            case "other":
                after = after._replace(left=(one.name, one.rows), txn=one.txn + 1, rows=0, name="")
            case "unlock":
                after = after._replace(name="", txn=one.txn + 1)
    backends = (*state.backends[:number], after, *state.backends[number + 1 :])
    return state._replace(backends=backends, visible=visible, next_id=next_id)


def _poll(state: State, reader: Reader) -> State:
    """Run the next step of the reader's poll."""
    parts = reader.order.replace("h", "h" * len(state.backends))
    part = parts[state.step]
    number = parts[: state.step].count("h")
    now = state._replace(step=state.step + 1)
    if part == "m":
        now = now._replace(highest=state.visible.bit_length())
    elif part == "h":
        one = state.backends[number]
        names = {each for each in (one.name, one.left[0]) if each}
        now = now._replace(holders=state.holders | names)
    else:
        now = now._replace(seen=state.visible)
    if now.step < len(parts):
        return now
    barrier = reader.look(state.barrier, now.highest, now.holders)
    return now._replace(
        barrier=barrier,
        cursor=max(state.cursor, barrier.final),
        step=0,
        highest=0,
        holders=frozenset(),
        seen=-1,
        polls=state.polls + 1,
    )
