"""Clients are created from URLs; mistakes in a URL are reported."""

from __future__ import annotations

import sys

import pytest

from moored.leases import MemoryStore, StoreMisconfigured, connect
from moored.leases._memory import _named
from moored.leases._url import parse
from moored.leases._url_parameters import UrlParameters


async def test_a_memory_store_is_opened_by_url() -> None:
    async with connect("memory://", service_name="orders", owner="pool-1") as leases:
        lease = await leases.acquire("db", limit=1)
        assert lease is not None
        assert lease.owner == "pool-1"
        assert repr(leases) == "<Leases memory://: open, 1 lease>"


async def test_stores_without_a_name_are_private_and_named_ones_are_shared() -> None:
    try:
        async with connect("memory://") as first, connect("memory://") as second:
            assert await first.acquire("db", limit=1) is not None
            assert await second.acquire("db", limit=1) is not None
        async with connect("memory://tests") as first, connect("memory://tests") as second:
            assert await first.acquire("db", limit=1) is not None
            assert await second.acquire("db", limit=1) is None
    finally:
        _named.pop("tests", None)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("cache", "'cache' is not a URL: write SCHEME://"),
        ("mongodb://cache", r"unknown scheme mongodb://; use one of memory://, postgres://"),
        ("memory://?limit=3", "memory://.*unknown parameter 'limit'; known parameters: none"),
        ("redis://cache:port", "redis://cache:port is not a URL"),
    ],
)
def test_invalid_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(StoreMisconfigured, match=words):
        connect(url)


@pytest.mark.parametrize(
    ("url", "module", "line"),
    [
        ("redis://cache", "redis", "redis:// needs redis, which is not installed: "),
        ("dynamodb://leases", "aiobotocore", "dynamodb:// needs aiobotocore, which is not "),
    ],
)
def test_a_missing_extra_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, line: str
) -> None:
    ours = [name for name in sys.modules if name.startswith("moored.leases.")]
    for name in [*ours, *(name for name in sys.modules if name.split(".")[0] == module)]:
        if name.startswith("moored.leases.") and module not in name.replace("dynamodb", module):
            continue
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreMisconfigured) as caught:
        connect(url)
    assert str(caught.value).startswith(line)
    assert "pip install 'moored[" in str(caught.value)


def test_adapters_are_imported_only_when_used() -> None:
    """In a new interpreter, because this one has them all."""
    import subprocess

    code = "import sys, moored.leases as l; l.connect('memory://'); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert "moored.leases" in loaded
    assert not loaded & {"redis", "psycopg", "aiobotocore", "botocore"}


def test_a_url_is_parsed_into_its_parts() -> None:
    url = parse("redis://us%40er:p%23ss@Cache-1:6380/2?prefix=a%20b&ssl=")
    assert (url.scheme, url.host, url.port, url.path) == ("redis", "Cache-1", 6380, "/2")
    assert (url.username, url.password) == ("us@er", "p#ss")
    assert url.parameters == {"prefix": "a b", "ssl": ""}
    assert parse("redis://[::1]:6379").host == "::1"
    assert parse("dynamodb://Orders_Leases?region=eu-west-1").host == "Orders_Leases"


def test_a_misspelt_parameter_is_reported_with_a_suggestion() -> None:
    settings = UrlParameters(parse("redis://cache?prefx=orders"))
    settings.text("prefix", "moored")
    with pytest.raises(StoreMisconfigured, match="'prefx'; did you mean 'prefix'"):
        settings.done()
    settings.done(others=True)


def test_the_repr_of_a_store_counts_its_leases() -> None:
    assert repr(MemoryStore()) == "<MemoryStore: 0 leases of 0 keys>"
