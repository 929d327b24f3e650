"""Health, phases, events and outages, as data and as text."""

from ._events import StackEvent, StackEvents
from ._explain import explain, explained, lock_words, reasons, who
from ._health import CONDITIONS, ConnectionState, Health, Persistent, Status, status_of, with_health
from ._links import links, server_of
from ._outages import Outages
from ._phases import CHART, CLIENT, LOCKING, POOL, RUNNING, STREAM, WORDS
from ._report import report, stream_fact

__all__ = [
    "CHART",
    "CLIENT",
    "CONDITIONS",
    "LOCKING",
    "POOL",
    "RUNNING",
    "STREAM",
    "WORDS",
    "ConnectionState",
    "Health",
    "Outages",
    "Persistent",
    "StackEvent",
    "StackEvents",
    "Status",
    "explain",
    "explained",
    "links",
    "lock_words",
    "reasons",
    "report",
    "server_of",
    "status_of",
    "stream_fact",
    "who",
    "with_health",
]
