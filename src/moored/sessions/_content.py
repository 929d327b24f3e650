"""The contents of sends and the events of sessions: plain objects, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._protocol import CloseClass


@dataclass(frozen=True, slots=True)
class Text:
    """A text message."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, a video, a document: the descriptor of uploaded bytes."""

    #: Such as "image", "video", "audio", "document".
    kind: str
    #: The location that the protocol's upload returned.
    location: str
    size: int = 0
    caption: str = ""
    #: The secret that is needed to read the bytes, such as their key.
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Poll:
    """A question with answers to choose from."""

    question: str
    options: tuple[str, ...]
    #: The most options that a voter may choose.
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """A recipient has received, or read, messages."""

    ids: tuple[str, ...]
    kind: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Presence:
    """An account is available, unavailable or typing."""

    who: str
    state: str


@dataclass(frozen=True, slots=True)
class Msg:
    """A message to this account."""

    #: "text", "media", "poll", "bytes" or a type of the protocol.
    type: str
    content: Any
    id: str = ""
    sender: str = ""
    #: The group, topic or other address that it was sent to, if not to this account alone.
    to: str = ""
    #: Whether the server has marked it as sent before.
    duplicate: bool = False
    #: More data of the protocol.
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Incoming:
    """Something that happened to a session.

    The types: `messages_upsert` (a `Msg`), `receipt_update` (a `Receipt`), `group_update`,
    `presence_update` (a `Presence`), `connection_update` (a `ConnectionUpdate`), `login` (a
    `LoginStep`), `record_corrupt` (a `Corruption`), `credentials_not_kept` (why),
    `session_crashed` (why), `sender_crashed` (a `SenderCrash`), `events_dropped` (how many),
    `message_set_aside` (a `SetAside`), `send_bounced` (a `Bounce`). A protocol may have more: MQTT
    has `subscription_refused` (a `SubscriptionRefused`).
    """

    type: str
    data: Any
    profile: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """A message that could not be handled: it is not acknowledged, and later ones are handled.

    The server sends it again over the next link, if the protocol redelivers messages.
    """

    #: The event whose handler failed; without data if the protocol could not interpret it.
    event: Incoming
    #: The exception of the handler or of the protocol.
    error: BaseException


@dataclass(frozen=True, slots=True)
class Bounce:
    """A send that the server had confirmed, and could not deliver."""

    id: str
    #: The protocol's own code.
    code: object
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SenderCrash:
    """A step of a send, or the protocol, crashed; all unsettled sends to the recipient failed."""

    #: The name of the exception's type; without its text, which may quote a message.
    error: str
    #: The number of sends that failed with it.
    sends: int


@dataclass(frozen=True, slots=True)
class ConnectionUpdate:
    """A change of the connection's state."""

    #: "connecting", "online", "offline" or "stopped"; with the step after a slash, if it has one.
    state: str
    #: Why there is no link: the class of the last link's end; None if the user ended it.
    kind: CloseClass | None = None
    reason: str = ""
