"""An echo bot: it publishes each message on to-bot/NAME to from-bot/NAME.

    python examples/mqtt_bot.py mqtt://127.0.0.1:1883

Kill and restart the broker, or cut the network: the bot reconnects by itself, and replies.
"""

import asyncio
import contextlib
import sys

from moored.sessions import ConnectionUpdate, Msg, Sessions
from moored.sessions.mqtt import Mqtt


async def main(broker: str) -> None:
    mqtt = Mqtt(broker, subscribe="to-bot/+", topic="from-bot/{recipient}")
    async with Sessions() as sessions:
        bot = await sessions.start("bot", mqtt)
        async for event in bot.events():
            match event.data:
                case ConnectionUpdate(state=state, reason=reason):
                    print(state, "" if state == "online" else reason, flush=True)
                case Msg(content=content, to=topic):
                    name = topic.rpartition("/")[2]
                    outcome = await bot.send(
                        name, content, hold=True, idempotent=True, timeout=3600, outcome=True
                    )
                    print(f"to {name}: {outcome}", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:] or ["mqtt://127.0.0.1:1883"]))
