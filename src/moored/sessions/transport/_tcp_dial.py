"""Open a TCP connection to one of a host's addresses, trying them in parallel (RFC 8305).

The event loop has this too, but leaks a connected socket if it is cancelled at the wrong moment.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from itertools import chain, zip_longest

from ._stream import Stream, read_buffer
from ._transport import Receiver

__all__ = ["cannot_connect", "dial_stream"]

# Seconds until the next address is tried as well, as RFC 8305 recommends.
_STAGGER = 0.25


async def dial_stream(host: str, port: int, receiver: Receiver) -> Stream:
    """Connect; the receiver is not called for an attempt that fails or is cancelled."""
    try:
        addresses = [host] if _is_address(host) else await _addresses(host, port)
    except ValueError as error:
        # Raised by the IDNA codec for an invalid name.
        raise OSError(errno.EINVAL, f"{host!r} is not a valid host name: {error}") from error
    if len(addresses) == 1:
        return await _attempt(addresses[0], port, receiver)
    stream = await _race(addresses, port)
    stream.adopt(receiver)
    return stream


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


async def _addresses(host: str, port: int) -> list[str]:
    """Resolve a name; IPv6 and IPv4 addresses alternate."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families: dict[int, dict[str, None]] = {}
    for family, *_, address in found:
        families.setdefault(family, {})[str(address[0])] = None
    turns = chain.from_iterable(zip_longest(*families.values()))
    return [address for address in turns if address is not None]


async def _attempt(address: str, port: int, receiver: Receiver | None = None) -> Stream:
    loop = asyncio.get_running_loop()
    stream = Stream(read_buffer(loop), receiver)
    try:
        await loop.create_connection(lambda: stream, address, port)
    except BaseException:
        stream.receiver = None  # report nothing more
        raise
    return stream


async def _race(addresses: list[str], port: int) -> Stream:
    """Return the first attempt that is connected, and close the others."""
    attempts: set[asyncio.Task[Stream]] = set()
    waiting, errors = list(addresses), list[OSError]()
    try:
        while waiting or attempts:
            if waiting:
                attempts.add(asyncio.ensure_future(_attempt(waiting.pop(0), port)))
            patience = _STAGGER if waiting else None
            done, attempts = await asyncio.wait(
                attempts, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            winner: Stream | None = None
            for attempt in done:
                error = attempt.exception()
                if isinstance(error, OSError):
                    errors.append(error)
                elif error is not None:
                    raise error
                elif winner is None:
                    winner = attempt.result()
                else:
                    attempt.result().abort()
            if winner is not None:
                return winner
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_drop)
            attempt.cancel()
    raise _sum_up(errors)


def _drop(attempt: asyncio.Task[Stream]) -> None:
    """Close an attempt that was connected although it had been cancelled."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().abort()


def _sum_up(errors: list[OSError]) -> OSError:
    if len({(type(error), error.errno) for error in errors}) == 1:
        return errors[0]
    return OSError("; ".join(str(error) for error in errors))


def cannot_connect(where: str, error: OSError) -> OSError:
    """Return the error with a message that names the endpoint and the reason."""
    if isinstance(error, socket.gaierror):
        why = f"the name cannot be resolved ({error.strerror})"
    elif isinstance(error, ssl.SSLCertVerificationError):
        why = f"the server's certificate is not accepted: {error.verify_message}"
    elif isinstance(error, ssl.SSLError):
        why = f"TLS failed: {error.reason or error.strerror or error}"
    elif error.errno is not None and str(error.strerror).startswith("Connect call failed"):
        why = os.strerror(error.errno)  # the loop's message hides the system's
    else:
        why = str(error.strerror or error)
    text = f"cannot connect to {where}: {why}"
    try:
        named = type(error)(error.errno, text) if error.errno is not None else type(error)(text)
    except TypeError:
        named = OSError(error.errno, text)
    named.__dict__.update(error.__dict__)
    return named
