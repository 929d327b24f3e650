"""The knobs of the service as options of a command, so that each is written down once."""

from __future__ import annotations

import inspect
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from moored.service import FILE_NAME, Config, ConfigError, Knob, knobs, load

__all__ = ["ConfigFile", "Json", "configurable", "load_config"]

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

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
        text = _read(path)
    except FileNotFoundError as error:
        if file is not None:
            raise ConfigError(f"--config: there is no file {file}") from error
        text = None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from error
    return load(given, environ, text, file=str(path))


def _read(path: Path) -> str:
    """Read a configuration file, if no other user can have written what is in it.

    The file says where the admin token is sent and which programs `serve` runs, and one that is
    not named on the command line is found by the working directory alone.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        # A group with the number of its owner is that user's own group, on most systems.
        others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: it is not a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{path}: it belongs to user {status.st_uid}, so it is not trusted: "
                f"chown it to {os.geteuid()} or root, or name another file with --config"
            )
        if status.st_mode & others:
            raise ConfigError(
                f"{path}: other users can write to it, so it is not trusted: chmod go-w {path}"
            )
        return file.read()


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
