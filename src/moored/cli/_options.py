"""The settings of the service as options of a command, from their declaration in `Config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from moored.service import FILE_NAME, Knob, knobs

__all__ = ["ConfigFile", "Json", "configurable"]

F = TypeVar("F", bound=Callable[..., Any])

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="MOORED_CONFIG",
        metavar="FILE",
        help=f"The file to read; the default is {FILE_NAME} in the working directory, if any.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def configurable(command: F) -> F:
    """Add an option for each setting to a command, which gets them as `**given`, None if not used.

    They are passed as strings, unless they are flags, so that the mistakes of all sources are
    reported together.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [_parameter(knob) for knob in knobs()]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return command


def _parameter(knob: Knob) -> inspect.Parameter:
    is_flag = knob.default is False
    default = "" if is_flag or knob.default in (None, ()) else f"; default: {knob.default}"
    option = typer.Option(
        knob.option,
        metavar=None if is_flag else knob.name.rpartition("_")[2].upper(),
        # In the help only: Typer would report a mistake in a variable alone, before the others.
        help=f"{knob.help} [env: {knob.variable}{default}]",
    )
    return inspect.Parameter(
        knob.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(bool if is_flag else str) | None, option],
    )
