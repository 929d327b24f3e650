"""The blocks that are neither programs nor typed commands: SQL, settings, rules, scripts.

Programs are run by `test_pages`, dialogues and commands by `test_tutorials` and `test_howto`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import psycopg
import pytest
import yaml  # type: ignore[import-untyped]
from tests.servers import require_server

from moored.cli import main
from moored.service import knobs

from .pages import ROOT, Block, all_blocks, page
from .test_pages import DOCUMENTS

NAMES = sorted(str(path.relative_to(ROOT / "docs").with_suffix("")) for path in DOCUMENTS)
BLOCKS = [(name, block) for name in (*NAMES, "README") for block in all_blocks(page(name))]
NODE = shutil.which("node")
#: Run by other tests, or nothing to run (`text` is what programs print, `sh` is `make run`).
ELSEWHERE = {"python", "pycon", "console", "text", "sh", "mermaid"}
#: The beginnings of statements that are not run here, and why.
NOT_RUN = {
    "AWS IAM GRANT": "it is of Aurora DSQL",
    "SELECT pg_drop_replication_slot": "tests/postgres drops slots",
    "DROP PUBLICATION": "it is made by the stream",
}


def of(*languages: str) -> list[tuple[str, Block]]:
    return [each for each in BLOCKS if each[1].language in languages]


def test_every_language_is_tested() -> None:
    tested = {"sql", "ini", "json", "toml", "yaml", "nginx", "js", "html"}
    assert {block.language for _, block in BLOCKS} == tested | ELSEWHERE


def test_statements_are_accepted(postgres_url: str) -> None:
    left = set(NOT_RUN)
    with psycopg.connect(postgres_url) as conn:
        for name in dict.fromkeys(name for name, _ in of("sql")):
            # What the pages assume.
            conn.execute("create table orders (id int primary key)")
            conn.execute("create table customers (id int primary key)")
            conn.execute("create role rds_replication; create role rds_iam")
            if name.startswith("howto/leases"):
                conn.execute("create role app")
            for each, block in of("sql"):
                text = re.sub(r"--.*", "", block.text) if each == name else ""
                for statement in filter(None, map(str.strip, text.split(";"))):
                    if skipped := {each for each in NOT_RUN if statement.startswith(each)}:
                        left -= skipped
                        continue
                    database = conn.info.dbname
                    statement = re.sub(r"(ON DATABASE) \w+", rf"\1 {database}", statement)
                    conn.execute(statement.encode())
            conn.rollback()
    assert left == set(), "these statements are on no page any more"


def test_settings_of_the_server_exist(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as conn:
        known = {name for (name,) in conn.execute("select name from pg_settings")}
    for _, block in of("ini"):
        names = re.findall(r"^(\w+) =", block.text, re.MULTILINE)
        assert names
        assert set(names) <= known


def test_documents_are_well_formed() -> None:
    settings = {knob.name for knob in knobs()}
    for _, block in of("json", "yaml", "toml"):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
        else:
            assert set(tomllib.loads(block.text)) <= settings


def test_locations_are_accepted_by_nginx(tmp_path: Path) -> None:
    nginx = require_server("nginx")
    for _, block in of("nginx"):
        path = tmp_path / "nginx.conf"
        server = f"server {{ listen 127.0.0.1:8080;\n{block.text}\n}}"
        path.write_text(f"pid {tmp_path}/pid; events {{}}\nhttp {{\naccess_log off;\n{server}\n}}")
        command = [nginx, "-t", "-q", "-p", str(tmp_path), "-e", "stderr", "-c", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(NODE is None, reason="without Node.js; tests/browser runs the shipped script")
def test_scripts_are_accepted_by_a_javascript_engine(tmp_path: Path) -> None:
    for _, block in of("js", "html"):
        script = re.sub(r"</?script.*?>", "", block.text)
        (tmp_path / "script.mjs").write_text(script)
        command = [str(NODE), "--check", str(tmp_path / "script.mjs")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", [each for each in NAMES if each.startswith(("reference", "topic"))]
)
def test_commands_of_the_reference_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their output is that of the how-to pages, which are compared; these commands are parsed."""
    for each, block in of("console"):
        for command in re.findall(r"^\$ (moored .*)$", block.text, re.MULTILINE):
            if each == name:
                words = shlex.split(re.split(r" +#| \| |>|;", command)[0])
                assert main([*words[1:], "--help"]) == 0, command
                assert capsys.readouterr().out.lstrip().startswith("Usage: ")
