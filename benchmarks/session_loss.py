"""How soon is a caller told when the link is lost under its send?

Publishes that a real Mosquitto has and does not confirm; then it is killed. The protocol cannot
resume here, so nobody will ever know: every caller is told that at once. The peer is aiomqtt, whose
callers wait for the timeout that they gave, 3 seconds.
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
SENDS = 20


def side(name: str, binary: str) -> float:
    """The median of one side's callers, in milliseconds, with a broker that does not survive it."""
    with Mosquitto(binary) as broker:
        command = [sys.executable, SIDE, "lost", name, broker.url(), str(SENDS), str(broker.pid)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["ms"])


def measure(report: Report, quick: bool) -> None:
    binary = servers.find("mosquitto")
    if binary is None:
        raise SystemExit("Mosquitto is needed: python tools/servers.py install")
    rounds = 3 if quick else 9
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(side("ours", binary))
        peer.append(side("aiomqtt", binary))
    report.add("resolve_ms_p50", Figure(median(ours), "ms", min(ours), max(ours)))
    report.add("aiomqtt_resolve_ms_p50", Figure(median(peer), "ms", min(peer), max(peer)))


if __name__ == "__main__":
    main("session_loss", __doc__.splitlines()[0], measure)
