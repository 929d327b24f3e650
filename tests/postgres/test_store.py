"""The state file of a stream."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.programs import Program

from moored.postgres import ConfigurationError, History, Lsn, Reset, StateError
from moored.postgres.consume import _store
from moored.postgres.consume._store import Saved, StateStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    opened = StateStore(tmp_path / "deep" / "state.db")
    yield opened
    opened.close()


def again(store: StateStore) -> StateStore:
    store.close()
    return StateStore(store.path)


def test_a_new_store_is_empty(store: StateStore) -> None:
    assert store.history() is None
    assert store.confirmed() is None
    assert store.load().consumers == {}


def test_the_state_survives_a_reopen(store: StateStore) -> None:
    store.set_history(History("7", 3))
    store.post(store.put, "search", None)
    store.post(store.put, "cache", 5)
    store.save(Lsn(100), {"search": 120, "cache": 100})
    other = again(store)
    assert other.history() == History("7", 3)
    assert other.confirmed() == 100
    assert other.load().consumers == {
        "search": Saved(Lsn(120), None),
        "cache": Saved(Lsn(100), None),
    }
    other.close()


def test_a_reset_is_stored_until_it_was_handled(store: StateStore) -> None:
    store.post(store.put, "search", 5)
    store.save(Lsn(5), {"search": 5})
    first = store.reset("restored from a backup")
    assert store.load().consumers == {"search": Saved(None, Reset("restored from a backup", 1))}
    assert store.confirmed() is None
    second = store.reset("restored from a backup")
    store.reset_handled("search", first.number)
    assert store.load().consumers == {"search": Saved(None, second)}
    store.reset_handled("search", second.number)
    assert store.load().consumers == {"search": Saved(None, None)}


def test_a_file_without_reset_numbers_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute(
            "create table consumers "
            "(name text primary key, acknowledged text, delivered text, reset text) without rowid"
        )
        file.execute("insert into consumers values ('search', null, null, 'restored')")
    with closing(StateStore(path)) as store:
        assert store.load().consumers == {"search": Saved(None, Reset("restored"))}
        store.reset_handled("search", 0)
        assert store.load().consumers == {"search": Saved(None, None)}


def test_a_reset_of_one_consumer_does_not_affect_others(store: StateStore) -> None:
    store.post(store.put, "slow", 5)
    store.post(store.put, "quick", 50)
    store.save(Lsn(5), {})
    store.reset("too slow", "slow")
    assert store.load().consumers["quick"] == Saved(Lsn(50), None)
    assert store.load().consumers["slow"] == Saved(None, Reset("too slow", 1))
    assert store.confirmed() == 5


def test_a_dropped_consumer_is_removed(store: StateStore) -> None:
    store.post(store.put, "search", 5)
    store.post(store.put_dropped, "search")
    assert store.load().consumers == {}


def test_the_greatest_lsn_can_be_stored(store: StateStore) -> None:
    store.post(store.put, "search", 2**64 - 1)
    store.save(Lsn(2**64 - 1), {"search": 2**64 - 1})
    assert store.confirmed() == 2**64 - 1
    assert store.load().consumers["search"].acknowledged == 2**64 - 1


def test_a_stale_save_changes_nothing(store: StateStore) -> None:
    """Another process may write an older state when it closes."""
    store.post(store.put, "search", 5)
    store.save(Lsn(10), {"search": 20}, {"search": 18})
    store.save(Lsn(8), {"search": 15, "nobody": 3}, {"search": 12})
    assert store.confirmed() == 10
    assert store.load().consumers == {"search": Saved(Lsn(20), None, Lsn(18))}
    store.reset("restored")
    store.save(Lsn(30), {"search": 40})
    assert store.confirmed() is None
    assert store.load().consumers["search"].acknowledged is None
    store.save(Lsn(3), {"search": 4}, times_reset=1)
    assert store.confirmed() == 3
    assert store.load().consumers["search"].acknowledged == 4


def test_resets_are_counted(store: StateStore) -> None:
    assert store.load().resets == (0, "")
    store.reset("restored from a backup")
    store.post(store.put, "search", 5)
    store.reset("too slow", "search")
    assert store.load().resets == (1, "restored from a backup")
    store.reset("")
    assert again(store).load().resets == (2, "")


def test_a_given_up_slot_is_stored_until_the_next_history(store: StateStore) -> None:
    store.set_history(History("7", 3), Lsn(5))
    store.give_up("invalidated")
    assert store.given_up() == "invalidated"
    assert store.history() == History("7", 3)
    store.set_history(History("7", 3), Lsn(9))
    assert store.given_up() is None
    assert store.confirmed() == 5  # what it was told, it was told
    store.reset("invalidated")
    store.set_history(History("7", 3), Lsn(9))
    assert store.confirmed() == 9


def test_a_file_that_is_not_sqlite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("something else, and rather more of it than a line" * 100)
    with pytest.raises(ConfigurationError, match=r"cannot be stored in .*state\.db"):
        StateStore(path)
    with pytest.raises(ConfigurationError, match="cannot be stored"):
        StateStore(path / "deeper" / "state.db")


def test_saved_state_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from moored.postgres import History, Lsn\n"
        "from moored.postgres.consume import StateStore\n"
        "store = StateStore(Path(sys.argv[1]))\n"
        "store.post(store.put, 'search', 1)\n"
        "store.save(Lsn(77), {'search': 78})\n"
        "print('saved', flush=True)\n"
        "sys.stdin.read()\n"
    )
    script, path = tmp_path / "saves.py", tmp_path / "state.db"
    script.write_text(program)
    with Program(str(script), str(path)) as process:
        assert process.stdout.readline() == "saved\n"
        process.kill()
    store = StateStore(path)
    assert store.confirmed() == 77
    assert store.load().consumers == {"search": Saved(Lsn(78), None)}
    store.close()


# -- a file that cannot be written ---------------------------------------------------------------


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store that waits only a moment for another process."""
    monkeypatch.setattr(_store, "PATIENCE", 0.05)
    opened = StateStore(tmp_path / "state.db")
    opened.post(opened.put, "search", 5)
    yield opened
    opened.close()


