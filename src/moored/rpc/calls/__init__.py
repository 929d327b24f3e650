"""Calls over a handler: the four kinds of methods, pending calls, retries, and unsent calls."""

from ._call_count import counted
from ._kinds import KINDS, FourKinds, arguments
from ._unsent import AsyncCallUnsent, CallUnsent

__all__ = ["KINDS", "AsyncCallUnsent", "CallUnsent", "FourKinds", "arguments", "counted"]
