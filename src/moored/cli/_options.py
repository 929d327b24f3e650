"""The knobs of the service as options of a command, so that each is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from moored.service import FILE_NAME, Config, ConfigError, Knob, knobs, load

__all__ = ["configurable", "load_config"]

F = TypeVar("F", bound=Callable[..., Any])

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="MOORED_CONFIG",
        metavar="FILE",
        help=f"The file to read; unless given, {FILE_NAME} in the working directory, if any.",
    ),
]


def configurable(command: F) -> F:
    """Give a command an option for each knob; they reach it as `**given`, None where not used.

    They are taken as text, so that all mistakes are found together, whatever their source.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [_parameter(knob) for knob in knobs()]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return command


def load_config(file: Path | None, given: dict[str, Any], environ: dict[str, str]) -> Config:
    """The effective configuration; raises `ConfigError`, also when a named file cannot be read."""
    path = file or Path(FILE_NAME)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if file is not None:
            raise ConfigError([f"--config: there is no file {file}"]) from error
        text = None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: it cannot be read: {error}"]) from error
    return load(given, environ, text, file=str(path))


def _parameter(knob: Knob) -> inspect.Parameter:
    default = "" if knob.default in (None, ()) else f"; default: {knob.default}"
    option = typer.Option(
        knob.option,
        metavar=knob.name.rpartition("_")[2].upper(),
        # The variable is named, not given to Typer: a mistake in it is found with all the others.
        help=f"{knob.help} [env: {knob.variable}{default}]",
    )
    return inspect.Parameter(
        knob.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
