"""The configuration of a process, from its options, its environment and a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._config import FILE_NAME, Config, load
from ._errors import ConfigError

__all__ = ["load_config"]


def load_config(
    file: Path | None = None,
    given: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration; raises `ConfigError`, also if a named file cannot be read.

    :param file: the file; by default moored.toml in the working directory, if there is one.
    :param given: the values of options, by the names of their settings.
    """
    path = file or Path(FILE_NAME)
    try:
        text = _read(path)
    except FileNotFoundError as error:
        if file is not None:
            raise ConfigError(f"--config: there is no file {file}") from error
        text = None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from error
    return load(given or {}, environ, text, file=str(path))


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
