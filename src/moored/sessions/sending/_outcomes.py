"""The four outcomes of a send, and the errors that three of them are raised as.

- `Acked`: the server has confirmed it.
- `Rejected`: the server has refused it.
- `NotSent`: nothing left the process; it is safe to send it again.
- `Unknown`: it left the process, then the link or the time was lost: only the caller can decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .._errors import SessionError

__all__ = [
    "Acked",
    "NotSent",
    "Outcome",
    "Rejected",
    "SendFailed",
    "SendNotSent",
    "SendRejected",
    "SendUnknown",
    "Submitted",
    "Unknown",
]


@dataclass(frozen=True, slots=True)
class Acked:
    """The server has confirmed it."""

    id: str
    #: What the server's confirmation, or the protocol, adds: the secret of a poll, for one.
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The server has refused it."""

    id: str
    #: The protocol's own code.
    code: object
    #: The code in words, if the server or the protocol has some.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotSent:
    """Nothing left the process: it is safe to send it again."""

    id: str
    #: Which step it had come to.
    stage: str
    #: Why it went no further.
    reason: BaseException | str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Unknown:
    """It left the process, and nobody knows whether it arrived."""

    id: str
    reason: BaseException | str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The outcome is not known yet, and its caller does not wait for it (`wait=False`)."""

    id: str


Outcome: TypeAlias = Acked | Rejected | NotSent | Unknown


class SendFailed(SessionError):
    """A send that was not confirmed; `outcome` says what is known."""

    def __init__(self, text: str, outcome: Outcome) -> None:
        super().__init__(text)
        self.outcome = outcome


class SendRejected(SendFailed):
    """The server has refused it."""


class SendNotSent(SendFailed):
    """Nothing left the process: it is safe to send it again."""


class SendUnknown(SendFailed):
    """It left the process, and nobody knows whether it arrived."""


def error_of(outcome: Rejected | NotSent | Unknown) -> SendFailed:
    """The error that an outcome is raised as; its cause is the outcome's reason."""
    match outcome:
        case Rejected(id=id, code=code, reason=reason):
            words = f" ({reason})" if reason else ""
            return SendRejected(f"{id} was rejected by the server: {code}{words}", outcome)
        case NotSent(id=id, stage=stage, reason=reason):
            error: SendFailed = SendNotSent(
                f"{id} was not sent (at {stage}): {reason}; it is safe to send it again", outcome
            )
        case Unknown(id=id, reason=reason):
            error = SendUnknown(
                f"{id} was sent, and it is not known whether it arrived: {reason}; "
                "send it again only if a second one does no harm",
                outcome,
            )
    if isinstance(reason, BaseException):
        error.__cause__ = reason
    return error
