"""A client for the streams of a broker, which reconnects and resumes by itself.

::

    async for event in follow("https://api.example/v1/subscribe", token=key):
        if isinstance(event, StreamReset):
            await load_everything()
        else:
            handle(event.channel, event.data)

Needs httpx, which `moored[client]` installs.
"""

from __future__ import annotations

import json
import random
from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import NamedTuple

from moored.kernel import extra

from ._events import StreamReset

with extra("client", "moored.broker.client"):
    import httpx

__all__ = ["ReceivedEvent", "StreamRefused", "follow"]

#: A stream without a byte for so many seconds counts as lost: the broker sends a comment every 15.
SILENCE = 45.0
#: Answers that another attempt does not change.
FINAL = (400, 401, 403, 404)


class StreamRefused(Exception):
    """The broker refuses the stream: the token, the channel or the address is not right."""


class ReceivedEvent(NamedTuple):
    """An event of the broker."""

    channel: str
    data: str
    #: The id to resume after; None for `skipped`, whose data is the number of dropped events.
    id: str | None


async def follow(
    url: str,
    *,
    token: str | Callable[[], str],
    channels: Iterable[str] = (),
    after: str = "",
    client: httpx.AsyncClient | None = None,
) -> AsyncGenerator[ReceivedEvent | StreamReset]:
    """Yield events without end, from the event after `after` on.

    :param token: the token, or a function that returns the current one for each connection.
    :param channels: all by default.
    :param client: an HTTP client with other settings, for example for a proxy.
    :raises StreamRefused: the answer is 400, 401, 403 or 404.
    """
    http = client or httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=SILENCE))
    params = {"channel": list(channels)}
    failures = 0
    try:
        while True:
            headers = {"Authorization": f"Bearer {token() if callable(token) else token}"}
            if after:
                headers["Last-Event-ID"] = after
            pause = 2.0
            try:
                async with http.stream("GET", url, params=params, headers=headers) as response:
                    if response.status_code in FINAL:
                        text = (await response.aread()).decode(errors="replace")
                        raise StreamRefused(f"{response.status_code} from {url}: {text}")
                    pause = float(response.headers.get("retry-after", pause))
                    response.raise_for_status()
                    failures = 0
                    async for name, data, id in _blocks(response):
                        after = after if id is None else id
                        if name == "reset":
                            yield StreamReset(json.loads(data)["reason"], after)
                        elif name == "retry":
                            pause = int(data) / 1000
                        else:
                            yield ReceivedEvent(name, data, id)
            except httpx.HTTPError:
                failures += 1
            await sleep(min(30.0, pause * 2 ** min(failures, 4)) * random.uniform(0.5, 1.0))
    finally:
        if client is None:
            await http.aclose()


async def _blocks(response: httpx.Response) -> AsyncIterator[tuple[str, str, str | None]]:
    """Yield the name, the data and the id of each event of a stream."""
    name, data, id = "message", list[str](), None
    async for line in response.aiter_lines():
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data), id
            name, data, id = "message", [], None
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            id = value
        elif field == "retry" and value.isdecimal():
            yield "retry", value, None
