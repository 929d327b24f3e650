"""Events for one user of a tenant reach no other user, live and from the history."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import jwt
import pytest
from tests.broker.serving import ACME, OTHER, reading, stage

from moored.broker import Broker, Jwt, LiveEvent, MemorySource, _audience
from moored.broker.postgres import OutboxEvents
from moored.postgres import Outbox
from moored.reservoir import AsyncConnectionPool
from moored.testing import Mutant, mutant

SECRET = "a secret of at least thirty-two bytes"
LIMIT = 30.0


def event(number: int, user: Any = None, tenant: str = ACME) -> str:
    named = {} if user is None else {"user_id": user}
    return json.dumps({"org_id": tenant, "number": number, **named})


#: Events by their numbers, and the users who get them.
EVENTS = [event(1, "ann"), event(2), event(3, "bob"), event(4, 7), event(5, "ann", OTHER), event(6)]
EXPECTED = {"ann": [1, 2, 6], "bob": [2, 3, 6], "7": [2, 4, 6], None: [2, 6]}


def token(user: str) -> str:
    named = {"org_id": ACME, "sub": user, "exp": time.time() + 60}
    return jwt.encode(named, SECRET)


async def numbers(stream: Any, last: int = 6) -> list[int]:
    """Return the numbers of the events up to the last one."""
    found: list[int] = []
    async with asyncio.timeout(LIMIT):
        while last not in found:
            item = await anext(stream)
            assert isinstance(item, LiveEvent), item
            found.append(json.loads(item.payload)["number"])
    return found


async def check(broker: Broker, publish: Any) -> None:
    """Compare what each user gets live, and what each gets from the history."""
    async with broker.subscribe(ACME) as first:
        start = first.start
        streams = {user: broker.open(ACME, user=user) for user in EXPECTED}
        for payload in EVENTS:
            await publish(payload)
        assert {user: await numbers(each) for user, each in streams.items()} == EXPECTED
        for each in streams.values():
            broker.close(each)
    for user, expected in EXPECTED.items():
        async with broker.subscribe(ACME, after=start, user=user) as stream:
            assert await numbers(stream) == expected


async def in_memory() -> None:
    source = MemorySource()

    async def publish(payload: str) -> None:
        source.publish("orders", payload)

    async with Broker(source, user="user_id") as broker:
        await check(broker, publish)


async def test_event_for_one_user_reaches_no_other() -> None:
    await in_memory()


async def test_history_of_an_outbox_has_events_of_the_user_and_of_all(postgres_url: str) -> None:
    async with (
        AsyncConnectionPool(postgres_url, max_size=4) as pool,
        Outbox(pool, install=True) as outbox,
        Broker(OutboxEvents(outbox), user="user_id") as broker,
    ):

        async def publish(payload: str) -> None:
            async with pool.connection() as conn:
                await outbox.publish(conn, "orders", payload, tenant=json.loads(payload)["org_id"])

        await check(broker, publish)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("may_have", lambda self, event: True),
        ("may_have", lambda self, event: self.user is None or event.user in ("", self.user)),
    ],
    ids=["no look at the user", "a stream without a user gets all"],
)
async def test_a_planted_leak_is_caught(name: str, planted: Any) -> None:
    leak: Mutant = mutant(_audience.StreamBuffer, name, planted, name="a leak")
    with leak, pytest.raises(AssertionError):
        await in_memory()


async def test_user_of_a_stream_is_the_subject_of_its_token() -> None:
    async with (
        stage(Jwt(SECRET, subject="sub"), user="user_id") as on,
        reading(on.url, token("ann")) as ann,
        reading(on.url, token("bob")) as bob,
        asyncio.timeout(LIMIT),
    ):
        await on.subscribers(2)
        for payload in EVENTS:
            on.source.publish("orders", payload)
        for stream, expected in ((ann, [1, 2, 6]), (bob, [2, 3, 6])):
            found: list[int] = []
            while 6 not in found:
                got = await stream.next()
                assert got is not None
                found.append(got.json()["number"])
            assert found == expected


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (event(1, None)[:-1] + ', "user_id": null}', "bad_user"),
        (event(1, True), "bad_user"),
        (event(1, ["ann"]), "bad_user"),
        (event(1, ""), "bad_user"),
        (event(1, "ann")[:-1] + ', "user_id": "bob"}', "user_twice"),
    ],
)
async def test_event_whose_user_is_not_certain_is_dropped(payload: str, reason: str) -> None:
    source = MemorySource()
    async with Broker(source, user="user_id") as broker, broker.subscribe(ACME) as stream:
        source.publish("orders", payload)
        source.publish("orders", event(6))
        assert await numbers(stream) == [6]
        assert broker.statistics().dropped == {reason: 1}
