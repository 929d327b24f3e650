"""A program that cannot outlive this process: the owner's side of the guard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import _guard
from ._descriptors import OwnedDescriptor

__all__ = ["Guarded"]

_GUARD = str(Path(_guard.__file__).resolve())


class Guarded:
    """A program that runs under the guard: it and its children end with the owner.

    `arguments` are those of the guard's `main` before the command.
    `on_stopping` is called with the name of each signal that the guard sends, and `settle` between
    the end of the guard and the callbacks of `when_ended`; both from another thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: int,
        lock: OwnedDescriptor,
        on_stopping: Callable[[str], None] = lambda signal: None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.command = list(command)
        self.pid: int | None = None
        self.status: int | None = None
        self._on_stopping = on_stopping
        self._settle = settle
        self._ended = threading.Event()
        self._watchers: list[Callable[[], None]] = []
        self._guard_lock = threading.Lock()
        commands, control = os.pipe()
        # The guard runs until this end is closed, so a fork of this process must not keep a copy.
        self._control = OwnedDescriptor(control)
        self._reports, reports = os.pipe()
        try:
            # In a session of its own, so that Ctrl-C in a terminal does not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _GUARD, *arguments, *command],
                stdin=commands,
                stdout=reports,
                stderr=log,
                pass_fds=[lock.descriptor],
                start_new_session=True,
                env=dict(environment),
            )
        except BaseException:
            self._control.close()
            os.close(self._reports)
            raise
        finally:
            os.close(commands)
            os.close(reports)
        thread = threading.Thread(target=self._watch, name="moored-embedded", daemon=True)
        thread.start()

    @property
    def guard_pid(self) -> int:
        """The pid of the guard."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether all processes of the program have ended."""
        return self._ended.is_set()

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the guard has ended; return False after the timeout."""
        return self._ended.wait(timeout)

    def when_ended(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` once at the end, from any thread; return a function that cancels this."""
        with self._guard_lock:
            if not self._ended.is_set():
                self._watchers.append(call)
                return lambda: self._forget(call)
        call()
        return lambda: None

    def stop(self) -> None:
        """Begin to stop the program; `wait_ended` waits for its end."""
        self._send("stop")

    def kill(self) -> None:
        """Begin to end the program with SIGKILL."""
        self._send("kill")

    def _send(self, command: str) -> None:
        with self._guard_lock:
            if self._control.open:
                try:
                    os.write(self._control.descriptor, f"{command}\n".encode())
                except BrokenPipeError:
                    pass  # the guard has ended already

    def _watch(self) -> None:
        with open(self._reports, "rb") as reports:
            for line in reports:
                self._on_report(line.decode().split())
        self._process.wait()
        self._settle()
        with self._guard_lock:
            self._control.close()
            self._ended.set()
            watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    def _on_report(self, words: list[str]) -> None:
        match words:
            case ["started", pid]:
                self.pid = int(pid)
            case ["stopping", name]:
                self._on_stopping(name)
            case ["ended", status]:
                self.status = int(status)

    def _forget(self, call: Callable[[], None]) -> None:
        with self._guard_lock:
            if call in self._watchers:
                self._watchers.remove(call)
