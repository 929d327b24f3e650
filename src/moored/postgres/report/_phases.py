"""The phases and steps of the connection manager, and all transitions between them.

::

    connection_setup   start_replication_client → :connecting → :acquiring_lock
                       → :configuring_connection → start_connection_pool → :connecting
                       → start_shapes_supervisor → start_replication_client:start_streaming
    running            waiting_for_streaming_confirmation → streaming

The lock belongs to a connection, so `connecting` comes before `acquiring_lock`. A failure of the
connection that the current step opens is retried in place, from that connection's first step. Any
other failure restarts the whole connection subsystem.
"""

from __future__ import annotations

from itertools import pairwise

from moored.kernel import Chart

__all__ = ["CHART", "CLIENT", "LOCKING", "POOL", "RUNNING", "STREAM", "WORDS"]

CLIENT = "start_replication_client"
LOCKING = f"{CLIENT}:acquiring_lock"
POOL = "start_connection_pool"
STREAM = "start_replication_client:start_streaming"

_SETUP = (
    CLIENT,
    f"{CLIENT}:connecting",
    LOCKING,
    f"{CLIENT}:configuring_connection",
    POOL,
    f"{POOL}:connecting",
    "start_shapes_supervisor",
    STREAM,
)
RUNNING = ("waiting_for_streaming_confirmation", "streaming")


def _moves() -> list[tuple[str, str]]:
    order = [f"connection_setup/{step}" for step in _SETUP] + [f"running/{s}" for s in RUNNING]
    # Retried in place: the replication client until it can stream, a pool until it is full.
    retries = [(step, order[0]) for step in order[1:4]] + [(order[5], order[4])]
    return [*pairwise(order), *retries]


#: The text for each step.
WORDS = {
    CLIENT: "not connected",
    f"{CLIENT}:connecting": "connecting to the server",
    LOCKING: "acquiring the lock",
    f"{CLIENT}:configuring_connection": "preparing the publication and the slot",
    POOL: "connection pools not connected",
    f"{POOL}:connecting": "opening the connection pools",
    "start_shapes_supervisor": "checking the history and publishing the tables",
    STREAM: "starting the stream",
    RUNNING[0]: "waiting for the first message of the stream",
    RUNNING[1]: "streaming",
}

CHART = Chart(
    phases={"connection_setup": _SETUP, "running": RUNNING},
    # A restart of the connection subsystem is possible in every state.
    moves=[*_moves(), ("*", "connection_setup")],
    initial="connection_setup",
    words=WORDS,
)
