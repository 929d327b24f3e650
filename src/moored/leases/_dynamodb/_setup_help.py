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


def create_command(config: DynamoConfig) -> str:
    """Return the AWS command line that creates the table."""
    attributes, keys = "AttributeName=pk,AttributeType=S", "AttributeName=pk,KeyType=HASH"
    if config.layout == SLOTS:
        attributes += " AttributeName=slot,AttributeType=N"
        keys += " AttributeName=slot,KeyType=RANGE"
    where = f" --region {config.region}" if config.region else ""
    where += f" --endpoint-url {config.endpoint_url}" if config.endpoint_url else ""
    return (
        f"aws dynamodb create-table --table-name {config.table} --billing-mode PAY_PER_REQUEST "
        f"--attribute-definitions {attributes} --key-schema {keys}{where}"
    )


def policy(config: DynamoConfig) -> str:
    """Return the statement of an IAM policy that allows the store's requests."""
    actions = [f"dynamodb:{action}" for action in ACTIONS[config.layout]]
    if config.create:
        actions.append("dynamodb:CreateTable")
    resource = f"arn:aws:dynamodb:{config.region or '*'}:*:table/{config.table}"
    return json.dumps({"Effect": "Allow", "Action": actions, "Resource": resource})
