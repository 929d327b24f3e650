"""A replica for replicas.py: a pool, a stream with a consumer, and live events of an outbox."""

from __future__ import annotations

import os

import moored
from moored.broker import Identity
from moored.postgres import Reset, Transaction

app = moored.App("replica")
db = app.pool(os.environ["URL"], name="db", max_size=4)
pg = app.postgres(os.environ["URL"], state_dir=os.environ["STATE"], pool_size=4)


async def authenticate(token: str) -> Identity | None:
    """Every token is the name of its tenant."""
    return Identity(token)


app.broker(pg.outbox, authenticate=authenticate, required=True)


@app.consumer(pg, "copy", tables=["orders"], after=["db"])
async def copy(txn: Transaction | Reset) -> None:
    """What needs the lock of the stream, which one replica has."""
