"""The app of `stop_program.py`, for `moored serve`."""

from __future__ import annotations

from tests.broker.stop_program import KEYS, publish

from moored.app import App, ComponentContext
from moored.broker import ApiKeys, MemorySource

service = App("stopping")
served = MemorySource()
serving = service.broker(
    served, authenticate=ApiKeys(KEYS), channels=["orders"], buffer=1, slow="drop"
)


@service.component
async def publisher(ctx: ComponentContext) -> None:
    await publish(served, serving)
