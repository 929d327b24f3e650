"""Translate the errors of DynamoDB and its driver.

`ConditionFailed` and `Cancelled` are not failures: DynamoDB reports with them that the condition of
a write did not hold. The stores catch both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from botocore import exceptions  # type: ignore[import-untyped]

from .._errors import StoreMisconfigured, StoreUnavailable
from ._config import DynamoConfig
from ._setup_help import create_command, policy

#: Error codes of requests, or of their parts, that may succeed when they are retried.
_BUSY = frozenset(
    {
        "InternalServerError",
        "LimitExceededException",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "ReplicatedWriteConflictException",
        "RequestLimitExceeded",
        "ThrottlingError",
        "ThrottlingException",
    }
)
_CONFLICT = frozenset(
    {"TransactionConflict", "TransactionConflictException", "TransactionInProgressException"}
)
_CLOCK = frozenset({"InvalidSignatureException", "RequestExpired", "RequestTimeTooSkewed"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "NotAuthorized"})
#: Parts of the error codes of credentials that are missing, wrong or expired.
_IDENTITY = ("Token", "Signature", "UnrecognizedClient")
_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.ProfileNotFound,
)
_REGION = (exceptions.NoRegionError, exceptions.InvalidRegionError)
# Metadata services and token endpoints count as connections: their outages may pass.
_CONNECTION = (
    exceptions.ConnectionError,
    exceptions.HTTPClientError,
    exceptions.CredentialRetrievalError,
    exceptions.MetadataRetrievalError,
    exceptions.ResponseStreamingError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    OSError,
)


class Reason(NamedTuple):
    """Why one action of a transaction was cancelled."""

    #: DynamoDB's code; "None" if this action did not cause the cancellation.
    code: str
    #: The existing item, if the action requested it.
    item: Mapping[str, Any] | None

    @property
    def refused(self) -> bool:
        """Whether this action's condition did not hold."""
        return self.code == "ConditionalCheckFailed"


class ConditionFailed(Exception):
    """The condition of a write did not hold; `item` is the existing item, or None."""

    def __init__(self, item: Mapping[str, Any] | None) -> None:
        super().__init__("the condition does not hold")
        self.item = item


class Cancelled(Exception):
    """A condition cancelled a transaction; it has one reason for each of its actions."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__(f"cancelled: {[reason.code for reason in reasons]}")
        self.reasons = tuple(reasons)


def code_of(error: BaseException) -> str:
    """Return DynamoDB's code of an error, or the class name of an error of the driver."""
    if isinstance(error, exceptions.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def may_be_retried(error: BaseException) -> bool:
    """Whether the request may succeed when it is retried."""
    if isinstance(error, exceptions.ClientError):
        return _is_busy(error)
    return isinstance(error, _CONNECTION) and not isinstance(error, exceptions.SSLError)


def is_conflict(error: BaseException) -> bool:
    """Whether the only cause were concurrent writes to the same items."""
    if code_of(error) in _CONFLICT:
        return True
    if not isinstance(error, exceptions.ClientError):
        return False
    codes = {reason.code for reason in _reasons(error)} - {"None"}
    return bool(codes) and codes <= _CONFLICT


def translate(error: Exception, config: DynamoConfig, *, wall_error: float) -> Exception:
    """Return the error to raise for one of the driver; other errors are returned unchanged."""
    if isinstance(error, exceptions.ClientError):
        return _of_server(error, config, wall_error)
    if isinstance(error, _CREDENTIALS):
        return misconfigured(
            config,
            f"no usable AWS credentials ({_message(error)})",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or assign a role to "
            "this machine",
        )
    if isinstance(error, _REGION):
        remedy = "add ?region=… to the URL, or set AWS_REGION"
        return misconfigured(config, f"the region is not known ({_message(error)})", remedy)
    if may_be_retried(error):
        return unavailable(config, _message(error))
    if isinstance(error, exceptions.BotoCoreError):
        return misconfigured(config, _message(error), "see the cause")
    return error  # a defect of this program must not look like a failure of DynamoDB


def unavailable(config: DynamoConfig, what: str) -> StoreUnavailable:
    """Return the error for a table that cannot be used now."""
    return StoreUnavailable(f"DynamoDB table {config.place} is unavailable: {what}")


def misconfigured(config: DynamoConfig, what: str, remedy: str) -> StoreMisconfigured:
    """Return the error for a table that cannot be used without a change."""
    return StoreMisconfigured(
        f"DynamoDB table {config.place} cannot be used as configured: {what}; {remedy}"
    )


def _of_server(error: exceptions.ClientError, config: DynamoConfig, wall_error: float) -> Exception:
    code = code_of(error)
    if code == "ConditionalCheckFailedException":
        return ConditionFailed(error.response.get("Item"))
    if code == "TransactionCanceledException":
        reasons = _reasons(error)
        if any(reason.refused for reason in reasons):
            return Cancelled(reasons)
    if _is_busy(error):
        return unavailable(config, _message(error))
    return misconfigured(config, _message(error), _remedy(code, config, wall_error))


def _remedy(code: str, config: DynamoConfig, wall_error: float) -> str:
    if code == "ResourceNotFoundException":
        return f"create the table, or set create=true in the URL: {create_command(config)}"
    if code in _DENIED:
        return f"allow {policy(config)}"
    if code in _CLOCK and abs(wall_error) > 60:
        return f"correct this machine's clock, which is wrong by {wall_error:+.0f} s"
    if code in _CLOCK or any(part in code for part in _IDENTITY):
        return "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, or the machine's role)"
    return "see the cause"


def _is_busy(error: exceptions.ClientError) -> bool:
    code = code_of(error)
    if code == "TransactionCanceledException":
        codes = {reason.code for reason in _reasons(error)} - {"None"}
        return bool(codes) and codes <= _BUSY | _CONFLICT
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    return code in _BUSY | _CONFLICT or int(status) >= 500


def _reasons(error: exceptions.ClientError) -> list[Reason]:
    found = error.response.get("CancellationReasons") or []
    return [Reason(str(each.get("Code") or "None"), each.get("Item")) for each in found]


def _message(error: BaseException) -> str:
    if isinstance(error, exceptions.ClientError):
        answer = error.response.get("Error", {})
        return f"{answer.get('Code', 'error')}: {answer.get('Message') or 'no message'}"
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
