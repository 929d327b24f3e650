"""What a protocol is: plain objects that turn bytes into events and requests into bytes.

They do no I/O, have no clock and start no task, so that the same code runs on a socket, in a test
and in the simulator. There are two:

- a `Protocol` says where to connect to, what it can do, and through which steps a send goes; one
  object may serve any number of sessions;
- a `Dialogue` is one link of one session, from the first byte to the last. It is made anew for each
  link. What must outlive a link (unacknowledged sends of a protocol that can resume) is in the
  `memory` that the session keeps for its protocol, and hands to each dialogue.

Whatever `feed` returns is handled in its order. A dialogue that is fed nonsense raises
`ProtocolError`, which closes that one link; any other exception is a defect and crashes the
session, whose supervisor starts it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

__all__ = [
    "Accepted",
    "Answered",
    "Bounced",
    "CloseClass",
    "Closing",
    "Confirmed",
    "ConfirmedUpTo",
    "Dialogue",
    "DialogueEvent",
    "Feature",
    "Greeting",
    "Happening",
    "Ignored",
    "InboundStep",
    "LoginStep",
    "Notice",
    "Outgoing",
    "Protocol",
    "Ready",
    "Refused",
    "Remember",
    "Repeat",
    "StartTls",
    "Unhandled",
]


class Feature(Enum):
    """What a protocol may offer besides sending bytes; what it lacks raises `Unsupported`."""

    TEXT = "text"
    MEDIA = "media"
    GROUPS = "groups"
    PRESENCE = "presence"
    READ_MARKERS = "read markers"
    POLLS = "polls"
    QUERIES = "queries"
    PAIRING = "pairing"
    SUBSCRIPTIONS = "subscriptions"


class CloseClass(Enum):
    """Why a link ended, as far as it matters for what comes next."""

    #: The network, or a server that restarts: try again, with growing pauses, and never give up.
    TRANSIENT = "transient"
    #: A new link is needed, in place of one that is in order: make it at once, do not count it.
    RESTART = "restart required"
    #: Another one has connected as the same account: stop.
    TAKEOVER = "taken over"
    #: The credentials are not accepted: stop.
    AUTHENTICATION = "authentication"
    #: The account is banned: stop.
    BANNED = "banned"
    #: The server does not talk to this version any more: stop.
    OUTDATED = "outdated"
    #: The settings, or what they make of this profile, cannot work: stop.
    MISCONFIGURED = "misconfigured"

    @property
    def final(self) -> bool:
        """Whether connecting again would do harm, or no good."""
        return self not in (CloseClass.TRANSIENT, CloseClass.RESTART)


# -- what a dialogue says of the bytes that it was fed -------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The handshake and the login are over; sends may be written from now on."""

    #: Whether the server still knows the state of the last link that was ready: unacknowledged
    #: sends live on.
    resumed: bool = False
    #: How many sends may be written and unconfirmed at once; None for any number.
    window: int | None = None
    #: Seconds of silence that this server allows, if it has its own mind about them; 0 for any.
    keepalive: float | None = None
    #: Whether the server keeps the state of this link when it ends, as the protocol promises. With
    #: False, its unacknowledged sends are settled at once when it does.
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class LoginStep:
    """The login needs somebody: a code to show, a question to answer."""

    #: What is wanted, such as "pairing code".
    kind: str
    #: What to show, such as the code.
    data: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The login has given credentials, which are to be kept for the next one."""

    credentials: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The server has confirmed a send; only the first confirmation of a send counts."""

    id: str
    extra: Any = None


@dataclass(frozen=True, slots=True)
class ConfirmedUpTo:
    """The server has confirmed so many more of the sends written over this link, in order."""

    count: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The server has refused a send."""

    id: str
    code: object
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bounced:
    """A send that the server has confirmed could not be delivered: the event `send_bounced`.

    For one that is not confirmed yet, it is a refusal.
    """

    id: str
    code: object
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """The server has answered a query."""

    id: str
    value: Any = None
    #: The protocol's code, if the answer is an error.
    code: object = None


@dataclass(frozen=True, slots=True)
class Happening:
    """Something came in that is for the user, or for a handler of the protocol."""

    #: What `Protocol.route` is asked about.
    frame: Any = field(repr=False)
    #: Given to `Dialogue.acknowledge` when the user's handler has returned; None for no need.
    token: Any = None
    #: What two copies of one message have in common, and nothing else ever has. With it, a message
    #: that was handled when its link was gone is not handled again: its copy is acknowledged.
    key: object = None
    #: Whether the server may have sent it before, and this is such a copy.
    again: bool = False


@dataclass(frozen=True, slots=True)
class Closing:
    """The server ends the link, and says why."""

    kind: CloseClass
    code: object = None
    reason: str = ""
    #: What to send before the socket is closed.
    farewell: bytes = b""
    #: The earliest moment to come back, in seconds from now, if the server said so.
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Greeting:
    """Bytes that must be sent now: the next move of a handshake, or an answer to a ping."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Something was received that needs no answer, such as the answer to a ping."""


