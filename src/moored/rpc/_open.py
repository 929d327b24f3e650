"""`channel()`: a channel by its address, from the manager of the process."""

from __future__ import annotations

from typing import Any

import grpc  # type: ignore[import-untyped]

from ._config import ConnectionConfig, is_target
from ._errors import ConfigError
from ._handler import Handler
from ._manager import ConnectionManager

__all__ = ["channel", "config_of"]


def channel(
    target: str,
    *,
    tls: bool | grpc.ChannelCredentials = False,
    client: object | None = None,
    connect: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> Handler:
    """Return a channel to a server at once, for threads; equal arguments share one channel.

    Its first call connects, and waits for the connection within its timeout, so the server may
    start later than this program.

    :param target: "host:port", a target of gRPC's own such as "dns:///greeter:50051", or a URI for
        `ConnectionConfig.from_uri`.
    :param tls: True for TLS with the authorities that gRPC trusts, or your own credentials.
    :param client: the object that uses the channel, held weakly: when all clients of a channel are
        gone, it is closed after a while.
    :param connect: connect now, and raise `ConnectFailed` if the server does not answer.
    :param timeout: with `connect`, how long to wait for the connection, in seconds.
    :param options: `token`, `ca`, `channel_options` and the others of `ConnectionConfig.from_uri`.
    """
    config = config_of(target, tls, options)
    manager = ConnectionManager.get_instance()
    if connect:
        return manager.get_or_create(config, client=client, timeout=timeout)
    refuse_timeout(timeout)
    return manager.open_channel(config, client)


def refuse_timeout(timeout: float | None) -> None:
    """Refuse a timeout without `connect`: it would have no effect."""
    if timeout is not None:
        raise ConfigError(
            "timeout= is how long connect=True waits for the connection: give both; without them, "
            "each call waits within its own timeout"
        )


def config_of(
    target: str, tls: bool | grpc.ChannelCredentials, options: dict[str, Any]
) -> ConnectionConfig:
    """Return a configuration from the arguments of `channel`."""
    if isinstance(tls, grpc.ChannelCredentials):
        options = {**options, "channel_credentials": tls}
    elif not isinstance(tls, bool):
        raise ConfigError(
            f"tls must be True, False or grpc.ChannelCredentials, not {type(tls).__name__}"
        )
    uri = target
    if isinstance(target, str) and "://" not in target and not is_target(target):
        uri = f"{'https' if tls else 'http'}://{target}"
    elif tls is True:
        options = {"secure": True, **options}
    return ConnectionConfig.from_uri(uri, **options)
