"""The configuration of the DynamoDB store from URLs, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.kernel import Clock
from moored.leases import StoreMisconfigured
from moored.leases._dynamodb._setup_help import ACTIONS
from moored.leases.dynamodb import (
    CounterStore,
    DynamoConfig,
    SlotStore,
    create_command,
    open_store,
    policy,
)


def test_a_table_in_aws() -> None:
    config = DynamoConfig.from_url("dynamodb://Leases_1.prod-x?region=eu-central-1")
    assert (config.table, config.region, config.endpoint_url) == (
        "Leases_1.prod-x",
        "eu-central-1",
        None,
    )
    assert (config.layout, config.create, config.local) == ("slots", False, False)
    assert (config.timeout, config.skew, config.sweep_every) == (5.0, 0.1, 30.0)
    assert config.place == "Leases_1.prod-x at eu-central-1"


def test_the_region_may_be_left_to_the_environment() -> None:
    assert DynamoConfig.from_url("dynamodb://leases").region is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "[::1]"])
def test_a_local_server_gets_development_defaults(host: str) -> None:
    config = DynamoConfig.from_url(f"dynamodb://leases?endpoint_url=http://{host}:8000")
    assert (config.local, config.create, config.region) == (True, True, "us-east-1")


def test_a_remote_server_gets_no_development_defaults() -> None:
    config = DynamoConfig.from_url("dynamodb://leases?endpoint_url=https://vpce-1.example.com")
    assert (config.local, config.create, config.region) == (False, False, None)


def test_every_parameter_is_read() -> None:
    config = DynamoConfig.from_url(
        "dynamodb://leases?region=x&layout=counter&create=true&timeout=2.5&skew=0&sweep_every=7"
        "&connections=3"
    )
    assert (config.layout, config.create, config.timeout) == ("counter", True, 2.5)
    assert (config.skew, config.sweep_every, config.connections) == (0.0, 7.0, 3)


def test_one_error_lists_all_mistakes() -> None:
    url = (
        "dynamodb://a/b?layout=rows&create=perhaps&timeout=0&skew=-1&sweep_every=x&connections=0"
        "&endpoint_url=ftp://x"
    )
    with pytest.raises(StoreMisconfigured) as caught:
        DynamoConfig.from_url(url)
    for part in (
        "'a' must have 3 to 255",
        "without '/b'",
        "layout='rows' must be 'slots' or 'counter'",
        "create='perhaps'",
        "timeout='0'",
        "skew='-1'",
        "sweep_every='x'",
        "connections='0'",
        "endpoint_url='ftp://x'",
    ):
        assert part in str(caught.value)


def test_an_unknown_parameter_is_reported_with_a_suggestion() -> None:
    with pytest.raises(StoreMisconfigured, match="did you mean 'endpoint_url'"):
        DynamoConfig.from_url("dynamodb://leases?endpoint=http://localhost:8000")


def test_the_layout_chooses_the_store() -> None:
    clock = Clock.system()
    assert isinstance(open_store("dynamodb://leases?region=x", clock=clock), SlotStore)
    store = open_store("dynamodb://leases?region=x&layout=counter", clock=clock)
    assert isinstance(store, CounterStore)
    assert repr(store) == "<CounterStore leases at x, 0 requests, <Sweeper: 0 ended, 0 corrected>>"


def test_the_command_that_makes_the_table() -> None:
    config = DynamoConfig.from_url("dynamodb://leases?region=eu-central-1")
    assert create_command(config) == (
        "aws dynamodb create-table --table-name leases --billing-mode PAY_PER_REQUEST "
        "--attribute-definitions AttributeName=pk,AttributeType=S "
        "AttributeName=slot,AttributeType=N "
        "--key-schema AttributeName=pk,KeyType=HASH AttributeName=slot,KeyType=RANGE "
        "--region eu-central-1"
    )
    counter = DynamoConfig.from_url("dynamodb://leases?layout=counter")
    assert "slot" not in create_command(counter)


def test_the_how_to_page_names_every_permission_and_parameter() -> None:
    page = Path(__file__).parents[3] / "docs" / "howto" / "leases-dynamodb.md"
    text = page.read_text()
    for actions in ACTIONS.values():
        assert [action for action in actions if f"dynamodb:{action}" not in text] == []
    with pytest.raises(StoreMisconfigured) as wrong:
        DynamoConfig.from_url("dynamodb://leases?xyzzy=1")
    known = str(wrong.value).partition("known parameters: ")[2].split(", ")
    assert "sweep_every" in known
    assert [name for name in known if f"| `{name}` |" not in text] == []


def test_the_policy_names_the_table_and_its_actions() -> None:
    config = DynamoConfig.from_url("dynamodb://leases?region=eu-central-1")
    statement = json.loads(policy(config))
    assert statement["Resource"] == "arn:aws:dynamodb:eu-central-1:*:table/leases"
    assert "dynamodb:UpdateItem" in statement["Action"]
    assert "dynamodb:CreateTable" not in statement["Action"]
    made = DynamoConfig.from_url("dynamodb://leases?region=eu-central-1&create=true")
    assert "dynamodb:CreateTable" in json.loads(policy(made))["Action"]
