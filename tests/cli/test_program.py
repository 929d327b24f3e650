"""The program itself: version, help, completion, and its error without the extra."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.service.support import moored
from tests.soaking import some_of

import moored as package
from moored.cli import main
from moored.cli._app import app
from moored.service import knobs

Output = pytest.CaptureFixture[str]

WITHOUT = """
import sys
sys.modules[{missing!r}] = None  # as if it were not installed
from moored.cli import main
sys.exit(main(["serve"]))
"""


def test_version_prints_the_version(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moored {package.__version__}\n"


def test_without_a_command_the_help_is_shown(bare: Path, capsys: Output) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("serve", "status", "tree", "explain", "config"):
        assert command in out


#: Commands whose output has another form: logs, and rows.
WITHOUT_JSON = {"serve", "snapshot"}


def commands(group: Any, *above: str) -> Iterator[tuple[str, Any]]:
    """Yield all commands with their names, such as "slots drop"."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, *above, name)
        else:
            yield " ".join((*above, name)), each


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json(name: str) -> None:
    command = COMMANDS[name]
    assert f"moored {name}" in command.help
    options = {option for parameter in command.params for option in parameter.opts}
    assert ("--json" in options) == (name not in WITHOUT_JSON)


def test_help_is_shown_for_each_of_its_options(bare: Path, capsys: Output) -> None:
    for option in ("--help", "-h"):
        assert main(["status", option]) == 0
        assert "Usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "completed"), [("sess", "sessions"), ("sessions st", "stop"), ("slots --h", "--help")]
)
def test_bash_completes_commands_and_options(
    typed: str,
    completed: str,
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    # What the script of `--show-completion bash` sets before it calls the program.
    monkeypatch.setenv("_MOORED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"moored {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    with pytest.raises(SystemExit):
        main([])
    assert completed in capsys.readouterr().out.split()


@pytest.mark.parametrize("command", ["serve", "config"])
def test_every_knob_is_an_option_with_its_variable(
    command: str, bare: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    for knob in knobs():
        assert knob.option in out
        assert knob.variable in out


@pytest.mark.parametrize(
    "shell",
    some_of(["bash", "zsh", "fish"], "bash"),
)
def test_there_is_completion_for_shells(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, Typer detects the shell, and a test may run without one.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = moored("--show-completion", shell)
    assert shown.returncode == 0
    assert "_MOORED_COMPLETE" in shown.stdout


@pytest.mark.parametrize(
    "missing", some_of(["typer", "rich", "uvicorn", "starlette", "structlog"], "typer", "structlog")
)
def test_without_the_extra_the_error_names_what_to_install(missing: str) -> None:
    program = WITHOUT.format(missing=missing)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        f"moored: the command needs {missing}, which is not installed: "
        "pip install 'moored[service]'\n"
    )


def test_a_missing_module_that_is_not_of_the_extra_is_a_defect() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing="psycopg")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "ModuleNotFoundError" in ended.stderr


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "moored.cli", "config", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1
