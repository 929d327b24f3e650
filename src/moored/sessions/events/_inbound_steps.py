"""The inbound steps: they change or drop an event before its consumer gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moored.kernel import awaited

from .._content import Incoming
from .._protocol import InboundStep

if TYPE_CHECKING:
    from .._session import Session

__all__ = ["InboundSteps"]

#: Seconds that one step may take for one event; later events wait meanwhile.
STEP_TIMEOUT = 30.0


@dataclass(slots=True, eq=False, repr=False)
class InboundSteps:
    """The inbound steps of one session."""

    _session: Session
    _steps: Sequence[tuple[str, InboundStep]]

    async def __call__(self, event: Incoming) -> Incoming | None:
        """Run all steps for an event; return None if one of them drops it."""
        for name, step in self._steps:
            async with asyncio.timeout(STEP_TIMEOUT):
                found = await awaited(step(event, self._session))
            if found is None:
                return None
            if not isinstance(found, Incoming):
                raise TypeError(f"the inbound step {name!r} must return an Incoming, or None")
            event = found
        return event
