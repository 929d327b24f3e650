"""The Dockerfile, the systemd unit and the Kubernetes example, against the real service."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from tests.service.support import running

from moored.app._parts import STOP_TIMEOUT
from moored.cli import main
from moored.service import DRAIN, _database, _http, knobs

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
VARIABLES = {knob.variable for knob in knobs()}
#: Seconds in which HTTP and its clients' streams have ended, before any part is stopped.
HTTP_STOP = DRAIN + _http.GRACE + 5.0

ORDERS = """
import asyncio
from pathlib import Path
import moored

app = moored.App("orders")


@app.component
async def importer(ctx):
    ctx.health("starting", "the file is not there")
    while not Path("there").exists():
        await asyncio.sleep(0.01)
    ctx.health("active")
    await asyncio.Event().wait()
"""


def dockerfile(directory: Path = DEPLOY) -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (directory / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.partition(" ") for line in text.splitlines() if line]
    return [(name, rest) for name, _, rest in lines]


def instruction(name: str, directory: Path = DEPLOY) -> str:
    """Return the argument of an instruction that occurs once."""
    (found,) = [rest for each, rest in dockerfile(directory) if each == name]
    return found


def command(name: str, directory: Path = DEPLOY) -> list[str]:
    """Return an instruction in exec form, to be run with the tests' interpreter."""
    rest = instruction(name, directory)
    words: list[str] = json.loads(rest.partition("CMD ")[2] or rest)
    return [sys.executable if word == "python" else word for word in words]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "moored.service")
    return parser


def pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (stateful,) = [each for each in documents if each["kind"] == "StatefulSet"]
    found: dict[str, Any] = stateful["spec"]["template"]["spec"]
    return found


def get(port: str, path: str) -> int:
    """Return the HTTP status of a path of the service, which may not listen yet."""
    transport = httpx.HTTPTransport(retries=10)
    with httpx.Client(transport=transport, timeout=60, trust_env=False) as client:
        return client.get(f"http://127.0.0.1:{port}{path}").status_code


def test_the_image_gets_what_the_build_reads() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, hook = settings["project"], settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    copied = [
        word
        for name, rest in dockerfile()
        if name == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    assert all((ROOT / each).exists() for each in copied)
    read = {"src", "pyproject.toml", "README.md", hook["path"], *project["license-files"]}
    assert read <= set(copied)
    install = next(rest for name, rest in dockerfile() if name == "RUN" and "pip install" in rest)
    extras = re.findall(r"\.\[(.*)\]", install)[0].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()
    constraints = shlex.split(install)[shlex.split(install).index("-c") + 1]
    assert constraints in copied
    assert instruction("USER").isdigit()  # so that Kubernetes can tell that it is not root
    assert instruction("USER") == str(pod()["securityContext"]["runAsUser"])
    python = project["requires-python"].removeprefix(">=").split(".")
    for version in (rest for name, rest in dockerfile() if name == "FROM"):
        assert [int(each) for each in re.findall(r"\d+", version)] >= [int(each) for each in python]


def test_the_image_runs_and_the_probes_follow_the_health(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(ORDERS)
    environ = dict(rest.split("=", 1) for name, rest in dockerfile() if name == "ENV")
    del environ["PATH"]
    assert environ.keys() <= VARIABLES
    environ |= {"MOORED_ADMIN_TOKEN": "x" * 32, "MOORED_STATE_DIR": str(tmp_path)}
    container = pod()["containers"][0]
    assert command("ENTRYPOINT") == ["moored"]
    assert command("CMD") == container["args"] == ["serve"]

    def answers(port: str) -> list[bool]:
        """Whether the startup, the readiness and the liveness probe succeed, and the image's."""
        names = ("startup", "readiness", "liveness")
        codes = [get(port, container[f"{each}Probe"]["httpGet"]["path"]) for each in names]
        health = subprocess.run(
            command("HEALTHCHECK"),
            env={**os.environ, **environ, "MOORED_PORT": port},
            capture_output=True,
            check=False,
        )
        return [*(200 <= code < 400 for code in codes), health.returncode == 0]

    with running("orders:app", cwd=tmp_path, environ=environ) as service:
        port = service.url.rpartition(":")[2]
        assert answers(port) == [False, False, True, True]
        (tmp_path / "there").touch()
        service.wait_for("ready after")
        assert answers(port) == [True, True, True, True]
        service.process.send_signal(getattr(signal, instruction("STOPSIGNAL")))
        assert service.wait() == 0
    assert all(json.loads(line)["level"] for line in service.lines)  # JSON only


def test_the_ports_of_the_examples_are_the_default() -> None:
    default = next(knob.default for knob in knobs() if knob.name == "port")
    assert instruction("EXPOSE") == str(default)
    assert pod()["containers"][0]["ports"] == [{"name": "http", "containerPort": default}]


def test_a_stop_has_the_time_that_the_service_may_take() -> None:
    before = float(pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    longest = before + HTTP_STOP + STOP_TIMEOUT
    assert pod()["terminationGracePeriodSeconds"] >= longest
    service = unit()["Service"]
    embedded = HTTP_STOP + _database.MANAGER_STOP_TIMEOUT + _database.STOP_TIMEOUT
    assert float(service["TimeoutStopSec"]) >= max(HTTP_STOP + STOP_TIMEOUT, embedded)


def test_systemd_accepts_the_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "moored"
    assert main([*arguments, "--help"]) == 0
    assert service["Environment"].partition("=")[0] in VARIABLES
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        text = (DEPLOY / "moored.service").read_text().replace(program, sys.executable)
        (tmp_path / "moored.service").write_text(text)
        verify = [analyze, "verify", "--man=no", str(tmp_path / "moored.service")]
        checked = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_the_secret_has_the_variables_of_the_service() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (secret,) = [each for each in documents if each["kind"] == "Secret"]
    assert secret["stringData"].keys() <= VARIABLES
