"""The public names."""

from __future__ import annotations

import pytest

import moored.embedded as embedded
from moored.kernel import MooredError


def test_the_public_names() -> None:
    assert embedded.__all__ == [
        "BinariesNotFound",
        "DataDirectoryInUse",
        "EmbeddedError",
        "EmbeddedPostgres",
        "Ended",
        "PortInUse",
        "SyncEmbeddedPostgres",
        "VersionMismatch",
        "default_data_dir",
    ]


@pytest.mark.parametrize("name", embedded.__all__)
def test_each_name_is_documented(name: str) -> None:
    assert getattr(embedded, name).__doc__


@pytest.mark.parametrize("face", [embedded.EmbeddedPostgres, embedded.SyncEmbeddedPostgres])
def test_both_classes_have_the_same_interface(face: type) -> None:
    for name in ("start", "stop", "restart", "kill", "wait_ended", "log_tail", "url", "url_of"):
        assert getattr(face, name).__doc__


def test_the_error_tree() -> None:
    assert issubclass(embedded.EmbeddedError, MooredError)
    for name in ("BinariesNotFound", "DataDirectoryInUse", "PortInUse", "VersionMismatch"):
        assert issubclass(getattr(embedded, name), embedded.EmbeddedError)
