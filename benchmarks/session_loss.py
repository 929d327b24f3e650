"""How soon does a send fail when its connection is lost?

Mosquitto receives publishes and does not confirm them; then it is killed. The MQTT session cannot
be resumed, so the outcome of each publish is unknown, which our callers get at once. The peer is
aiomqtt, whose callers wait for their timeout of 3 seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _harness import Report, main, side_process, spread

# The tests and tools are not installed: import them from the checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sessions.mosquitto import Mosquitto
from tools import servers

SENDS = 20


def side(name: str, binary: str) -> float:
    """Return the median over one side's callers, in milliseconds; start and kill a broker."""
    with Mosquitto(binary) as broker:
        found = side_process("_session_sides.py", "lost", name, broker.url(), SENDS, broker.pid)
    return found["ms"]


def measure(report: Report, quick: bool) -> None:
    binary = servers.find("mosquitto")
    if binary is None:
        raise SystemExit("Mosquitto is not installed: run python tools/servers.py install")
    rounds = 3 if quick else 9
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(side("ours", binary))
        peer.append(side("aiomqtt", binary))
    report.add("resolve_ms_p50", spread(ours, "ms"))
    report.add("aiomqtt_resolve_ms_p50", spread(peer, "ms"))


if __name__ == "__main__":
    main("session_loss", __doc__.splitlines()[0], measure)
