"""The configuration of the Redis store, from its URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .._url import StoreUrl, parse
from .._url_parameters import UrlParameters

__all__ = ["RedisConfig"]

_TLS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


@dataclass(frozen=True)
class RedisConfig:
    """The settings of a `redis://`, `rediss://` or `unix://` URL."""

    #: The host and port, or the socket, for messages.
    place: str
    #: The prefix of every Redis key, so that several deployments can share a server.
    prefix: str
    #: Timeout of one call in seconds, including the wait for a connection.
    timeout: float
    #: The largest number of connections; further calls wait for one, within their timeout.
    connections: int
    #: Whether the server is a node of a Redis Cluster.
    cluster: bool
    #: The driver's connection arguments, which may contain a password.
    dial: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_url(cls, url: str) -> RedisConfig:
        """Parse a URL; raises one `StoreMisconfigured` that lists all mistakes."""
        parsed = parse(url)
        settings = UrlParameters(parsed)
        prefix = settings.text("prefix", "moored")
        if "{" in prefix or "}" in prefix:
            settings.wrong(f"prefix={prefix!r} must not contain braces: they mark hash tags")
        config = cls(
            place=_place(parsed),
            prefix=prefix,
            timeout=settings.seconds("timeout", 5.0),
            connections=settings.count("connections", 4),
            cluster=settings.flag("cluster", False),
            dial=_dial(parsed, settings),
        )
        if config.cluster and config.dial.get("db"):
            settings.wrong("a Redis Cluster has only database 0")
        if config.cluster and "unix_socket_path" in config.dial:
            settings.wrong("a Redis Cluster cannot be used over a Unix socket")
        settings.done()
        return config

    def client(self) -> Redis | RedisCluster:
        """Return a client that does not retry: the lease client decides about retries."""
        options = {
            "decode_responses": True,
            "protocol": 2,
            "max_connections": self.connections,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": self.timeout,
            "socket_connect_timeout": self.timeout,
            **self.dial,
        }
        if self.cluster:
            del options["db"]
            return RedisCluster(**options)
        return Redis(**options)


def _place(url: StoreUrl) -> str:
    if url.scheme == "unix":
        return url.path
    host = f"[{url.host}]" if ":" in url.host else url.host or "localhost"
    return f"{host}:{url.port or 6379}"


def _dial(url: StoreUrl, settings: UrlParameters) -> dict[str, Any]:
    dial: dict[str, Any] = {"username": url.username or None, "password": url.password}
    tls = {name: value for name in _TLS if (value := settings.given(name)) is not None}
    check = settings.flag("ssl_check_hostname", True)
    dial["db"] = settings.count("db", _database(url, settings), least=0)
    if url.scheme == "unix":
        if not url.path:
            settings.wrong("the socket path is missing: write unix:///run/redis.sock")
        return {**dial, "unix_socket_path": url.path}
    dial.update(host=url.host or "localhost", port=url.port or 6379)
    if url.scheme == "rediss":
        return {**dial, **tls, "ssl": True, "ssl_check_hostname": check}
    if tls:
        settings.wrong(f"{', '.join(tls)}: TLS needs rediss://")
    return dial


def _database(url: StoreUrl, settings: UrlParameters) -> int:
    name = url.path.strip("/")
    if url.scheme == "unix" or not name:
        return 0
    if name.isdecimal():
        return int(name)
    settings.wrong(f"the database {name!r} must be a number")
    return 0
