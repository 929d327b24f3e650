"""Check that every public name has a docstring, and every package a page in docs/reference.

A package's public names are those of its `__all__`; its page in docs/reference documents all of
them (automodule).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import moored

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
#: Packages without a public API: the reference documents the command instead.
WITHOUT_API = {"moored.cli"}
#: Internal subpackages: users import from the parent package.
INTERNAL = {
    *(f"moored.postgres.{each}" for each in ("consume", "decode", "listen", "manage", "outbox")),
    *(
        f"moored.postgres.{each}"
        for each in ("doctor", "parking", "report", "server", "snapshot", "stream")
    ),
    *("moored.rpc.calls", "moored.rpc.topology"),
    *(f"moored.sessions.{each}" for each in ("events", "link", "sending", "storage", "transport")),
}


def packages() -> list[str]:
    """Return the packages of moored, and their public modules."""
    found = []
    for room in pkgutil.iter_modules(moored.__path__, "moored."):
        if room.name.startswith("moored._"):
            continue
        found.append(room.name)
        package = importlib.import_module(room.name)
        if room.ispkg:
            found += [
                module.name
                for module in pkgutil.iter_modules(package.__path__, f"{room.name}.")
                if not module.name.rpartition(".")[2].startswith("_")
            ]
    return [name for name in found if name not in WITHOUT_API | INTERNAL]


def is_data(value: object) -> bool:
    """Whether a value is a constant or a type alias, which have no docstring in Python."""
    return not (inspect.isclass(value) or inspect.isroutine(value))


def mistakes(package: str, pages: str) -> list[str]:
    """Return what is missing in the documentation of one package."""
    module = importlib.import_module(package)
    found = []
    names = getattr(module, "__all__", None)
    if names is None:
        return [f"{package} has no __all__"]
    if f"automodule:: {package}\n" not in pages:
        found.append(f"{package} is not in docs/reference (add `.. automodule:: {package}`)")
    for name in names:
        value = getattr(module, name)
        if not is_data(value) and not (
            value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        ):
            found.append(f"{package}.{name} has no docstring")
    return found


def main() -> int:
    """Report every public name that is not documented."""
    pages = "".join(page.read_text() + "\n" for page in REFERENCE.glob("*.md"))
    found = [mistake for package in packages() for mistake in mistakes(package, pages)]
    for mistake in found:
        print(f"public names: {mistake}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
