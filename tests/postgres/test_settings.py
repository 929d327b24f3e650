"""Where the state is kept, and what of a URL gets into the name of a directory."""

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
    """Somebody who is not root, in a directory of the test's own."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("MOORED_STATE_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_default_place_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Postgres(URL).settings.state_dir
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Postgres(URL).settings.state_dir == before
    assert before == tmp_path / ".local/state/moored/streams/db.example_6543_shop"


def test_the_variables_and_the_option_override_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_state_dir(URL) == Path("/xdg/moored/streams/db.example_6543_shop")
    monkeypatch.setenv("MOORED_STATE_DIR", "/given")
    assert Postgres(URL).settings.state_dir == Path("/given")
    assert Postgres(URL, state_dir="here").settings.state_dir == tmp_path / "here"


def test_root_has_a_place_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_state_dir(URL) == Path("/var/lib/moored/streams/db.example_6543_shop")


def test_the_server_itself_names_it_not_the_pooler() -> None:
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
def test_every_url_is_the_name_of_one_directory(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PGPORT", "PGDATABASE", "PGHOST", "PGUSER"):
        monkeypatch.delenv(variable, raising=False)
    assert default_state_dir(url).name == name


def test_what_libpq_takes_from_the_environment_is_in_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGPORT", "6543")
    assert default_state_dir("postgresql:///shop").name == "db.example_6543_shop"


def test_a_url_that_cannot_be_read_is_refused_when_it_is_used_and_not_before() -> None:
    assert default_state_dir("postgresql://db/shop?nonsense=1").name


def test_a_password_that_is_not_escaped_is_not_in_the_name() -> None:
    assert "hidden" not in str(default_state_dir("postgresql://app:p@hidden@db/shop"))


def test_the_password_of_every_url_is_hidden_in_what_others_report() -> None:
    urls = [f"postgresql://app:{word}@db/shop" for word in ("sesame1", "sesame2", "sesame3")]
    Postgres(urls[0], replication_url=urls[1], notify_url=urls[2], state_dir="here")
    said = describe(ConnectionError("refused for sesame1, sesame2 and sesame3"))
    assert "sesame" not in said
