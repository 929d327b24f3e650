"""Which server is the primary: sources of topologies, and what follows them."""

from ._follower import Follower, source_of
from ._sources import (
    CallableTopology,
    DnsTopology,
    HttpTopology,
    StaticTopology,
    TopologySource,
)
from ._topology import Advice, Capability, Member, Role, Topology

__all__ = [
    "Advice",
    "CallableTopology",
    "Capability",
    "DnsTopology",
    "Follower",
    "HttpTopology",
    "Member",
    "Role",
    "StaticTopology",
    "Topology",
    "TopologySource",
    "source_of",
]
