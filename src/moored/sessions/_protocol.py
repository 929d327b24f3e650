"""The interface of a protocol: plain objects that turn bytes into events and sends into bytes.

They do no I/O, have no clock and start no tasks, so that the same code runs on a socket, in a test
and in the simulator. There are two:

- a `Protocol` holds the endpoint, the features and the steps of sends; one object may serve any
  number of sessions;
- a `Dialogue` is one link of one session, from the first byte to the last. Each link has a new one.
  State that must outlive a link (unacknowledged sends of a protocol that can resume) is in the
  `memory`, which the session keeps and passes to each dialogue.

The events that `feed` returns are handled in order. A dialogue that is fed invalid bytes raises
`ProtocolError`, which closes the link; any other exception is a defect and crashes the session's
connection, which its supervisor restarts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias


class Feature(Enum):
    """Optional features of a protocol; calling one that it lacks raises `Unsupported`."""

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
    """Why a link ended, which decides whether the session reconnects."""

    #: A network failure, or a server that restarts: reconnect with backoff, and never give up.
    TRANSIENT = "transient"
    #: The server requests a new link in place of a working one: reconnect without a pause.
    RESTART = "restart required"
    #: Another client has connected as the same account: stop.
    TAKEOVER = "taken over"
    #: The credentials are not accepted: stop.
    AUTHENTICATION = "authentication"
    #: The account is banned: stop.
    BANNED = "banned"
    #: The server does not support this version of the protocol: stop.
    OUTDATED = "outdated"
    #: The settings cannot work, at least for this profile: stop.
    MISCONFIGURED = "misconfigured"

    @property
    def final(self) -> bool:
        """Whether the session stays offline, because reconnecting would do harm or cannot help."""
        return self not in (CloseClass.TRANSIENT, CloseClass.RESTART)


# -- the events that a dialogue returns ----------------------------------------------------------


class DialogueEvent:
    """Something that a dialogue reports about received bytes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ready(DialogueEvent):
    """The handshake and the login are complete; sends may be written from now on."""

    #: Whether the server has kept the state of the last link that was ready, so that its
    #: unacknowledged sends can be resumed.
    resumed: bool = False
    #: The most sends that may be unconfirmed at once; None for any number.
    window: int | None = None
    #: The keepalive interval that this server requests, in seconds; 0 for no keepalive.
    keepalive: float | None = None
    #: Whether the server keeps the state of this link when it ends, as the protocol promises. With
    #: False, its unacknowledged sends are settled as soon as the link ends.
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class LoginStep(DialogueEvent):
    """The login needs a person, to enter a code or to answer a question."""

    #: What is needed, such as "pairing code".
    kind: str
    #: The data to show, such as the code.
    data: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Accepted(DialogueEvent):
    """The server has issued credentials, to be stored for the next login."""

    credentials: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Confirmed(DialogueEvent):
    """The server has confirmed a send; only the first confirmation of a send counts."""

    id: str
    extra: Any = None


@dataclass(frozen=True, slots=True)
class ConfirmedUpTo(DialogueEvent):
    """The server has confirmed the next `count` sends of this link, in the order written."""

    count: int


@dataclass(frozen=True, slots=True)
class Refused(DialogueEvent):
    """The server has refused a send."""

    id: str
    code: object
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bounced(DialogueEvent):
    """The server could not deliver a send that it had confirmed: the event `send_bounced`.

    For a send that is not confirmed yet, it is a refusal.
    """

    id: str
    code: object
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Answered(DialogueEvent):
    """The server has answered a query."""

    id: str
    value: Any = None
    #: The protocol's code, if the answer is an error.
    code: object = None


@dataclass(frozen=True, slots=True)
class Happening(DialogueEvent):
    """A message or notification for the user arrived."""

    #: The argument of `Protocol.route` and `Protocol.interpret`.
    frame: Any = field(repr=False)
    #: Passed to `Dialogue.acknowledge` when the user's handler has returned; None if the server
    #: needs no acknowledgement.
    token: Any = None
    #: Equal for the copies of one message, and for no other message. With it, a message that was
    #: handled after its link was lost is not handled again: its copy is acknowledged.
    key: object = None
    #: Whether this may be a copy of a message that the server has sent before.
    again: bool = False


