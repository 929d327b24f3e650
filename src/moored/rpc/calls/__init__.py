"""Calls over a channel that is replaced: their four kinds, those that wait, and those not sent."""

from ._call_count import counted
from ._kinds import KINDS, FourKinds, arguments
from ._unsent import AsyncCallUnsent, CallUnsent

__all__ = ["KINDS", "AsyncCallUnsent", "CallUnsent", "FourKinds", "arguments", "counted"]
