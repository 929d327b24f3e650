"""Streams behind a real nginx, with its default settings for a proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from tests.broker.serving import ACME, KEYS, reading, served
from tests.http_client import http_client
from tests.servers import free_port, require_server

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource

CONFIG = """
daemon off; pid {directory}/nginx.pid; error_log {directory}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://{upstream}; proxy_http_version 1.1; }}
  }}
}}
"""


@asynccontextmanager
async def nginx(directory: Path, upstream: str) -> AsyncIterator[str]:
    port = free_port()
    text = CONFIG.format(directory=directory, port=port, upstream=urlsplit(upstream).netloc)
    config = directory / "nginx.conf"
    config.write_text(text)
    command = [require_server("nginx"), "-p", str(directory), "-c", str(config)]
    process = await asyncio.create_subprocess_exec(*command, "-e", str(directory / "error.log"))
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(30), http_client() as client:
            while True:
                try:
                    await client.get(f"{url}/v1/subscribe.js")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.02)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def test_each_event_arrives_before_the_next_one_is_published(tmp_path: Path) -> None:
    source = MemorySource()
    async with Broker(source, channels=["orders"]) as broker:
        app = BrokerApp(broker, ApiKeys(KEYS))
        async with (
            served(app) as upstream,
            nginx(tmp_path, upstream) as url,
            reading(url) as events,
            asyncio.timeout(60),
        ):
            for number in range(20):
                source.publish("orders", json.dumps({"org_id": ACME, "number": number}))
                found = await events.next()
                assert found is not None
                assert found.json()["number"] == number