@dataclass(frozen=True, slots=True)
class Closing(DialogueEvent):
    """The server ends the link, for this reason."""

    kind: CloseClass
    code: object = None
    reason: str = ""
    #: Bytes to send before the socket is closed.
    farewell: bytes = b""
    #: The seconds to wait before reconnecting, if the server requests a minimum.
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Greeting(DialogueEvent):
    """Bytes to send now: the next part of a handshake, or the answer to a ping."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ignored(DialogueEvent):
    """A frame that needs no action, such as the answer to a ping."""


@dataclass(frozen=True, slots=True)
class Remember(DialogueEvent):
    """Data for the next process: stored, and passed to `Protocol.recall`."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Repeat(DialogueEvent):
    """A peer could not read a send, and requests it again."""

    id: str


@dataclass(frozen=True, slots=True)
class StartTls(DialogueEvent):
    """The server is ready for TLS on this link (STARTTLS); for an endpoint with `starttls`.

    Further plain text is dropped. When the link is encrypted, the bytes that `Dialogue.secured`
    returns are sent.
    """


@dataclass(frozen=True, slots=True)
class Unhandled(DialogueEvent):
    """A frame that the protocol does not handle; it is logged and counted."""

    what: str


@dataclass(slots=True)
class Outgoing:
    """A send during its steps; a step may change its content and body."""

    id: str
    recipient: str
    #: The argument of `send`: bytes, or one of the contents (`Text`, `Media`, `Poll`, …).
    content: Any
    #: The result of the steps, which `Dialogue.write` encodes.
    body: Any = None
    #: Data that steps pass on to later ones; the value of "extra" becomes the `extra` of `Acked`.
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that the server does not answer, such as a presence; for `query`."""

    data: Any = field(repr=False)


#: A step of sends: gets the send and the session, returns the send or another one. May be async.
#: `StepFailed` fails only this send.
Step: TypeAlias = Callable[[Outgoing, Any], Any]

#: A step of received events: gets the `Incoming` and the session; returns that, another one, or
#: None to drop it. May be async, and use records, query and send. If it raises, the message is set
#: aside.
InboundStep: TypeAlias = Callable[[Any, Any], Any]


class Dialogue(ABC):
    """One link of one session."""

    __slots__ = ()

    @abstractmethod
    def hello(self) -> bytes:
        """Return the first bytes to send; empty if the server sends first."""

    @abstractmethod
    def feed(self, data: bytes) -> Iterable[DialogueEvent]:
        """Return the events of received bytes."""

    @abstractmethod
    def write(self, outgoing: Outgoing) -> bytes:
        """Return a send as bytes, which are written to the link immediately."""

    def resend(self, wanted: Container[str]) -> Iterable[tuple[str, bytes | None]]:
        """Return the unconfirmed sends of the last link, by id and in order, to resume them.

        Return only those whose id is in `wanted`: the others are settled, and must not be written
        again. Empty bytes hold a send back, and new sends with it: the dialogue writes it later, as
        a `Greeting`. None gives a send up, because every link that it was written to has ended.
        """
        return ()

    def secured(self) -> bytes:
        """Return the first bytes to send over TLS, after `StartTls`; drop buffered plain text."""
        raise NotImplementedError

    def query(self, id: str, question: Any) -> bytes:
        """Return a query as bytes; its answer is reported as `Answered`."""
        raise NotImplementedError

    def notice(self, data: Any) -> bytes:
        """Return the data of a `Notice` as bytes; the server does not answer it."""
        raise NotImplementedError

    def ping(self) -> bytes:
        """Return bytes that a live server answers; empty if the protocol has no ping."""
        return b""

    def acknowledge(self, token: Any) -> bytes:
        """Return the acknowledgement of a message that was handled; may be empty.

        `ProtocolError` sends its farewell and replaces the link.
        """
        return b""

    def skip(self, token: Any) -> bytes:
        """Return bytes for a message that could not be handled; may be empty.

        The server should keep it and send it again over the next link, and later messages must be
        acknowledged nevertheless. If one acknowledgement covers all earlier messages, return what
        `acknowledge` would.
        """
        return b""

    def end_of_batch(self) -> bytes:
        """Return bytes to send after all events of one `feed` were handled; may be empty.

        For an acknowledgement that covers all of them, for example.
        """
        return b""

    def login(self, answer: Any) -> bytes:
        """Return the user's answer to a `LoginStep` as bytes."""
        raise NotImplementedError

    def goodbye(self) -> bytes:
        """Return bytes to send before the client closes the link."""
        return b""


