"""What is sent and what comes in, as plain objects: never a protocol's own frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._protocol import CloseClass

__all__ = [
    "Bounce",
    "ConnectionUpdate",
    "Incoming",
    "Media",
    "Msg",
    "Poll",
    "Presence",
    "Receipt",
    "SenderCrash",
    "SetAside",
    "Text",
]


@dataclass(frozen=True, slots=True)
class Text:
    """A text."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, a film, a document: a descriptor of bytes that are kept elsewhere."""

    #: Such as "image", "video", "audio", "document".
    kind: str
    #: Where it is, as the protocol's upload said.
    location: str
    size: int = 0
    caption: str = ""
    #: What is needed to read it, such as its key.
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Poll:
    """A question with answers to choose from."""

    question: str
    options: tuple[str, ...]
    #: How many may be chosen.
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """Somebody has got, or read, something."""

    ids: tuple[str, ...]
    kind: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Presence:
    """Somebody is there, or not, or writes."""

    who: str
    state: str


@dataclass(frozen=True, slots=True)
class Msg:
    """Something that somebody sent to this account."""

    #: "text", "media", "poll", "bytes" or a word of the protocol's.
    type: str
    content: Any
    id: str = ""
    sender: str = ""
    #: The group, or whatever else it was sent to, if it was not to this account alone.
    to: str = ""
    #: Whether the server says that it has sent it before.
    duplicate: bool = False
    #: Whatever else the protocol has to tell.
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
    """A message that could not be handled: it is not acknowledged, and holds up no other message.

    The server sends it again over the next link, if the protocol's server does so at all.
    """

    #: The event that the handler failed at; without data, if the protocol could not interpret it.
    event: Incoming
    #: What the handler, or the protocol, raised.
    error: BaseException


@dataclass(frozen=True, slots=True)
class Bounce:
    """A send that the server had confirmed, and could not deliver in the end."""

    id: str
    #: The protocol's own code.
    code: object
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SenderCrash:
    """The sender of a recipient has crashed: a step, or the protocol, raised what none may."""

    #: The name of the exception's type. Its words are not here: they may be somebody's.
    error: str
    #: How many sends have failed with it.
    sends: int


@dataclass(frozen=True, slots=True)
class ConnectionUpdate:
    """The connection has changed."""

    #: "connecting", "online", "offline" or "stopped"; the step is after a slash, if there is one.
    state: str
    #: Why there is no link: how the last one ended, or who ended it (then without a class).
    kind: CloseClass | None = None
    reason: str = ""
