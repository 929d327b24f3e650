"""Run the shop with a clock that jumps: SIGUSR1 sets it a day ahead, SIGUSR2 a day back.

The clocks of the machine and of PostgreSQL stay as they are.
"""

from __future__ import annotations

import signal
import sys
import time

import uvicorn

DAY = 86_400
_time, _time_ns = time.time, time.time_ns
_ahead = 0


def _jump(number: int, frame: object) -> None:
    global _ahead
    _ahead += DAY if number == signal.SIGUSR1 else -DAY


if __name__ == "__main__":
    time.time = lambda: _time() + _ahead
    time.time_ns = lambda: _time_ns() + _ahead * 10**9
    signal.signal(signal.SIGUSR1, _jump)
    signal.signal(signal.SIGUSR2, _jump)
    uvicorn.run("tests.stories.shop:api", port=int(sys.argv[2]), log_level="warning")
