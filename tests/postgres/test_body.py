"""The messages of a transaction: the same whether they are in memory or in a file."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.postgres.recording import begin, commit, feed_all, framed, insert, relation, texts

from moored.postgres import Insert, Relation, ReplicaIdentity, StateError
from moored.postgres.decode import _body as body_module
from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._body import SPILL_AFTER, Body, Shelf
from moored.testing import scaled

pytestmark = pytest.mark.pure

Entry = bytes | Relation


def table(number: int) -> Relation:
    return Relation(number, "public", f"t{number}", ReplicaIdentity.DEFAULT, [])


def filled(body: Body, entries: list[Entry]) -> Body:
    for entry in entries:
        if isinstance(entry, Relation):
            body.describe(entry)
        else:
            body.append(entry)
    return body


def open_files(under: Path) -> list[str]:
    """The files in this directory that this process has open, with or without a name."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if path.startswith(str(under)):
            found.append(path)
    return found


tables = [table(number) for number in range(5)]
entries_of_all_kinds = st.lists(
    st.one_of(st.binary(min_size=1, max_size=60), st.sampled_from(tables)), max_size=60
)


def test_a_small_body_stays_in_memory(tmp_path: Path) -> None:
    body = Body(Shelf(tmp_path))
    assert filled(body, [b"one", tables[0], b"two"]) is body
    assert not body.spilled
    assert (body.count, body.size) == (2, 6)
    assert list(body.entries()) == [b"one", tables[0], b"two"]
    assert open_files(tmp_path) == []


def test_a_body_above_the_limit_is_written_to_a_file(tmp_path: Path) -> None:
    body = Body(Shelf(tmp_path, spill_after=10))
    filled(body, [b"12345", tables[0], b"67890"])
    spilled = [bool(body.spilled)]
    body.append(b"!")
    assert [*spilled, bool(body.spilled)] == [False, True], "the limit itself is not too much"
    filled(body, [tables[1], b"more", tables[0], b"x" * 1000])
    assert (body.count, body.size) == (5, 1015)
    wanted = [b"12345", tables[0], b"67890", b"!", tables[1], b"more", tables[0], b"x" * 1000]
    assert list(body.entries()) == wanted
    assert list(body.entries()) == wanted, "it can be read again"


def test_the_default_limit_applies() -> None:
    assert Shelf().spill_after == SPILL_AFTER == 16 * 2**20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries_of_all_kinds, st.integers(0, 500), st.integers(1, 200))