def test_a_save_succeeds_after_a_reader_has_released_the_file(impatient: StateStore) -> None:
    reader = sqlite3.connect(impatient.path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select * from consumers").fetchall()
    with pytest.raises(StateError, match=r"state\.db.*locked.*0\.05 s"):
        impatient.save(Lsn(100), {"search": 100})
    reader.close()
    impatient.save(Lsn(120), {"search": 120})
    assert impatient.confirmed() == 120


def test_a_failed_save_leaves_the_file_free_for_other_writers(impatient: StateStore) -> None:
    reader = sqlite3.connect(impatient.path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select * from consumers").fetchall()
    with pytest.raises(StateError):
        impatient.save(Lsn(100), {"search": 100})
    reader.close()
    other = StateStore(impatient.path)
    other.save(Lsn(110), {"search": 110})
    other.close()


def test_a_full_disk_is_named_with_its_path(impatient: StateStore) -> None:
    impatient._database.execute("pragma max_page_count = 1")
    with pytest.raises(StateError, match=r"disk of .*state\.db.* is full"):
        impatient.post(impatient.put, "x" * 100_000, 5)
    impatient._database.execute("pragma max_page_count = 100000")
    impatient.post(impatient.put, "another", 5)
    assert "another" in impatient.load().consumers


def test_a_failed_read_names_the_path(impatient: StateStore) -> None:
    writer = sqlite3.connect(impatient.path, isolation_level=None)
    writer.execute("begin exclusive")
    with pytest.raises(StateError, match=r"state\.db.*locked"):
        impatient.load()
    writer.close()
    assert "search" in impatient.load().consumers


def test_only_the_user_can_read_the_file(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "streams" / "state.db")
    store.post(store.put, "search", 5)
    store.close()
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_symbolic_link_instead_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.db").touch()
    (tmp_path / "state.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(ConfigurationError, match="state_dir"):
        StateStore(tmp_path / "state.db")


# -- a file that was deleted while it was open ---------------------------------------------------


def saved(store: StateStore, at: int) -> dict[str, Saved]:
    """Let a consumer have a position."""
    store.set_history(History("7", 3))
    store.post(store.put_new, "search", None)
    store.save(Lsn(at), {"search": at})
    return {"search": Saved(Lsn(at), None)}


def test_what_a_deleted_file_had_is_stored_in_a_new_one(impatient: StateStore) -> None:
    for at in (10, 20):
        before = saved(impatient, at)
        impatient.path.unlink()
        with pytest.raises(StateError, match=r"state\.db was deleted"):
            impatient.save(Lsn(30), {"search": 30})
        assert impatient.load().consumers == before
        with closing(StateStore(impatient.path)) as other:
            assert other.load().consumers == before
            assert other.confirmed() == at


def test_a_file_that_replaces_a_deleted_one_is_used_as_it_is(
    impatient: StateStore, tmp_path: Path
) -> None:
    saved(impatient, 20)
    with closing(StateStore(tmp_path / "backup.db")) as backup:
        before = saved(backup, 10)
    backup.path.replace(impatient.path)
    assert impatient.load().consumers == before
    assert impatient.confirmed() == 10


def test_a_file_that_was_emptied_before_it_was_deleted_is_lost(impatient: StateStore) -> None:
    impatient.path.write_bytes(b"")
    impatient.path.unlink()
    assert impatient.load().consumers == {}
    after = saved(impatient, 10)
    assert impatient.load().consumers == after


def test_a_new_file_that_is_locked_is_waited_for(impatient: StateStore) -> None:
    before = saved(impatient, 10)
    impatient.path.unlink()
    with closing(sqlite3.connect(impatient.path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(StateError, match="locked"):
            impatient.load()
    assert impatient.load().consumers == before


def test_a_directory_in_which_no_file_can_be_created_is_named(store: StateStore) -> None:
    before, folder = saved(store, 10), store.path.parent
    shutil.rmtree(folder)
    folder.touch()
    with pytest.raises(StateError, match=r"state\.db cannot be used: .*; make .*deep a directory"):
        store.load()
    folder.unlink()
    assert store.load().consumers == before
