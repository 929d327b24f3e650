"""An app whose names and reasons contain markup."""

from __future__ import annotations

import asyncio

import moored
from moored.app import ComponentContext

__all__ = ["MARKUP", "app"]

MARKUP = "<img src=x onerror=hacked=1>"

app = moored.App("<b>shop<b>")


@app.component(name=MARKUP)
async def component(ctx: ComponentContext) -> None:
    """Be degraded, for a reason that contains markup."""
    ctx.health("degraded", f"because of {MARKUP}")
    await asyncio.Event().wait()


@app.component(name="<i>after<i>", after=[MARKUP])
async def follower(ctx: ComponentContext) -> None:
    """Work."""
    await asyncio.Event().wait()
