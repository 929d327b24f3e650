"""A `ConnectionConfig` from the arguments of PyMilvus's clients.

Each keyword argument means what it means to PyMilvus, so that only the import need be changed:

- PyMilvus's names are translated; the TLS paths are combined as PyMilvus combines them;
- arguments that PyMilvus ignores are ignored, and logged once;
- arguments that PyMilvus refuses are refused, with an error of both packages.

`host` and `port` are the exception: PyMilvus's clients ignore them and connect to the URI, or to
localhost. Here they are used if no URI is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from pymilvus import MilvusException  # type: ignore[import-untyped]
from pymilvus.client.prepare import Prepare  # type: ignore[import-untyped]
from pymilvus.exceptions import (  # type: ignore[import-untyped]
    ConnectionConfigException,
    ParamError,
)

from .._config import _OPTIONS as OPTIONS
from .._config import ConnectionConfig, split_uri, uri_parts
from .._errors import ConfigError
from ._topology import GLOBAL, PORT, MilvusTopology

__all__ = ["URI", "MilvusConfig", "MilvusConfigError", "milvus_config"]

log = logging.getLogger(__name__)

URI = f"http://localhost:{PORT}"

#: PyMilvus's names that are ignored without a log line: its clients have no aliases, the cluster is
#: chosen for each call, the manager gets the timeout, and every connection has keepalive.
NEEDLESS = frozenset({"alias", "cluster_id", "keep_alive", "timeout"})
#: PyMilvus's names that are refused, and what to do instead.
REFUSED = {
    "address": "give it in the URI",
    "channel": "here the manager makes the channels; see handler_factory",
}
#: For TLS: the trusted authorities, or the three that go together.
TRUSTED, AUTHORITY = "server_pem_path", "ca_pem_path"
CERTIFICATE, KEY = "client_pem_path", "client_key_path"
_PATHS = (TRUSTED, AUTHORITY, CERTIFICATE, KEY)

#: The messages that were logged, so that each is logged once.
_mentioned: set[str] = set()


class MilvusConfigError(ConfigError, ConnectionConfigException, ParamError):  # type: ignore[misc]
    """A URI or an option is wrong: an error of both packages, of all kinds that PyMilvus has."""

    def __init__(self, message: str = "") -> None:
        MilvusException.__init__(self, message=message)


@dataclass(frozen=True, repr=False)
class MilvusConfig(ConnectionConfig):
    """A configuration with a database, and the client information that `Connect` sends.

    The first part of the URI's path names the database. A URI with `global-cluster` in its host or
    path names a global cluster, whose primary must be looked up; the parts of the path before it
    belong to the address of the topology, and those after it name the database.
    """

    db_name: str = ""
    #: PyMilvus's `option`.
    client_info: Mapping[str, str] = field(default_factory=dict, hash=False)

    default_port: ClassVar[int] = PORT

    @classmethod
    def from_uri(
        cls, uri: str, *, token: str | None = None, db_name: str | None = None, **options: Any
    ) -> Self:
        """Parse a URI; the arguments `token` and `db_name` override its parts."""
        if db_name is not None and not isinstance(db_name, str):
            raise ConfigError(f"db_name must be a str, not {type(db_name).__name__}")
        made = super().from_uri(uri, token=token, **options)
        _, path = _around_global(made.path)
        return replace(made, db_name=db_name or unquote(path[0] if path else ""))

    @property
    def is_global(self) -> bool:
        """Whether the URI names a global cluster."""
        _, _, *rest = uri_parts(self.uri)
        return GLOBAL in "".join(rest).lower()

    def topology_source(self, **options: Any) -> MilvusTopology | None:
        """Return the source of the topology of a global cluster."""
        if not self.is_global:
            return None
        parts = split_uri(self.uri)
        origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        given = {"token": self.token, "ca": self.options.get("ca"), **options}
        return MilvusTopology("/".join([origin, *_around_global(self.path)[0]]), **given)

    @property
    def _identity(self) -> object:
        if not self.is_global and not self.client_info:
            return None
        return self.is_global and _around_global(self.path)[0], sorted(self.client_info.items())


def milvus_config(
    uri: str = URI,
    *,
    token: str = "",
    user: str = "",
    password: str = "",
    db_name: str = "",
    **options: Any,
) -> MilvusConfig:
    """Return a configuration from the arguments of PyMilvus's clients, or from Moored's options.

    A file path `….db` is a database of Milvus Lite, which is started in this process. Raises
    `MilvusConfigError`, which is a `ConfigError` and a `MilvusException`.
    """
    if not token and user and password:
        token = f"{user}:{password}"
    try:
        return _config(uri, token, db_name, options)
    except ConfigError as error:
        raise MilvusConfigError(str(error)) from error


def _config(uri: Any, token: str, db_name: str, options: Mapping[str, Any]) -> MilvusConfig:
    if not isinstance(options.get("secure", False), bool):
        raise ConfigError(f"secure must be True or False, not {type(options['secure']).__name__}")
    given = {name: each for name, each in options.items() if each is not None and each != ""}
    for name in given.keys() & REFUSED.keys():
        raise ConfigError(f"{name} is not supported: {REFUSED[name]}")
    where = _where(uri, given.pop("host", None), given.pop("port", None))
    info = _client_info(given.pop("option", {}))
    ours = _renamed(given)
    for name in sorted(given.keys() - OPTIONS.keys()):
        if name not in NEEDLESS:
            _mention(logging.INFO, f"{name} is not used: PyMilvus's clients do nothing with it")
    ours.update((name, each) for name, each in given.items() if name in OPTIONS)
    made = MilvusConfig.from_uri(where, token=token, db_name=db_name, **ours)
    if not made.secure and ours.keys() & {"ca", "certificate"}:
        why = "the connection is not encrypted; write https:// or secure=True"
        _mention(logging.WARNING, f"the TLS options are not used: {why}")
    return replace(made, client_info=info)


def _where(uri: Any, host: Any, port: Any) -> str:
    if isinstance(uri, (str, Path)) and str(uri).endswith(".db"):
        return _start_lite(Path(uri))
    if host is None and port is None:
        return uri  # type: ignore[no-any-return]
    if uri and uri != URI:
        _mention(logging.INFO, "host and port are not used: the URI overrides them")
        return uri  # type: ignore[no-any-return]
    host = "localhost" if host is None else host
    if not isinstance(host, str) or set(host) & set("/@?#"):
        raise ConfigError("host must be a name or an address, and nothing else: give a URI as uri")
    if isinstance(port, bool) or not isinstance(port, (int, str, type(None))):
        raise ConfigError(f"port must be a number, not {type(port).__name__}")
    bare = ":" in host and not host.startswith("[")
    return f"http://{f'[{host}]' if bare else host}:{PORT if port is None else port}"


def _around_global(path: str) -> tuple[list[str], list[str]]:
    """Return the parts of a path before and after `global-cluster`; without it, all are after."""
    parts = [part for part in path.split("/") if part]
    for number, part in enumerate(parts):
        if part.lower() == GLOBAL:
            return parts[:number], parts[number + 1 :]
    return [], parts


def _client_info(option: Any) -> dict[str, str]:
    """Return the client information for the `Connect` call."""
    try:
        Prepare.register_request("", "", **option)
    except (TypeError, ValueError) as error:
        why = "option must be a mapping of str to str, without user and host"
        raise ConfigError(why) from error
    return dict(option)


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """Remove PyMilvus's names from the options; return them by Moored's names."""
    theirs = {name: given.pop(name) for name in _PATHS if name in given}
    used = _used(theirs.keys())
    if options := given.pop("grpc_options", None):
        theirs["grpc_options"] = _channel_options(options)
        used["grpc_options"] = "channel_options"
    for name, ours in used.items():
        if ours in given:
            raise ConfigError(f"the option {ours} means the same as {name}: give one of them")
    return {ours: theirs[name] for name, ours in used.items()}


def _used(paths: Set[str]) -> dict[str, str]:
    """Return the paths that PyMilvus uses, with Moored's names for them."""
    used = {}
    if TRUSTED in paths:
        used = {TRUSTED: "ca"}
    elif len(paths) == 3:
        used = {AUTHORITY: "ca", CERTIFICATE: "certificate", KEY: "private_key"}
    if left := paths - used.keys():
        _mention(logging.WARNING, _left_out(left))
    return used


def _channel_options(given: Any) -> dict[str, Any]:
    try:
        return dict(given)
    except (TypeError, ValueError) as error:
        raise ConfigError("grpc_options must be a mapping of names to values") from error


def _left_out(names: Iterable[str]) -> str:
    return (
        f"{', '.join(sorted(names))} not used, as in PyMilvus: {TRUSTED} goes alone; "
        f"{AUTHORITY}, {CERTIFICATE} and {KEY} go together. "
        "The options ca, certificate and private_key have no such rule"
    )


def _mention(level: int, text: str) -> None:
    if text not in _mentioned:
        _mentioned.add(text)
        log.log(level, text)


def _start_lite(path: Path) -> str:
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of {str(path)!r} does not exist: create it first")
    try:
        from milvus_lite.server_manager import (  # type: ignore[import-untyped]
            server_manager_instance,
        )
    except ImportError as error:
        raise ConfigError(
            f"{str(path)!r} is a database of Milvus Lite: pip install milvus-lite"
        ) from error
    uri = server_manager_instance.start_and_get_uri(str(path))
    if uri is None:
        raise ConfigError(f"Milvus Lite cannot open {str(path)!r}: its log says why")
    return str(uri)
