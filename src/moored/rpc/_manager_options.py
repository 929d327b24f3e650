"""How a manager behaves: every number in one place, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any

import grpc  # type: ignore[import-untyped]

from moored.kernel import Backoff, Clock, Machine, Recorder, refuse

from ._config import ConnectionConfig
from ._core import CHART, ConnectionCore
from ._counters import Counters
from ._dial import CredentialProvider, TokenCredentials
from ._refusals import Refusals
from .topology._follower import source_of

__all__ = ["ManagerOptions", "refused", "unavailable"]


def unavailable(error: BaseException) -> bool:
    """Whether a new connection may help: when the server cannot be reached, and only then.

    A server that lives may answer so, too: a connection that lives is kept all the same.
    """
    code = getattr(error, "code", None)
    return callable(code) and code() is grpc.StatusCode.UNAVAILABLE


def refused(error: BaseException) -> bool:
    """Whether the server does not take the credentials."""
    code = getattr(error, "code", None)
    return callable(code) and code() is grpc.StatusCode.UNAUTHENTICATED


def _tokens(config: ConnectionConfig) -> CredentialProvider | None:
    return TokenCredentials(config.token) if config.token else None


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """The options of both managers."""

    #: Makes the strategy of a connection; regular or global, as its URI says, if it is not given.
    #: It must not wait, nor use the manager: it is asked in the middle of a change of that.
    strategy: Callable[[ConnectionConfig], Any] | None = None
    #: Makes a channel; gRPC's own, if it is not given. With more `channels` than one, it is called
    #: for each: gRPC's own with equal arguments would share a connection.
    handler_factory: Callable[[ConnectionConfig], Any] | None = None
    #: How many channels a connection has, each with a connection of its own to the server: more
    #: than one where the server limits how many calls each may have under way (the setting
    #: `max_concurrent_streams`), so that calls need not wait for each other.
    channels: int = 1
    #: Where the topology of a global connection comes from.
    fetch_topology: Any = None
    #: Asks over a channel whether the server answers; `grpc.health.v1`, if it is not given.
    probe: Callable[[Any], Any] | None = None
    #: Whether a new connection may help against an error. Against UNAVAILABLE it never does while
    #: the connection lives: then the server itself has answered so.
    classify: Callable[[BaseException], bool] = unavailable
    #: As whom calls are made; with the token of the configuration, if it is not given. Credentials
    #: that know how to `refresh` are refreshed when the server refuses them. This must not wait,
    #: nor use the manager, either: what is slow belongs into the provider's own methods.
    credentials: Callable[[ConnectionConfig], CredentialProvider | None] = _tokens
    #: For so long a shared connection stays open after the last client has gone.
    linger: float = 60.0
    #: A connection that was not used for so long is looked at before it is handed out.
    idle: float = 30.0
    #: How long an attempt may take, and who waits for one without a time of its own.
    connect_timeout: float = 10.0
    #: After so long a channel is replaced, in time; None for never.
    max_age: float | None = None
    #: For so long calls may go on over a channel that was replaced because it led to another server
    #: or has lost its connection; then they end with UNAVAILABLE. More, where streams last longer.
    grace: float = 30.0
    clock: Clock | None = None
    recorder: Recorder | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ManagerOptions:
        """From what a manager was given."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(
                    f"ConnectionManager: the option {name!r} is not known: there are "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**options)

    def __post_init__(self) -> None:
        numbers = ("linger", "idle", "connect_timeout", "max_age", "grace")
        mistakes = [
            f"{name}={value!r} must be more than 0 seconds"
            for name in numbers
            if not ((value := getattr(self, name)) is None and name == "max_age")
            and not (isinstance(value, Real) and float(value) > 0)
        ]
        functions = ("strategy", "handler_factory", "probe", "classify", "credentials")
        mistakes += [
            f"{name} must be a function, not {type(value).__name__}"
            for name in functions
            if (value := getattr(self, name)) is not None and not callable(value)
        ]
        if not isinstance(self.channels, int) or self.channels < 1:
            mistakes.append(f"channels={self.channels!r} must be at least 1")
        elif self.channels > 1 and self.strategy is not None:
            mistakes.append(f"channels={self.channels!r} must be given to the strategy instead")
        refuse("ConnectionManager", mistakes)

    def core(
        self,
        config: ConnectionConfig,
        clock: Clock,
        recorder: Recorder,
        counters: Counters | None = None,
    ) -> ConnectionCore:
        """The core of a new connection: while a caller waits, no pause is longer than 250 ms."""
        return ConnectionCore(
            Machine(f"rpc.{config.address}", CHART, clock=clock, recorder=recorder),
            eager=Backoff(0.02, 0.2, jitter=0.25, clock=clock),
            patient=Backoff(0.25, 30.0, jitter=0.25, clock=clock),
            idle=self.idle,
            counters=counters,
        )

    @cached_property
    def _source(self) -> Any:
        """One source for all connections, so that one query serves all of them."""
        return None if self.fetch_topology is None else source_of(self.fetch_topology)

    def refusals(self, credentials: CredentialProvider | None, clock: Clock) -> Refusals | None:
        """What decides about refreshes; None, if these credentials know none."""
        if getattr(credentials, "refresh", None) is None:
            return None
        return Refusals(Backoff(1.0, 60.0, jitter=0.25, clock=clock))

    def strategy_of(
        self,
        config: ConnectionConfig,
        regular: Callable[..., Any],
        moving: Callable[..., Any],
        clock: Clock,
        recorder: Recorder,
    ) -> Any:
        """The strategy of a connection: of these two kinds, unless one is given."""
        if self.strategy is not None:
            return self.strategy(config)
        if not config.is_global and self.fetch_topology is None:
            return regular(handler_factory=self.handler_factory, channels=self.channels)
        return moving(
            handler_factory=self.handler_factory,
            channels=self.channels,
            fetch_topology=self._source,
            clock=clock,
            recorder=recorder,
        )
