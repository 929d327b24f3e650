"""Who is in a cluster of clusters, and which member calls go to.

It does no I/O: `_sources` asks, this decides. Invariants:

- only a newer version replaces what is known;
- a topology that cannot be used (nobody is writable, an address makes no sense) replaces nothing;
- whether to move is decided by the address *in use*, not by what was known before: a refresh may
  have learned of the new primary long before the old one fails.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntFlag
from random import Random
from typing import Any, Literal
from urllib.parse import urlsplit

from .._config import ConnectionConfig
from .._counters import Counters
from .._errors import ConfigError, TopologyError

__all__ = [
    "Advice",
    "Capability",
    "Member",
    "Role",
    "Topology",
    "TopologyMixin",
    "address_of",
    "config_for",
    "parse_topology",
    "pick",
]

#: Which member is wanted: the one that takes writes, or the nearest that can be read.
Role = Literal["primary", "any"]

#: Where a member is if Milvus's answer does not say it.
MILVUS_PORT = 19530
#: How much of a server's own words is repeated.
MAX_WORDS = 200


class Capability(IntFlag):
    """What a member can do, as Milvus numbers it."""

    READABLE = 1
    WRITABLE = 2
    PRIMARY = READABLE | WRITABLE


@dataclass(frozen=True)
class Member:
    """One cluster of the topology."""

    cluster_id: str
    #: A URI, or "host:port".
    endpoint: str
    #: Bits of `Capability`; unknown ones are kept.
    capability: int = Capability.PRIMARY
    #: The name in its certificate, where the endpoint is a bare address.
    server_name: str = ""

    @property
    def readable(self) -> bool:
        """Whether it answers reads."""
        return bool(self.capability & Capability.READABLE)

    @property
    def writable(self) -> bool:
        """Whether it takes writes."""
        return bool(self.capability & Capability.WRITABLE)


@dataclass(frozen=True)
class Topology:
    """The members at one time; a higher version is a later time."""

    version: int
    members: tuple[Member, ...]
    #: Whether the members that take writes are all as good (the addresses of one name, say): then
    #: each of them may stand for the primary.
    equal: bool = False

    @property
    def primary(self) -> Member:
        """The first member that takes writes; raises `TopologyError` if there is none."""
        for member in self.members:
            if member.writable:
                return member
        raise TopologyError(
            f"version {self.version} of the topology has no primary: {self._listed()}; "
            "what was known before is kept until one is chosen"
        )

    @property
    def primaries(self) -> tuple[Member, ...]:
        """The members that take writes; more than one mean something only if they are equal."""
        return tuple(member for member in self.members if member.writable)

    @property
    def readable(self) -> tuple[Member, ...]:
        """The members that answer reads."""
        return tuple(member for member in self.members if member.readable)

    def _listed(self) -> str:
        if not self.members:
            return "it has no members"
        return "none is writable among " + ", ".join(each.cluster_id for each in self.members)


class Advice(Enum):
    """What to do with a connection, given where it leads."""

    MOVE = "the member in use is not the one that is wanted"
    RECONNECT = "the member in use is the one that is wanted: only a new connection may help"
    UNKNOWN = "no topology is known yet"


def parse_topology(answer: Any) -> Topology:
    """Read Milvus's answer; raises `TopologyError` that names what is wrong with it."""
    body = _field(answer, "the answer", dict)
    code = body.get("code", 0)
    if code != 0:
        words = str(body.get("message") or "no reason was given")[:MAX_WORDS]
        raise TopologyError(f"the server refused to tell the topology: {words} (code {code!r})")
    data = _field(body.get("data"), "data", dict)
    clusters = _field(data.get("clusters"), "data.clusters", list)
    members = tuple(_member(each, f"data.clusters[{n}]") for n, each in enumerate(clusters))
    return Topology(_number(data.get("version"), "data.version"), members)


def _member(entry: Any, where: str) -> Member:
    entry = _field(entry, where, dict)
    return Member(
        _field(entry.get("clusterId"), f"{where}.clusterId", str),
        _with_port(_field(entry.get("endpoint"), f"{where}.endpoint", str)),
        _number(entry.get("capability"), f"{where}.capability"),
    )


def _with_port(endpoint: str) -> str:
    """Milvus's own port, if it names none; one that is wrong is left to who uses it."""
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    place = parts.netloc.rpartition("@")[2].rpartition("]")[2]
    if parts.scheme == "https" or ":" in place or not parts.netloc or parts.path.strip("/"):
        return endpoint
    return f"{endpoint.rstrip('/')}:{MILVUS_PORT}"


