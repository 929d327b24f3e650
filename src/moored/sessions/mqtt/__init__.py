"""Sessions over MQTT 5: a send is a publish with QoS 1, and its outcome is what the server says.

::

    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Mqtt("mqtts://broker"))
        await alice.send("bob", b"hello")

`Acked` means that the server has taken responsibility for the message: whether somebody is there
to get it is another matter (`extra` says "no matching subscribers" where the server tells). After a
lost link the server is asked for the session that it has kept; what it had not acknowledged is then
published again, marked as a duplicate and with the same id, as the standard demands: receivers may
get it twice, and know it by the user property `message-id`.

A session that the server has kept from an earlier process is taken as it is: what came meanwhile is
delivered, and what that process had sent without an answer is not known any more.
"""

from ._dialogue import MqttDialogue
from ._memory import MqttMemory
from ._mqtt import Mqtt
from ._packets import ID_PROPERTY, Message, MessageTooLarge, Publication, SubscriptionRefused, Will

__all__ = [
    "ID_PROPERTY",
    "Message",
    "MessageTooLarge",
    "Mqtt",
    "MqttDialogue",
    "MqttMemory",
    "Publication",
    "SubscriptionRefused",
    "Will",
]
