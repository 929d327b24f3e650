"""The four outcomes of a send, and the errors that three of them are raised as.

- `Acked`: the server has confirmed the send.
- `Rejected`: the server has refused the send.
- `NotSent`: nothing left the process; it is safe to send it again, though of no use unchanged if
  its reason is a `StepFailed` other than a `QueryFailed`: its content was refused.
- `Unknown`: it left the process, and then the link was lost or the timeout expired; the caller must
  decide whether to send it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .._errors import QueryFailed, SessionError, StepFailed


@dataclass(frozen=True, slots=True)
class Acked:
    """The server has confirmed the send."""

    id: str
    #: More data of the confirmation or of the protocol, such as the secret of a poll.
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The server has refused the send."""

    id: str
    #: The protocol's own code.
    code: object
    #: The text for the code, if the server or the protocol has one.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotSent:
    """Nothing left the process: it cannot arrive twice if it is sent again."""

    id: str
    #: The step at which it failed: the name of a step, "queue" before, or "relay" after them.
    stage: str
    #: Why it was not sent.
    reason: BaseException | str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Unknown:
    """The send left the process, and it is unknown whether it arrived."""

    id: str
    reason: BaseException | str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A send with `wait=False` that has no outcome yet."""

    id: str


Outcome: TypeAlias = Acked | Rejected | NotSent | Unknown


class SendFailed(SessionError):
    """The send was not confirmed; see `outcome`."""

    def __init__(self, text: str, outcome: Outcome) -> None:
        super().__init__(text)
        self.outcome = outcome


class SendRejected(SendFailed):
    """The server has refused the send."""


class SendNotSent(SendFailed):
    """Nothing left the process: it cannot arrive twice if it is sent again."""


class SendUnknown(SendFailed):
    """The send left the process, and it is unknown whether it arrived."""


def error_of(outcome: Rejected | NotSent | Unknown) -> SendFailed:
    """Return the exception for an outcome; its cause is the outcome's reason."""
    match outcome:
        case Rejected(id=id, code=code, reason=reason):
            words = f" ({reason})" if reason else ""
            return SendRejected(f"{id} was rejected by the server: {code}{words}", outcome)
        case NotSent(id=id, stage=stage, reason=reason):
            lasts = isinstance(reason, StepFailed) and not isinstance(reason, QueryFailed)
            advice = "do not send it again unchanged" if lasts else "it is safe to send it again"
            error: SendFailed = SendNotSent(
                f"{id} was not sent (at {stage}): {reason}; {advice}", outcome
            )
        case Unknown(id=id, reason=reason):
            error = SendUnknown(
                f"{id} was sent, and it is unknown whether it arrived: {reason}; "
                "send it again only if a duplicate does no harm",
                outcome,
            )
    if isinstance(reason, BaseException):
        error.__cause__ = reason
    return error
