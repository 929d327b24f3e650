"""`moored serve module:attribute`: find a user's app, and run it again when its files change."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import typer

from moored.app import App

from ._client import CommandFailed

__all__ = ["find_app", "run_again_on_change"]

#: Seconds between two looks at the files.
LOOK = 0.5
#: Seconds that a program may take to stop before it is killed.
STOP_TIMEOUT = 30.0


def find_app(target: str) -> App:
    """Import the app that `module:attribute` names, also from the working directory."""
    module, _, attribute = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise CommandFailed(
            f"there is no module {module!r} in {os.getcwd()} or among the installed packages: "
            "name an app as module:attribute, such as orders:app"
        ) from None
    app = getattr(found, attribute or "app", None)
    if not isinstance(app, App):
        apps = [name for name, value in vars(found).items() if isinstance(value, App)]
        hint = f"it has {', '.join(apps)}" if apps else "create one there with moored.App"
        raise CommandFailed(f"{module} has no app named {attribute or 'app'!r}: {hint}")
    return app


def run_again_on_change(command: list[str]) -> int:
    """Run a command until a signal stops it, and anew when a Python file here has changed.

    For development: between the two runs nothing answers.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    code = 0
    while not stopped:
        seen, process = _changes(), subprocess.Popen(command)
        while not stopped and _changes() == seen:
            time.sleep(LOOK)
        if not stopped:
            typer.echo("moored: a file has changed: starting again")
        if process.poll() is None:
            process.terminate()
        try:
            code = process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    return code


def _changes() -> dict[Path, int]:
    """Return when each Python file below the working directory was last changed."""
    found = {}
    for path in Path.cwd().rglob("*.py"):
        if not any(part.startswith(".") for part in path.relative_to(Path.cwd()).parts):
            try:
                found[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue  # removed meanwhile
    return found
