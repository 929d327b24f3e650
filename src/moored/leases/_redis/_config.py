"""How the Redis store is configured: by its URL."""

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
_KNOWN = ("prefix", "timeout", "connections", "cluster", "db", "ssl_check_hostname", *_TLS)


@dataclass(frozen=True)
class RedisConfig:
    """What a `redis://`, `rediss://` or `unix://` URL says."""

    #: The server, as people name it.
    place: str
    #: What every name in Redis begins with, so that several clusters can share a server.
    prefix: str
    #: How long one call may take in all, in seconds; then the store counts as unavailable.
    timeout: float
    #: How many connections there may be; further calls wait for one, within their time.
    connections: int
    #: Whether the server is a node of a Redis Cluster.
    cluster: bool
    #: What the driver needs to connect: secrets among it.
    dial: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_url(cls, url: str) -> RedisConfig:
        """Read a URL; raises one `StoreMisconfigured` that names all its mistakes."""
        parsed = parse(url).check(_KNOWN)
        settings = UrlParameters(parsed)
        prefix = settings.text("prefix", "moored")
        if "{" in prefix or "}" in prefix:
            settings.wrong(f"prefix={prefix!r} must not hold braces: they say where a key lives")
        config = cls(
            place=_place(parsed),
            prefix=prefix,
            timeout=settings.seconds("timeout", 5.0),
            connections=settings.count("connections", 4),
            cluster=settings.flag("cluster", False),
            dial=_dial(parsed, settings),
        )
        if config.cluster and config.dial.get("db"):
            settings.wrong("a Redis Cluster has database 0 alone")
        if config.cluster and "unix_socket_path" in config.dial:
            settings.wrong("a Redis Cluster is not reached by a socket")
        settings.done()
        return config

    def client(self) -> Redis | RedisCluster:
        """A client that tries once: trying again is decided by those who know the call."""
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
    dial["db"] = settings.count("db", _database(url, settings), least=0)
    if url.scheme == "unix":
        if not url.path:
            settings.wrong("the path of the socket is missing: unix:///run/redis.sock")
        return {**dial, "unix_socket_path": url.path}
    dial.update(host=url.host or "localhost", port=url.port or 6379)
    tls = {name: value for name, value in url.parameters.items() if name in _TLS}
    if url.scheme == "rediss":
        check = settings.flag("ssl_check_hostname", True)
        return {**dial, **tls, "ssl": True, "ssl_check_hostname": check}
    if tls:
        settings.wrong(f"{', '.join(tls)}: only rediss:// uses TLS")
    return dial


def _database(url: StoreUrl, settings: UrlParameters) -> int:
    name = url.path.strip("/")
    if url.scheme == "unix" or not name:
        return 0
    if name.isdecimal():
        return int(name)
    settings.wrong(f"the database {name!r} must be a number")
    return 0
