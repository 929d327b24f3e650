"""Leases in Postgres: the modules behind `moored.leases.postgres`.

::

    PostgresStore     the `Store` methods, as statements
    Layout            which tables exist, and whether the role may use them
    PostgresLink      connections; runs statements with a timeout
    Statements        the SQL; each call is one transaction and one round trip

Invariants:

- acquires of one key run one after the other, and each sees the leases that earlier ones granted;
- a lease is never both renewed for its holder and granted to another;
- no lock outlives one message, so a suspended client blocks no other client;
- a late response is never read: its connection is closed.
"""
