"""A small protocol with most optional features, and its server: for docs, demos, simulations.

::

    server = DemoServer()
    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Demo(server))
        await alice.send("bob", Text("hello"))

The server is in the same process or, after `await server.serve()`, on a TCP port. It can simulate
the faults of a server: drop, delay and duplicate acks, refuse sends, abort links, ban accounts. A
`query` to it is an object with a `do`:

- `echo` (value), `devices` (of);
- `presence` (state), `watch` (who);
- `read` (of, ids): sends read receipts to a sender;
- `group_create` (name, members), `group_info`, `group_add` and `group_remove` (group, who);
- `upload` (data, as base64, of at most one frame) and `download` (location).
"""

from ._frames import MAX_FRAME
from ._protocol import Demo, DemoDialogue, DemoMemory
from ._server import DemoServer, ReceivedSend

__all__ = ["MAX_FRAME", "Demo", "DemoDialogue", "DemoMemory", "DemoServer", "ReceivedSend"]
