"""Events on their way from the link to the consumer that acknowledges them."""

from ._event_queue import Done, EventQueue
from ._event_stream import EventStream
from ._inbound_steps import InboundSteps
from ._retrying import retrying
from ._sink import Handler, Sink

__all__ = ["Done", "EventQueue", "EventStream", "Handler", "InboundSteps", "Sink", "retrying"]
