"""Checks that matter only when two things happen in an unlucky order."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from tests.leases.virtual import ScriptedStore, client, in_virtual_time

from moored.leases import sync
from moored.testing import Sim

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.pure]


@in_virtual_time
async def test_an_expired_lease_that_the_store_may_have_renewed_is_released_there(
    sim: Sim,
) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases, client(store) as others:
        lease = await leases.acquire("db", limit=10)
        assert lease is not None
        store.hangs = "after"  # renewals are made, and their answers are lost
        assert await lease.lost() is not None
        store.hangs = ""
        assert [each.id for each in await others.held()] == [lease.id]
        await asyncio.sleep(10.0)
        assert list(await others.held()) == []


def test_a_lease_that_is_granted_after_its_caller_was_interrupted_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = threading.Event()
    granted: list[Future[Any]] = []
    with sync.connect("memory://") as leases:
        thread = leases._runner._thread

        def interrupt(work: Any, timeout: float | None = None) -> None:
            async def later() -> None:
                await asyncio.to_thread(interrupted.wait, 30.0)
                await work

            granted.append(thread.submit(later()))
            raise KeyboardInterrupt

        monkeypatch.setattr(thread, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            leases.acquire("db", limit=1)
        monkeypatch.undo()
        interrupted.set()
        granted[0].result(30.0)
        assert leases.statistics().acquired == 1
        assert list(leases.held("db")) == []
