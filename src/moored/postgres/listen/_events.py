"""The events of a subscription, and the limits of PostgreSQL for names and payloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .._errors import ConfigurationError, PostgresError

__all__ = [
    "Gap",
    "Notification",
    "NotifyRefused",
    "PoolerRefused",
    "check_channels",
    "check_payload",
    "quoted",
]

#: PostgreSQL aborts the transaction that sends more bytes.
MAX_PAYLOAD = 7999
#: LISTEN truncates a longer name without an error, and NOTIFY refuses it.
MAX_CHANNEL = 63


class Notification(NamedTuple):
    """A notification, as the server sent it."""

    channel: str
    payload: str
    #: The process ID of the server process that sent it.
    pid: int


class Gap(NamedTuple):
    """Notifications may have been lost before this event; read again what they announce.

    After a lost connection it is delivered once every channel is listened to again, so that a
    query which is sent after it, together with the next notifications, misses nothing.
    """

    #: When the listener last heard from the server, in seconds since 1970; with the reason
    #: "slow", when the subscription overflowed.
    since: float
    #: "slow", or the reason why the connection was lost.
    reason: str


class PoolerRefused(ConfigurationError):
    """The direct path leads through a pooler that does not support LISTEN."""


class NotifyRefused(PostgresError, ValueError):
    """A channel name or a payload that PostgreSQL does not accept; nothing was sent."""


def check_channels(channels: tuple[str, ...]) -> None:
    """Raise `NotifyRefused` unless each is a valid channel name."""
    if not channels:
        raise NotifyRefused("there must be at least one channel")
    if wrong := [text for channel in channels for text in _mistakes(channel)]:
        raise NotifyRefused("; ".join(wrong))


def _mistakes(channel: str) -> Iterator[str]:
    size = _size(channel, "channel name")
    if not 1 <= size <= MAX_CHANNEL or "\0" in channel:
        shown = channel if size <= MAX_CHANNEL else f"{channel[:40]}…"
        yield (
            f"the channel name {shown!r} has {size} bytes: PostgreSQL permits 1 to {MAX_CHANNEL} "
            "bytes without NUL; use a shorter name, and put the rest into the payload"
        )


def check_payload(channel: str, payload: str) -> None:
    """Raise `NotifyRefused` if the payload is too long or contains NUL."""
    size = _size(payload, "payload")
    if size > MAX_PAYLOAD:
        raise NotifyRefused(
            f"the payload for {channel!r} has {size:,} bytes, and PostgreSQL permits "
            f"{MAX_PAYLOAD:,}: publish it through moored.postgres.Outbox, which sends payloads of "
            "any size"
        )
    if "\0" in payload:
        raise NotifyRefused(f"the payload for {channel!r} contains NUL, which is not permitted")


def _size(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        at = text[error.start]
        raise NotifyRefused(
            f"the {what} has the surrogate {at!r}, which is no character: remove it, or use "
            "base64 for bytes"
        ) from None


def quoted(channel: str) -> str:
    """Return a channel name as an identifier of SQL."""
    return '"' + channel.replace('"', '""') + '"'
