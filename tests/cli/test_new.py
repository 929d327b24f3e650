"""`moored init`: what it writes runs and passes its own tests; it overwrites nothing."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from tests.docs.pages import blocks
from tests.docs.reader import Terminal
from tests.http_client import ONE_REQUEST
from tests.servers import free_port
from tests.service.support import LIMIT, answers, clean_environment, moored, until

FILES = (
    *("Dockerfile", "README.md", "compose.yaml", "dev.py", "requirements-dev.txt"),
    *("requirements.txt", "service.py", "test_service.py"),
)
#: Three times the five seconds that a stop may take.
STOP_LIMIT = 15.0


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_files_and_next_commands_are_printed(tmp_path: Path) -> None:
    done = moored("init", "my shop", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    wrote = "".join(f"wrote my shop/{name}\n" for name in FILES)
    enter = "cd 'my shop' && pip install -r requirements-dev.txt"
    assert done.stdout == f"{wrote}next:\n  {enter}\n  python dev.py\n"
    assert sorted(contents(tmp_path / "my shop")) == list(FILES)
    done = moored("init", "other", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["written"] == [f"other/{name}" for name in FILES]


def test_tests_of_the_written_service_pass(tmp_path: Path) -> None:
    assert moored("init", cwd=tmp_path).returncode == 0
    # Other plugins that happen to be installed here are not required by the service.
    environ = clean_environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    command = [sys.executable, "-m", "pytest", "-q", "--basetemp", str(tmp_path / "base")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_service_runs_as_its_readme_says_and_stops_at_sigterm(tmp_path: Path) -> None:
    assert moored("init", cwd=tmp_path).returncode == 0
    port = str(free_port())
    (block,) = blocks((tmp_path / "README.md").read_text().replace("8000", port), "console")
    _, run, subscribe, order, _ = (line.removeprefix("$ ") for line in block.splitlines())
    command = [sys.executable, *shlex.split(run)[1:]]
    log = (tmp_path / "log").open("w+")
    with (
        log,
        subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(PORT=port), stdout=log, stderr=log
        ) as service,
    ):
        try:
            base = f"http://127.0.0.1:{port}"
            until(lambda: answers(f"{base}/moored/v1/health?ready"), "it is ready")
            (link,) = re.findall(r"http://\S+token=\S+", (tmp_path / "log").read_text())
            with httpx.Client(
                follow_redirects=True,
                timeout=LIMIT,
                limits=ONE_REQUEST,
                trust_env=False,
                verify=False,
            ) as person:
                assert 'src="static/page.js"' in person.get(link).text
            with Terminal.opened(subscribe, tmp_path) as browser:
                browser.wait_for("event: start")
                with Terminal.opened(order, tmp_path) as caller:
                    caller.wait_ended(LIMIT)
                browser.wait_for(r'"op" : "insert".*"item":"tea"')
                browser.wait_for(r'"op" : "update".*"packed":true')
                service.send_signal(signal.SIGTERM)
                assert service.wait(STOP_LIMIT) == 0
            subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
            added = ["git", "add", "--all", "--dry-run"]
            assert "data" not in subprocess.check_output(added, cwd=tmp_path, text=True)
        finally:
            service.kill()


def test_a_second_init_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    assert moored("init", cwd=tmp_path).returncode == 0
    (tmp_path / "service.py").write_text("print('mine')")
    before = contents(tmp_path)
    done = moored("init", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} has {', '.join(FILES)}, which init would overwrite" in done.stderr
    assert contents(tmp_path) == before


def test_one_file_that_is_there_prevents_the_others(tmp_path: Path) -> None:
    (tmp_path / "README.md").symlink_to("nowhere")
    done = moored("init", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} has README.md, which" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("directory", "name"), [("My Shop!", "my-shop"), ("2nd/class", "class"), ("…", "service")]
)
def test_the_service_is_named_for_its_directory(directory: str, name: str, tmp_path: Path) -> None:
    (tmp_path / directory).mkdir(parents=True)
    (tmp_path / directory / "notes").touch()
    assert moored("init", str(tmp_path / directory)).returncode == 0
    assert f'moored.App("{name}")' in (tmp_path / directory / "service.py").read_text()
    assert (tmp_path / directory / "README.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("directory", ["file", "file/below", "/proc/service"])
def test_a_directory_that_cannot_be_written_is_one_line(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = moored("init", directory, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"cannot write {directory}: " in done.stderr
    assert "name a directory that you may write to" in done.stderr


def test_requirements_are_met_by_this_version(tmp_path: Path) -> None:
    assert moored("init", cwd=tmp_path).returncode == 0
    needed = Requirement((tmp_path / "requirements.txt").read_text().strip())
    assert version(needed.name) in needed.specifier


def test_the_service_has_at_most_60_lines(tmp_path: Path) -> None:
    assert moored("init", cwd=tmp_path).returncode == 0
    assert (tmp_path / "service.py").read_text().count("\n") <= 60
