"""A state machine that makes only declared moves, and keeps the cause of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ._chart import Chart
from ._clock import Clock
from ._errors import IllegalMove
from ._observers import Observers
from ._recorder import Cause, Event, Recorder, in_words
from ._state import State, StateLike, written
from ._words import duration

__all__ = ["Machine", "Move"]


class Move(NamedTuple):
    """One move that a machine made."""

    #: When, in monotonic seconds.
    at: float
    #: When, in seconds since 1970, for people.
    wall: float
    source: State
    target: State
    #: The cause, as text.
    cause: str
    #: Seconds that the machine had been in the source state.
    lasted: float
    #: The recorded event, which can be the cause of later events; None without a recorder.
    event: Event | None

    def as_dict(self) -> dict[str, Any]:
        """Return the move as plain data for JSON."""
        return {
            "wall": self.wall,
            "from": str(self.source),
            "to": str(self.target),
            "cause": self.cause,
            "lasted": self.lasted,
        }

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} after {duration(self.lasted)}, because {self.cause}"


class Machine:
    """A state machine: it is in one state at a time and makes only the moves that its chart allows.

    A machine has no lock: use it from one event loop, or under a lock of your own. `history` is the
    number of moves that are kept; the recorder, if given, gets each state with its cause.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_history",
        "_limit",
        "_observers",
        "_recorder",
        "_since",
        "_state",
        "chart",
        "name",
    )

    def __init__(
        self,
        name: str,
        chart: Chart,
        *,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        history: int = 100,
    ) -> None:
        self.name = name
        self.chart = chart
        self._clock = clock
        self._recorder = recorder
        self._limit = history
        # A list: it is short, and a deque takes 600 bytes for none.
        self._history: list[Move] = []
        self._observers: Observers[Move] | None = None
        self._state = self.chart.initial
        self._since = self._now().monotonic()
        self._record(None)

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._state.phase

    @property
    def step(self) -> str:
        """The current step within the phase."""
        return self._state.step

    @property
    def since(self) -> float:
        """When the machine entered its current state, in monotonic seconds."""
        return self._since

    @property
    def history(self) -> tuple[Move, ...]:
        """The last moves, the oldest first."""
        return tuple(self._history)

    def at(self, *names: str) -> bool:
        """Whether the machine is in one of these phases, steps or states ("phase/step").

        :raises ValueError: the chart does not declare one of the names.
        """
        return self.chart.at(self._state, *names)

    def move(self, to: StateLike, *, cause: Cause) -> Move:
        """Move to a state and record the cause; raises `IllegalMove` if the chart forbids it."""
        target = self.chart.find(to)
        if target is None or target not in self.chart.legal(self._state):
            raise IllegalMove(self._refusal(to, in_words(cause)))
        clock = self._now()
        now, source = clock.monotonic(), self._state
        lasted = now - self._since
        self._state, self._since = target, now
        event = self._record(cause)
        move = Move(now, clock.wall(), source, target, in_words(cause), lasted, event)
        self._history.append(move)
        if len(self._history) > self._limit:
            del self._history[0]
        if self._observers is not None:
            self._observers.notify(move)
        return move

    def observe(self, callback: Callable[[Move], None]) -> Callable[[], None]:
        """Call the callback after each move; returns a function that removes it."""
        if self._observers is None:
            self._observers = Observers(f"machine {self.name!r}")
        return self._observers.add(callback)

    def as_dict(self) -> dict[str, Any]:
        """Return the state, its age and the last moves as plain data for JSON."""
        return {
            "name": self.name,
            "phase": self.phase,
            "step": self.step,
            "doing": self.chart.words[self._state],
            "for": self._now().monotonic() - self._since,
            "history": [move.as_dict() for move in self._history],
        }

    def __repr__(self) -> str:
        lasted = duration(self._now().monotonic() - self._since)
        return f"<Machine {self.name}: at {self._state} for {lasted}>"

    def _now(self) -> Clock:
        return self._clock or Clock.current()

    def _record(self, cause: Cause | None) -> Event | None:
        if self._recorder is None:
            return None
        text, data = self.chart._recorded[self._state]
        return self._recorder._note(self.name, text, "state", cause, data)

    def _refusal(self, to: StateLike, cause: str) -> str:
        words = f"{self.name}: may not move from {self._state} to {written(to)} (because {cause})"
        if self.chart.find(to) is None:
            words += ", which is not a declared state"
        legal = ", ".join(map(str, self.chart.legal(self._state))) or "nothing"
        return f"{words}; from {self._state} it may move to {legal}"
