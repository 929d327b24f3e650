"""`moored init`: write a small service, from the files in `template`."""

from __future__ import annotations

import os
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ._client import CommandFailed
from ._options import Json
from ._show import show

__all__ = ["init"]

#: The name of the service in the template.
NAME = "my-service"

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="[DIRECTORY]",
        help="Where to write it, here by default; its name becomes the name of the service.",
    ),
]


def init(directory: Directory = Path(), as_json: Json = False) -> int:
    """Write a small service that runs at once: a pool, a consumer of changes, and live events.

    No file is overwritten: if one exists, nothing is written. Example:

        moored init orders
    """
    template = files(__package__) / "template"
    texts = {each.name: each.read_text("utf-8") for each in template.iterdir() if each.is_file()}
    there = sorted(name for name in texts if os.path.lexists(directory / name))
    if there:
        raise CommandFailed(
            f"{directory.absolute()} has {', '.join(there)}, which init would overwrite: nothing "
            "was written; move them away, or name another directory"
        )
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "service"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for each, text in texts.items():
            with (directory / each).open("x", encoding="utf-8") as file:
                file.write(text.replace(NAME, name))
    except OSError as error:
        raise CommandFailed(
            f"cannot write {error.filename or directory}: {error.strerror or error}: name a "
            "directory that you may write to"
        ) from None
    enter = f"cd {shlex.quote(str(directory))} && " if directory.resolve() != Path.cwd() else ""
    written = [str(directory / each) for each in sorted(texts)]
    run = [f"{enter}pip install -r requirements-dev.txt", "python dev.py"]
    data = {"name": name, "written": written, "next": run}
    lines = [f"wrote {each}" for each in written] + ["next:", *(f"  {each}" for each in run)]
    show(data, as_json, lambda out: out.print("\n".join(lines), markup=False))
    return 0
