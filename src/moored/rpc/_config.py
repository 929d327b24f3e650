"""The configuration of a connection: address, token and options, parsed from a URI.

::

    https://{user:pass|token}@host:50051/mydb
      │      │    │           │    │     └── path: not used by gRPC, but by some services
      │      │    │           │    └── port: 443 for https, else 80, if it is not given
      │      │    │           └── host; an IPv6 address in brackets
      │      │    └── password: "user:pass" is the token
      │      └── user; without a password, it is the token
      └── scheme: http, https, tcp or unix

Names and passwords are percent-decoded. Two configurations with the same `key` share a connection:
the key covers everything that affects the connection, which the path does not. A token is
never shown: the key holds a digest of it, with a salt that each process draws at random.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, unquote, urlsplit

from moored.kernel import HIDDEN

from ._errors import ConfigError

__all__ = ["ConnectionConfig", "is_target", "redacted", "sendable", "split_uri", "uri_parts"]

SCHEMES = ("http", "https", "tcp", "unix")
#: Targets that gRPC resolves itself: they are passed on as they are.
TARGETS = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
PORT, TLS_PORT = 80, 443

#: Drawn once for a process and its forks: a digest in a log cannot be looked up elsewhere.
_SALT = os.urandom(16)
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)?(.*@)?([^/?#]*)([^?#]*)(.*)", re.DOTALL)
#: The name of a server, followed by something that is no port.
_NO_PORT = re.compile(r"^(\[[^\]]*\]|[^:\[/]*(?=:)):?+(?!\d{0,5}(/|$)).*$", re.DOTALL)

#: The names of `options`, and the types that each accepts.
_OPTIONS: dict[str, tuple[type, ...]] = {
    # Whether to use TLS; by default, for https only.
    "secure": (bool,),
    # The trusted authorities, and the client certificate with its key: PEM, or a file path.
    "ca": (bytes, str, Path),
    "certificate": (bytes, str, Path),
    "private_key": (bytes, str, Path),
    # The name in the server's certificate, where it differs from the host.
    "server_name": (str,),
    # grpc.ChannelCredentials, in place of all of these.
    "channel_credentials": (object,),
    # How gRPC spreads the calls of a target with several addresses, such as "round_robin".
    "policy": (str,),
    # gRPC channel arguments; they override Moored's defaults.
    "channel_options": (Mapping, tuple, list),
}


@dataclass(frozen=True, repr=False)
class ConnectionConfig:
    """The configuration of a connection. Create it with `from_uri`."""

    #: The URI as given; it may hold the token.
    uri: str
    #: "host:port", or the whole target that gRPC resolves itself.
    address: str
    token: str = ""
    #: TLS and channel arguments.
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    #: The port of a URI without one, unless its scheme is https.
    default_port: ClassVar[int] = PORT

    @classmethod
    def from_uri(cls, uri: str, *, token: str | None = None, **options: Any) -> Self:
        """Parse a URI; the argument `token` overrides the one in it.

        A target of gRPC's own (`dns:///…`, `ipv4:…`, `ipv6:…`, `unix:…`, `xds:///…`) is passed on.
        An empty string counts as not given. Options: `secure`, `ca`, `certificate`, `private_key`
        (PEM, or a file path), `server_name`, `policy` ("round_robin"), and gRPC's own
        `channel_credentials` and `channel_options`.
        """
        _check_options(options)
        if token is not None and not isinstance(token, str):
            raise ConfigError(f"token must be a str, not {type(token).__name__}")
        if uri is not None and not isinstance(uri, str):
            raise ConfigError(f"the URI must be a str, not {type(uri).__name__}")
        if uri is None or not uri.strip():
            raise ConfigError("the URI is empty: write it as in http://localhost:50051")
        uri = uri.strip()
        if is_target(uri):
            return cls(uri, _target(uri), sendable(token or ""), options)
        parts = split_uri(uri)
        address = _address(parts, uri, cls.default_port)
        return cls(uri, address, sendable(token or _userinfo(parts)), options)

    @property
    def path(self) -> str:
        """The path of the URI as given, such as "/mydb"; "" for a unix socket."""
        return "" if self.address == self.uri else uri_parts(self.uri)[3]

    def topology_source(self, **options: Any) -> Any:
        """Return the source of the topology that the URI names; None if it names none."""
        return None

    @property
    def _identity(self) -> object:
        """What the key covers besides the address, the token and the options."""
        return None

    @cached_property
    def secure(self) -> bool:
        """Whether the connection is encrypted."""
        if self.options.get("channel_credentials") is not None:
            return True
        chosen = self.options.get("secure")
        return self.uri.lower().startswith("https:") if chosen is None else bool(chosen)

    @cached_property
    def key(self) -> str:
        """The key by which connections are shared; it does not show the token."""
        options = {name: each for name, each in self.options.items() if each and name != "secure"}
        if "channel_options" in options:
            options["channel_options"] = sorted(dict(options["channel_options"]).items())
        wire = (self.address, self.token, self.secure, self._identity, sorted(options.items()))
        digest = hashlib.blake2b(repr(wire).encode(), key=_SALT, digest_size=8)
        return f"{self.address}|{digest.hexdigest()}"

    @property
    def shown(self) -> str:
        """The URI with its secrets hidden, for messages."""
        return redacted(self.uri)

    def __getstate__(self) -> dict[str, Any]:
        # Without the key: the process that unpickles this has another salt.
        return {name: value for name, value in vars(self).items() if name not in ("key", "secure")}

    def __repr__(self) -> str:
        shown = [f"uri={self.shown!r}", f"address={self.address!r}"]
        shown += [f"token={HIDDEN!r}"] if self.token else []
        shown += [f"options={', '.join(sorted(self.options))}"] if self.options else []
        return f"ConnectionConfig({', '.join(shown)})"


def split_uri(uri: str) -> SplitResult:
    """Parse a URI; raise a `ConfigError` that names the wrong part."""
    if (found := _FORBIDDEN.search(uri)) is not None:
        raise ConfigError(
            f"{redacted(uri)!r} has a space or a control character at {found.start()}: "
            "percent-encode it (a space is %20)"
        )
    scheme = uri_parts(uri)[0].removesuffix("://")
    if not scheme:
        raise ConfigError(f"{redacted(uri)!r} has no scheme: write it as in http://{redacted(uri)}")
    if scheme.lower() not in SCHEMES:
        raise ConfigError(
            f"the scheme {scheme!r} of {redacted(uri)!r} is not known: "
            f"use one of {', '.join(SCHEMES)}"
        )
    parts = None
    with contextlib.suppress(ValueError):  # its text may quote a password: it is not shown
        parts = urlsplit(uri)
    if parts is None:
        raise ConfigError(
            f"the host of {redacted(uri)!r} is wrong: only an IPv6 address has brackets, as in "
            "http://[::1]:50051; in a user name or a password, percent-encode them (%5B, %5D)"
        )
    if "@" in parts.path:
        raise ConfigError(
            f"{redacted(uri)!r} has a / before its last @: in a user name or a password, "
            "percent-encode it (%2F)"
        )
    for name, value in (("query", parts.query), ("fragment", parts.fragment)):
        if value:
            raise ConfigError(
                f"{redacted(uri)!r} has a {name}, which is not supported: "
                "pass options beside the URI; in a password, percent-encode ? and #"
            )
    return parts


def is_target(text: str) -> bool:
    """Whether gRPC resolves this target itself."""
    return text.lower().startswith(TARGETS)


def _target(uri: str) -> str:
    scheme, _, rest = uri.partition(":")
    if not rest.strip("/"):
        if scheme.lower().startswith("unix"):
            raise ConfigError(f"{uri!r} names no socket: write it as in unix:///run/app.sock")
        raise ConfigError(f"{uri!r} names no server: write it as in dns:///greeter:50051")
    return uri


def _userinfo(parts: SplitResult) -> str:
    if parts.username is None:
        return ""
    user = unquote(parts.username)
    return user if parts.password is None else f"{user}:{unquote(parts.password)}"


def _address(parts: SplitResult, uri: str, default_port: int) -> str:
    place = parts.netloc.rpartition("@")[2]
    if place.startswith("["):
        host, _, port = place.partition("]")
        host, port = f"{host}]", port.removeprefix(":")
    elif place.count(":") > 1:
        raise ConfigError(f"the host of {redacted(uri)!r} is wrong: put an IPv6 address in [ ]")
    else:
        host, _, port = place.partition(":")
    if not host or host == "[]":
        raise ConfigError(f"{redacted(uri)!r} names no host: write it as in http://localhost")
    return f"{host}:{_port(parts, port, uri, default_port)}"


def _port(parts: SplitResult, text: str, uri: str, default_port: int) -> int:
    if not text:
        return TLS_PORT if parts.scheme == "https" else default_port
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 0 < port < 65536:
        raise ConfigError(
            f"the port of {redacted(uri)!r} is wrong: a port is a number from 1 to 65535; if the "
            "text is a password, a host must follow, as in http://user:password@host"
        )
    return port


def sendable(token: str) -> str:
    """Return the token; raise `ConfigError` if it has a control character.

    gRPC would refuse every call with such a token, and show the token in its error.
    """
    if _CONTROL.search(token):
        raise ConfigError("the token has a control character in it (a line end, perhaps)")
    return token


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        allowed = _OPTIONS.get(name)
        if allowed is None:
            known = ", ".join(sorted(_OPTIONS))
            raise ConfigError(f"the option {name!r} is not known: there are {known}")
        if value is not None and not isinstance(value, allowed):
            wanted = " or ".join(kind.__name__ for kind in allowed)
            raise ConfigError(f"the option {name} must be {wanted}, not {type(value).__name__}")
    if (options.get("certificate") is None) != (options.get("private_key") is None):
        raise ConfigError("the options certificate and private_key go together: give both")
    _check_channel_options(options.get("channel_options") or ())


def _check_channel_options(given: Any) -> None:
    """Check the types here: gRPC would fail when it connects, without naming the option."""
    for entry in given.items() if isinstance(given, Mapping) else given:
        match entry:
            case [str() as name, value]:
                pass
            case _:
                raise ConfigError(
                    "the option channel_options must have pairs of a name and a value, as in "
                    f"[('grpc.keepalive_time_ms', 10000)], not {type(entry).__name__}"
                )
        if not isinstance(value, (int, str, bytes)):
            raise ConfigError(
                f"{name!r} in the option channel_options must be int, str or bytes, "
                f"not {type(value).__name__}"
            )
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise ConfigError(f"{name!r} in the option channel_options must fit into 32 bits")


def redacted(uri: str) -> str:
    """Return a URI with everything before its last @ hidden: a password may hold any other mark.

    A query and a fragment are hidden too, because they may hold a token, and so is an invalid
    port, which may be a password without a host.
    """
    begin, account, server, path, rest = uri_parts(uri)
    place = f"{server}{path}"
    if not place.lower().startswith("unix:"):
        place = _NO_PORT.sub(rf"\1:{HIDDEN}", place)
    account = f"{HIDDEN}@" if account else ""
    return f"{begin}{account}{place}{rest[:1]}{HIDDEN if rest else ''}"


def uri_parts(uri: str) -> tuple[str, ...]:
    """Return scheme, account, server, path and the rest of a URI, also of an invalid one."""
    found = _URI.fullmatch(uri)
    assert found is not None
    return tuple(each or "" for each in found.groups())
