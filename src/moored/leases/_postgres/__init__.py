"""Leases in Postgres: the rooms behind `moored.leases.postgres`.

::

    PostgresStore     what a lease is, in rows
    Layout            which tables are there, and who may use them
    PostgresLink      statements and their rows, within their time
    Statements        what the server does in one transaction, and one round trip

Invariants:

- one at a time counts and gives leases of a key, and sees what those before it gave;
- a renewal and a gift of the same lease never both succeed;
- no lock outlives one message, so a client that is stopped keeps nobody waiting;
- a late answer reaches nobody: its connection is cut off.
"""
