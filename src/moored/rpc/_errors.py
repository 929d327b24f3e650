"""What can go wrong with a shared channel, and what to do about it.

::

    MooredError
    └── ChannelError             something that `moored.rpc` raises on purpose
        ├── ConfigError          a URI or an option is wrong: the text names the part
        ├── ConnectFailed        the endpoint could not be reached within the caller's time
        ├── TopologyError        who is the primary could not be found out
        │   └── TopologyRefused  as the token is not accepted: a ConnectFailed, too
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
    """Something that `moored.rpc` raises on purpose."""


class ChannelConfigError(ChannelError, kernel.ConfigError):
    """A URI or an option is wrong: the text names the part."""


#: The name under which `moored.rpc` exports it.
ConfigError = ChannelConfigError


class ConnectFailed(ChannelError):
    """The endpoint could not be reached within the caller's time; the cause is the last failure."""


class TopologyError(ChannelError):
    """The topology could not be fetched or used; the one that was known before is kept."""


class TopologyRefused(TopologyError, ConnectFailed):
    """The topology server does not accept the token; a retry would not help soon."""


class ManagerClosed(ChannelError):
    """The manager, or this connection of it, is closed."""


def closed(address: str) -> ManagerClosed:
    """The error of a call over a closed channel."""
    return ManagerClosed(
        f"the connection to {address} is closed, as it was released, or its manager was closed: "
        "take one with get_or_create"
    )


def no_config(given: object) -> ConfigError:
    """The error for a configuration of the wrong type: a URI, most likely."""
    return ConfigError(
        f"get_or_create takes a ConnectionConfig, not {type(given).__name__}: make one with "
        "ConnectionConfig.from_uri"
    )


def no_channel(given: object) -> ConfigError:
    """The error for a channel that was never handed out: an intercepted one, most likely."""
    return ConfigError(
        f"{type(given).__name__} is not what get_or_create has returned: keep that beside what is "
        "made of it, and give that one back"
    )


def uncopied(thing: object) -> TypeError:
    """Raised when a process-local object is copied or pickled."""
    return TypeError(
        f"{type(thing).__name__} cannot be copied or pickled: pass the ConnectionConfig, and take "
        "a channel with get_or_create where it is used"
    )
