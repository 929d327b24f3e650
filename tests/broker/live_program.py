"""A program for tests in a browser: streams from Redis, and a page that shows what arrives.

python live_program.py PORT REDIS_URL
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from tests.broker.serving import KEYS

from moored.broker import ApiKeys, Broker, BrokerApp
from moored.broker.redis import RedisEvents

PAGE = """
<!doctype html><title>events</title><link rel="icon" href="data:,"><ol></ol><ul></ul>
<script type="module">
  import { subscribe } from "/v1/subscribe.js";
  const show = (list, text) => document.querySelector(list).append(
    Object.assign(document.createElement("li"), { textContent: text }));
  subscribe("/v1/subscribe", {
    token: "acme-key",
    onevent: (event) => show("ol", JSON.parse(event.data).number),
    onreset: (reason) => show("ol", "reset"),
  });

  async function open(last) {
    const again = () => setTimeout(open, 200, last);
    try {
      const headers = { Authorization: "Bearer acme-key" };
      const { ticket } = await (await fetch("/v1/tickets", { method: "POST", headers })).json();
      const query = new URLSearchParams({ ticket, last_event_id: last });
      const events = new EventSource(`/v1/subscribe?${query}`);
      for (const name of ["start", "orders", "reset"]) {
        events.addEventListener(name, (event) => {
          last = event.lastEventId;
          if (name !== "start") show("ul", JSON.parse(event.data).number ?? name);
        });
      }
      events.onerror = () => { events.close(); again(); };
    } catch { again(); }
  }
  open("");
</script>
"""


def main(port: int, redis: str) -> None:
    source = RedisEvents(redis)
    broker = Broker(source, replay=source, channels=["orders"])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with broker:
            yield
        await source.close()

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(PAGE)

    routes = [Route("/", page), Mount("/", BrokerApp(broker, ApiKeys(KEYS)))]
    app = Starlette(routes=routes, lifespan=lifespan)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