@dataclass(frozen=True, slots=True)
class Remember:
    """The next process needs this: keep it in the storage, and give it to `Protocol.recall`."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A peer could not read a send, and asks for it again."""

    id: str


@dataclass(frozen=True, slots=True)
class StartTls:
    """The server is ready for TLS on this link (STARTTLS); for an endpoint with `starttls`.

    What came behind it in plain text is not heard. When the link is encrypted, what
    `Dialogue.secured` returns is sent.
    """


@dataclass(frozen=True, slots=True)
class Unhandled:
    """A frame that nobody knows what to do with; it is logged and counted."""

    what: str


DialogueEvent: TypeAlias = (
    Ready
    | LoginStep
    | Accepted
    | Confirmed
    | ConfirmedUpTo
    | Refused
    | Bounced
    | Answered
    | Happening
    | Closing
    | Greeting
    | Ignored
    | Remember
    | Repeat
    | StartTls
    | Unhandled
)


@dataclass(slots=True)
class Outgoing:
    """A send on its way through the steps; a step may change or replace what is in it."""

    id: str
    recipient: str
    #: As the user gave it: bytes, or one of the contents (`Text`, `Media`, `Poll`, …).
    content: Any
    #: What the steps have made of it, and what `Dialogue.write` will write.
    body: Any = None
    #: What else steps tell each other; what is under "extra" becomes the `extra` of `Acked`.
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to say that the server does not answer, such as a presence; for `query`."""

    data: Any = field(repr=False)


#: One step: gets the send, returns it or another; may be async; `StepFailed` fails this send only.
Step: TypeAlias = Callable[[Outgoing, Any], Any]

#: One step for what comes in: gets the `Incoming` and the session, returns that, another one, or
#: None if nothing is left for the consumer; may be async, use records, query and send. What it
#: raises sets the message aside.
InboundStep: TypeAlias = Callable[[Any, Any], Any]


class Dialogue(ABC):
    """One link of one session."""

    __slots__ = ()

    @abstractmethod
    def hello(self) -> bytes:
        """What is sent first; empty, if the server speaks first."""

    @abstractmethod
    def feed(self, data: bytes) -> Iterable[DialogueEvent]:
        """Bytes have come in."""

    @abstractmethod
    def write(self, outgoing: Outgoing) -> bytes:
        """A send, as bytes; from now on it has left the process."""

    def resend(self, wanted: Container[str]) -> Iterable[tuple[str, bytes | None]]:
        """After a resumption: the unconfirmed sends of the last link, with their ids, in order.

        Only those whose ids are `wanted`: the others are settled, and must not be written again.
        Empty bytes keep a send back, and new sends with it: the dialogue writes it later, as a
        `Greeting`. None gives a send up, because the links that it was written to have ended.
        """
        return ()

    def secured(self) -> bytes:
        """After `StartTls`: what is sent first over TLS. Forget what came in plain text."""
        raise NotImplementedError

    def query(self, id: str, question: Any) -> bytes:
        """A question, as bytes; its answer comes as `Answered`."""
        raise NotImplementedError

    def notice(self, data: Any) -> bytes:
        """What is in a `Notice`, as bytes; nothing is waited for."""
        raise NotImplementedError

    def ping(self) -> bytes:
        """What makes a live server answer; empty, if the protocol has nothing of the kind."""
        return b""

    def acknowledge(self, token: Any) -> bytes:
        """What tells the server that something it sent was handled; empty for nothing.

        `ProtocolError` ends the link, after its farewell, for a new one.
        """
        return b""

    def skip(self, token: Any) -> bytes:
        """What lets later ones be acknowledged though this one is not; empty for nothing.

        Called for something that could not be handled. The server should keep it, and send it again
        over the next link. Where that cannot be said, because one acknowledgement covers all
        before it, return what `acknowledge` would.
        """
        return b""

    def end_of_batch(self) -> bytes:
        """Called when all events of the bytes that `feed` got were handled; empty for nothing.

        For what is said once for all of them, such as one confirmation of everything up to here.
        """
        return b""

    def login(self, answer: Any) -> bytes:
        """The user's answer to a `LoginStep`, as bytes."""
        raise NotImplementedError

    def goodbye(self) -> bytes:
        """What is sent before the link is closed on purpose."""
        return b""


