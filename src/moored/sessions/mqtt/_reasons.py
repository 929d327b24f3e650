"""The reason codes of MQTT 5: their texts, and whether a session reconnects.

A code below 0x80 means success. Where the standard leaves open whether a client should reconnect,
the session does: with backoff that does no harm, and a session that stopped would need a person.
"""

from __future__ import annotations

from .._protocol import CloseClass

__all__ = ["FAILURE", "end_class", "refusal_class", "words_of"]

#: The lowest code that means failure.
FAILURE = 0x80

_WORDS = {
    0x00: "success",
    0x04: "disconnected with the will",
    0x10: "no matching subscribers",
    0x11: "no subscription existed",
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "the server refuses the packet for a reason of its own",
    0x84: "this version of the protocol is not supported",
    0x85: "the client id is not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "the server is unavailable",
    0x89: "the server is busy",
    0x8A: "banned",
    0x8B: "the server is shutting down",
    0x8C: "bad authentication method",
    0x8D: "keep alive timeout",
    0x8E: "the session was taken over by another connection",
    0x8F: "the topic filter is not valid",
    0x90: "the topic name is not valid",
    0x91: "the packet id is in use",
    0x92: "the packet id is not known",
    0x93: "more was sent than the receive maximum allows",
    0x94: "the topic alias is not valid",
    0x95: "the packet is too large",
    0x96: "the message rate is too high",
    0x97: "a quota is used up",
    0x98: "an administrator ended the connection",
    0x99: "the payload does not have the format it claims",
    0x9A: "retained messages are not supported",
    0x9B: "the quality of service is not supported",
    0x9C: "another server is to be used for now",
    0x9D: "the server has moved",
    0x9E: "shared subscriptions are not supported",
    0x9F: "connections come too fast",
    0xA0: "the connection has reached its maximum time",
    0xA1: "subscription identifiers are not supported",
    0xA2: "wildcard subscriptions are not supported",
}

#: The classes of codes in a CONNACK; the others are transient.
_REFUSALS = {
    0x84: CloseClass.OUTDATED,
    0x85: CloseClass.AUTHENTICATION,
    0x86: CloseClass.AUTHENTICATION,
    0x87: CloseClass.AUTHENTICATION,
    0x8A: CloseClass.BANNED,
    0x8C: CloseClass.AUTHENTICATION,
    # The server does not have what this client is built on, or what its will needs.
    0x9A: CloseClass.OUTDATED,
    0x9B: CloseClass.OUTDATED,
}
#: The classes of codes in a DISCONNECT; the others are transient. Brokers also end links with "not
#: authorized" for one publish: only the next CONNACK shows whether the account may connect.
_ENDS = {
    0x8E: CloseClass.TAKEOVER,
    # Only the maximum time of the connection: it may reconnect immediately.
    0xA0: CloseClass.RESTART,
}


def words_of(code: int) -> str:
    """Return the text of a reason code."""
    return _WORDS.get(code) or f"reason code 0x{code:02X}, which the standard does not define"


def refusal_class(code: int) -> CloseClass:
    """Return the class of a link that was refused with this code in a CONNACK."""
    return _REFUSALS.get(code, CloseClass.TRANSIENT)


def end_class(code: int) -> CloseClass:
    """Return the class of a link that the server ended with this code in a DISCONNECT."""
    return _ENDS.get(code, CloseClass.TRANSIENT)
