"""How much memory does a session take, and is any kept for a recipient after a send?

1,000 online sessions, each with one confirmed send and with its recorder on, against as many bare
transports to the same server; each side in a new process, and the server in its own. If Mosquitto
is installed, over MQTT as well.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _harness import Figure, Report, main, side_process, spread

# The tests and tools are not installed: import them from the checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sessions.mosquitto import Mosquitto
from tools import servers

COUNT = 1_000
RECIPIENTS = 50_000
SIDE = "_session_memory_side.py"


@contextmanager
def demo_server() -> Iterator[str]:
    """Run a server of the demo protocol in its own process; yield its port."""
    command = [sys.executable, str(Path(__file__).with_name(SIDE)), "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def compare(report: Report, where: str, rounds: int, prefix: str = "") -> None:
    """Compare sessions with bare transports, in pairs."""
    over, seconds = [], []
    for _ in range(rounds):
        transport = side_process(SIDE, "transports", where, COUNT)["kib"]
        session = side_process(SIDE, "sessions", where, COUNT)
        over.append(session["kib"] - transport)
        seconds.append(session["seconds"])
    report.add(f"{prefix}kib_per_session_over_transport", spread(over, "KiB"))
    report.add(f"{prefix}start_{COUNT}_s", Figure(statistics.median(seconds), "s"))


def measure(report: Report, quick: bool) -> None:
    rounds = 1 if quick else 3
    with demo_server() as port:
        compare(report, port, rounds)
        left = side_process(SIDE, "recipients", port, RECIPIENTS)["kib"]
        report.add(f"kib_left_after_{RECIPIENTS}_recipients", Figure(max(0.0, left), "KiB"))
    binary = servers.find("mosquitto")
    if binary is None:
        report.notes.append("without MQTT: Mosquitto is not installed (tools/servers.py install)")
        return
    with Mosquitto(binary) as broker:
        compare(report, broker.url(), rounds, "mqtt_")


if __name__ == "__main__":
    main("session_memory", (__doc__ or "").partition("\n")[0], measure)
