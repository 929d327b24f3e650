"""The demo without a browser: what it refuses, and what it is without gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.service.support import moored

from moored.demo import _demo
from moored.demo._demo import DemoApp


@contextmanager
def built(directory: Path) -> Iterator[DemoApp]:
    """Yield a demo that is not started."""
    demo = DemoApp(directory)
    try:
        yield demo
    finally:
        demo.close()


def test_the_demo_listens_on_a_loopback_address_only() -> None:
    ended = moored("serve", "--demo", "--host", "0.0.0.0", MOORED_ADMIN_TOKEN="t0ken")
    assert ended.returncode == 2
    assert "the demo listens on a loopback address only" in ended.stderr
    assert "--host 0.0.0.0" in ended.stderr


def test_the_directory_of_a_killed_demo_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = tmp_path / "moored-demo-killed"
    (killed / "postgres").mkdir(parents=True)
    (killed / "lock").touch()
    with _demo.temporary_directory() as first:
        assert not killed.exists()
        with _demo.temporary_directory():
            assert first.is_dir(), "its demo runs"
    assert list(tmp_path.iterdir()) == []


def test_without_grpc_the_demo_has_no_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with built(tmp_path) as demo:
        assert {"grpc", "grpc-server"} <= set(demo.app._parts)
        assert "kill-grpc" in demo.faults.faults
    monkeypatch.setattr(_demo, "find_spec", lambda name: None)
    with built(tmp_path) as demo:
        assert not {"grpc", "grpc-server"} & set(demo.app._parts)
        assert "kill-grpc" not in demo.faults.faults
