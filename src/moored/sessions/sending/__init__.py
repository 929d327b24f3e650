"""A send, from the call to its one outcome."""

from ._acks import Parked
from ._outcomes import (
    Acked,
    NotSent,
    Outcome,
    Rejected,
    SendFailed,
    SendNotSent,
    SendRejected,
    SendUnknown,
    Submitted,
    Unknown,
    error_of,
)
from ._retry_cache import MemoryRetryCache, RetryCache
from ._sends import Sends
from ._window import Window

__all__ = [
    "Acked",
    "MemoryRetryCache",
    "NotSent",
    "Outcome",
    "Parked",
    "Rejected",
    "RetryCache",
    "SendFailed",
    "SendNotSent",
    "SendRejected",
    "SendUnknown",
    "Sends",
    "Submitted",
    "Unknown",
    "Window",
    "error_of",
]