def _field(value: Any, where: str, kind: type) -> Any:
    if not isinstance(value, kind):
        wanted = {"dict": "an object", "list": "a list", "str": "a string"}[kind.__name__]
        raise TopologyError(
            f"the answer about the topology is not understood: {where} must be {wanted}, "
            f"not {type(value).__name__}"
        )
    return value


def _number(value: Any, where: str) -> int:
    # Milvus writes its version as text.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TopologyError(
            f"the answer about the topology is not understood: {where} must be a number, "
            f"not {type(value).__name__}"
        )
    return value


# -- addresses -------------------------------------------------------------------------------------


def address_of(member: Member) -> str:
    """Where a member is, as "host:port": 443 for https, 80 otherwise, if no port is given."""
    return _config_of(member).address


def _config_of(member: Member) -> ConnectionConfig:
    whole = member.endpoint.strip()
    if whole and "://" not in whole and not whole.lower().startswith("unix:"):
        whole = f"tcp://{whole}"
    try:
        return ConnectionConfig.from_uri(whole)
    except ConfigError as error:
        raise TopologyError(f"the endpoint of {member.cluster_id} is wrong: {error}") from None


def config_for(config: ConnectionConfig, member: Member) -> ConnectionConfig:
    """The configuration with which to connect to a member.

    It is encrypted if the endpoint says https, or if the configuration is: an answer never turns
    TLS off. What the user chose with `secure` goes before both.
    """
    found = _config_of(member)
    options = dict(config.options)
    if options.get("secure") is None and found.secure:
        options["secure"] = True
    if member.server_name and options.get("server_name") is None:
        options["server_name"] = member.server_name
    return replace(config, address=found.address, options=options)


# -- the choice ------------------------------------------------------------------------------------


def pick(
    topology: Topology,
    role: Role = "primary",
    latencies: Mapping[str, float] | None = None,
    *,
    avoid: Collection[str] = (),
    chance: Random | None = None,
) -> Member:
    """The member that calls go to; raises `TopologyError` if there is none.

    For "any", it is the readable one with the lowest latency; those that were not measured come
    after those that were, in the order of the topology. Of several primaries that are equal it is
    any, so that not everybody goes to the same.

    :param latencies: seconds, by address.
    :param avoid: addresses that were tried without success; they are taken only if there is no
        other. It means nothing for the primary, unless there are several that are equal.
    :param chance: chooses among those that are equal; without it, it is the first.
    """
    if role == "primary" and not topology.equal:
        return topology.primary
    found = topology.primaries if role == "primary" else topology.readable
    if not found:
        what = "readable member" if role == "any" else "primary"
        raise TopologyError(f"version {topology.version} of the topology has no {what}")
    known = latencies or {}
    addresses = {address_of(member): member for member in found}
    untried = [address for address in addresses if address not in avoid] or list(addresses)
    if role == "primary" and chance is not None:
        return addresses[chance.choice(untried)]
    return addresses[min(untried, key=lambda each: known.get(each, float("inf")))]


class TopologyMixin:
    """What a strategy knows of the topology; without I/O, and safe to use from several threads."""

    def __init__(self, role: Role = "primary") -> None:
        if role not in ("primary", "any"):
            raise ConfigError(f"role={role!r} is not known: use 'primary' or 'any'")
        self.role: Role = role
        #: Where it is counted how often the topology was asked for; a manager gives its own.
        self.counters = Counters()
        self._accepting = threading.Lock()
        self._known: Topology | None = None

    @property
    def topology(self) -> Topology | None:
        """The newest that could be used."""
        return self._known

    def accept(self, topology: Topology) -> bool:
        """Take a topology in; returns whether it was newer than what is known.

        One that is newer, but cannot be used, raises `TopologyError` and changes nothing.
        """
        with self._accepting:
            known = self._known
            if known is not None and topology.version <= known.version:
                return False
            for member in _wanted(topology, self.role):
                address_of(member)
            self._known = topology
            return True

    def advise(self, in_use: str) -> Advice:
        """What to do with a connection that leads to this address."""
        known = self._known
        if known is None:
            return Advice.UNKNOWN
        wanted = {address_of(member) for member in _wanted(known, self.role)}
        return Advice.RECONNECT if in_use in wanted else Advice.MOVE


def _wanted(topology: Topology, role: Role) -> Iterable[Member]:
    """The members that a connection may lead to."""
    if role == "primary" and not topology.equal:
        return (topology.primary,)
    pick(topology, role)
    return topology.primaries if role == "primary" else topology.readable
