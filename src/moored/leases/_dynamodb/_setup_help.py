"""The commands for an operator: create the table, and allow its use."""

from __future__ import annotations

import json

from ._config import SLOTS, DynamoConfig

__all__ = ["ACTIONS", "create_command", "policy"]

#: The permissions that the store needs, by layout. `CreateTable` is needed only with create=true.
ACTIONS = {
    "slots": (
        "DescribeTable",
        "Query",
        "Scan",
        "UpdateItem",
    ),
    "counter": (
        "DescribeTable",
        "GetItem",
        "Scan",
        "PutItem",
        "UpdateItem",
        "DeleteItem",
    ),
}


def key_attributes(config: DynamoConfig) -> list[tuple[str, str, str]]:
    """Return the name, the type and the role of each attribute of the table's key."""
    return [("pk", "S", "HASH"), *([("slot", "N", "RANGE")] if config.layout == SLOTS else [])]


def create_command(config: DynamoConfig) -> str:
    """Return the AWS command line that creates the table."""
    keys = key_attributes(config)
    attributes = " ".join(f"AttributeName={name},AttributeType={of}" for name, of, _ in keys)
    schema = " ".join(f"AttributeName={name},KeyType={kind}" for name, _, kind in keys)
    where = f" --region {config.region}" if config.region else ""
    where += f" --endpoint-url {config.endpoint_url}" if config.endpoint_url else ""
    return (
        f"aws dynamodb create-table --table-name {config.table} --billing-mode PAY_PER_REQUEST "
        f"--attribute-definitions {attributes} --key-schema {schema}{where}"
    )


def policy(config: DynamoConfig) -> str:
    """Return the statement of an IAM policy that allows the store's requests."""
    actions = [f"dynamodb:{action}" for action in ACTIONS[config.layout]]
    if config.create:
        actions.append("dynamodb:CreateTable")
    resource = f"arn:aws:dynamodb:{config.region or '*'}:*:table/{config.table}"
    return json.dumps({"Effect": "Allow", "Action": actions, "Resource": resource})
