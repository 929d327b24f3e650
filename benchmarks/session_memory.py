"""What does a session cost in memory, and does a recipient leave anything behind?

1,000 sessions, each online, each with one send confirmed and with its recorder on, against as many
bare transports to the same server; each side in a fresh process, and the server in its own. With
Mosquitto installed, over MQTT as well.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _harness import Figure, Report, main

# Before what is imported from the tests: they are no package of ours.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sessions.mosquitto import Mosquitto
from tools import servers

COUNT = 1_000
RECIPIENTS = 50_000
SIDE = str(Path(__file__).with_name("_session_memory_side.py"))


@contextmanager
def demo_server() -> Iterator[str]:
    """A server of the demo protocol in a process of its own; yields its port."""
    command = [sys.executable, SIDE, "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def side(name: str, where: str, count: int) -> dict[str, float]:
    """What one side measures in a fresh process."""
    command = [sys.executable, SIDE, name, where, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(report: Report, where: str, rounds: int, prefix: str = "") -> None:
    """Sessions over bare transports, in pairs."""
    over, seconds = [], []
    for _ in range(rounds):
        transport = side("transports", where, COUNT)["kib"]
        session = side("sessions", where, COUNT)
        over.append(session["kib"] - transport)
        seconds.append(session["seconds"])
    report.add(
        f"{prefix}kib_per_session_over_transport",
        Figure(statistics.median(over), "KiB", min(over), max(over)),
    )
    report.add(f"{prefix}start_{COUNT}_s", Figure(statistics.median(seconds), "s"))


def measure(report: Report, quick: bool) -> None:
    rounds = 1 if quick else 3
    with demo_server() as port:
        compare(report, port, rounds)
        left = side("recipients", port, RECIPIENTS)["kib"]
        report.add(f"kib_left_after_{RECIPIENTS}_recipients", Figure(max(0.0, left), "KiB"))
    binary = servers.find("mosquitto")
    if binary is None:
        report.notes.append("without MQTT: Mosquitto is not installed (tools/servers.py install)")
        return
    with Mosquitto(binary) as broker:
        compare(report, broker.url(), rounds, "mqtt_")


if __name__ == "__main__":
    main("session_memory", (__doc__ or "").partition("\n")[0], measure)
