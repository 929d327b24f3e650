"""The errors of `moored.rpc`.

::

    MooredError
    └── ChannelError             the base of all errors of `moored.rpc`
        ├── ConfigError          a URI or an option is wrong: the text names it
        ├── ConnectFailed        the endpoint was not reached within the caller's timeout
        ├── TopologyError        the topology could not be fetched or used
        │   └── TopologyRefused  the topology server refused the token: a ConnectFailed, too
        └── ManagerClosed        the manager, or this connection of it, is closed
"""

from __future__ import annotations

from moored import kernel
from moored.kernel import MooredError

__all__ = [
    "ChannelError",
    "ConfigError",
    "ConnectFailed",
    "ManagerClosed",
    "TopologyError",
    "TopologyRefused",
    "closed",
    "no_channel",
    "no_config",
    "uncopied",
]


class ChannelError(MooredError):
    """The base of all errors of `moored.rpc`."""


class ChannelConfigError(ChannelError, kernel.ConfigError):
    """A URI or an option is wrong: the text names it."""


#: The name under which `moored.rpc` exports it.
ConfigError = ChannelConfigError


class ConnectFailed(ChannelError):
    """The endpoint was not reached within the caller's timeout; the cause is the last failure."""


class TopologyError(ChannelError):
    """The topology could not be fetched or used; the one that was known before is kept."""


class TopologyRefused(TopologyError, ConnectFailed):
    """The topology server does not accept the token; a retry would not help soon."""


class ManagerClosed(ChannelError):
    """The manager, or this connection of it, is closed."""


def closed(address: str) -> ManagerClosed:
    """Return the error of a call over a closed channel."""
    return ManagerClosed(
        f"the channel to {address} is closed: it was released, or its manager was closed; get a "
        "new one with get_or_create()"
    )


def no_config(given: object) -> ConfigError:
    """Return the error for a configuration of the wrong type: a URI, most likely."""
    return ConfigError(
        f"get_or_create takes a ConnectionConfig, not {type(given).__name__}: make one with "
        "ConnectionConfig.from_uri"
    )


def no_channel(given: object) -> ConfigError:
    """Return the error for a channel that was never handed out: most likely an intercepted one."""
    return ConfigError(
        f"{type(given).__name__} was not returned by get_or_create(): pass the channel that "
        "get_or_create() returned, not an intercepted channel that was made from it"
    )


def uncopied(thing: object) -> TypeError:
    """Return the error for copying or pickling a process-local object."""
    return TypeError(
        f"{type(thing).__name__} cannot be copied or pickled: pass the ConnectionConfig, and take "
        "a channel with get_or_create where it is used"
    )
