"""Topologies: which server is the primary, where to fetch that, and how to follow it."""

from ._sources import CallableTopology, DnsTopology, HttpTopology, StaticTopology
from ._topology import Capability, Member, Topology

__all__ = [
    "CallableTopology",
    "Capability",
    "DnsTopology",
    "HttpTopology",
    "Member",
    "StaticTopology",
    "Topology",
]
