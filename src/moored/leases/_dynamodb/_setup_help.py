"""What a person types to make a table, and to be allowed to use it."""

from __future__ import annotations

import json

from ._config import SLOTS, DynamoConfig

__all__ = ["ACTIONS", "create_command", "policy"]

#: What the store does to its table, by layout. `CreateTable` is needed only with create=true.
ACTIONS = {
    "slots": (
        "DescribeTable",
        "DescribeTimeToLive",
        "Query",
        "Scan",
        "UpdateItem",
        "PartiQLUpdate",
    ),
    "counter": (
        "DescribeTable",
        "DescribeTimeToLive",
        "GetItem",
        "Scan",
        "PutItem",
        "UpdateItem",
        "DeleteItem",
        "PartiQLUpdate",
    ),
}


def create_command(config: DynamoConfig) -> str:
    """The command that makes the table."""
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
    """The statement of an IAM policy that allows what the store does."""
    actions = [f"dynamodb:{action}" for action in ACTIONS[config.layout]]
    if config.create:
        actions.append("dynamodb:CreateTable")
    resource = f"arn:aws:dynamodb:{config.region or '*'}:*:table/{config.table}"
    return json.dumps({"Effect": "Allow", "Action": actions, "Resource": resource})
