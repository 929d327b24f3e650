"""Milvus's topology service: its path, and the default port of its members."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from ..topology._sources import HttpTopology
from ..topology._topology import Member, Topology

__all__ = ["GLOBAL", "PORT", "MilvusTopology"]

#: Milvus's port for gRPC.
PORT = 19530
#: The part of a host or a path that names a global cluster.
GLOBAL = "global-cluster"


class MilvusTopology(HttpTopology):
    """Milvus's REST interface: `GET {uri}/global-cluster/topology`.

    Parameters: see `HttpTopology`. Members without a port have Milvus's.
    """

    def __init__(self, uri: str, *given: Any, **options: Any) -> None:
        super().__init__(f"{uri.rstrip('/')}/{GLOBAL}/topology", *given, **options)

    def parse(self, body: Any) -> Topology:
        """Return the topology in an answer; see `HttpTopology`."""
        found = super().parse(body)
        return replace(found, members=tuple(map(_with_port, found.members)))


def _with_port(member: Member) -> Member:
    """Add the port to an endpoint without one; an invalid endpoint is left as it is."""
    endpoint = member.endpoint
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    place = parts.netloc.rpartition("@")[2].rpartition("]")[2]
    if parts.scheme == "https" or ":" in place or not parts.netloc or parts.path.strip("/"):
        return member
    return replace(member, endpoint=f"{endpoint.rstrip('/')}:{PORT}")
