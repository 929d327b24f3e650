"""Topology sources: an HTTP service, a fixed list, DNS, or a function.

`fetch` never blocks the loop, and always ends within its timeout. It raises `TopologyError`, or
`ConfigError` where no retry can help.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from moored.kernel import (
    Backoff,
    BackoffExhausted,
    Clock,
    Secrets,
    counted,
    describe,
    run_callback,
    start_thread,
)

from .._config import redacted, sendable, split_uri
from .._errors import ConfigError, TopologyError, TopologyRefused
from ._http import Answer, Get, NoHttpAnswer, place_of
from ._topology import Capability, Member, Topology, parse_topology

__all__ = [
    "CallableTopology",
    "DnsTopology",
    "HttpTopology",
    "StaticTopology",
    "TopologySource",
]

T = TypeVar("T")

TIMEOUT = 10.0
ATTEMPTS = 3

#: What a user's function may return: a topology, or the current members.
Found: TypeAlias = Topology | Iterable[Member | str]


class TopologySource(ABC):
    """A source of topologies."""

    #: Whether the topology may change, so that it is fetched regularly.
    changes = True
    #: Whether the token has changed since it was refused.
    renewed = False
    #: Why the fetch in progress has not succeeded yet.
    trouble = ""

    @abstractmethod
    async def fetch(self) -> Topology:
        """Return the current topology, without blocking the loop."""


class HttpTopology(TopologySource):
    """A service that returns the topology as JSON, in answer to a GET request.

    A failed request is retried, up to three attempts in all; an answer that refuses (a code other
    than 0, or a refused token) is not. A redirect is followed only to the same server: the token is
    sent to no other.

    :param uri: the URL to request; https if it has no scheme. A user name and password in it are
        not used.
    :param token: sent as `Authorization: Bearer`, unless it is empty. A function, for a token that
        changes, is called for each request and must not wait.
    :param timeout: the timeout of one attempt, in seconds.
    :param ca: the trusted authorities, as PEM or a file path; by default the system's.
    :param sleep: waits between attempts; for tests.
    """

    def __init__(
        self,
        uri: str,
        token: str | Callable[[], str] = "",
        timeout: float = TIMEOUT,
        *,
        attempts: int = ATTEMPTS,
        ca: bytes | str | Path | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._token_now = token if callable(token) else partial(_sendable, token)
        if not callable(token):
            _sendable(token)
        self._place = place_of(_url(uri))
        # The sent tokens, to hide them where a server repeats them, and the refused one.
        self._sent = Secrets()
        self._refused: str | None = None
        self._timeout = timeout
        self._attempts = attempts
        self._ca = ca
        self._clock = clock
        self._sleep = sleep

    @property
    def renewed(self) -> bool:  # type: ignore[override]
        """Whether the token has changed since it was refused."""
        if self._refused is None:
            return False
        try:
            return self._token_now() != self._refused
        except Exception:  # the next `fetch` raises it
            return False

    async def fetch(self) -> Topology:
        """Request the topology; see `TopologySource.fetch`."""
        backoff = Backoff(1.0, 10.0, jitter=0.1, max_attempts=self._attempts, clock=self._clock)
        failures: list[str] = []
        self.trouble = ""
        while True:
            token = self._token()
            get = self._get(token)
            try:
                return self._read(await _awaited(get.future, self._timeout), token)
            except TimeoutError:
                self.trouble = f"no answer within {self._timeout:.1f} s"
            except NoHttpAnswer as error:
                self.trouble = self._sent.hide(str(error))
            finally:
                get.give_up()
            failures.append(self.trouble)
            try:
                delay = backoff.fail()
            except BackoffExhausted:
                raise self._error(failures) from None
            await self._sleep(delay)

    def _error(self, failures: list[str]) -> TopologyError:
        return TopologyError(
            f"the topology could not be fetched from {self._place} in "
            f"{counted(len(failures), 'attempt')}: {'; '.join(dict.fromkeys(failures))}"
        )

    def _token(self) -> str:
        """Return the token to send, and remember it."""
        token = _sendable(self._token_now())
        self._sent.add(token)
        return token

    def _get(self, token: str) -> Get:
        headers = {"Accept": b"application/json"}
        if token:
            headers["Authorization"] = b"Bearer " + token.encode()
        # The TLS context is made in the thread: loading the authorities takes a while.
        return Get(self._place, headers, timeout=self._timeout, context=lambda: self._context)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        ca = self._ca
        if isinstance(ca, str) and "-----BEGIN" not in ca:
            ca = Path(ca)
        try:
            if isinstance(ca, Path):
                return ssl.create_default_context(cafile=ca)
            return ssl.create_default_context(cadata=ca.decode() if isinstance(ca, bytes) else ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the option ca cannot be used: {describe(error)}") from error

    def _read(self, answer: Answer, token: str) -> Topology:
        if answer.status in (401, 403):
            self._refused = token
            raise TopologyRefused(
                f"{answer.place} does not accept the token (HTTP {answer.status}): give a valid one"
            )
        if answer.status != 200:
            raise NoHttpAnswer(f"HTTP {answer.status}")
        try:
            body = json.loads(answer.body)
        except (ValueError, RecursionError):
            raise NoHttpAnswer("the answer is not JSON") from None
        try:
            return self.parse(body)
        except TopologyError as error:
            wrong = str(error)
        # Outside of the except clause: the error's context may repeat the token.
        raise TopologyError(f"{answer.place}: {self._sent.hide(wrong)}")

    def parse(self, body: Any) -> Topology:
        """Return the topology in an answer; raise `TopologyError` if it is wrong."""
        return parse_topology(body)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._place}>"


def _sendable(token: object) -> str:
    if not isinstance(token, str):
        if inspect.iscoroutine(token):
            token.close()
        raise ConfigError(f"the token must be a str, not {type(token).__name__}")
    return sendable(token)


def _url(uri: str) -> str:
    if "://" not in uri:
        uri = f"https://{uri}"
    parts = split_uri(uri)
    if parts.scheme == "unix":
        raise ConfigError(f"a topology cannot be fetched over a unix socket: {redacted(uri)!r}")
    scheme = "https" if parts.scheme == "https" else "http"
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


class StaticTopology(TopologySource):
    """A fixed list of members.

    :param members: endpoints, the primary first, or members with their capabilities.
    """

    changes = False

    def __init__(self, members: Iterable[Member | str], version: int = 1) -> None:
        self._topology = Topology(version, _members(members))

    async def fetch(self) -> Topology:
        """Return the list."""
        return self._topology

    def __repr__(self) -> str:
        return f"<StaticTopology: {len(self._topology.members)} members>"


class _VersionCounter:
    """Numbers the topologies of a source without versions: one more whenever the members change.

    Known members keep their places, and new ones go to the end: the primary changes only if it has
    gone, not because the source lists its members in another order.
    """

    def __init__(self) -> None:
        self._last = Topology(0, ())

    def of(self, members: tuple[Member, ...]) -> Topology:
        last = self._last
        if set(members) != set(last.members):
            staying = [each for each in last.members if each in members]
            coming = [each for each in members if each not in staying]
            last = self._last = Topology(last.version + 1, (*staying, *coming))
        return last


class DnsTopology(TopologySource):
    """The addresses of a DNS name; all are writable and equivalent.

    A connection goes to a random one, and to another one when that fails.

    :param resolve: returns the addresses for a host and a port, for tests and for other name
        services; by default `socket.getaddrinfo`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout: float = TIMEOUT,
        resolve: Callable[[str, int], Iterable[str]] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._timeout = timeout
        self._resolve = resolve or _look_up
        self._versions = _VersionCounter()

    async def fetch(self) -> Topology:
        """Resolve the name, without blocking the loop."""
        look_up = partial(self._resolve, self._host, self._port)
        try:
            found = start_thread(lambda: list(look_up()), name=f"look up {self._host}")
            return self._read(await _awaited(found, self._timeout))
        except Exception as error:
            raise _failure(
                f"the name {self._host} could not be looked up", error, self._timeout
            ) from error

    def _read(self, addresses: list[str]) -> Topology:
        if not addresses:
            raise TopologyError("it has no address")
        members = tuple(self._member(each) for each in sorted(set(addresses)))
        return replace(self._versions.of(members), equal=True)

    def _member(self, address: str) -> Member:
        host = f"[{address}]" if ":" in address else address
        return Member(address, f"{host}:{self._port}", Capability.PRIMARY, self._host)

    def __repr__(self) -> str:
        return f"<DnsTopology {self._host}:{self._port}>"


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class CallableTopology(TopologySource):
    """A user's function, plain (it is called in a thread, so it may block) or async.

    It returns a `Topology`, or the current members or endpoints, which get a new version whenever
    they change. Another order is no change: mark the primary by the capabilities of the members, or
    return the primary alone.
    """

    def __init__(
        self, function: Callable[[], Found | Awaitable[Found]], *, timeout: float = TIMEOUT
    ) -> None:
        self._function = function
        self._timeout = timeout
        self._versions = _VersionCounter()

    async def fetch(self) -> Topology:
        """Call the function, without blocking the loop."""
        try:
            async with asyncio.timeout(self._timeout):
                return self._read(await run_callback(self._function, name="topology"))
        except Exception as error:
            raise _failure(f"{self!r} failed", error, self._timeout) from error

    def _read(self, found: Any) -> Topology:
        if isinstance(found, Topology):
            return found
        if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
            raise TopologyError(
                f"it must return a Topology, or a list of members, not {type(found).__name__}"
            )
        return self._versions.of(_members(found))

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"<CallableTopology {name}>"


def _members(given: Iterable[Member | str]) -> tuple[Member, ...]:
    found = []
    for each in given:
        if isinstance(each, str):
            each = Member(redacted(each), each)
        elif not isinstance(each, Member):
            raise TopologyError(f"a member must be a Member or a str, not {type(each).__name__}")
        found.append(each)
    return tuple(dict.fromkeys(found))


def _failure(what: str, error: Exception, limit: float) -> TopologyError:
    if isinstance(error, TimeoutError) and not str(error):
        return TopologyError(f"{what}: no answer within {limit:.1f} s")
    text = str(error) if isinstance(error, TopologyError) else describe(error)
    return TopologyError(f"{what}: {text}")


async def _awaited(future: Future[T], limit: float) -> T:
    async with asyncio.timeout(limit):
        return await asyncio.wrap_future(future)
