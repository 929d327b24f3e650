"""A TCP proxy with faults that are switched while it runs.

Use `FaultProxy` in tests, with asyncio or threads, or run the proxy as a program::

    python -m moored.testing.proxy 127.0.0.1:5432
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from ._proxy import FaultProxy
from ._proxy_answer import Answer, Caller, postgres_fatal
from ._proxy_commands import HELP, run_command
from ._proxy_faults import Direction, ProxyStatistics

__all__ = [
    "Answer",
    "Caller",
    "Direction",
    "FaultProxy",
    "ProxyStatistics",
    "main",
    "postgres_fatal",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a proxy from the command line; read commands from standard input."""
    options = _parser().parse_args(arguments)
    try:
        return asyncio.run(_run(options))
    except OSError as error:
        host, port = options.listen
        print(f"moored: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moored.testing.proxy",
        description="A TCP proxy with faults that are switched while it runs.",
        epilog=f"commands, one per line on standard input:\n\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("server", help="the server: HOST:PORT, or the path of a Unix socket")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        type=_address,
        help="the address to listen on (default: a free port of 127.0.0.1)",
    )
    parser.add_argument(
        "--answer",
        metavar="SQLSTATE",
        help="send PostgreSQL clients over the limit this FATAL error, for example 53400",
    )
    parser.add_argument(
        "--do",
        metavar="COMMAND",
        action="append",
        default=[],
        help="a command to run at the start, for example --do 'limit 20' (may be repeated)",
    )
    parser.add_argument(
        "--no-input",
        action="store_true",
        help="read no commands, and run until SIGTERM or SIGINT",
    )
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _server(text: str) -> tuple[str, int | None]:
    return (text, None) if text.startswith(("/", "./")) else _address(text)


async def _run(options: argparse.Namespace) -> int:
    try:
        host, port = _server(options.server)
        answer = postgres_fatal(options.answer) if options.answer else None
        proxy = FaultProxy(host, port, listen_host=options.listen[0], listen_port=options.listen[1])
        for command in options.do:
            run_command(proxy, command, answer)
    except (ValueError, argparse.ArgumentTypeError) as error:
        print(f"moored: {error}", file=sys.stderr)
        return 2
    lines: asyncio.Queue[str | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lines.put_nowait, None)
    async with proxy:
        print(f"listening on {proxy.host}:{proxy.port}, forwarding to {proxy.upstream}", flush=True)
        if not options.no_input:
            _read_input(loop, lines)
        while (line := await lines.get()) is not None and line.strip() != "quit":
            _run_command(proxy, line, answer)
    print("ended", flush=True)
    return 0


def _run_command(proxy: FaultProxy, line: str, answer: Answer | None) -> None:
    if not line.strip():
        return
    try:
        print(run_command(proxy, line, answer), flush=True)
    except ValueError as error:
        print(f"moored: {error}", file=sys.stderr, flush=True)


def _read_input(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str | None]) -> None:
    def put(line: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def read() -> None:
        # Read the file descriptor: a thread that blocks in sys.stdin holds the lock of sys.stdin,
        # which the interpreter needs at exit.
        rest = b""
        while data := os.read(0, 4096):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                put(line.decode(errors="replace"))
        if rest:
            put(rest.decode(errors="replace"))
        put(None)

    threading.Thread(target=read, name="moored-proxy-input", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
