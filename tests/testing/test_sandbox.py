"""Event handlers in a sandbox session, without a server."""

from __future__ import annotations

import asyncio

import pytest

from moored.sessions import Acked, Incoming, Poll, Session, Text
from moored.testing import session_sandbox

pytestmark = pytest.mark.pure


async def test_a_handler_gets_events_and_its_sends_are_recorded() -> None:
    answered = []

    async def bot(event: Incoming) -> None:
        if event.type == "messages_upsert":
            answered.append(
                await sandbox.session.send_text(event.data.sender, event.data.content.text.upper())
            )

    async with session_sandbox(on_event=bot) as sandbox:
        await sandbox.receive(Text("ping"), sender="ann")
        (sent,) = sandbox.sent
        assert (sent.recipient, sent.content) == ("ann", Text("PING"))
        assert answered == [Acked(sent.id)]


async def test_code_that_iterates_over_events_gets_them() -> None:
    async def bot(session: Session) -> None:
        async for event in session.events():
            if event.type == "messages_upsert":
                await session.send_poll(event.data.sender, Poll("tea?", ("yes", "no")))

    async with session_sandbox() as sandbox:
        task = asyncio.create_task(bot(sandbox.session))
        await sandbox.receive(Text("hello"))
        assert sandbox.sent[-1].content == Poll("tea?", ("yes", "no"))
        await sandbox.session.stop()
        await task


async def test_a_handler_that_raises_fails_the_test() -> None:
    def bot(event: Incoming) -> None:
        if event.type == "messages_upsert":
            raise ValueError("a defect")

    async with session_sandbox(on_event=bot) as sandbox:
        with pytest.raises(AssertionError, match="the handler raised an exception"):
            await sandbox.receive(Text("ping"))
