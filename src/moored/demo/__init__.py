"""`moored serve --demo`: a whole service on this machine, and buttons that break it.

::

    app "demo"
    ├─ server       an embedded PostgreSQL, with temporary data
    ├─ db           a pool, through the server's socket
    ├─ postgres     the change stream, and the listener, by the direct path: through a fault proxy
    ├─ search       a consumer of the changes
    ├─ live         a broker of the outbox's events, with two subscribers
    ├─ grpc-server  a gRPC server in a process of its own
    ├─ grpc         a channel to it
    ├─ chat         sessions of accounts at a chat server in this process
    ├─ load         writes, calls and sends, all the time
    └─ faults       the routes of the buttons, and the measured recoveries

Invariants:

- it listens on a loopback address only, and the routes that break something exist only here;
- a recovery is measured where it happens: from the press to the first failure or degraded part
  that the service notices, and to the moment at which all parts are active and the load has been
  served again from end to end;
- at the end no process and no file is left; the files of a killed demo are removed by the next one.
"""

from ._demo import run_demo

__all__ = ["run_demo"]
