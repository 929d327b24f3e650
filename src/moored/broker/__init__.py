"""The broker: events for browsers, each only to the subscribers of its tenant.

A `Broker` reads a source (the outbox or the listener of a Postgres, a change stream, Redis Streams,
or a `MemorySource`) and hands each event to the subscribers of its tenant and channel. A subscriber
has a bounded buffer; it resumes after its last event, or gets an explicit reset. `BrokerApp` serves
the streams as server-sent events and over WebSockets.

Invariants:

- an event without a certain tenant reaches no subscriber;
- an event reaches only subscribers of its tenant;
- a subscriber gets all events after its position in order, each once, or a reset;
- a slow subscriber delays neither the source nor another subscriber.
"""

from ._audience import SlowPolicy
from ._broker import Broker, BrokerStatistics
from ._events import (
    BrokerError,
    BrokerOff,
    EventSource,
    HistoryLost,
    LiveEvent,
    ReplaySource,
    Skipped,
    SlowSubscriber,
    SourceEvent,
    SourceGap,
    StreamReset,
    TooManyStreams,
)
from ._http import BrokerApp
from ._identity import ApiKeys, Authenticator, Identity, TokenRefused
from ._jwt import Jwt
from ._memory import MemorySource
from ._signals import drain_on_signals
from ._stream import LiveStream
from ._tenants import canonical_tenant, canonical_uuid

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # The broker and its streams
    "Broker",
    "BrokerStatistics",
    "LiveEvent",
    "LiveStream",
    "Skipped",
    "SlowPolicy",
    "StreamReset",
    "drain_on_signals",
    # Sources
    "EventSource",
    "MemorySource",
    "ReplaySource",
    "SourceEvent",
    "SourceGap",
    "canonical_tenant",
    "canonical_uuid",
    # HTTP
    "ApiKeys",
    "Authenticator",
    "BrokerApp",
    "Identity",
    "Jwt",
    # Errors
    "BrokerError",
    "BrokerOff",
    "HistoryLost",
    "SlowSubscriber",
    "TokenRefused",
    "TooManyStreams",
]
