"""The image and the compose file of `moored init`, against `deploy/` and a real PostgreSQL."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict
from tests.servers import free_port
from tests.service.support import answers, clean_environment, moored, own_stream, until

from .test_files import VARIABLES, command, dockerfile, instruction

STATE = "MOORED_STATE_DIR"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    directory = tmp_path / "shop"
    assert moored("init", str(directory)).returncode == 0
    return directory


def compose(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((directory / "compose.yaml").read_text())
    return found


def test_the_image_is_like_the_one_of_deploy(written: Path) -> None:
    for name in ("USER", "VOLUME"):
        assert instruction(name, written) == instruction(name)
    ours, theirs = dockerfile(written), dockerfile()
    assert next(each for each in ours if each[0] == "RUN") in theirs  # the user
    assert {each for each in ours if each[0] in ("FROM", "ENV")} <= set(theirs)
    copied = [word for name, rest in ours if name == "COPY" for word in rest.split()[:-1]]
    assert all((written / each).is_file() for each in copied)
    assert "service.py" in copied


def test_the_compose_file_fits_to_the_image(written: Path) -> None:
    services = compose(written)["services"]
    db, service = services["db"], services["service"]
    assert service["build"] == "."
    assert service["depends_on"] == ["db"]
    assert db["command"][-1] == "wal_level=logical"
    url = conninfo_to_dict(service["environment"]["DATABASE_URL"])
    names = {"user": "POSTGRES_USER", "password": "POSTGRES_PASSWORD", "dbname": "POSTGRES_DB"}
    assert {variable: url[name] for name, variable in names.items()} == db["environment"]
    assert url["host"] in services
    assert set(service["environment"]) <= VARIABLES
    port = instruction("EXPOSE", written)
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert port in command("CMD", written)
    volumes = [*db["volumes"], *service["volumes"]]
    assert [each.partition(":")[0] for each in volumes] == list(compose(written)["volumes"])
    environ = dict(rest.split("=") for name, rest in dockerfile(written) if name == "ENV")
    assert service["volumes"] == [f"state:{environ[STATE]}"]


def test_the_command_of_the_image_serves_and_its_health_check_succeeds(
    written: Path, postgres_url: str
) -> None:
    port, shown = free_port(), instruction("EXPOSE", written)
    run, check = (
        shlex.split(shlex.join(command(name, written)).replace(shown, str(port)))
        for name in ("CMD", "HEALTHCHECK")
    )
    run[:1] = [command("HEALTHCHECK")[0], "-m", run[0]]
    environ = clean_environment(DATABASE_URL=postgres_url, **own_stream())
    with subprocess.Popen(run, cwd=written, env=environ) as service:
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/moored/v1/health?ready"), "it is ready")
            assert subprocess.run(check, env=os.environ, check=False).returncode == 0
        finally:
            service.terminate()
    assert subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode == 1
