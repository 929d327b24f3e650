"""Topologies: which server is the primary, where to fetch that, and how to follow it."""
