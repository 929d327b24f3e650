"""What does a send cost beside the bare codec and transport, and how many go through in a second?

Publishes with QoS 1 to a local Mosquitto, a window of them under way, each confirmed. The bare side
is a loop over the same codec and the same transport, which promises nothing; the peer is aiomqtt.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from _harness import Figure, Report, main

# Before what is imported from the tests: they are no package of ours.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sessions.mosquitto import Mosquitto
from tools import servers

SIDE = str(Path(__file__).with_name("_session_sides.py"))
#: As many as Mosquitto lets a client have under way.
WINDOW = 20


def side(name: str, url: str, count: int) -> dict[str, float]:
    """What one side measures in a fresh process."""
    command = [sys.executable, SIDE, "send", name, url, str(count), str(WINDOW)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(report: Report, quick: bool) -> None:
    binary = servers.find("mosquitto")
    if binary is None:
        raise SystemExit("Mosquitto is needed: python tools/servers.py install")
    rounds, count = (3, 5_000) if quick else (7, 20_000)
    costs, speeds, ours, bare = [], [], [], []
    with Mosquitto(binary, "max_queued_messages 0") as broker:
        for _ in range(rounds):
            mine = side("ours", broker.url(), count)
            least = side("bare", broker.url(), count)
            peer = side("aiomqtt", broker.url(), count)
            costs.append(mine["cpu_us"] / least["cpu_us"])
            speeds.append(mine["per_second"] / peer["per_second"])
            ours.append(mine["cpu_us"])
            bare.append(least["cpu_us"])
    report.add(
        "cpu_us_per_send_vs_bare_client", Figure(median(costs), "times", min(costs), max(costs))
    )
    report.add("sends_vs_aiomqtt", Figure(median(speeds), "times", min(speeds), max(speeds)))
    report.add("cpu_us_per_send", Figure(median(ours), "µs", min(ours), max(ours)))
    report.add("bare_cpu_us_per_send", Figure(median(bare), "µs", min(bare), max(bare)))


if __name__ == "__main__":
    main("session_send", __doc__.splitlines()[0], measure)
