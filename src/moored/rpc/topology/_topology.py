"""The members of a global cluster, and the choice of the one that calls go to.

It does no I/O: `_sources` fetches topologies. Invariants:

- only a newer version replaces the known topology;
- an unusable topology (no writable member, an invalid address) replaces nothing;
- whether to move depends on the address *in use*, not on the previous topology: a refresh may have
  reported the new primary long before the old one fails.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntFlag
from random import Random
from typing import Any, Literal

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
    "wanted",
]

#: The wanted member: the writable one, or the nearest readable one.
Role = Literal["primary", "any"]

#: The number of characters of a server's message that an error quotes.
MAX_WORDS = 200


class Capability(IntFlag):
    """What a member can do, as bits."""

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
    #: The name in its certificate, if the endpoint is an IP address.
    server_name: str = ""

    @property
    def readable(self) -> bool:
        """Whether the member accepts reads."""
        return bool(self.capability & Capability.READABLE)

    @property
    def writable(self) -> bool:
        """Whether the member accepts writes."""
        return bool(self.capability & Capability.WRITABLE)


@dataclass(frozen=True)
class Topology:
    """The members at one time; a higher version is newer."""

    version: int
    members: tuple[Member, ...]
    #: Whether all writable members are equivalent (the addresses of one DNS name, for instance), so
    #: that each may serve as the primary.
    equal: bool = False

    @property
    def primary(self) -> Member:
        """The first writable member; raises `TopologyError` if there is none."""
        return wanted(self, "primary")[0]

    @property
    def primaries(self) -> tuple[Member, ...]:
        """The writable members; those after the first are used only if `equal` is set."""
        return tuple(member for member in self.members if member.writable)

    @property
    def readable(self) -> tuple[Member, ...]:
        """The readable members."""
        return tuple(member for member in self.members if member.readable)


class Advice(Enum):
    """What to do with a connection, given its address."""

    MOVE = "the member in use is not the one that is wanted"
    RECONNECT = "the member in use is the one that is wanted: only a new connection may help"
    UNKNOWN = "no topology is known yet"


def parse_topology(answer: Any) -> Topology:
    """Parse the answer of an HTTP service; raise a `TopologyError` that names the wrong field."""
    body = _field(answer, "the answer", dict)
    code = body.get("code", 0)
    if code != 0:
        words = str(body.get("message") or "no reason was given")[:MAX_WORDS]
        raise TopologyError(f"the server refused to return the topology: {words} (code {code!r})")
    data = _field(body.get("data"), "data", dict)
    clusters = _field(data.get("clusters"), "data.clusters", list)
    members = tuple(_member(each, f"data.clusters[{n}]") for n, each in enumerate(clusters))
    return Topology(_number(data.get("version"), "data.version"), members)


def _member(entry: Any, where: str) -> Member:
    entry = _field(entry, where, dict)
    return Member(
        _field(entry.get("clusterId"), f"{where}.clusterId", str),
        _field(entry.get("endpoint"), f"{where}.endpoint", str),
        _number(entry.get("capability"), f"{where}.capability"),
    )


def _field(value: Any, where: str, kind: type) -> Any:
    if not isinstance(value, kind):
        wanted = {"dict": "an object", "list": "a list", "str": "a string"}[kind.__name__]
        raise TopologyError(
            f"the answer about the topology is not understood: {where} must be {wanted}, "
            f"not {type(value).__name__}"
        )
    return value


def _number(value: Any, where: str) -> int:
    # Large numbers are often sent as strings.
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
    """Return "host:port" of a member; without a port, it is 443 for https, and 80 otherwise."""
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
    """Return the configuration with which to connect to a member.

    TLS is used if the endpoint is https, or if the configuration uses TLS: a topology never turns
    TLS off. The user's option `secure` overrides both.
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
    """Return the member that calls go to; raise `TopologyError` if there is none.

    For "any", it is the readable member with the lowest latency; members without a measurement come
    last, in the order of the topology. Of several equal primaries it is a random one, so that
    clients spread over them.

    :param latencies: seconds, by address.
    :param avoid: addresses that were tried without success; they are chosen only if there is no
        other. A single primary is always chosen.
    :param chance: chooses among equal primaries; without it, the first is chosen.
    """
    found = wanted(topology, role)
    known = latencies or {}
    addresses = {address_of(member): member for member in found}
    untried = [address for address in addresses if address not in avoid] or list(addresses)
    if role == "primary" and chance is not None:
        return addresses[chance.choice(untried)]
    return addresses[min(untried, key=lambda each: known.get(each, float("inf")))]


class TopologyMixin:
    """The known topology of a strategy: no I/O, thread-safe."""

    def __init__(self, role: Role = "primary") -> None:
        if role not in ("primary", "any"):
            raise ConfigError(f"role={role!r} is not known: use 'primary' or 'any'")
        self.role: Role = role
        #: The counters of topology fetches: the endpoint's, with a manager.
        self.counters = Counters()
        self._accepting = threading.Lock()
        #: The newest usable topology.
        self.topology: Topology | None = None

    def serve(self, endpoint: Any, user: Any) -> None:
        """Count for an endpoint of a manager, and report to its background."""
        self.counters = endpoint.counters

    def accept(self, topology: Topology) -> bool:
        """Replace the known topology by a newer one; return whether it was newer.

        A newer topology that is unusable raises `TopologyError` and changes nothing.
        """
        with self._accepting:
            known = self.topology
            if known is not None and topology.version <= known.version:
                return False
            for member in wanted(topology, self.role):
                address_of(member)
            self.topology = topology
            return True

    def advise(self, in_use: str) -> Advice:
        """Return what to do with a connection to this address."""
        known = self.topology
        if known is None:
            return Advice.UNKNOWN
        addresses = {address_of(member) for member in wanted(known, self.role)}
        return Advice.RECONNECT if in_use in addresses else Advice.MOVE


def wanted(topology: Topology, role: Role) -> tuple[Member, ...]:
    """Return the members that a connection may lead to; raise `TopologyError` if there is none."""
    if role == "any":
        found, what = topology.readable, "readable member: none is readable"
    else:
        found, what = topology.primaries, "primary: none is writable"
    if not found:
        names = ", ".join(each.cluster_id for each in topology.members) or "its 0 members"
        raise TopologyError(
            f"version {topology.version} of the topology has no {what} among {names}; "
            "the previous topology is kept until there is one"
        )
    return found if role == "any" or topology.equal else found[:1]
