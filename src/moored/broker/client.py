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
import logging
import random
from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import NamedTuple

from moored.kernel import describe, extra, run_callback

from ._events import StreamReset

with extra("client", "moored.broker.client"):
    import httpx

__all__ = ["ReceivedEvent", "StreamRefused", "follow"]

log = logging.getLogger("moored.broker")

#: A stream without a byte for so many seconds counts as lost: the broker sends a comment every 15.
SILENCE = 45.0
#: The client errors that another attempt may not get.
TEMPORARY = (408, 425, 429)
#: Seconds before the next attempt, unless the server names them; and at most.
PAUSE, LONGEST = 2.0, 30.0


class StreamRefused(Exception):
    """The server refuses the stream: the token, the channel or the address is not right."""


class ReceivedEvent(NamedTuple):
    """An event of the broker."""

    channel: str
    data: str
    #: The id to resume after; None for `skipped`, whose data has the number of dropped events.
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
    :raises StreamRefused: the answer is a redirect or a client error, for which another attempt
        does not help. All other failures are logged, and the client connects again.
    """
    # Its imports and certificates would hold the event loop, on a busy machine for seconds.
    http: httpx.AsyncClient = client or await run_callback(_new_client, name="moored-broker-client")
    params = {"channel": list(channels)}
    failures = 0
    try:
        while True:
            headers = {"Authorization": f"Bearer {token() if callable(token) else token}"}
            if after:
                headers["Last-Event-ID"] = after
            pause = PAUSE
            try:
                async with http.stream("GET", url, params=params, headers=headers) as response:
                    pause = _seconds(response.headers.get("retry-after", ""))
                    await _check(response)
                    failures = 0
                    async for name, data, id in _blocks(response):
                        after = after if id is None else id
                        if name == "reset":
                            yield StreamReset(json.loads(data)["reason"], after)
                        elif name == "retry":
                            pause = int(data) / 1000
                        elif name not in ("start", "expired", "keepalive"):
                            yield ReceivedEvent(name, data, id)
            except httpx.HTTPError as error:
                failures += 1
                log.log(
                    logging.WARNING if failures == 1 else logging.DEBUG,
                    "the stream of %s was lost and will be reopened: %s",
                    url,
                    describe(error),
                )
            longer = min(LONGEST, pause * 2 ** min(failures, 4)) * random.uniform(0.5, 1.0)
            await sleep(max(pause, longer))
    finally:
        if client is None:
            await http.aclose()


def _new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=SILENCE))


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header, which may also be a date."""
    return float(retry_after) if retry_after.isdecimal() else PAUSE


async def _check(response: httpx.Response) -> None:
    """Raise unless the server has opened the stream."""
    status = response.status_code
    if 300 <= status < 500 and status not in TEMPORARY:
        text = (await response.aread()).decode(errors="replace")
        raise StreamRefused(f"{status} from {response.url}: {text or response.reason_phrase}")
    response.raise_for_status()


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream; httpx would also split at other characters, such as U+2028."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line


async def _blocks(response: httpx.Response) -> AsyncIterator[tuple[str, str, str | None]]:
    """Yield the name, the data and the id of each event of a stream."""
    name, data, id = "message", list[str](), None
    async for line in _lines(response):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data), id
            elif id is not None:
                yield "keepalive", "", id
            name, data, id = "message", [], None
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            id = value
        elif field == "retry" and value.isdecimal():
            yield "retry", value, None
