"""At SIGTERM and SIGINT the broker ends its streams, and leaves no trace if the program goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.broker.serving import ACME, KEYS, frozen, reading, served, stage

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource, drain_on_signals


async def test_signal_drains_the_broker_and_reaches_the_handler_of_the_server() -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        broker = Broker(MemorySource(), channels=["orders"])
        async with broker, broker.subscribe(ACME) as stream, asyncio.timeout(30):
            with drain_on_signals(broker, over=0):
                os.kill(os.getpid(), signal.SIGTERM)
                assert [item async for item in stream] == []
            assert signals == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            assert len(signals) == 2, "the handler of the server is installed again"
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_at_a_signal_the_end_of_a_stream_that_is_not_read_is_cut() -> None:
    """The response is complete, and uvicorn would wait until the client has read it."""
    source = MemorySource()
    async with Broker(source, channels=["orders"]) as broker:
        asgi, transports = BrokerApp(broker, ApiKeys(KEYS)), list[Any]()

        async def observed(scope: Any, receive: Any, send: Any) -> None:
            transports.append(receive.__self__.transport)
            await asgi(scope, receive, send)

        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            async with served(observed) as url, asyncio.timeout(60):
                with frozen(url):
                    while not transports or not transports[0].get_write_buffer_size():
                        payload = {"org_id": ACME, "text": "x" * 10_000}
                        source.publish("orders", json.dumps(payload))
                        await asyncio.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGTERM)
                    while broker.statistics().subscribers:  # noqa: ASYNC110 - no event for it
                        await asyncio.sleep(0.01)
                    transports[0].close()  # as uvicorn does when it shuts down
                    while transports[0].get_write_buffer_size():  # noqa: ASYNC110 - nor for this
                        await asyncio.sleep(0.01)
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that the handler of the program gets, which goes on."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


async def test_handlers_are_restored_when_the_last_stream_has_ended(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    async with stage() as on:
        async with reading(on.url), reading(on.url):
            await on.subscribers(2)
            assert signal.getsignal(signal.SIGINT) != before
        await on.subscribers(0)
        assert signal.getsignal(signal.SIGINT) == before


async def test_program_that_goes_on_after_a_signal_accepts_streams_again(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.broker._http.DRAIN", 0.1)
    monkeypatch.setattr("moored.broker._broker.STOPPED", 3.0)
    async with stage() as on:
        async with reading(on.url) as acme:
            await on.subscribers(1)
            os.kill(os.getpid(), signal.SIGINT)
            assert await acme.next() is None
        assert (await on.get("/v1/subscribe", x_api_key="acme-key")).status_code == 503
        await on.until(lambda: not on.broker.draining)
        async with reading(on.url) as acme:
            await on.subscribers(1)
            on.publish(1)
            assert await acme.next() is not None
    assert handled == [signal.SIGINT]