class Protocol(ABC):
    """How to talk to a kind of server; one object for any number of sessions."""

    #: Its name in logs and in `repr`.
    name: str = "protocol"
    #: What it can do besides sending.
    features: frozenset[Feature] = frozenset()
    #: What a send goes through before it is written.
    steps: Sequence[tuple[str, Step]] = ()
    #: What a message goes through before a consumer gets it, one message at a time.
    inbound_steps: Sequence[tuple[str, InboundStep]] = ()
    #: Seconds of silence after which the server is asked for a sign of life; None for never.
    keepalive: float | None = 30.0
    #: Seconds that a server has to answer that; then the link counts as lost.
    patience: float = 5.0
    #: Whether unconfirmed sends may live on in the next link.
    resumes: bool = False
    #: How many things the server may send before they are acknowledged; None, if it never waits.
    inbound_window: int | None = None
    #: Whether peers may ask for a send again (`Repeat`), so that recent ones must be kept.
    repeats: bool = False
    #: Whether the server confirms by a count (`ConfirmedUpTo`) instead of by ids.
    cumulative: bool = False
    #: Whether what came in is acknowledged in its order, so that `Dialogue.skip` has something to
    #: do, and what there is no room for is left to another link.
    acknowledges_in_order: bool = False
    #: Seconds after which a new link is made for the messages that were set aside because a handler
    #: raised: servers send them again over the next link alone, and may stop sending others
    #: when too many are unacknowledged. None for never.
    redelivery: float | None = 300.0
    #: Whether the server sends again, over the next link, what was not acknowledged: "never",
    #: "always", or if it still knows the last link ("resumed", which is what `Ready` says then).
    #: If it does, what no handler has begun when a link ends is not kept: it would come twice.
    redelivers: Literal["never", "resumed", "always"] = "never"
    #: Whether it does so for the next session of the profile, too. If it does, a session that is
    #: stopped leaves to that one what no handler has begun; otherwise handlers get it first.
    outlives: bool = False

    @property
    @abstractmethod
    def endpoint(self) -> Any:
        """Where to connect to: a `Tcp`, `WebSocket` or `InMemory` endpoint."""

    def locate(self, profile: str, credentials: bytes | None, memory: Any) -> Any:
        """Where the next link of a profile leads: to `endpoint`, if nothing else is known.

        Called once for each attempt, so that a protocol can follow a redirect which it has put into
        its memory, and give it up when the attempt has failed.
        """
        return self.endpoint

    def remember(self) -> Any:
        """The memory of a session that has none yet; kept while the session lives."""
        return None

    def recall(self, memory: Any, stored: bytes) -> None:  # noqa: B027 (may be nothing)
        """An earlier process has left this with `Remember`; called before the first link."""

    def forget(self, memory: Any) -> Any:
        """What is left of it when somebody else may have had the account: by default, a new one.

        Nothing unconfirmed may be written again: whoever sent it was told that its fate is unknown.
        """
        return self.remember()

    @abstractmethod
    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> Dialogue:
        """A dialogue for a new link."""

    def route(self, frame: Any) -> str:
        """Which handler a frame is for, by looking at nothing else; "unhandled" for none."""
        return "unhandled"

    def interpret(self, tag: str, frame: Any) -> Any:
        """What the user gets for a frame with that tag; None for nothing."""
        return None

    def question(self, what: str, **details: Any) -> Any:
        """What `Dialogue.query` gets for one of the features, such as "presence".

        A `Notice`, if the server has no answer to that: `Dialogue.notice` gets what is in it.
        """
        return {"do": what, **details}

    async def upload(self, session: Any, kind: str, data: bytes, caption: str) -> Any:
        """Put bytes where others can get them, and return their `Media`."""
        raise NotImplementedError

    async def download(self, session: Any, media: Any) -> bytes:
        """Get the bytes that a `Media` describes."""
        raise NotImplementedError

    def sandbox_check(self, profile: str, outgoing: Outgoing) -> None:  # noqa: B027 (may be nothing)
        """Raise `StepFailed` for what `write` would refuse, for sessions without a server."""

    def sandbox_answer(self, question: Any) -> Any:
        """What the server would answer to a query, for sessions without a server."""
        return None

    def sandbox_extra(self, outgoing: Outgoing) -> Any:
        """What a confirmation would carry as `extra`, for sessions without a server."""
        return None
