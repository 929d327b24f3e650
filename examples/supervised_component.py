"""A supervised component: it connects, reports that it has started, and is restarted on failure.

Expected output:

    link 1 is up
    link 2 is up
    running for 0.0 s
      because  1st restart
      because  failed
      because  the server went away (ConnectionResetError)
"""

import asyncio
import logging

from moored.kernel import Child, Context, Supervisor

second_link = asyncio.Event()


async def listener(ctx: Context) -> None:
    link = f"link {ctx.generation}"  # dial here: a raise before started() is a failed start
    ctx.started(link)  # the next sibling starts only now
    print(f"{link} is up")
    if ctx.generation == 1:
        raise ConnectionResetError("the server went away")
    second_link.set()
    await asyncio.Event().wait()  # return: done; raise: restarted; cancel: stopped


async def main() -> None:
    logging.disable()  # the failure would be logged with its traceback
    async with Supervisor("root", strategy="rest_for_one") as root:
        await root.start_child(Child("listener", listener))
        await second_link.wait()
        for line in root.recorder.explain("root/listener").splitlines():
            print(line.partition(" at ")[0])


if __name__ == "__main__":
    asyncio.run(main())
