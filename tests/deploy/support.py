"""Start `moored serve` as an operator's tools do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.service.support import LIMIT, Running, clean_environment

__all__ = ["DEPLOY", "served"]

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


@contextmanager
def served(
    *arguments: str, under: Sequence[str] = (), cwd: Path | None = None, **environ: str
) -> Iterator[Running]:
    """Run `moored serve` on a free port, as an argument of another command if there is one."""
    process = subprocess.Popen(
        [*under, sys.executable, "-m", "moored.cli", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=clean_environment(**environ),
    )
    with process:
        service = Running(process, read=True)
        try:
            yield service
            process.wait(LIMIT)
        finally:
            process.kill()
            service.wait()
