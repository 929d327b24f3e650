"""`moored` as PID 1, the init process of a container: it passes signals on and reaps orphans.

The command itself runs in a child process, because only the parent of a process can tell orphans
from the processes that the program has started and waits for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

__all__ = ["run_under_init"]

#: Signals that are sent to the command.
PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
#: Seconds in which orphans may end after the command, for example a PostgreSQL whose service was
#: killed; the kernel kills the rest.
GRACE = 10


def run_under_init(run: Callable[[], int]) -> int:
    """Run a command in a child process, and return its exit code when it and its orphans ended."""
    # Blocked until there is a process to send them to: PID 1 ignores signals without a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    child = os.fork()
    if child == 0:
        # In a group of its own: Ctrl-C of a terminal reaches only PID 1, which passes it on once.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return run()

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    ended = status = 0
    while ended != child:
        ended, status = os.wait()
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    code = code if code >= 0 else 128 - code
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.alarm(GRACE)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return code
