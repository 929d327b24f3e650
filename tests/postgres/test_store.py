"""What survives the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.postgres import History, Lsn
from holdfast.postgres._store import Saved, StateStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    opened = StateStore(tmp_path / "deep" / "state.db")
    yield opened
    opened.close()


def again(store: StateStore) -> StateStore:
    store.close()
    return StateStore(store.path)


def test_a_new_one_knows_nothing(store: StateStore) -> None:
    assert store.history() is None
    assert store.told() is None
    assert store.consumers() == {}


def test_everything_is_there_again(store: StateStore) -> None:
    store.set_history(History("7", 3))
    store.add("search", None)
    store.add("cache", 5)
    store.save(Lsn(100), {"search": 120, "cache": 100})
    other = again(store)
    assert other.history() == History("7", 3)
    assert other.told() == 100
    assert other.consumers() == {
        "search": Saved(Lsn(120), None),
        "cache": Saved(Lsn(100), None),
    }
    other.close()


def test_a_reset_is_told_until_it_was_understood(store: StateStore) -> None:
    store.add("search", 5)
    store.save(Lsn(5), {"search": 5})
    store.reset("restored from a backup")
    assert store.consumers() == {"search": Saved(None, "restored from a backup")}
    assert store.told() is None
    store.was_told("search")
    assert store.consumers() == {"search": Saved(None, None)}


def test_a_reset_of_one_leaves_the_others_alone(store: StateStore) -> None:
    store.add("slow", 5)
    store.add("quick", 50)
    store.save(Lsn(5), {})
    store.reset("too slow", "slow")
    assert store.consumers()["quick"] == Saved(Lsn(50), None)
    assert store.consumers()["slow"] == Saved(None, "too slow")
    assert store.told() == 5


def test_a_consumer_that_is_dropped_is_forgotten(store: StateStore) -> None:
    store.add("search", 5)
    store.drop("search")
    assert store.consumers() == {}


def test_the_greatest_place_there_is_fits(store: StateStore) -> None:
    store.add("search", 2**64 - 1)
    store.save(Lsn(2**64 - 1), {"search": 2**64 - 1})
    assert store.told() == 2**64 - 1
    assert store.consumers()["search"].acknowledged == 2**64 - 1


def test_what_was_saved_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from holdfast.postgres import History, Lsn\n"
        "from holdfast.postgres._store import StateStore\n"
        "store = StateStore(Path(sys.argv[1]))\n"
        "store.add('search', 1)\n"
        "store.save(Lsn(77), {'search': 78})\n"
        "print('saved', flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = tmp_path / "state.db"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        os.kill(process.pid, signal.SIGKILL)
    store = StateStore(path)
    assert store.told() == 77
    assert store.consumers() == {"search": Saved(Lsn(78), None)}
    store.close()
