"""Private names of dependencies that a later version may remove: Moored goes on, or says why not.

Each program runs in its own interpreter, which removes the name before Moored is imported.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

GRPC = """
import asyncio, grpc
from grpc._cython import cygrpc
if {name!r}: delattr(cygrpc, {name!r})
from moored.rpc import _grpc_internals as internals
async def main():
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(endless)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {{"m": handler}}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{{port}}")
    internals.make_cuttable(channel)
    call = channel.stream_stream("/s/m")()
    assert await call.read() == b"first"
    assert internals.is_connected(channel)
    pending = asyncio.ensure_future(call.read())
    await asyncio.sleep(0)
    await internals.cut_async(channel, "cut")
    ended = (await asyncio.gather(pending, return_exceptions=True))[0]
    print(type(ended).__name__)
    await server.stop(None)
async def endless(requests, context):
    yield b"first"
    await asyncio.Event().wait()
asyncio.run(main())
"""

PSYCOPG = """
import asyncio, psycopg, sys
del psycopg.BaseConnection._rollback_gen
from moored.reservoir import AsyncConnectionPool, ConnectionPool
def threads(url):
    with ConnectionPool(url, max_size=1) as pool:
        try:
            with pool.connection() as conn:
                conn.execute("select 1", prepare=True)  # psycopg has to forget it after a rollback
                conn.execute("select 1 / 0")
        except psycopg.errors.DivisionByZero:
            pass
        with pool.connection() as conn:
            return conn.execute("select 1").fetchone()
async def tasks(url):
    async with AsyncConnectionPool(url, max_size=1) as pool:
        try:
            async with pool.connection() as conn:
                await conn.execute("select 1", prepare=True)
                await conn.execute("select 1 / 0")
        except psycopg.errors.DivisionByZero:
            pass
        async with pool.connection() as conn:
            return await (await conn.execute("select 1")).fetchone()
print(threads(sys.argv[1]), asyncio.run(tasks(sys.argv[1])))
"""

SQLALCHEMY = """
import sqlalchemy.pool.base as base
del base._ConnectionRecord
try:
    import moored.reservoir.sqlalchemy
except ImportError as error:
    print(error)
"""


def output(program: str, *arguments: str) -> str:
    """Run a program, which must succeed, and return what it prints, and after that what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "ended"),
    [("", "AioRpcError"), ("_AioCall", "CancelledError"), ("AioRpcStatus", "CancelledError")],
)
def test_without_names_of_grpc_calls_end_as_close_ends_them(name: str, ended: str) -> None:
    shown = output(GRPC.format(name=name))
    assert shown.startswith(ended)
    assert ("lacks private names" in shown) is bool(name), "it does not say what is off"


def test_without_names_of_psycopg_a_connection_is_closed_instead_of_rolled_back(
    postgres_url: str,
) -> None:
    shown = output(PSYCOPG, postgres_url)
    assert shown.startswith("(1,) (1,)")
    assert "cannot roll back within a timeout" in shown


def test_without_the_record_of_sqlalchemy_the_error_says_what_to_do() -> None:
    assert "has no pool.base._ConnectionRecord" in output(SQLALCHEMY)
