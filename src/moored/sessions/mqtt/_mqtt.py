"""MQTT 5 as a protocol of sessions: its settings."""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moored.kernel import SECRETS, describe, refuse

from .._content import Msg, Text
from .._errors import SessionError
from .._protocol import Feature, Outgoing, Protocol
from ..transport import Tcp, WebSocket, default_tls
from . import _packets as packets
from ._codec import text_field
from ._dialogue import MqttDialogue
from ._filters import check_filter
from ._memory import MqttMemory
from ._packets import MessageTooLarge, Publication, SubscriptionRefused, Will
from ._uri import Address, parse_uri

__all__ = ["Mqtt"]

_TAGS: dict[type, str] = {
    MessageTooLarge: "message",
    Publication: "message",
    SubscriptionRefused: "subscription_refused",
}
_FIELD = re.compile(r"\{([^{}]*)\}")
#: The least limit for the size of a WebSocket frame.
LARGE_FRAME = 16 * 1024 * 1024


class Mqtt(Protocol):
    """An MQTT 5 server; a send is a publish with QoS 1, confirmed by its PUBACK.

    :param uri: `mqtt://`, `mqtts://`, `ws://` or `wss://`, with a user and a password if needed
        (percent-encoded). Stored credentials of a profile take precedence. Redirects of the server
        are followed; the scheme and the TLS settings stay.
    :param host_of: a function that returns the host of a profile, as `host` or `host:port`, if
        accounts are on several servers; None for the URI's. It is called for each link. The rest of
        the URI and the TLS settings apply to all of them.
    :param client_id: the MQTT client id; `{profile}` is filled in. If two links have the same id,
        the later one takes over, and the server notifies the other one. (Mosquitto before 2.0.15
        only closes it, so that it reconnects: leases prevent that.) Empty: the server assigns one,
        which is kept until the session is stopped.
    :param topic: the topic of a send; `{recipient}` and `{profile}` are filled in.
    :param subscribe: the topic filters that each session subscribes to, with QoS 1; `{profile}` is
        filled in.
    :param keepalive: seconds of silence after which the server is pinged; the server waits 1.5
        times as long for a packet of ours. None for no keepalive.
    :param patience: seconds that the server has to answer a ping; then the link counts as lost, so
        that a dead one is detected within the sum of both.
    :param session_expiry: seconds for which the server keeps the MQTT session without a link, with
        the messages that arrive meanwhile; unconfirmed sends can be resumed during that time. 0:
        links do not resume.
    :param clean_start: discard the MQTT session of an earlier process when a session is started.
    :param receive_maximum: the most unacknowledged messages that the server may send, and so the
        most that wait for the user's handler.
    :param send_window: the most unconfirmed sends, unless the server requests fewer; each is kept
        in memory, to be sent again.
    :param max_packet_size: the largest packet that is accepted, as announced to the server. A
        larger message that it sends nevertheless is refused, with the event `message_set_aside`.
    :param will: the message that the server publishes if the client vanishes.
    :param ca: for TLS, the file of the authorities to trust; those of the system by default.
    :param certificate: for TLS, the file of the client's certificate, if the server requires one.
    :param key: the file of its key, if it is a separate one.
    :param tls: a context, in place of these three.
    :param server_name: for TLS over TCP, the name in the server's certificate, if it is not the
        host's.
    """

    name = "mqtt"
    features = frozenset((Feature.TEXT, Feature.SUBSCRIPTIONS))
    acknowledges_in_order = True

    def __init__(
        self,
        uri: str,
        *,
        host_of: Callable[[str], str | None] | None = None,
        client_id: str = "{profile}",
        topic: str = "{recipient}",
        subscribe: str | Iterable[str] = ("{profile}",),
        keepalive: float | None = 30.0,
        patience: float = 5.0,
        session_expiry: int = 3600,
        clean_start: bool = False,
        receive_maximum: int = 64,
        send_window: int = 1024,
        max_packet_size: int = 1024 * 1024,
        will: Will | None = None,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self.keepalive = keepalive
        self.patience = patience
        self.resumes = session_expiry > 0
        self.redelivers = "resumed" if self.resumes else "never"
        self.outlives = self.resumes and bool(client_id) and not clean_start
        self._host_of = host_of
        self._client_id = client_id
        self._topic = topic
        self._filters = (subscribe,) if isinstance(subscribe, str) else tuple(subscribe)
        self._session_expiry = session_expiry
        self._clean_start = clean_start
        self.receive_maximum = self.inbound_window = receive_maximum
        self.send_window = send_window
        self.max_packet_size = max_packet_size
        self._will = will
        SECRETS.add_from(uri)
        mistakes: list[str] = []
        address = parse_uri(uri, mistakes)
        mistakes += self._wrong_numbers()
        mistakes += self._wrong_templates()
        if address is not None and not address.secure:
            given = {"ca": ca, "certificate": certificate, "key": key, "tls": tls}
            given["server_name"] = server_name
            mistakes += [
                f"{name} is for TLS, and {address.scheme}:// has none"
                for name, value in given.items()
                if value is not None
            ]
        if address is not None and address.scheme == "wss" and server_name is not None:
            mistakes.append("server_name is for mqtts://, not for wss://")
        elif key is not None and certificate is None:
            mistakes.append("key is the key of a certificate: pass certificate as well")
        if tls is not None and (ca or certificate or key):
            mistakes.append("tls takes the place of ca, certificate and key")
        refuse("Mqtt", mistakes)
        assert address is not None
        self._address = address
        self._tls = None
        if address.secure:
            self._tls = tls if tls is not None else _context(ca, certificate, key)
        self._server_name = server_name
        self._endpoint = self._endpoint_at(address)

    # -- the settings --------------------------------------------------------------------------

    def _wrong_numbers(self) -> Iterable[str]:
        bounds = {
            "session_expiry": (self._session_expiry, 0, packets.LONGEST),
            "receive_maximum": (self.receive_maximum, 1, 0xFFFF),
            "send_window": (self.send_window, 1, 0xFFFF - 1),
            "max_packet_size": (self.max_packet_size, 128, packets.LARGEST),
        }
        for name, (value, least, most) in bounds.items():
            if not least <= value <= most:
                yield f"{name}={value!r} must be from {least} to {most}"
        if self.keepalive is not None and not 0 < self.keepalive <= 0xFFFF:
            yield f"keepalive={self.keepalive!r} must be more than 0, and at most 65535 seconds"
        if not 0 < self.patience < math.inf:
            yield f"patience={self.patience!r} must be more than 0 seconds, and finite"

    def _wrong_templates(self) -> Iterable[str]:
        yield from _unknown("client_id", self._client_id, {"profile"})
        yield from _unknown("topic", self._topic, {"profile", "recipient"})
        if not self._topic or "+" in self._topic or "#" in self._topic:
            yield "topic must not be empty or have wildcards"
        for text in self._filters:
            yield from _unknown("subscribe", text, {"profile"})
            try:
                check_filter(text)
            except ValueError as error:
                yield f"subscribe has {error}"
        if self._will is not None:
            yield from _unknown("the will's topic", self._will.topic, {"profile"})
            if not self._will.topic or "+" in self._will.topic or "#" in self._will.topic:
                yield "the will's topic must not be empty or have wildcards"
            try:
                packets.connect("", keepalive=0, clean_start=True, values={}, will=self._will)
            except Exception as error:  # its properties are not checked otherwise
                yield f"the will cannot be used: {error}"

    # -- the protocol --------------------------------------------------------------------------

    @property
    def endpoint(self) -> Tcp | WebSocket:
        """The server of the URI."""
        return self._endpoint

    def locate(
        self, profile: str, credentials: bytes | None, memory: MqttMemory
    ) -> Tcp | WebSocket:
        """Return the server of a redirect, once; otherwise that of the profile or of the URI."""
        if memory.moved is not None and not memory.tried:
            memory.tried = True
            if (address := self._address.elsewhere(memory.moved)) is not None:
                return self._endpoint_at(address)
        memory.moved, memory.tried = None, False
        try:
            host = None if self._host_of is None else self._host_of(profile)
        except Exception as error:
            raise SessionError(f"host_of failed for this profile: {describe(error)}") from error
        if host is None:
            return self._endpoint
        if (address := self._address.elsewhere(host)) is None:
            raise SessionError(f"host_of returned {host!r}, which is not a host or host:port")
        return self._endpoint_at(address)

    def _endpoint_at(self, address: Address) -> Tcp | WebSocket:
        if not address.web:
            return Tcp(address.host, address.port, tls=self._tls, server_name=self._server_name)
        # A frame may hold the end of one packet and the next one. It is read as a whole, so one
        # with an oversized packet must be accepted before the packet can be set aside.
        return WebSocket(
            f"{address}{address.path}",
            subprotocol="mqtt",
            tls=self._tls,
            max_size=max(2 * self.max_packet_size, LARGE_FRAME),
        )

    @staticmethod
    def credentials(username: str, password: str | bytes | None = None) -> bytes:
        """Return the credentials of a user and a password, to be stored for a profile."""
        text_field(username)  # raises for an invalid name
        if password is None:
            return username.encode()
        return username.encode() + b"\0" + packets.as_bytes(password)[0]

    def remember(self) -> MqttMemory:
        """Return the client's state of a new MQTT session."""
        return MqttMemory()

    def recall(self, memory: MqttMemory, stored: bytes) -> None:
        """Restore the filters of the last process, which the server may still have."""
        if self.outlives:
            memory.subscribed = tuple(text for text in stored.decode().split("\n") if text)

    def forget(self, memory: MqttMemory) -> MqttMemory:
        """Drop the sends in flight; keep the client id."""
        memory.forget()
        return memory

    def begin(self, profile: str, credentials: bytes | None, memory: MqttMemory) -> MqttDialogue:
        """Return a dialogue for a new link."""
        try:
            return self._begin(profile, credentials, memory)
        except ValueError as error:
            raise SessionError(f"the profile cannot be used with MQTT: {error}") from error

    def _begin(self, profile: str, credentials: bytes | None, memory: MqttMemory) -> MqttDialogue:
        client_id = memory.client_id or _fill(self._client_id, profile)
        # Clean if no link can resume; with `clean_start`, only the first link discards the session.
        clean = not self.resumes or not client_id or (self._clean_start and not memory.begun)
        username, password = self._address.username, self._address.password
        if credentials is not None:
            username, password = _user(credentials)
        values = {
            "session_expiry_interval": self._session_expiry or None,
            "receive_maximum": self.receive_maximum,
            "maximum_packet_size": self.max_packet_size,
        }
        will = self._will
        hello = packets.connect(
            client_id,
            keepalive=math.ceil(self.keepalive or 0),
            clean_start=clean,
            values=values,
            username=username,
            password=password,
            will=will,
            will_topic=_fill(will.topic, profile) if will is not None else "",
        )
        topic = tuple(_fill(piece, profile) for piece in self._topic.split("{recipient}"))
        filters = tuple((_filter(text, profile), text) for text in self._filters)
        goodbye = packets.disconnect(0x04 if will is not None and will.on_goodbye else 0)
        return MqttDialogue(self, memory, hello, clean, topic, filters, goodbye)

    def sandbox_check(self, profile: str, outgoing: Outgoing) -> None:
        """Raise `StepFailed` for content that no server accepts; for `offline=True`."""
        self.begin(profile, None, self.remember()).check(outgoing)

    def question(self, what: str, **details: Any) -> Any:
        """Return the query for SUBSCRIBE or UNSUBSCRIBE; raises `ValueError` for a bad filter."""
        check_filter(details["topic"])
        return super().question(what, **details)

    def route(self, frame: Any) -> str:
        """Return the tag of a publication or of a refused subscription."""
        return _TAGS.get(type(frame), "unhandled")

    def interpret(self, tag: str, frame: Any) -> Any:
        """Return a publication as a `Msg`: text if its sender has marked it so, else bytes."""
        if tag != "message":
            return frame if tag != "unhandled" else None
        if isinstance(frame, MessageTooLarge):
            raise frame
        kind: str = "bytes"
        content: Any = frame.payload
        if frame.properties.get("payload_format_indicator"):
            try:
                kind, content = "text", Text(frame.payload.decode())
            except UnicodeDecodeError:
                pass  # wrongly marked as text: bytes
        extra = {**frame.properties, "retained": True} if frame.retained else frame.properties
        return Msg(kind, content, frame.id or "", "", frame.topic, frame.duplicate, extra)

    def __repr__(self) -> str:
        return f"<Mqtt {self._address}, topic {self._topic}>"


def _unknown(what: str, text: str, known: set[str]) -> Iterable[str]:
    """Yield the mistakes in a template: unknown fields, and characters that MQTT forbids."""
    for name in _FIELD.findall(text):
        if name not in known:
            fields = " and ".join(f"{{{one}}}" for one in sorted(known))
            yield f"{what} has {{{name}}}, and only {fields} can be filled in"
    try:
        text_field(text)
    except ValueError as error:
        yield f"{what} cannot be used: {error}"


def _fill(text: str, profile: str) -> str:
    return text.replace("{profile}", profile)


def _filter(text: str, profile: str) -> str:
    """Fill in a topic filter; a profile with a wildcard would receive messages of others."""
    if "{profile}" in text and ("+" in profile or "#" in profile):
        raise ValueError("a profile with + or # would subscribe to more than its own topic")
    return _fill(text, profile)


def _user(credentials: bytes) -> tuple[str, bytes | None]:
    name, separator, rest = credentials.partition(b"\0")
    try:
        return name.decode(), rest if separator else None
    except UnicodeDecodeError:
        # Without the cause, which would show a byte of them.
        raise ValueError("its credentials were not created by Mqtt.credentials()") from None


def _context(
    ca: str | Path | None, certificate: str | Path | None, key: str | Path | None
) -> ssl.SSLContext:
    if ca is None and certificate is None:
        return default_tls()
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"Mqtt: ca={str(ca)!r} cannot be used: {error}") from error
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        files = f"certificate={str(certificate)!r}" + (f" with key={str(key)!r}" if key else "")
        raise ValueError(f"Mqtt: {files} cannot be used: {error}") from error
    return context
