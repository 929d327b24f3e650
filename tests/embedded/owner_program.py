"""A process that owns an embedded server; run by tests, which kill it.

Usage: `owner_program.py SCENARIO [DIRECTORY]`. It ends at the end of its standard input.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from typing import Any

from moored.embedded import DataDirectoryInUse, SyncEmbeddedPostgres

UNSYNCED = {"fsync": "off"}


def show(*values: Any) -> None:
    print(*values, flush=True)  # noqa: T201


def show_facts(pg: SyncEmbeddedPostgres) -> None:
    show(json.dumps([pg.guard_pid, pg.pid, pg.url, str(pg.data_dir)]))


def run(*directory: str) -> None:
    """Run the server until standard input ends, and stop it."""
    with SyncEmbeddedPostgres(*directory, options=UNSYNCED) as pg:
        show_facts(pg)
        sys.stdin.read()


def exit_without_stop() -> None:
    pg = SyncEmbeddedPostgres()
    pg.start()
    show_facts(pg)
    sys.stdin.read()


def forget_the_directory() -> None:
    pg = SyncEmbeddedPostgres()
    pg.start()
    pg.kill()
    show(pg.data_dir)


def have_children(directory: str) -> None:
    """Run the server beside a fork and a program, which inherit every descriptor."""
    with SyncEmbeddedPostgres(directory, options=UNSYNCED) as pg:
        show_facts(pg)
        fork = os.fork()
        if fork == 0:
            time.sleep(600)
        program = subprocess.Popen(["sleep", "600"], close_fds=False)
        show(fork, program.pid)
        sys.stdin.read()


def start_if_free(directory: str) -> None:
    try:
        run(directory)
    except DataDirectoryInUse:
        show("in use")


SCENARIOS = (run, exit_without_stop, forget_the_directory, have_children, start_if_free)

if __name__ == "__main__":
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]](*sys.argv[2:])
    atexit._run_exitfuncs()  # a forked process would not
