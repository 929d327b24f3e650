"""What can go wrong with a shared channel, and what to do about it.

::

    HoldfastError
    └── ChannelError             something that `holdfast.rpc` raises on purpose
        ├── ConfigError          a URI or an option is wrong: the text names the part
        ├── ConnectFailed        the endpoint could not be reached within the caller's time
        ├── TopologyError        who is the primary could not be found out
        │   └── TopologyRefused  as the token is not accepted: a ConnectFailed, too
        └── ManagerClosed        the manager, or this connection of it, is closed
"""

from __future__ import annotations

from holdfast.kernel import HoldfastError

__all__ = [
    "ChannelError",
    "ConfigError",
    "ConnectFailed",
    "ManagerClosed",
    "TopologyError",
    "TopologyRefused",
    "closed",
]


class ChannelError(HoldfastError):
    """Something that `holdfast.rpc` raises on purpose."""


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
