"""The guard: a small process between its owner and PostgreSQL, which ends with the owner.

It is run by its path (`python -I -S _guard.py …`) and imports only the standard library, so that
it starts within about 30 ms. It must be single-threaded: the signal that a child gets at the death
of its parent (PR_SET_PDEATHSIG) is bound to the parent's *thread*.

=======  ==================================================================================
stdin    commands: `stop`, `kill`; end of file: the owner has died
stdout   reports: `started PID`, `stopping SIGNAL`, `ended STATUS` (negative: a signal)
stderr   the log of the server, and of this process if it fails
=======  ==================================================================================

Invariants:

- the owner dies: the guard stops the server, with deadlines;
- the guard dies: the kernel sends SIGQUIT to the server, which is an immediate shutdown;
- the server dies: its orphans become children of the guard, which kills them before it reports.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

#: Descriptors of the directories of the server's data and socket: through them the server can use
#: the directories even if its user may not enter a directory above.
DATA_FD, SOCKET_FD = 100, 101

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IPC_RMID = 0
_NEVER = float("inf")

# A service manager sends SIGTERM to every process. The owner stops the server in its own order; if
# the signal kills the owner, stdin ends.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    """Call prctl, which Python does not provide; do nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Guard:
    """One server process, its orphans, and the plan by which it is ended, if any."""

    def __init__(
        self, user: str, directories: Sequence[str], grace: str, command: Sequence[str]
    ) -> None:
        self.user = user
        self.directories = [path for path in directories if path]
        self.grace = tuple(float(part) for part in grace.split(","))
        self.command = list(command)
        self.pid = 0
        self.status: int | None = None
        self.all_ended = False
        self.plan: list[tuple[signal.Signals, float]] = []
        self.due = _NEVER
        self.orphaned = False

    def run(self) -> None:
        """Start the server, and return when all its processes have ended."""
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self.spawn()
        report(f"started {self.pid}")
        sources = [0, wake]
        while not self.all_ended:
            readable, _, _ = select.select(sources, [], [], self.wait_time())
            if wake in readable:
                os.read(wake, 4096)
            if 0 in readable and not self.read_commands():
                sources.remove(0)
            self.reap()
            self.escalate()
        report(f"ended {self.status}")

    def spawn(self) -> None:
        """Start the server as its user; it ends with this process."""
        guard = os.getpid()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            self.become_server(guard)
        except BaseException as error:
            os.write(2, f"moored: cannot run {self.command[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def become_server(self, guard: int) -> None:
        """In the forked child: drop privileges and descriptors, then execute the server."""
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        for kept, path in enumerate(self.directories, start=DATA_FD):
            os.dup2(os.open(path, os.O_RDONLY | os.O_DIRECTORY), kept, inheritable=True)
        os.chdir("/")
        os.umask(0o077)
        if self.user:
            uid, gid = (int(part) for part in self.user.split(":"))
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # After the change of user, which clears it. SIGQUIT, because without the guard nothing
        # limits the duration of a shutdown.
        prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != guard:
            return
        os.execv(self.command[0], self.command)

    def read_commands(self) -> bool:
        """Execute the owner's commands; return False if the owner has died."""
        words = os.read(0, 4096).decode().split()
        self.orphaned = not words
        kill = (signal.SIGKILL, _NEVER)
        if "kill" in words:
            self.plan = [kill]
        else:
            # A fast shutdown, then an immediate one, then SIGKILL.
            fast, immediate = self.grace
            self.plan = [(signal.SIGINT, fast), (signal.SIGQUIT, immediate), kill]
        self.due = time.monotonic()
        return bool(words)

    def escalate(self) -> None:
        """Take the next step of the plan if it is due; kill the orphans of an ended server."""
        if self.status is not None:
            for pid in orphans():
                os.kill(pid, signal.SIGKILL)
        elif time.monotonic() >= self.due:
            number, seconds = self.plan.pop(0)
            self.due = time.monotonic() + seconds
            report(f"stopping {number.name}")
            os.kill(self.pid, number)

    def wait_time(self) -> float | None:
        """Return the seconds until the next step is due; None: wait for a command or signal."""
        if self.status is not None:
            return 0.02
        return None if self.due == _NEVER else max(0.0, self.due - time.monotonic())

    def reap(self) -> None:
        """Reap ended children; until then their pids are not reused, and are safe to signal."""
        while not self.all_ended:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.all_ended = True
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)


def orphans() -> list[int]:
    """Return the pids of this process's children: the orphans of a dead server."""
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The second field, the program's name in brackets, may contain any character.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def report(line: str) -> None:
    """Send a line to the owner, if it is alive."""
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:
        pass


def remove(path: str) -> None:
    """Remove the directory of an ended server, and its shared memory."""
    import shutil  # only if needed: it would be a third of the guard's start

    release_memory(path)
    shutil.rmtree(path, ignore_errors=True)


def release_memory(path: str) -> None:
    """Free the shared memory of a killed server, which otherwise only its next start would free."""
    try:
        # An attacker in the server may have put a link or a FIFO there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(f"{path}/data/postmaster.pid", flags)) as file:
            key, number = (int(word) for word in file.read().splitlines()[6].split())
    except (OSError, IndexError, ValueError):
        return
    libc = ctypes.CDLL(None)
    if libc.shmget(key, 0, 0) == number:  # otherwise another program has the number now
        libc.shmctl(number, _IPC_RMID, None)


def main(user: str, data: str, socket: str, grace: str, temporary: str, *command: str) -> None:
    """Guard one server; `temporary` is a directory to remove if the owner has died."""
    guard = Guard(user, (data, socket), grace, command)
    guard.run()
    if temporary and guard.orphaned:
        remove(temporary)


if __name__ == "__main__":
    main(*sys.argv[1:])
