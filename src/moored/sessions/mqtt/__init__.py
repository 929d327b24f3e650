"""Sessions over MQTT 5: a send is a publish with QoS 1, and its PUBACK is the outcome.

::

    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Mqtt("mqtts://broker"))
        await alice.send("bob", b"hello")

`Acked` means that the server has accepted the message, not that it has a subscriber (`extra` is "no
matching subscribers" if the server reports that). After a lost link, the MQTT session is resumed:
unacknowledged publishes are sent again, marked as duplicates and with the same id, as the standard
requires. Receivers may get a message twice, and recognise it by the user property `message-id`.

An MQTT session of an earlier process is resumed as well: messages that arrived meanwhile are
delivered; unacknowledged publishes of that process are not repeated.
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
