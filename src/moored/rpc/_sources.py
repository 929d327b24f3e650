"""Where a topology comes from: Milvus's REST interface, a fixed list, DNS, or a function of yours.

Each can be asked from a thread (`fetch`) and from a loop (`fetch_async`, which never blocks it).
Both end within their time whatever the other side does. They raise `TopologyError`, or a
`ConfigError` where no retry can help.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from moored.kernel import Clock, LoopThread, describe, start_thread

from ._config import ConnectionConfig, redacted, split_uri
from ._errors import ConfigError, TopologyError, TopologyRefused
from ._http import Answer, Get, NoAnswer, place_of
from ._secrets import hidden
from ._topology import Capability, Member, Topology, parse_topology

__all__ = [
    "CallableTopology",
    "DnsTopology",
    "HttpTopology",
    "StaticTopology",
    "TopologySource",
]

T = TypeVar("T")

PATH = "/global-cluster/topology"
TIMEOUT = 10.0
ATTEMPTS = 3
#: The waits between attempts: the first, the longest, and how much chance is added.
FIRST_DELAY, MAX_DELAY, JITTER = 1.0, 10.0, 0.1
#: So many tokens are remembered, to be hidden where a server repeats them.
KEPT = 8

#: What a function of the user's may return: a topology, or who is there now.
Found: TypeAlias = Topology | Iterable[Member | str]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class TopologySource(ABC):
    """Somebody who knows the topology."""

    #: Whether it is worth asking again.
    changes = True
    #: Whether it has another token by now than the one that was refused last.
    renewed = False
    #: Why it could not be had so far, while it is being asked for.
    trouble = ""

    @abstractmethod
    def fetch(self, timeout: float | None = None) -> Topology:
        """Ask, and wait here.

        :param timeout: the limit for all of it, attempts and pauses; None is as long as it takes.
        """

    @abstractmethod
    async def fetch_async(self, timeout: float | None = None) -> Topology:
        """Ask, without blocking the loop."""


class HttpTopology(TopologySource):
    """Milvus's REST interface: `GET {uri}/global-cluster/topology`.

    What fails on the way is tried again, three times in all; what the server refuses (a code
    other than 0, the token) is not. A redirect is followed only to the same server: the token goes
    to no other.

    :param uri: of the service; https, if it does not say. A name and password in it are not used.
    :param token: sent as `Authorization: Bearer`; none is sent if it is empty. One that changes is
        given as a function, which is called for each request and must not wait.
    :param timeout: how long one attempt may take.
    :param ca: the authorities to trust, as PEM or the path of a file, if not the system's.
    :param sleep: how a thread waits between attempts, for tests; `sleep_async` likewise.
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
        sleep: Callable[[float], object] = time.sleep,
        sleep_async: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._token_now = token if callable(token) else partial(_sendable, token)
        if not callable(token):
            _sendable(token)
        self._place = place_of(_url(uri))
        # What was sent lately, and what was refused.
        self._sent: deque[str] = deque(maxlen=KEPT)
        self._refused: str | None = None
        self._timeout = timeout
        self._attempts = attempts
        self._ca = ca
        self._clock = clock
        self._sleep = sleep
        self._sleep_async = sleep_async

    @classmethod
    def of(cls, config: ConnectionConfig, **options: Any) -> HttpTopology:
        """The one that a configuration means.

        It is asked at the root, as a path names a database; if `global-cluster` is a part of the
        path, under what stands before that.
        """
        parts = split_uri(config.uri)
        origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        given = {"token": config.token, "ca": config.options.get("ca"), **options}
        return cls(origin + config.topology_root, **given)

    @property
    def renewed(self) -> bool:  # type: ignore[override]
        """Whether it has another token by now than the one that was refused last."""
        if self._refused is None:
            return False
        try:
            return self._token_now() != self._refused
        except Exception:  # who asks is told
            return False

    def fetch(self, timeout: float | None = None) -> Topology:
        """Ask, and wait here."""
        rounds = _Rounds(self, timeout)
        while True:
            limit, token = rounds.begin(), self._token()
            get = self._get(token)
            try:
                return self._read(get.future.result(limit), token)
            except TimeoutError:
                delay = rounds.failed(f"no answer within {limit:.1f} s")
            except NoAnswer as error:
                delay = rounds.failed(str(error))
            finally:
                get.give_up()
            self._sleep(delay)

    async def fetch_async(self, timeout: float | None = None) -> Topology:
        """Ask, without blocking the loop."""
        rounds = _Rounds(self, timeout)
        while True:
            limit, token = rounds.begin(), self._token()
            get = self._get(token)
            try:
                return self._read(await _awaited(get.future, limit), token)
            except TimeoutError:
                delay = rounds.failed(f"no answer within {limit:.1f} s")
            except NoAnswer as error:
                delay = rounds.failed(str(error))
            finally:
                get.give_up()
            await self._sleep_async(delay)

    def _token(self) -> str:
        """What to send now."""
        token = _sendable(self._token_now())
        if token and token not in self._sent:
            self._sent.append(token)
        return token

    def _get(self, token: str) -> Get:
        headers = {"Accept": b"application/json"}
        if token:
            headers["Authorization"] = b"Bearer " + token.encode()
        # Made in the thread: to load the authorities takes a while.
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
            raise NoAnswer(f"HTTP {answer.status}")
        try:
            body = json.loads(answer.body)
        except (ValueError, RecursionError):
            raise NoAnswer("the answer is not JSON") from None
        try:
            return parse_topology(body)
        except TopologyError as error:
            wrong = str(error)
        # Not in the handler: the error that it handles may repeat the token.
        raise TopologyError(f"{answer.place}: {self._hidden(wrong)}")

    def _hidden(self, text: str) -> str:
        """A server may repeat what it was sent."""
        return hidden(text, tuple(self._sent))

    def __repr__(self) -> str:
        return f"<HttpTopology {self._place}>"


