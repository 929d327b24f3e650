"""What the driver raises, translated once: unavailable, misconfigured, or an answer.

Two answers are no failures, but how DynamoDB says no: `ConditionFailed` and `Cancelled`. The stores
catch them; nobody else ever sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from botocore import exceptions as theirs  # type: ignore[import-untyped]

from .._errors import StoreMisconfigured, StoreUnavailable
from ._config import DynamoConfig
from ._setup_help import create_command, policy

__all__ = [
    "BUSY_STATEMENT",
    "Cancelled",
    "ConditionFailed",
    "Reason",
    "StatementRefused",
    "code_of",
    "headers_of",
    "is_conflict",
    "is_worth_another_try",
    "misconfigured",
    "translate",
    "unavailable",
]

#: What DynamoDB says when the same request may work in a moment.
_BUSY = frozenset(
    {
        "InternalServerError",
        "InternalServerErrorException",
        "LimitExceededException",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "ReplicatedWriteConflictException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "ThrottledException",
        "Throttling",
        "ThrottlingError",
        "ThrottlingException",
    }
)
_CONFLICT = frozenset(
    {"TransactionConflict", "TransactionConflictException", "TransactionInProgressException"}
)
#: What a statement of a batch may be answered with, when it may work in a moment.
BUSY_STATEMENT = frozenset(
    {
        "InternalServerError",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "ThrottlingError",
        "TransactionConflict",
    }
)
_CLOCK = frozenset({"InvalidSignatureException", "RequestExpired", "RequestTimeTooSkewed"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "NotAuthorized"})
_IDENTITY = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "UnrecognizedClientException",
    }
)
_CREDENTIALS = (
    theirs.NoCredentialsError,
    theirs.PartialCredentialsError,
    theirs.ProfileNotFound,
)
_REGION = (theirs.NoRegionError, theirs.InvalidRegionError)
# Metadata services and token endpoints are servers too: they may be back in a moment.
_LINK = (
    theirs.ConnectionError,
    theirs.HTTPClientError,
    theirs.CredentialRetrievalError,
    theirs.MetadataRetrievalError,
    theirs.ResponseStreamingError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    OSError,
)


class Reason(NamedTuple):
    """Why one action of a transaction did not happen; "None" when it would have."""

    code: str
    #: The item as it is, where the action asked for it.
    item: Mapping[str, Any] | None

    @property
    def refused(self) -> bool:
        """Whether this action's condition did not hold."""
        return self.code == "ConditionalCheckFailed"


class ConditionFailed(Exception):
    """The condition of a write did not hold; `item` is what is there, None if nothing is."""

    def __init__(self, item: Mapping[str, Any] | None) -> None:
        super().__init__("the condition does not hold")
        self.item = item


class Cancelled(Exception):
    """A transaction was not made because of a condition; one reason for each of its actions."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__(f"cancelled: {[reason.code for reason in reasons]}")
        self.reasons = tuple(reasons)


class StatementRefused(Exception):
    """One statement of a batch was answered with an error that has nothing to do with its item."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        # In a batch the codes have no ending, and mean the same.
        self.code = code if code.endswith(("Exception", "Error")) else f"{code}Exception"


def code_of(error: BaseException) -> str:
    """DynamoDB's code for an error, or the name of what broke on the way there."""
    if isinstance(error, StatementRefused):
        return error.code
    if isinstance(error, theirs.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def headers_of(reply: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers of a response, with names in lower case."""
    headers: Mapping[str, str] = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def is_worth_another_try(error: BaseException) -> bool:
    """Whether the same request may be answered otherwise in a moment."""
    if isinstance(error, theirs.ClientError):
        return _is_busy(error)
    return isinstance(error, _LINK) and not isinstance(error, theirs.SSLError)


def is_conflict(error: BaseException) -> bool:
    """Whether nothing but other writes to the same items stood in the way."""
    if code_of(error) in _CONFLICT:
        return True
    if not isinstance(error, theirs.ClientError):
        return False
    codes = {reason.code for reason in _reasons(error)} - {"None"}
    return bool(codes) and codes <= _CONFLICT


def translate(error: Exception, config: DynamoConfig, *, wall_error: float) -> Exception:
    """The error to raise instead of the driver's; the same one, if it is not the driver's."""
    if isinstance(error, theirs.ClientError):
        return _of_server(error, config, wall_error)
    if isinstance(error, StatementRefused):
        what = f"an update was answered with {error.code}: {_said(error)}"
        return misconfigured(config, what, _cure(error.code, config, wall_error))
    if isinstance(error, _CREDENTIALS):
        return misconfigured(
            config,
            f"there are no usable AWS credentials ({_said(error)})",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give this machine "
            "a role",
        )
    if isinstance(error, _REGION):
        cure = "add ?region=… to the URL, or set AWS_REGION"
        return misconfigured(config, f"the region is not known ({_said(error)})", cure)
    if is_worth_another_try(error):
        return unavailable(config, _said(error))
    if isinstance(error, theirs.BotoCoreError):
        return misconfigured(config, _said(error), "see the cause")
    return error  # not the driver's: a mistake in here, which must not look like one out there


def unavailable(config: DynamoConfig, what: str) -> StoreUnavailable:
    """The table cannot be used now."""
    return StoreUnavailable(f"DynamoDB table {config.place} cannot be used now: {what}")


def misconfigured(config: DynamoConfig, what: str, cure: str) -> StoreMisconfigured:
    """The table cannot be used like this."""
    return StoreMisconfigured(
        f"DynamoDB table {config.place} cannot be used like this: {what}; {cure}"
    )


def _of_server(error: theirs.ClientError, config: DynamoConfig, wall_error: float) -> Exception:
    code = code_of(error)
    if code == "ConditionalCheckFailedException":
        return ConditionFailed(error.response.get("Item"))
    if code == "TransactionCanceledException":
        reasons = _reasons(error)
        if any(reason.refused for reason in reasons):
            return Cancelled(reasons)
    if _is_busy(error):
        return unavailable(config, _said(error))
    return misconfigured(config, _said(error), _cure(code, config, wall_error))


def _cure(code: str, config: DynamoConfig, wall_error: float) -> str:
    if code == "ResourceNotFoundException":
        return f"make the table, or let it be made with create=true: {create_command(config)}"
    if code in _DENIED:
        return f"allow {policy(config)}"
    if code in _CLOCK and abs(wall_error) > 60:
        return f"this machine's clock is wrong by {wall_error:+.0f} s: set it"
    if code in _CLOCK or code in _IDENTITY:
        return "look at the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, or the machine's role)"
    return "see the cause"


def _is_busy(error: theirs.ClientError) -> bool:
    code = code_of(error)
    if code == "TransactionCanceledException":
        # A transaction is worth another try when nothing but others stood in its way.
        codes = {reason.code for reason in _reasons(error)} - {"None"}
        return bool(codes) and codes <= _BUSY | _CONFLICT
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    return code in _BUSY | _CONFLICT or int(status) >= 500


def _reasons(error: theirs.ClientError) -> list[Reason]:
    found = error.response.get("CancellationReasons") or []
    return [Reason(str(each.get("Code") or "None"), each.get("Item")) for each in found]


def _said(error: BaseException) -> str:
    if isinstance(error, theirs.ClientError):
        told = error.response.get("Error", {})
        return f"{told.get('Code', 'error')}: {told.get('Message') or 'no further words'}"
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
