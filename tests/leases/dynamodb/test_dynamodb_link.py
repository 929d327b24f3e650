"""Requests to DynamoDB: timeouts, retries and translated errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from botocore import exceptions as theirs  # type: ignore[import-untyped]
from tests.leases.dynamodb.fault_injection import cancelled, lost, refusal
from tests.silent_server import silent_server

from moored.kernel import Clock
from moored.leases import StoreMisconfigured, StoreUnavailable
from moored.leases._dynamodb._errors import Cancelled, ConditionFailed
from moored.leases._dynamodb._link import DynamoLink
from moored.leases.dynamodb import DynamoConfig, open_store

DATE = {"ResponseMetadata": {"HTTPHeaders": {"date": "Sun, 15 Nov 2026 03:13:01 GMT"}}}


class Scripted:
    """A driver that gives these answers, one after the other; the last one for ever."""

    def __init__(self, *answers: Exception | dict[str, Any]) -> None:
        self._answers = list(answers)

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> Any:
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def link_to(*answers: Exception | dict[str, Any], **parameters: Any) -> DynamoLink:
    given = "".join(f"&{name}={value}" for name, value in parameters.items())
    config = DynamoConfig.from_url(f"dynamodb://leases?region=eu-central-1{given}")
    link = DynamoLink(config, clock=Clock.system())
    link._client = Scripted(*answers)
    return link


@pytest.mark.parametrize(
    "error",
    [
        refusal("ProvisionedThroughputExceededException"),
        refusal("ThrottlingException"),
        refusal("RequestLimitExceeded"),
        refusal("InternalServerError", status=500),
        refusal("SomethingNew", status=503),
        refusal("TransactionInProgressException"),
        cancelled("None", "TransactionConflict"),
        cancelled("ThrottlingError", "None"),
        lost(),
        theirs.EndpointConnectionError(endpoint_url="x"),
        theirs.ReadTimeoutError(endpoint_url="x"),
        theirs.ConnectTimeoutError(endpoint_url="x"),
        theirs.CredentialRetrievalError(provider="iam-role", error_msg="no answer"),
        OSError("no route"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'response', '')}"[:60],
)
async def test_transient_errors_are_retried(error: Exception) -> None:
    link = link_to(error, error, DATE)
    assert await link.call("get_item") is DATE
    assert link.requests["get_item"] == 3
    assert link.retries == 2


async def test_a_lasting_transient_error_raises_store_unavailable() -> None:
    link = link_to(refusal("ThrottlingException", message="slow down"))
    with pytest.raises(StoreUnavailable, match=r"leases at eu-central-1.*slow down"):
        await link.call("get_item")
    assert link.requests["get_item"] == 6


async def test_conflicts_are_retried_until_the_timeout() -> None:
    link = link_to(cancelled("TransactionConflict", "None"), timeout=1.5)
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"within 1.5 s, after \d+ failed attempts"):
        await link.send("transact_write_items")
    assert link.requests["transact_write_items"] > 1
    assert time.monotonic() - before < 1.5 + 10.0


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (refusal("ResourceNotFoundException"), "aws dynamodb create-table --table-name leases"),
        (refusal("AccessDeniedException"), '"dynamodb:UpdateItem"'),
        (refusal("UnrecognizedClientException"), "check the credentials"),
        (refusal("ExpiredTokenException"), "check the credentials"),
        (refusal("InvalidSignatureException"), "check the credentials"),
        (refusal("ValidationException", message="the key is wrong"), "the key is wrong"),
        (theirs.NoCredentialsError(), "AWS_ACCESS_KEY_ID"),
        (theirs.PartialCredentialsError(provider="env", cred_var="x"), "AWS_ACCESS_KEY_ID"),
        (theirs.ProfileNotFound(profile="x"), "AWS_PROFILE"),
        (theirs.NoRegionError(), "add ?region="),
        (theirs.SSLError(endpoint_url="x", error="certificate"), "certificate"),
        (cancelled("ValidationError", "None"), "TransactionCanceledException"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'response', '')}"[:60],
)
async def test_permanent_errors_raise_store_misconfigured_with_a_remedy(
    error: Exception, cure: str
) -> None:
    link = link_to(error)
    with pytest.raises(StoreMisconfigured) as caught:
        await link.call("get_item")
    assert cure in str(caught.value)
    assert "leases at eu-central-1" in str(caught.value)
    assert link.requests["get_item"] == 1
    assert caught.value.__cause__ is error


async def test_a_signature_refused_for_a_wrong_clock_reports_the_clock() -> None:
    link = link_to(refusal("InvalidSignatureException"))
    # The answer's date is from another year than this machine's clock.
    now = time.monotonic()
    link.time.observe("Sun, 15 Nov 2020 03:13:01 GMT", sent=now, received=now)
    with pytest.raises(StoreMisconfigured, match=r"clock, which is wrong by \+\d+ s"):
        await link.call("get_item")


async def test_a_defect_of_the_program_is_not_translated() -> None:
    link = link_to(TypeError("a mistake"))
    with pytest.raises(TypeError, match="a mistake"):
        await link.call("get_item")


async def test_failed_conditions_are_not_store_errors() -> None:
    item = {"pk": {"S": "x"}}
    link = link_to(refusal("ConditionalCheckFailedException", Item=item))
    with pytest.raises(ConditionFailed) as failed:
        await link.call("update_item")
    assert failed.value.item == item
    link = link_to(cancelled("None", "ConditionalCheckFailed"))
    with pytest.raises(Cancelled) as stopped:
        await link.send("transact_write_items")
    assert [reason.refused for reason in stopped.value.reasons] == [False, True]


async def test_a_failed_condition_outweighs_a_conflict() -> None:
    link = link_to(cancelled("ConditionalCheckFailed", "TransactionConflict"))
    with pytest.raises(Cancelled):
        await link.send("transact_write_items")
    assert link.requests["transact_write_items"] == 1


async def test_dates_are_read_from_responses_and_from_errors() -> None:
    metadata = DATE["ResponseMetadata"]
    refused = refusal("ConditionalCheckFailedException", ResponseMetadata=metadata)
    for answer in (DATE, refused):
        link = link_to(answer)
        try:
            await link.call("update_item")
        except ConditionFailed:
            pass
        assert link.time.latest() - link.time.earliest() < 2.0


@pytest.mark.parametrize("layout", ["slots", "counter"])
async def test_a_silent_server_raises_store_unavailable_in_time(layout: str) -> None:
    async with silent_server() as server:
        endpoint = f"http://127.0.0.1:{server.port}"
        url = f"dynamodb://leases?endpoint_url={endpoint}&timeout=0.5&layout={layout}"
        store = open_store(url, clock=Clock.system())
        before = time.monotonic()
        with pytest.raises(StoreUnavailable, match="leases at http://127"):
            await store.open()
        assert time.monotonic() - before < 0.5 + 10.0  # the driver is loaded at its first use
        await store.close()


async def test_a_refused_connection_raises_store_unavailable(unused_tcp_port: int) -> None:
    url = f"dynamodb://leases?endpoint_url=http://127.0.0.1:{unused_tcp_port}&timeout=2"
    store = open_store(url, clock=Clock.system())
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()


async def test_a_missing_region_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # credentials are not the question
    store = open_store("dynamodb://leases", clock=Clock.system())
    with pytest.raises(StoreMisconfigured, match=r"add \?region="):
        await store.open()
    await store.close()
