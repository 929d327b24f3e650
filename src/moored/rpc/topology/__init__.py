"""Topologies: which server is the primary, where to fetch that, and how to follow it."""

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
