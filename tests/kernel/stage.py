"""Children that record what happens to them, for the tests of the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from moored.kernel import Child, Context
from moored.testing import run_one, scaled


class Stage:
    """Children that record their starts and stops, and fail on command."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self._orders: dict[str, asyncio.Future[None]] = {}

    def child(self, name: str, **options: object) -> Child:
        async def run(ctx: Context) -> None:
            self.trace.append(f"+{name}{ctx.generation}")
            try:
                order = self._orders[name] = asyncio.get_running_loop().create_future()
                ctx.started(f"{name}{ctx.generation}")
                await order
            except asyncio.CancelledError:
                self.trace.append(f"-{name}{ctx.generation}")
                raise

        return Child(name, run, **options)  # type: ignore[arg-type]

    def crash(self, name: str) -> None:
        self._orders[name].set_exception(ValueError(f"{name} broke"))

    def finish(self, name: str) -> None:
        self._orders[name].set_result(None)

    def take(self) -> str:
        taken, self.trace = " ".join(self.trace), []
        return taken


async def settle() -> None:
    """Wait a virtual second, in which everything that is due now happens."""
    await asyncio.sleep(1)


def virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    async def play(sim: object) -> None:
        await scenario()

    for seed in range(scaled(5, least=2)):
        run_one(play, seed)
        run_one(play, seed, timer_slack=0.001)
