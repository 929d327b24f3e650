"""The options of a manager, checked at its construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any

from moored.kernel import Clock, Recorder, refuse

from ._config import ConnectionConfig
from ._dial import CredentialProvider, TokenCredentials, unavailable
from .topology._follower import source_of

__all__ = ["RENEW", "ManagerOptions"]


#: What `classify` returns for an error after which a live connection is to be replaced as well.
RENEW = "renew"


def _tokens(config: ConnectionConfig) -> CredentialProvider | None:
    return TokenCredentials(config.token) if config.token else None


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """The options of both managers."""

    #: Makes the strategy of a connection; by default a regular or a global one, by its URI. It must
    #: neither wait nor use the manager, on whose loop it is called.
    strategy: Callable[[ConnectionConfig], Any] | None = None
    #: Makes a channel; by default gRPC's own. With more than one of `channels` it is called for
    #: each: gRPC channels with equal arguments would share a connection.
    handler_factory: Callable[[ConnectionConfig], Any] | None = None
    #: The number of channels of a connection, each with its own TCP connection. Use more than one
    #: if the server limits the concurrent calls of each (the setting `max_concurrent_streams`), so
    #: that calls do not queue.
    channels: int = 1
    #: The source of the topology of a global connection.
    fetch_topology: Any = None
    #: Checks over a channel whether the server answers; by default with `grpc.health.v1`.
    probe: Callable[[Any], Any] | None = None
    #: Whether a new connection may help against an error. A live connection is kept when its server
    #: answers UNAVAILABLE, until five such answers without a success; for "renew" it is replaced
    #: at once. The calls of a live connection go on when it is replaced.
    classify: Callable[[BaseException], bool | str] = unavailable
    #: Makes the credentials of a connection; by default from the configuration's token. Credentials
    #: with a `refresh` method are refreshed when the server refuses them. This function must
    #: neither wait nor use the manager: slow work belongs into the provider's own methods.
    credentials: Callable[[ConnectionConfig], CredentialProvider | None] = _tokens
    #: Seconds that a shared connection stays open after its last client has gone.
    linger: float = 60.0
    #: A connection that was idle for this many seconds is probed before it is handed out.
    idle: float = 30.0
    #: The timeout of an attempt to connect, and of callers that give none.
    connect_timeout: float = 10.0
    #: A channel of this age in seconds is replaced, without an interruption; None for never.
    max_age: float | None = None
    #: Seconds that calls may continue over a replaced channel that leads to another server or has
    #: lost its connection; then they end with UNAVAILABLE. Increase it for longer streams.
    grace: float = 30.0
    clock: Clock | None = None
    recorder: Recorder | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ManagerOptions:
        """Return the options of a manager; raise `TypeError` for an unknown one."""
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

    @cached_property
    def topology_source(self) -> Any:
        """One source for all connections, so that one query serves all of them."""
        return None if self.fetch_topology is None else source_of(self.fetch_topology)
