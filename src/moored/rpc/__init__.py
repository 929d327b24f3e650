"""One shared gRPC channel for each endpoint and identity, which survives restarts and moves.

`channel` returns a `grpc.Channel` that generated stubs accept. It stays valid while the connection
below it is replaced, because the server restarted, moved, or changed its credentials::

    stub = GreeterStub(rpc.channel("greeter:50051"))                    # threads
    stub = GreeterStub(rpc.aio.channel("greeter:50051"))                # asyncio

These use the manager of the process, or of the running loop. A manager of your own has options::

    config = ConnectionConfig.from_uri("https://user:pass@greeter:50051")
    with ConnectionManager(max_age=3600) as manager:
        stub = GreeterStub(manager.get_or_create(config))

Invariants:

- a connection has one current generation; an error of an older one changes nothing;
- at most one attempt to connect is in progress for a connection, however many callers wait for it;
- an endpoint that hangs never delays callers of another endpoint;
- a call waits for a connection within its own timeout, and is never retried unless you ask for it;
- a token is never shown.
"""

from moored.kernel import extra

with extra("grpc", "moored.rpc"):
    import grpc as _grpc  # type: ignore[import-untyped]  # noqa: F401

from . import aio
from ._config import ConnectionConfig
from ._dial import CredentialProvider, TokenCredentials
from ._endpoint import Endpoint as ManagedConnection
from ._errors import ChannelError, ConfigError, ConnectFailed, ManagerClosed, TopologyError
from ._handler import AsyncHandler, Handler
from ._manager import ConnectionManager
from ._manager_async import AsyncConnectionManager
from ._open import channel
from ._strategies import (
    AsyncGlobalStrategy,
    AsyncRegularStrategy,
    ConnectionStrategy,
    GlobalStrategy,
    RegularStrategy,
)
from .calls._intercept_async import intercept_aio_channel
from .calls._retry import AsyncRetryInterceptor, RetryInterceptor, retry_on_rpc_failure
from .topology._sources import CallableTopology, DnsTopology, HttpTopology, StaticTopology
from .topology._topology import Capability, Member, Topology

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # Channels, managers, configuration
    "aio",
    "channel",
    "AsyncConnectionManager",
    "ConnectionConfig",
    "ConnectionManager",
    "AsyncHandler",
    "Handler",
    "ManagedConnection",
    # Retries and interceptors
    "AsyncRetryInterceptor",
    "RetryInterceptor",
    "intercept_aio_channel",
    "retry_on_rpc_failure",
    # Credentials
    "CredentialProvider",
    "TokenCredentials",
    # How a channel is made
    "AsyncGlobalStrategy",
    "AsyncRegularStrategy",
    "ConnectionStrategy",
    "GlobalStrategy",
    "RegularStrategy",
    # Topologies: which server is the primary
    "CallableTopology",
    "Capability",
    "DnsTopology",
    "HttpTopology",
    "Member",
    "StaticTopology",
    "Topology",
    # Errors
    "ChannelError",
    "ConfigError",
    "ConnectFailed",
    "ManagerClosed",
    "TopologyError",
]
