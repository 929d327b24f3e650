"""The `moored` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

#: The packages of the extra `service` that the command needs.
_EXTRA = frozenset({"prometheus_client", "rich", "starlette", "structlog", "typer", "uvicorn"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    if os.getpid() == 1:
        from ._init import run_under_init

        return run_under_init(lambda: _run(arguments))
    return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        from ._app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.stderr.write(
            f"moored: the command needs {missing}, which is not installed: "
            "pip install 'moored[service]'\n"
        )
        return 2
    except KeyboardInterrupt:
        return 130