class Protocol(ABC):
    """How to communicate with a kind of server; one object for any number of sessions."""

    #: Its name in logs, metrics and `repr`.
    name: str = "protocol"
    features: frozenset[Feature] = frozenset()
    #: The steps of a send, by name, before it is written.
    steps: Sequence[tuple[str, Step]] = ()
    #: The steps of a message, by name, before a consumer gets it; for one message at a time.
    inbound_steps: Sequence[tuple[str, InboundStep]] = ()
    #: Seconds of silence after which the server is pinged; None for no keepalive.
    keepalive: float | None = 30.0
    #: Seconds that a server has to answer a ping; then the link counts as lost.
    patience: float = 5.0
    #: Whether unconfirmed sends may be resumed over the next link.
    resumes: bool = False
    #: The most unacknowledged messages that the server sends; None if it does not limit them.
    inbound_window: int | None = None
    #: Whether peers may request a send again (`Repeat`), so that recent ones must be kept.
    repeats: bool = False
    #: Whether the server confirms by a count (`ConfirmedUpTo`) instead of by ids.
    cumulative: bool = False
    #: Whether messages are acknowledged in order, so that one that cannot be handled needs
    #: `Dialogue.skip`, and one that does not fit into the event queue needs a new link.
    acknowledges_in_order: bool = False
    #: Seconds after which a new link is made for the messages that were set aside because a handler
    #: raised: servers send them again only over the next link, and may stop sending others while
    #: too many are unacknowledged. None for never.
    redelivery: float | None = 300.0
    #: Whether the server sends unacknowledged messages again over the next link: "never", "always",
    #: or "resumed": if `Ready` reports that the last link was resumed. If it does, messages that no
    #: handler has begun are dropped when a link ends: they would be handled twice.
    redelivers: Literal["never", "resumed", "always"] = "never"
    #: Whether it also sends them to the next session of the profile. If so, a session that is
    #: stopped drops the messages that no handler has begun; otherwise they are handled first.
    outlives: bool = False

    @property
    @abstractmethod
    def endpoint(self) -> Any:
        """The server to connect to: a `Tcp`, `WebSocket` or `InMemory` endpoint."""

    def locate(self, profile: str, credentials: bytes | None, memory: Any) -> Any:
        """Return the endpoint for the next link of a profile; `endpoint` by default.

        Called once for each dial, so that a protocol can follow a redirect that it has put into its
        memory, and drop it if the dial fails.
        """
        return self.endpoint

    def remember(self) -> Any:
        """Return a new memory for a session, which keeps it until it is stopped."""
        return None

    def recall(self, memory: Any, stored: bytes) -> None:  # noqa: B027 (may be nothing)
        """Restore what an earlier process stored with `Remember`; called before the first link."""

    def forget(self, memory: Any) -> Any:
        """Return the memory to use after another process may have used the account.

        No unconfirmed send may be written again: its outcome was already reported as `Unknown`.
        """
        return self.remember()

    @abstractmethod
    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> Dialogue:
        """Return a dialogue for a new link."""

    def route(self, frame: Any) -> str:
        """Return the tag of a frame, which depends only on the frame; "unhandled" for none."""
        return "unhandled"

    def interpret(self, tag: str, frame: Any) -> Any:
        """Return the user's data for a frame with this tag; None for no event."""
        return None

    def question(self, what: str, **details: Any) -> Any:
        """Return the argument of `Dialogue.query` for one of the features, such as "presence".

        Return a `Notice` if the server does not answer it: `Dialogue.notice` gets its data.
        """
        return {"do": what, **details}

    async def upload(self, session: Any, kind: str, data: bytes, caption: str) -> Any:
        """Upload bytes, and return their `Media`."""
        raise NotImplementedError

    async def download(self, session: Any, media: Any) -> bytes:
        """Return the bytes that a `Media` describes."""
        raise NotImplementedError

    def sandbox_check(self, profile: str, outgoing: Outgoing) -> None:  # noqa: B027 (may be nothing)
        """Raise `StepFailed` for content that `write` would refuse; for `offline=True`."""

    def sandbox_answer(self, question: Any) -> Any:
        """Return a sample answer to a query; for `offline=True`."""
        return None

    def sandbox_extra(self, outgoing: Outgoing) -> Any:
        """Return a sample `extra` of a confirmation; for `offline=True`."""
        return None
