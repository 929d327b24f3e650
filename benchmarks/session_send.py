"""How much CPU does a send take, compared with the bare codec, and how many are sent per second?

Publishes with QoS 1 to a local Mosquitto, with a window of them in flight, each confirmed. The bare
side is a loop over the same codec and transport, without guarantees; the peer is aiomqtt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _harness import Report, main, side_process, spread

# The tests and tools are not installed: import them from the checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sessions.mosquitto import Mosquitto
from tools import servers

#: The publishes that Mosquitto lets a client have in flight.
WINDOW = 20


def side(name: str, url: str, count: int) -> dict[str, float]:
    """Run one side in a new process."""
    return side_process("_session_sides.py", "send", name, url, count, WINDOW)


def measure(report: Report, quick: bool) -> None:
    binary = servers.find("mosquitto")
    if binary is None:
        raise SystemExit("Mosquitto is not installed: run python tools/servers.py install")
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
    report.add("cpu_us_per_send_vs_bare_client", spread(costs, "times"))
    report.add("sends_vs_aiomqtt", spread(speeds, "times"))
    report.add("cpu_us_per_send", spread(ours, "µs"))
    report.add("bare_cpu_us_per_send", spread(bare, "µs"))


if __name__ == "__main__":
    main("session_send", __doc__.splitlines()[0], measure)
