"""The reason codes of MQTT 5: what they say, and what a session does about them.

A code below 0x80 means that it worked. What a client can do about the others falls into few
classes; where the standard leaves open whether it is worth coming back, we come back: with growing
pauses that does no harm, and a session that stopped for good would wait for a person.
"""

from __future__ import annotations

from .._protocol import CloseClass

__all__ = ["FAILURE", "end_class", "refusal_class", "words_of"]

#: From here on, a code says that something failed.
FAILURE = 0x80

_WORDS = {
    0x00: "success",
    0x04: "disconnected with the will",
    0x10: "no matching subscribers",
    0x11: "no subscription existed",
    0x18: "continue authentication",
    0x19: "authenticate again",
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "the server does not do that",
    0x84: "this version of the protocol is not supported",
    0x85: "the client id is not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "the server is unavailable",
    0x89: "the server is busy",
    0x8A: "banned",
    0x8B: "the server is shutting down",
    0x8C: "bad authentication method",
    0x8D: "nothing was heard from us within the keep alive time",
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

#: A CONNACK with one of these; whatever is not here is transient.
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
#: A DISCONNECT with one of these; whatever is not here is transient. Brokers end links with "not
#: authorized" for one publish, too: only the next CONNACK says whether the account may connect.
_ENDS = {
    0x8E: CloseClass.TAKEOVER,
    # It works, it has only lasted for long enough.
    0xA0: CloseClass.RESTART,
}


def words_of(code: int) -> str:
    """A reason code, for people."""
    return _WORDS.get(code) or f"reason code 0x{code:02X}, which the standard does not have"


def refusal_class(code: int) -> CloseClass:
    """What to do about a link that was refused with this code."""
    return _REFUSALS.get(code, CloseClass.TRANSIENT)


def end_class(code: int) -> CloseClass:
    """What to do about a link that the server ended with this code."""
    return _ENDS.get(code, CloseClass.TRANSIENT)
