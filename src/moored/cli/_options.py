"""The settings of the service as options of a command, from their declaration in `Config`."""

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
        help=f"The file to read; the default is {FILE_NAME} in the working directory, if any.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def configurable(command: F) -> F:
    """Add an option for each setting to a command, which gets them as `**given`, None if not used.

    They are passed as strings, so that the mistakes of all sources are reported together.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [_parameter(knob) for knob in knobs()]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return command


def load_config(file: Path | None, given: dict[str, Any], environ: dict[str, str]) -> Config:
    """Return the configuration; raises `ConfigError`, also if a named file cannot be read."""
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
    """Read a configuration file, unless another user may have written to it.

    The file decides where the admin token is sent and which programs `serve` runs, and by default
    it is read from the working directory, which another user may have prepared.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        # A group with the same number as the owner is that user's private group on most systems.
        others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: it is not a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{path}: it belongs to user {status.st_uid}, so it is not trusted: "
                f"chown it to {os.geteuid()} or root, or choose another file with --config"
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
        # In the help only: Typer would report a mistake in a variable alone, before the others.
        help=f"{knob.help} [env: {knob.variable}{default}]",
    )
    return inspect.Parameter(
        knob.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
