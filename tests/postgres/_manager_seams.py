"""Connect the real manager to a scripted server: replacements for its I/O."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psycopg
from psycopg.conninfo import conninfo_to_dict

from moored.kernel import Backoff, Context, IllegalMove, Machine, Move
from moored.postgres.consume import _store
from moored.postgres.manage import Stack, _manager, _restarter, _stack
from moored.postgres.manage._manager import Manager, SubsystemFailed
from moored.postgres.manage._manager_core import Actions, ManagerCore, Role
from moored.postgres.manage._parts import PostedEvent
from moored.postgres.server import _connect
from moored.postgres.server._faults import Diagnosis
from moored.postgres.stream import _replication
from moored.testing import Sim

from ._manager_world import Instance, KeptStore, World
from .scripted_connections import Connection, Link, Pool

__all__ = ["a_bad_day", "seams"]

T = TypeVar("T")

_worlds: list[World] = []


def _world() -> World:
    return _worlds[-1]


def _instance(conninfo: str) -> Instance:
    user = str(conninfo_to_dict(conninfo)["user"])
    return next(each for each in _world().instances if each.name == user)


async def _dial(conninfo: str, *, timeout: float, **options: Any) -> Link:
    async with asyncio.timeout(timeout):
        return Link(await _world().server.connect("replication", _instance(conninfo).name))


async def _open(conninfo: str, **options: Any) -> Connection:
    return Connection(await _world().server.connect("short", _instance(conninfo).name))


def _cut(connection: Connection) -> None:
    connection.session.server.hang_up(connection.session)


def _in_thread(call: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """A thread that continues after its waiter was cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(result)

    loop.call_later(_world().rng.choice((0.0, 0.001, 0.05)), work)
    return done


def _pool(
    stack: Stack, role: Role, url: str, size: int, post: Callable[[PostedEvent], None]
) -> Pool:
    return Pool(_world().server, stack.settings.application_name, role, stack.core, post)


def _kept_store(path: Path) -> KeptStore:
    return next(each.store for each in _world().instances if each.name == path.parent.name)


class WatchedCore(ManagerCore):
    """The core, with a watcher of its reactions to failures."""

    def client_failed(self, diagnosis: Diagnosis) -> Actions:
        return self._watched("client", diagnosis, super().client_failed)

    def pool_ready(self, role: Role) -> Actions:
        _of_core(self).worked.add(role.value)
        return super().pool_ready(role)

    def pool_failed(self, role: Role, diagnosis: Diagnosis) -> Actions:
        react = partial(super().pool_failed, role)
        return self._watched("pool", diagnosis, react, role.value)

    def subsystem_failed(self, diagnosis: Diagnosis) -> Actions:
        return self._watched("subsystem", diagnosis, super().subsystem_failed)

    def _watched(
        self, part: str, diagnosis: Diagnosis, react: Callable[[Diagnosis], Actions], role: str = ""
    ) -> Actions:
        step = self.machine.step
        actions = react(diagnosis)
        instance = _of_core(self)
        instance.world.watcher.reacted(instance, part, step, diagnosis, actions, role)
        return actions


class WatchedBackoff(Backoff):
    """The backoff, with a watcher of its waits."""

    def fail(self) -> float:
        wait = super().fail()
        if (instance := _of_backoff(self)) is not None:
            instance.world.watcher.waits(instance, wait)
        return wait

    def succeed(self) -> float:
        if (instance := _of_backoff(self)) is not None:
            instance.world.watcher.proven(instance)
        return super().succeed()


class WatchedMachine(Machine):
    """The state machine, with reports of refused moves."""

    def move(self, *args: Any, **options: Any) -> Move:
        try:
            return super().move(*args, **options)
        except IllegalMove as error:
            _world().violated(str(error))
            raise


class WatchedManager(Manager):
    """The manager, with a watcher that checks after each event and at the end of the run."""

    async def run(self, ctx: Context) -> None:
        begun = asyncio.get_running_loop().time()
        try:
            await super().run(ctx)
        except asyncio.CancelledError:
            raise
        except SubsystemFailed as error:
            if asyncio.get_running_loop().time() - begun < 1.0:
                _world().violated(f"the manager begins again without a wait: {error}")
            raise
        except BaseException as error:
            _world().violated(f"the manager failed: {error!r}")
            raise

    async def _carry_out(self, actions: Actions) -> None:
        await super()._carry_out(actions)
        instance = _of_core(self._core)
        instance.world.watcher.settled(instance, self)


def _of_core(core: ManagerCore) -> Instance:
    return next(each for each in _world().instances if _core_of(each) is core)


def _core_of(instance: Instance) -> ManagerCore | None:
    stack = getattr(instance.pg, "_stack", None)  # it is opened in a thread
    return None if stack is None else stack.core


def _of_backoff(backoff: Backoff) -> Instance | None:
    for each in _world().instances:
        if (core := _core_of(each)) is not None and core.backoff is backoff:
            return each
    return None


@contextmanager
def seams() -> Iterator[None]:
    """Put the scripted server in the place of the real one."""
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (_replication, "ReplicationLink", mock.Mock(spec=["dial"], dial=_dial)),
            (psycopg.AsyncConnection, "connect", _open),
            (_manager, "ManagedPool", _pool),
            (_stack, "StateStore", _kept_store),
            (_store, "_make_private", lambda path: None),
            (_stack, "ManagerCore", WatchedCore),
            (_stack, "Backoff", WatchedBackoff),
            (_stack, "Machine", WatchedMachine),
            (_restarter, "Manager", WatchedManager),
            (_connect, "cut", _cut),
            (_store, "in_thread", _in_thread),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


async def a_bad_day(sim: Sim) -> Counter[str]:
    """One schedule."""
    world = World(sim)
    _worlds.append(world)
    try:
        await world.live()
        return world.saw
    finally:
        _worlds.remove(world)