class _Rounds:
    """The attempts of one fetch: how long the next may take, and the pause before it."""

    def __init__(self, source: HttpTopology, timeout: float | None) -> None:
        self._source = source
        self._clock = source._clock or Clock.current()
        self._failures: list[str] = []
        source.trouble = ""
        self._ends_at = None if timeout is None else self._clock.monotonic() + timeout

    def begin(self) -> float:
        """How long the attempt that begins now may take."""
        longest = self._source._timeout
        return longest if self._ends_at is None else max(0.0, min(longest, self._left()))

    def failed(self, reason: str) -> float:
        """An attempt has failed: how long to wait before the next; raises if it was the last."""
        self._failures.append(self._source._hidden(reason))
        self._source.trouble = self._failures[-1]
        if len(self._failures) >= self._source._attempts:
            raise self._error()
        delay = min(FIRST_DELAY * 2.0 ** (len(self._failures) - 1), MAX_DELAY)
        delay += delay * JITTER * self._clock.random.random()
        if self._ends_at is not None and delay >= self._left():
            raise self._error()
        return delay

    def _left(self) -> float:
        return (self._ends_at or 0.0) - self._clock.monotonic()

    def _error(self) -> TopologyError:
        count = len(self._failures)
        return TopologyError(
            f"the topology could not be fetched from {self._source._place} in {count} "
            f"attempt{'s' if count > 1 else ''}: {'; '.join(dict.fromkeys(self._failures))}"
        )


def _sendable(token: object) -> str:
    if not isinstance(token, str):
        if inspect.iscoroutine(token):
            token.close()
        raise ConfigError(f"the token must be a text, not {type(token).__name__}")
    if _CONTROL.search(token):
        raise ConfigError("the token has a control character in it (a line end, perhaps)")
    return token


def _url(uri: str) -> str:
    if "://" not in uri:
        uri = f"https://{uri}"
    parts = split_uri(uri)
    if parts.scheme == "unix":
        raise ConfigError(f"a topology cannot be asked for over a socket: {redacted(uri)!r}")
    scheme = "https" if parts.scheme == "https" else "http"
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}{PATH}"


class StaticTopology(TopologySource):
    """A list that does not change.

    :param members: endpoints, the primary first, or members with their capabilities.
    """

    changes = False

    def __init__(self, members: Iterable[Member | str], version: int = 1) -> None:
        self._topology = Topology(version, _members(members))

    def fetch(self, timeout: float | None = None) -> Topology:
        """The list."""
        return self._topology

    async def fetch_async(self, timeout: float | None = None) -> Topology:
        """The list."""
        return self._topology

    def __repr__(self) -> str:
        return f"<StaticTopology: {len(self._topology.members)} members>"


