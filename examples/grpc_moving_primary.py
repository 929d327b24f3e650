"""Follow a primary that moves, whether the topology changes before the server fails or after.

Here a dictionary holds the topology; in a real service it may be a table, etcd, DNS, or Milvus's
topology over HTTP.

Expected output:

    berlin says hello
    the directory names paris; berlin still runs
    paris says hello
    paris stops, and only then the directory names berlin
    berlin says hello
    3 generations, at the address of berlin: True
"""

from __future__ import annotations

import asyncio

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.rpc import (
    AsyncConnectionManager,
    AsyncGlobalStrategy,
    AsyncHandler,
    Capability,
    ConnectionConfig,
    Member,
    retry_on_rpc_failure,
)

directory = {"primary": "", "replica": ""}


def members() -> list[Member]:
    """Return the members of the cluster; the function may block, or be async."""
    return [
        Member("one", directory["primary"], Capability.PRIMARY),
        Member("two", directory["replica"], Capability.READABLE),
    ]


def strategy(config: ConnectionConfig) -> AsyncGlobalStrategy:
    """Refresh the topology every 0.1 s, to keep this example short; the default is 300 s."""
    return AsyncGlobalStrategy(fetch_topology=members, refresh_every=0.1)


async def serve(name: str) -> tuple[grpc.aio.Server, str]:
    async def hello(request: bytes, context: object) -> bytes:
        return f"{name} says hello".encode()

    methods = {"Hello": grpc.unary_unary_rpc_method_handler(hello)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Greeter", methods),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"http://127.0.0.1:{port}"


@retry_on_rpc_failure
async def hello(channel: AsyncHandler, *, timeout: float) -> str:
    answer: bytes = await channel.unary_unary("/example.Greeter/Hello")(b"", timeout=timeout)
    return answer.decode()


async def main() -> None:
    berlin, at_berlin = await serve("berlin")
    paris, at_paris = await serve("paris")
    directory.update(primary=at_berlin, replica=at_paris)
    async with AsyncConnectionManager(strategy=strategy) as manager:
        channel = await manager.get_or_create(ConnectionConfig.from_uri("http://greeter"))
        print(await hello(channel, timeout=30))

        print("the directory names paris; berlin still runs")
        directory.update(primary=at_paris, replica=at_berlin)
        # The channel moves by itself, without a call.
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await channel.channel_ready()
        print(await hello(channel, timeout=30))

        print("paris stops, and only then the directory names berlin")
        await paris.stop(grace=1)
        calling = asyncio.create_task(hello(channel, timeout=30))
        await asyncio.sleep(0.2)
        directory.update(primary=at_berlin, replica=at_paris)
        print(await calling)

        back = at_berlin.endswith(channel.address)
        print(f"{channel.generation} generations, at the address of berlin: {back}")
    await berlin.stop(grace=1)


if __name__ == "__main__":
    asyncio.run(main())
