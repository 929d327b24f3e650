"""The default state directory, and secrets in its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moored.kernel import describe
from moored.postgres import Postgres
from moored.postgres._settings import default_state_dir

pytestmark = pytest.mark.pure

URL = "postgresql://app:s3cr3t@db.example:6543/shop"


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who is not root, in a directory of the test."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("MOORED_STATE_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_default_state_dir_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Postgres(URL).settings.state_dir
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Postgres(URL).settings.state_dir == before
    assert before == tmp_path / ".local/state/moored/streams/db.example_6543_shop"


def test_variables_and_the_option_override_the_state_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_state_dir(URL) == Path("/xdg/moored/streams/db.example_6543_shop")
    monkeypatch.setenv("MOORED_STATE_DIR", "/given")
    assert Postgres(URL).settings.state_dir == Path("/given")
    assert Postgres(URL, state_dir="here").settings.state_dir == tmp_path / "here"


def test_the_state_dir_of_root_is_in_var_lib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_state_dir(URL) == Path("/var/lib/moored/streams/db.example_6543_shop")


def test_the_state_dir_is_named_by_the_replication_url() -> None:
    pg = Postgres("postgresql://pooler/shop", replication_url=URL)
    assert pg.settings.state_dir.name == "db.example_6543_shop"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("host=/run/postgresql dbname=shop", "run-postgresql_5432_shop"),
        ("postgresql://app@db", "db_5432_app"),
        ("postgresql://db/../etc", "db_5432_..-etc"),
    ],
)
def test_every_url_gives_a_valid_directory_name(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PGPORT", "PGDATABASE", "PGHOST", "PGUSER"):
        monkeypatch.delenv(variable, raising=False)
    assert default_state_dir(url).name == name


def test_libpqs_environment_variables_are_part_of_the_directory_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGPORT", "6543")
    assert default_state_dir("postgresql:///shop").name == "db.example_6543_shop"


def test_an_invalid_url_is_refused_only_when_it_is_used() -> None:
    assert default_state_dir("postgresql://db/shop?nonsense=1").name


def test_an_unescaped_password_is_not_in_the_directory_name() -> None:
    assert "hidden" not in str(default_state_dir("postgresql://app:p@hidden@db/shop"))


def test_the_password_of_every_url_is_hidden_in_what_others_report() -> None:
    urls = [f"postgresql://app:{word}@db/shop" for word in ("sesame1", "sesame2", "sesame3")]
    Postgres(urls[0], replication_url=urls[1], notify_url=urls[2], state_dir="here")
    said = describe(ConnectionError("refused for sesame1, sesame2 and sesame3"))
    assert "sesame" not in said