class _Editions:
    """Numbers for those who have no versions: one more whenever the members are others.

    Who was there keeps its place, and newcomers go to the end: a primary is left only if it is
    gone, not because the list was written in another order.
    """

    def __init__(self) -> None:
        self._begin()
        self._last = Topology(0, ())

    def _begin(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()

    def of(self, members: tuple[Member, ...]) -> Topology:
        if self._pid != os.getpid():
            self._begin()  # somebody may have held it when this process was forked
        with self._lock:
            if set(members) != set(self._last.members):
                staying = [each for each in self._last.members if each in members]
                coming = [each for each in members if each not in staying]
                self._last = Topology(self._last.version + 1, (*staying, *coming))
            return self._last


class DnsTopology(TopologySource):
    """All addresses that a name has now; each may be written to.

    :param resolve: how to look a name up, for tests and other name services: gets the host and
        the port, returns addresses.
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
        self._editions = _Editions()

    def fetch(self, timeout: float | None = None) -> Topology:
        """Look the name up, and wait here."""
        limit = _shorter(self._timeout, timeout)
        try:
            return self._read(self._begin().result(limit))
        except Exception as error:
            raise _failure(f"the name {self._host} could not be looked up", error, limit) from error

    async def fetch_async(self, timeout: float | None = None) -> Topology:
        """Look the name up, without blocking the loop."""
        limit = _shorter(self._timeout, timeout)
        try:
            return self._read(await _awaited(self._begin(), limit))
        except Exception as error:
            raise _failure(f"the name {self._host} could not be looked up", error, limit) from error

    def _begin(self) -> Future[list[str]]:
        return start_thread(
            lambda: list(self._resolve(self._host, self._port)), name=f"look up {self._host}"
        )

    def _read(self, addresses: list[str]) -> Topology:
        if not addresses:
            raise TopologyError("it has no address")
        # In one order at the start too: name servers like to turn the list.
        return self._editions.of(tuple(self._member(each) for each in sorted(set(addresses))))

    def _member(self, address: str) -> Member:
        host = f"[{address}]" if ":" in address else address
        return Member(address, f"{host}:{self._port}", Capability.PRIMARY, self._host)

    def __repr__(self) -> str:
        return f"<DnsTopology {self._host}:{self._port}>"


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class CallableTopology(TopologySource):
    """A function of yours, plain (it is called in a thread, so it may block) or async.

    It returns a `Topology`, or just the members or endpoints that there are now: those are
    numbered here, with a new version whenever they change. Their order is no change: who is the
    primary is said by the capabilities of members, or by naming nobody else.
    """

    def __init__(
        self, function: Callable[[], Found | Awaitable[Found]], *, timeout: float = TIMEOUT
    ) -> None:
        self._function = function
        self._timeout = timeout
        self._editions = _Editions()

    def fetch(self, timeout: float | None = None) -> Topology:
        """Call it, and wait here."""
        limit = _shorter(self._timeout, timeout)
        try:
            if inspect.iscoroutinefunction(self._function):
                return LoopThread.shared().run(self._call_async(limit))
            found = start_thread(self._function, name="topology").result(limit)
            if inspect.isawaitable(found):
                return LoopThread.shared().run(self._await(found, limit))
            return self._read(found)
        except Exception as error:
            raise _failure(f"{self!r} failed", error, limit) from error

    async def fetch_async(self, timeout: float | None = None) -> Topology:
        """Call it, without blocking the loop."""
        limit = _shorter(self._timeout, timeout)
        try:
            return await self._call_async(limit)
        except Exception as error:
            raise _failure(f"{self!r} failed", error, limit) from error

    async def _call_async(self, limit: float) -> Topology:
        if inspect.iscoroutinefunction(self._function):
            return await self._await(self._function(), limit)
        found = await _awaited(start_thread(self._function, name="topology"), limit)
        if inspect.isawaitable(found):
            return await self._await(found, limit)
        return self._read(found)

    async def _await(self, found: Awaitable[Found], limit: float) -> Topology:
        async with asyncio.timeout(limit):
            return self._read(await found)

    def _read(self, found: Any) -> Topology:
        if isinstance(found, Topology):
            return found
        if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
            raise TopologyError(
                f"it must return a Topology, or a list of members, not {type(found).__name__}"
            )
        return self._editions.of(_members(found))

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"<CallableTopology {name}>"


def _members(given: Iterable[Member | str]) -> tuple[Member, ...]:
    found = []
    for each in given:
        if isinstance(each, str):
            each = Member(redacted(each), each)
        elif not isinstance(each, Member):
            raise TopologyError(f"a member must be a Member or a text, not {type(each).__name__}")
        found.append(each)
    return tuple(dict.fromkeys(found))


def _shorter(own: float, given: float | None) -> float:
    return own if given is None else min(own, given)


def _failure(what: str, error: Exception, limit: float) -> TopologyError:
    if isinstance(error, TimeoutError) and not str(error):
        return TopologyError(f"{what}: no answer within {limit:.1f} s")
    told = str(error) if isinstance(error, TopologyError) else describe(error)
    return TopologyError(f"{what}: {told}")


async def _awaited(future: Future[T], limit: float) -> T:
    async with asyncio.timeout(limit):
        return await asyncio.wrap_future(future)