def test_a_body_in_a_file_equals_one_in_memory(
    tmp_path: Path, entries: list[Entry], limit: int, chunk: int
) -> None:
    """Wherever the file is cut into pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_CHUNK", chunk)
        kept = filled(Body(), entries)
        spilled = filled(Body(Shelf(tmp_path, spill_after=limit)), entries)
        assert bool(spilled.spilled) is (spilled.size > limit)
        assert list(spilled.entries()) == list(kept.entries()) == entries
        assert (spilled.count, spilled.size) == (kept.count, kept.size)
        assert spilled.described == kept.described


def test_a_body_can_be_read_while_it_grows(tmp_path: Path) -> None:
    body = filled(Body(Shelf(tmp_path, spill_after=1)), [b"one", b"two"])
    before = body.entries()
    assert next(before) == b"one"
    filled(body, [b"three", tables[0]])
    assert list(body.entries()) == [b"one", b"two", b"three", tables[0]]
    assert next(before) == b"two"


def test_a_reader_that_began_in_memory_is_not_disturbed_by_the_file(tmp_path: Path) -> None:
    body = filled(Body(Shelf(tmp_path, spill_after=7)), [b"one", b"two"])
    reader = body.entries()
    assert next(reader) == b"one"
    body.append(b"three")
    assert body.spilled
    assert list(reader) == [b"two", b"three"]


def test_several_readers_interleave(tmp_path: Path) -> None:
    entries: list[Entry] = [b"%d" % number for number in range(100)]
    body = filled(Body(Shelf(tmp_path, spill_after=1)), entries)
    readers = [body.entries() for _ in range(3)]
    assert [list(together) for together in zip(*readers, strict=True)] == [
        [entry] * 3 for entry in entries
    ]


def test_several_readers_in_threads(tmp_path: Path) -> None:
    """The first reader writes the gathered entries; no reader writes them twice."""
    entries: list[Entry] = [b"%d" % number * 100 for number in range(500)]
    for _ in range(scaled(200, least=20)):
        body = filled(Body(Shelf(tmp_path, spill_after=1)), entries)
        start, found = threading.Barrier(4), []

        def look(body: Body = body, start: threading.Barrier = start) -> None:
            start.wait()
            found.append(list(body.entries()) == entries)  # noqa: B023 (joined below)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4


def test_the_file_is_deleted_with_its_body(tmp_path: Path) -> None:
    body = filled(Body(Shelf(tmp_path / "new" / "one", spill_after=1)), [b"12", b"34"])
    assert body.spilled
    assert list((tmp_path / "new" / "one").iterdir()) == [], "it has no name"
    assert len(open_files(tmp_path)) == 1
    reader = body.entries()
    assert next(reader) == b"12"
    del body
    gc.collect()
    assert next(reader) == b"34", "it is there as long as somebody reads it"
    assert len(open_files(tmp_path)) == 1
    del reader
    gc.collect()
    assert open_files(tmp_path) == []


def test_an_unwritable_directory_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    body = Body(Shelf(tmp_path / "file", spill_after=1))
    with pytest.raises(StateError, match=r"file \(File exists\).*another state_dir"):
        filled(body, [b"12"])


def test_a_message_larger_than_a_chunk_is_read_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assembling it chunk by chunk would copy it once for each chunk."""
    large = os.urandom(100_000)
    monkeypatch.setattr(body_module, "_CHUNK", 100)
    body = filled(Body(Shelf(tmp_path, spill_after=1)), [b"before", large, tables[0], b"after"])
    sizes: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert list(body.entries()) == [b"before", large, tables[0], b"after"]
    assert len(sizes) == 4, "a piece, the rest of the large one, a piece, and the end"


def test_a_transaction_in_a_file_has_the_same_changes(tmp_path: Path) -> None:
    """Relations are described in between, where the columns change."""
    messages = [begin(), relation([("id", 23)])]
    messages += [insert(texts(str(number))) for number in range(100)]
    messages += [relation([("id", 23), ("name", 25)])]
    messages += [insert(texts(str(number), "x" * number)) for number in range(100)]
    messages += [commit()]
    (kept,) = feed_all(messages)
    (spilled,) = feed_all(messages, Assembler(lambda: Body(Shelf(tmp_path, spill_after=2000))))
    assert not kept.body.spilled
    assert spilled.body.spilled
    assert kept.body.count == spilled.body.count == 200
    assert list(kept) == list(spilled)
    *_, last = spilled
    assert isinstance(last, Insert)
    assert last.new == {"id": 99, "name": "x" * 99}


def test_a_body_can_be_read_again_after_an_unfinished_read(tmp_path: Path) -> None:
    messages = [begin(), relation([("id", 23)]), *[insert(texts("1"))] * 50, commit()]
    (spilled,) = feed_all(messages, Assembler(lambda: Body(Shelf(tmp_path, spill_after=100))))
    for change in spilled:
        assert change.kind == "insert"
        break
    assert sum(1 for _ in spilled) == 50


def test_the_size_includes_the_headers(tmp_path: Path) -> None:
    (committed,) = feed_all([begin(), relation([("id", 23)]), insert(texts("1")), commit()])
    assert committed.body.size == len(framed(insert(texts("1"))))


def test_a_full_disk_is_named_with_the_directory(tmp_path: Path) -> None:
    body = filled(Body(Shelf(tmp_path, spill_after=1)), [b"one", b"two"])
    assert body.spilled is not None
    assert body.spilled._file is not None
    os.close(body.spilled._file)
    body.spilled._file = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(
        StateError, match=rf"{tmp_path} \(No space left on device\): free disk space"
    ):
        list(body.entries())


def test_a_large_message_is_in_memory_once_while_it_is_read(tmp_path: Path) -> None:
    size = 20 * 2**20
    body = Body(Shelf(tmp_path, spill_after=1))
    body.append(bytes(size))
    tracemalloc.start()
    try:
        assert [len(entry) for entry in body.entries() if isinstance(entry, bytes)] == [size]
        assert tracemalloc.get_traced_memory()[1] < 1.3 * size
    finally:
        tracemalloc.stop()
