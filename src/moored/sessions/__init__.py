"""One supervised tree for each account, and an outcome for every send.

::

    async with Sessions(storage="accounts.db") as sessions:
        alice = await sessions.connect("alice", Mqtt("mqtts://broker"))
        match await alice.send("bob", b"hello", outcome=True):
            case Acked(id=id): ...
            case Rejected(code=code): ...
            case NotSent(reason=reason): ...  # nothing left this process, so it cannot arrive twice
            case Unknown(reason=reason): ...  # it left, and then the link was lost: you decide

Invariants:

- every send has exactly one outcome, as soon as the link is lost and not only by its timeout;
- a send that is `NotSent` never arrives, and sends to one recipient arrive in order;
- the crash of one account, or of one recipient's sender, affects no other;
- a profile has one session, in the process or, with leases, in the cluster;
- a report from an old link changes nothing.
"""

from ._content import (
    Bounce,
    ConnectionUpdate,
    Incoming,
    Media,
    Msg,
    Poll,
    Presence,
    Receipt,
    SenderCrash,
    SetAside,
    Text,
)
from ._errors import (
    AlreadyRunning,
    CorruptRecord,
    LinkLost,
    NotConnected,
    ProtocolError,
    QueryFailed,
    QueryTimeout,
    SenderCrashed,
    SessionError,
    SessionStopped,
    StepFailed,
    StorageError,
    Unsupported,
)
from ._protocol import (
    Accepted,
    Answered,
    Bounced,
    CloseClass,
    Closing,
    Confirmed,
    ConfirmedUpTo,
    Dialogue,
    Feature,
    Greeting,
    Happening,
    Ignored,
    LoginStep,
    Notice,
    Outgoing,
    Protocol,
    Ready,
    Refused,
    Remember,
    Repeat,
    StartTls,
    Unhandled,
)
from ._session import Session
from ._session_via import SessionVia
from ._sessions import Sessions
from .events import EventStream, retrying
from .link import LastLoss
from .sending import (
    Acked,
    MemoryRetryCache,
    NotSent,
    Outcome,
    Rejected,
    RetryCache,
    SendFailed,
    SendNotSent,
    SendRejected,
    SendUnknown,
    Submitted,
    Unknown,
)
from .storage import Corruption, Namespace, Records, Storage, open_storage
from .transport import InMemory, Tcp, WebSocket

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # Sessions
    "ConnectionUpdate",
    "EventStream",
    "LastLoss",
    "Session",
    "SessionVia",
    "Sessions",
    "retrying",
    # The outcomes of a send
    "Acked",
    "NotSent",
    "Outcome",
    "Rejected",
    "Submitted",
    "Unknown",
    # Contents and events
    "Bounce",
    "Incoming",
    "Media",
    "Msg",
    "Poll",
    "Presence",
    "Receipt",
    "SenderCrash",
    "SetAside",
    "Text",
    # For authors of protocols
    "Accepted",
    "Answered",
    "Bounced",
    "CloseClass",
    "Closing",
    "Confirmed",
    "ConfirmedUpTo",
    "Dialogue",
    "Feature",
    "Greeting",
    "Happening",
    "LoginStep",
    "InMemory",
    "MemoryRetryCache",
    "Notice",
    "Outgoing",
    "Ignored",
    "Protocol",
    "Ready",
    "Refused",
    "Remember",
    "Repeat",
    "StartTls",
    "RetryCache",
    "Corruption",
    "Namespace",
    "Records",
    "Storage",
    "Tcp",
    "Unhandled",
    "WebSocket",
    "open_storage",
    # Errors
    "AlreadyRunning",
    "CorruptRecord",
    "LinkLost",
    "NotConnected",
    "ProtocolError",
    "QueryFailed",
    "QueryTimeout",
    "SendFailed",
    "SendNotSent",
    "SendRejected",
    "SendUnknown",
    "SenderCrashed",
    "SessionError",
    "SessionStopped",
    "StepFailed",
    "StorageError",
    "Unsupported",
]
