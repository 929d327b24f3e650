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


class ConfigError(ChannelError):
    """A URI or an option is wrong: the text names the part."""


class ConnectFailed(ChannelError):
    """The endpoint could not be reached within the caller's time; the cause is the last failure."""


class TopologyError(ChannelError):
    """Who is the primary could not be found out; what was known before is kept."""


class TopologyRefused(TopologyError, ConnectFailed):
    """Who knows the primary does not accept the token; to ask again would not help soon."""


class ManagerClosed(ChannelError):
    """The manager, or this connection of it, is closed."""


def closed(address: str) -> ManagerClosed:
    """For a call over a channel that is closed."""
    return ManagerClosed(
        f"the connection to {address} is closed, as it was released, or its manager was closed: "
        "take one with get_or_create"
    )


def no_config(given: object) -> ConfigError:
    """For what is given as a configuration, and is none: a URI, most likely."""
    return ConfigError(
        f"get_or_create takes a ConnectionConfig, not {type(given).__name__}: make one with "
        "ConnectionConfig.from_uri"
    )


def no_channel(given: object) -> ConfigError:
    """For what is given back, and was never handed out: an intercepted channel, most likely."""
    return ConfigError(
        f"{type(given).__name__} is not what get_or_create has returned: keep that beside what is "
        "made of it, and give that one back"
    )


def uncopied(thing: object) -> TypeError:
    """For who copies or pickles what stays in its process, and there is once."""
    return TypeError(
        f"{type(thing).__name__} cannot be copied or pickled: pass the ConnectionConfig, and take "
        "a channel with get_or_create where it is used"
    )
