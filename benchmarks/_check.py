"""Run the quick benchmarks and compare them with targets.toml; exit 1 if a target is missed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def figures_of(name: str) -> dict[str, float]:
    """Run one benchmark and return its figures."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])["figures"]
    return found


def misses(targets: dict[str, dict[str, float]], figures: dict[str, float]) -> list[str]:
    """Return a sentence for each missed target."""
    found = []
    for name, target in targets.items():
        value = figures.get(name)
        if value is None:
            found.append(f"{name} was not measured")
        elif value < target.get("min", value):
            found.append(f"{name} is {value:.3g}, must be at least {target['min']:g}")
        elif value > target.get("max", value):
            found.append(f"{name} is {value:.3g}, must be at most {target['max']:g}")
    return found


def main() -> int:
    """Check every benchmark that has targets."""
    all_targets = tomllib.loads((HERE / "targets.toml").read_text())
    failed = False
    for benchmark, targets in all_targets.items():
        found = misses(targets, figures_of(benchmark))
        failed = failed or bool(found)
        print(f"{benchmark}: " + ("; ".join(found) or f"{len(targets)} targets met"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
