"""The phases and steps of the connection manager, and every move between them.

::

    connection_setup   start_replication_client → :connecting → :acquiring_lock
                       → :configuring_connection → start_connection_pool → :connecting
                       → start_shapes_supervisor → start_replication_client:start_streaming
    running            waiting_for_streaming_confirmation → streaming

A connection must exist before it can lock, so `connecting` comes before `acquiring_lock`. A failure
of the connection that the current step is about is retried in place: back to where that one begins.
Any other failure begins everything again.
"""

from __future__ import annotations

from itertools import pairwise

from moored.kernel import Chart

__all__ = ["CHART", "CLIENT", "POOL", "RUNNING", "STREAM", "WORDS"]

CLIENT = "start_replication_client"
POOL = "start_connection_pool"
STREAM = "start_replication_client:start_streaming"

_SETUP = (
    CLIENT,
    f"{CLIENT}:connecting",
    f"{CLIENT}:acquiring_lock",
    f"{CLIENT}:configuring_connection",
    POOL,
    f"{POOL}:connecting",
    "start_shapes_supervisor",
    STREAM,
)
RUNNING = ("waiting_for_streaming_confirmation", "streaming")


def _names() -> list[tuple[str, str]]:
    order = [f"connection_setup/{step}" for step in _SETUP] + [f"running/{s}" for s in RUNNING]
    forward = list(pairwise(order))
    # Retried in place: the replication client until it can stream, a pool until it is full.
    again = [(step, order[0]) for step in order[1:4]] + [(order[5], order[4])]
    return [*forward, *again]


#: What each step does, for people.
WORDS = {
    CLIENT: "not connected",
    f"{CLIENT}:connecting": "connecting to the server",
    f"{CLIENT}:acquiring_lock": "acquiring the lock",
    f"{CLIENT}:configuring_connection": "preparing the publication and the slot",
    POOL: "not connected to the pools' server",
    f"{POOL}:connecting": "opening the connection pools",
    "start_shapes_supervisor": "checking the history and publishing the tables",
    STREAM: "starting the stream",
    RUNNING[0]: "waiting for the first message of the stream",
    RUNNING[1]: "streaming",
}

CHART = Chart(
    phases={"connection_setup": _SETUP, "running": RUNNING},
    # A restart of the connection subsystem begins again, from wherever it was.
    moves=[*_names(), ("*", "connection_setup")],
    initial="connection_setup",
    words=WORDS,
)
