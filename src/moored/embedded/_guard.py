"""The guard: a small process between its owner and PostgreSQL, so that nothing outlives the owner.

It is run by its path (`python -I -S _guard.py …`) and imports the standard library alone, so that
it is up within some 30 ms. It is single-threaded on purpose: the signal that a child gets at the
death of its parent is bound to the parent's *thread*.

=======  ==================================================================================
stdin    commands: `stop FAST IMMEDIATE` (seconds), `kill`; its end means: the owner is gone
stdout   reports: `started PID`, `stopping SIGNAL`, `ended STATUS` (negative: a signal)
stderr   the log of the server, and of this process if it fails
=======  ==================================================================================

What holds:

- the owner dies: the guard stops the server, with deadlines;
- the guard dies: the kernel sends SIGQUIT to the server, which then ends without its clients;
- the server dies: its orphans become children of the guard, which ends them before it reports.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

#: The directories of the server's data and of its socket, held open: so they can be reached even
#: where a directory above them is closed to the server's user.
DATA_FD, SOCKET_FD = 100, 101

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IPC_RMID = 0
_NEVER = float("inf")

# A service manager's SIGTERM reaches every process: it is for the owner to stop the server in its
# own order, and if the owner dies of the signal, stdin ends.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    """Ask the kernel for what Python has no name for; elsewhere than on Linux, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Guard:
    """One server process, its orphans, and the plan by which it is being ended, if it is."""

    def __init__(
        self, user: str, directories: Sequence[str], grace: str, command: Sequence[str]
    ) -> None:
        self.user = user
        self.directories = [path for path in directories if path]
        self.grace = tuple(float(part) for part in grace.split(","))
        self.command = list(command)
        self.pid = 0
        self.status: int | None = None
        self.childless = False
        self.plan: list[tuple[signal.Signals, float]] = []
        self.due = _NEVER
        self.orphaned = False

    def run(self) -> None:
        """Start the server and stay until everything of it is gone."""
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
        while not self.childless:
            readable, _, _ = select.select(sources, [], [], self.patience())
            if wake in readable:
                os.read(wake, 4096)
            if 0 in readable and not self.listen():
                sources.remove(0)
            self.reap()
            self.escalate()
        report(f"ended {self.status}")

    def spawn(self) -> None:
        """Start the server as its user, tied to the life of this process."""
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
        """In the child: drop what the server must not have, then become it."""
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
        # After the change of user, which clears it. SIGQUIT, because there will be nobody left
        # to lose patience with a slow shutdown.
        prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != guard:
            return
        os.execv(self.command[0], self.command)

    def listen(self) -> bool:
        """Obey what the owner sent; False when there is no owner any more."""
        words = os.read(0, 4096).decode().split()
        if not words:
            self.orphaned = True
            self.stop(*self.grace)
            return False
        if "kill" in words:
            self.begin([(signal.SIGKILL, _NEVER)])
        elif words[0] == "stop":
            self.stop(float(words[1]), float(words[2]))
        return True

    def stop(self, fast: float, immediate: float) -> None:
        """Plan a fast shutdown, then one that does not wait, then none at all."""
        self.begin(
            [(signal.SIGINT, fast), (signal.SIGQUIT, immediate), (signal.SIGKILL, _NEVER)],
        )

    def begin(self, plan: list[tuple[signal.Signals, float]]) -> None:
        """Take this plan instead of the present one, and its first step at once."""
        self.plan = plan
        self.due = time.monotonic()

    def escalate(self) -> None:
        """Take the next step of the plan when its time has come."""
        if self.status is not None:
            for pid in orphans():
                os.kill(pid, signal.SIGKILL)
        elif time.monotonic() >= self.due:
            number, patience = self.plan.pop(0)
            self.due = time.monotonic() + patience
            report(f"stopping {number.name}")
            os.kill(self.pid, number)

    def patience(self) -> float | None:
        """How long to wait for news; None: until there are some."""
        if self.status is not None:
            return 0.02
        return None if self.due == _NEVER else max(0.0, self.due - time.monotonic())

    def reap(self) -> None:
        """Collect those that have ended; until then their numbers are theirs, safe to signal."""
        while not self.childless:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)


def orphans() -> list[int]:
    """The children of this process: what a dead server left behind."""
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The second field is the program's name and may hold anything but its last ")".
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def report(line: str) -> None:
    """Tell the owner, if there is one."""
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:
        pass


def remove(path: str) -> None:
    """Remove the directory of a server that is gone, and what it left in the kernel."""
    import shutil  # here, because it would be a third of the guard's start, and is seldom needed

    release_memory(path)
    shutil.rmtree(path, ignore_errors=True)


def release_memory(path: str) -> None:
    """Give back the shared memory of a killed server that no next start will clean up after."""
    try:
        # Neither a link nor a FIFO that a stranger in the server has left there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(f"{path}/data/postmaster.pid", flags)) as file:
            key, number = (int(word) for word in file.read().splitlines()[6].split())
    except (OSError, IndexError, ValueError):
        return
    libc = ctypes.CDLL(None)
    if libc.shmget(key, 0, 0) == number:  # else the number is somebody else's by now
        libc.shmctl(number, _IPC_RMID, None)


def main(user: str, data: str, socket: str, grace: str, temporary: str, *command: str) -> None:
    """Guard one server; `temporary` is the directory that nobody needs once the owner is dead."""
    guard = Guard(user, (data, socket), grace, command)
    guard.run()
    if temporary and guard.orphaned:
        remove(temporary)


if __name__ == "__main__":
    main(*sys.argv[1:])
