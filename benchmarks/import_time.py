"""How long does `import moored` take on top of the interpreter, and what does it import?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from _harness import Figure, Report, main

#: Packages of the extras: none may be imported before it is used.
OPTIONAL = {"psycopg", "grpc", "starlette", "uvicorn", "redis", "typer", "rich", "structlog"}


def seconds(program: str) -> float:
    """Return how long a new interpreter takes for a program."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - began


def imported() -> set[str]:
    """Return the packages that are loaded after `import moored`."""
    program = "import moored, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def measure(report: Report, quick: bool) -> None:
    """Pair interpreters with and without the import."""
    found = imported()
    if "moored" not in found or found & OPTIONAL:
        raise AssertionError(f"import moored imports {found & OPTIONAL or 'nothing'}")
    more = [(seconds("import moored") - seconds("pass")) * 1000 for _ in range(15 if quick else 60)]
    low, middle, high = statistics.quantiles(more, n=4)
    report.add("import_ms", Figure(middle, "ms", low, high))


if __name__ == "__main__":
    main("import_time", __doc__ or "", measure)
