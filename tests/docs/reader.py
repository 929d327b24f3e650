"""A reader who types along: runs the commands of a page in order, and compares what they print.

Each `console` block is a terminal of its own. A command that does not end, such as a server, stays
until the end of the page, and a `text` block is what an open terminal prints later. A
`pycon` block is typed into Python's prompt, which is open until the end of the page. Numbers of
more than one digit may differ; `…` stands for any text, and alone on a line for any lines.
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from moored.testing import scaled

from .pages import ROOT, all_blocks, page

__all__ = ["FRESH", "Reader", "Terminal", "pattern"]

LIMIT = 90.0
INSTALL_LIMIT = 600.0
#: At full scale the commands that install are run in a new environment; else they are left out.
FRESH = scaled(100) >= 100
_NUMBER = r"\d+(?:[.,]\d+)*"
_INSTALL = re.compile(r"^(?:pip|sudo apt-get) install .*$", re.MULTILINE)


def pattern(shown: str) -> str:
    """Return a regular expression for lines that a page shows."""

    def one(line: str) -> str:
        if line == "…":
            return r"(?:.*\n)*?"
        parts = re.split(f"({_NUMBER}|…)", line)
        return "".join(map(expression, parts)) + r" *(?:\n|\Z)"

    def expression(part: str) -> str:
        if part == "…":
            return ".*"
        return _NUMBER if len(part) > 1 and part[0].isdigit() else re.escape(part)

    return "".join(map(one, shown.splitlines()))


class Terminal:
    """A shell that runs a script, and what it has printed."""

    ended = False

    def __init__(
        self,
        script: str,
        directory: Path,
        environment: Mapping[str, str],
        changed: threading.Condition,
    ) -> None:
        self.script = script
        self._process = subprocess.Popen(
            ["bash", "-e", "-c", script],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._printed = ""
        self._changed = changed
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def type(self, text: str) -> None:
        """Type into the running program."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._add(line)
        self._add(None)

    def _add(self, line: str | None) -> None:
        with self._changed:
            self._printed += line or ""
            self.ended = line is None
            self._changed.notify_all()

    @property
    def printed(self) -> str:
        """Everything that it has printed until now."""
        return self._printed

    @classmethod
    @contextlib.contextmanager
    def opened(cls, script: str, directory: Path, **environment: str) -> Iterator[Self]:
        """Open a terminal alone, with more variables than a reader has, and close it at the end."""
        environment = _plain_environment() | environment
        terminal = cls(script, directory, environment, threading.Condition())
        try:
            yield terminal
        finally:
            terminal.stop()

    def wait_for(self, expression: str, limit: float = LIMIT) -> None:
        """Wait until the output has a match, or fail with the output."""
        found = re.compile(expression)
        with self._changed:
            done = self._changed.wait_for(
                lambda: found.search(self._printed) or self.ended, timeout=limit
            )
            assert found.search(self._printed), (
                f"{self.script}\n{'ended' if done else 'still runs'}, and printed\n{self._printed}"
            )

    def wait_ended(self, limit: float) -> None:
        """Wait until the script has ended, which must succeed."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, timeout=limit), self._printed
        assert self._process.wait(LIMIT) == 0, f"{self.script}\nfailed with\n{self._printed}"

    def stop(self) -> None:
        """Press Ctrl-C until all its programs have ended, and close it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            # A job that a script starts in the background ignores SIGINT.
            for number, seconds in ((signal.SIGINT, 3), (signal.SIGTERM, 30), (signal.SIGKILL, 30)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                self._thread.join(seconds)
                if not self._thread.is_alive():
                    return
        finally:
            self._process.wait(LIMIT)


class Reader:
    """Reads one page, in a directory of its own, with other numbers of ports."""

    def __init__(self, directory: Path, ports: Mapping[str, int] | None = None) -> None:
        self._directory = directory
        self._ports = ports or {}
        self._environment = _plain_environment() | {"HOME": str(directory)}
        self._terminals: list[Terminal] = []
        self._changed = threading.Condition()
        self._prompt: Terminal | None = None
        (directory / "examples").symlink_to(ROOT / "examples")
        programs = Path(sys.executable).parent
        if FRESH:
            subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
            programs = directory / "venv" / "bin"
        self._environment["PATH"] = f"{programs}:{os.environ['PATH']}:/usr/sbin"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for terminal in reversed(self._terminals):
            terminal.stop()

    def read(self, name: str) -> None:
        """Do what the page says, from the first block to the last one."""
        for language, caption, text in all_blocks(page(name)):
            text = self._with_ports(text)
            if caption:
                (self._directory / caption).write_text(text + "\n")
            elif language == "console":
                self._run(text)
            elif language == "pycon":
                self._type(text + "\n")
            elif language == "text":
                self._expect_later(text)

    def _with_ports(self, text: str) -> str:
        for old, new in self._ports.items():
            text = text.replace(old, str(new))
        return text

    def _run(self, block: str) -> None:
        script, shown = "", ""
        for line in block.splitlines():
            if line.startswith("$ "):
                script += line.removeprefix("$ ") + "\n"
            else:
                shown += line + "\n"
        script = _INSTALL.sub(_installed if FRESH else "", script).strip()
        if not script:
            return
        terminal = self._open(script)
        if shown:
            terminal.wait_for("^" + pattern(shown))
        else:
            terminal.wait_ended(INSTALL_LIMIT)

    def _open(self, script: str) -> Terminal:
        self._terminals.append(Terminal(script, self._directory, self._environment, self._changed))
        return self._terminals[-1]

    def _expect_later(self, shown: str) -> None:
        """Wait until one of the terminals has printed these lines."""
        found = re.compile(pattern(shown))
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(found.search(terminal.printed) for terminal in self._terminals),
                timeout=LIMIT,
            ), "\n".join([shown, *(terminal.printed for terminal in self._terminals)])

    def _type(self, dialogue: str) -> None:
        """Type a dialogue into Python's prompt that accepts `await`, and compare the answers."""
        if self._prompt is None:
            self._prompt = self._open("python -m asyncio")
        begin = len(self._prompt.printed)
        examples = doctest.DocTestParser().get_examples(dialogue)
        for each in examples:
            # A compound statement ends with an empty line.
            self._prompt.type(each.source + ("\n" if each.source.count("\n") > 1 else ""))
        self._prompt.type(f'print("answered", {begin})\n')
        self._prompt.wait_for(f"answered {begin}\n")
        printed = self._prompt.printed[begin:]
        position = 0
        for each in examples:
            found = re.compile(pattern(each.want)).search(printed, position)
            assert found, f"{each.source}printed something else:\n{printed[position:]}"
            position = found.end()


def _plain_environment() -> dict[str, str]:
    """Return the environment of a reader: ours without the settings of the tests."""
    ours = ("MOORED_", "PYTHON", "PYTEST_", "INITDB_ONCE", "COVERAGE", "VIRTUAL_ENV", "MAKE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return plain | {"PYTHONUNBUFFERED": "1"}


def _installed(command: re.Match[str]) -> str:
    """Return a command that installs this checkout, or checks that a program is installed."""
    words = shlex.split(command[0])
    if words[0] == "sudo":
        return " && ".join(f"command -v {word}" for word in words[3:])
    packages = [re.sub(r"^moored(?=\[|$)", str(ROOT), word) for word in words[2:]]
    constraints = ["-q", "-c", str(ROOT / "constraints.txt")]
    return shlex.join(["pip", "install", *constraints, *packages])
