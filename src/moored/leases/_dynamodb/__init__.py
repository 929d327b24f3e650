"""Leases in DynamoDB: the modules behind `moored.leases.dynamodb`.

::

    SlotStore   CounterStore ── Sweeper     the `Store` methods, for two layouts of items
        └────┬───────┘
        DynamoTable                         the table, checked or created before its first use
        DynamoLink ── ServerTime            requests with timeouts and retries; the server's clock

Invariants:

- a live slot or lease is never overwritten by another id;
- a lease expires in the store after its holder's own deadline, never before;
- the fence of a key with limit 1 only grows, even if its item is deleted;
- each token of a rate limit is granted once, however wrong the clocks are.
"""
