"""Credentials that could not be stored, for a profile that another process has owned since."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.sessions.support import until
from tests.sessions.test_cluster import notice_lost_lease, revoke_lease

from moored.leases import connect
from moored.sessions import SessionError, Sessions
from moored.testing.demo import Demo, DemoServer

CREDENTIALS = ("alice", "creds", "creds")


async def test_unsaved_credentials_of_an_old_lease_do_not_replace_those_of_the_next_owner(
    tmp_path: Path,
) -> None:
    server = DemoServer(pairing=True)
    storage = f"{tmp_path}/accounts.db"
    async with connect("memory://") as leases, Sessions(leases=leases, storage=storage) as one:
        await one._storage.new("alice")
        await one._storage.put(*CREDENTIALS, server.add("alice"))
        first = await one.connect("alice", Demo(server))
        # As if the storage had failed when the server sent them.
        first._runtime.credentials._lease = first._runtime.lease
        first._runtime.credentials.unsaved = True
        await revoke_lease(leases, first)
        async with Sessions(leases=leases, storage=storage) as two:
            newer = server.add("alice")
            await two._storage.put(*CREDENTIALS, newer)
            await two.connect("alice", Demo(server))
            await notice_lost_lease(first)
            await until(lambda: first.state == "offline/refused")
        with contextlib.suppress(SessionError):  # the server refuses the old ones
            await first.connect()
        assert await one._storage.get(*CREDENTIALS) == newer
