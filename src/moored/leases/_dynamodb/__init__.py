"""Leases in DynamoDB: the rooms behind `moored.leases.dynamodb`.

::

    SlotStore   CounterStore ── Sweeper     what a lease is, in items
        └────┬───────┘
        DynamoTable                         the right table, looked at before its first use
        DynamoLink ── ServerTime            requests, their time limits, and the server's clock

Invariants:

- a slot or a lease that lives is never overwritten by another id;
- a lease ends in the store after its holder's own deadline, never before;
- the fence of a key with limit 1 only grows, also when its item is deleted;
- each token of a rate limit is given to one taker, whatever the clocks say.
"""
