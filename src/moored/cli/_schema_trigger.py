"""`moored schema-trigger`: the statements of the optional event trigger."""

from __future__ import annotations

from typing import Annotated

import typer

from moored.postgres.server import DROP_SCHEMA_TRIGGER, SCHEMA_TRIGGER

from ._options import Json
from ._show import show

__all__ = ["schema_trigger"]

Drop = Annotated[bool, typer.Option("--drop", help="Print the statements that remove it.")]


def schema_trigger(drop: Drop = False, as_json: Json = False) -> int:
    """Print an event trigger by which streams learn at once of changes of the schema.

    A superuser runs the statements. Streams use the trigger from their next connection on.

    Example: `moored schema-trigger | psql -U postgres orders`
    """
    text = DROP_SCHEMA_TRIGGER if drop else SCHEMA_TRIGGER
    show({"sql": text}, as_json, lambda _: typer.echo(text, nl=False))
    return 0
