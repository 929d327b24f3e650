"""The simple way in: a channel by its address, from the manager of the process."""

from __future__ import annotations

from typing import Any

import grpc  # type: ignore[import-untyped]

from ._config import ConnectionConfig
from ._errors import ConfigError
from ._handler import Handler
from ._manager import ConnectionManager

__all__ = ["channel", "config_of"]


def channel(
    target: str,
    *,
    tls: bool | grpc.ChannelCredentials = False,
    client: object | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Handler:
    """A channel to this server for threads, connected; the same for all who may share it.

    :param target: "host:port", or a URI as `ConnectionConfig.from_uri` takes it.
    :param tls: True for TLS with the authorities that gRPC trusts, or credentials of your own.
    :param client: who uses it, held weakly: when all of them are gone, it is closed after a while.
    :param timeout: how long to wait for the server.
    :param options: `token`, `ca`, `channel_options` and the others of `ConnectionConfig.from_uri`.
    """
    config = config_of(target, tls, options)
    return ConnectionManager.get_instance().get_or_create(config, client=client, timeout=timeout)


def config_of(
    target: str, tls: bool | grpc.ChannelCredentials, options: dict[str, Any]
) -> ConnectionConfig:
    """What `channel` is given, as a configuration."""
    if isinstance(tls, grpc.ChannelCredentials):
        options = {**options, "channel_credentials": tls}
    elif not isinstance(tls, bool):
        raise ConfigError(
            f"tls must be True, False or grpc.ChannelCredentials, not {type(tls).__name__}"
        )
    uri = target
    if isinstance(target, str) and "://" not in target and not target.startswith("unix:"):
        uri = f"{'https' if tls else 'http'}://{target}"
    elif tls is True:
        options = {"secure": True, **options}
    return ConnectionConfig.from_uri(uri, **options)
