"""The client of the demo protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from moored.sessions import (
    Accepted,
    Answered,
    Bounced,
    CloseClass,
    Closing,
    Confirmed,
    ConfirmedUpTo,
    Dialogue,
    Feature,
    Greeting,
    Happening,
    Ignored,
    LoginStep,
    Media,
    Msg,
    Notice,
    Outgoing,
    Poll,
    Presence,
    Protocol,
    ProtocolError,
    QueryFailed,
    Ready,
    Receipt,
    Refused,
    StepFailed,
    Unhandled,
)
from moored.sessions._protocol import DialogueEvent
from moored.sessions.transport import Endpoint

from ._frames import (
    MAX_FRAME,
    DemoFrames,
    Frame,
    bytes_of,
    content_of,
    count_of,
    encode,
    text_from,
    text_of,
    wire_form,
)

if TYPE_CHECKING:
    from ._server import DemoServer

__all__ = ["VERSION", "Demo", "DemoDialogue", "DemoMemory"]

#: The version of the protocol.
VERSION = 1

_CLASSES = {kind.name.lower(): kind for kind in CloseClass}
_ONLY_WHEN_READY = frozenset(
    ("ack", "upto", "nack", "bounce", "answer", "message", "receipt", "presence", "group")
)


@dataclass(slots=True)
class DemoMemory:
    """What a session keeps between two links: the token for resuming, and unconfirmed sends."""

    token: str | None = None
    unconfirmed: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class DemoDialogue(Dialogue):
    """One link."""

    _profile: str
    _credentials: bytes | None
    _memory: DemoMemory | None
    cumulative: bool = False
    version: int = VERSION
    _frames: DemoFrames = field(default_factory=DemoFrames)
    # The ids of unconfirmed sends of this link, if a count confirms them.
    _line: deque[str] | None = None
    _ready: bool = False
    _over: bool = False

    def __post_init__(self) -> None:
        if self.cumulative:
            self._line = deque()

    # -- sending -------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return the hello: profile, credentials and options."""
        key = None if self._credentials is None else text_from(self._credentials)
        frame: Frame = {"k": "hello", "v": self.version, "profile": self._profile, "key": key}
        if self.cumulative:
            frame["cumulative"] = True
        if self._memory is not None:
            frame["resume"] = self._memory.token or ""
        return encode(frame)

    def write(self, outgoing: Outgoing) -> bytes:
        """Return a send as bytes."""
        body = wire_form(outgoing.content) if outgoing.body is None else outgoing.body
        id = outgoing.id
        try:
            data = encode({"k": "send", "id": id, "to": outgoing.recipient, "content": body})
        except (TypeError, ValueError, RecursionError) as error:
            raise StepFailed(f"it cannot be written as JSON: {error}") from error
        if len(data) > MAX_FRAME:
            raise StepFailed(f"it needs {len(data)} bytes; a frame has at most {MAX_FRAME}")
        if self._memory is not None:
            self._memory.unconfirmed.pop(id, None)  # the new one is the last in the order
            self._memory.unconfirmed[id] = data
        if self._line is not None:
            self._line.append(id)
        return data

    def resend(self, wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
        """Return the unconfirmed sends of the last link that are not settled."""
        if self._memory is None:
            return
        for id, data in list(self._memory.unconfirmed.items()):
            if id not in wanted:
                del self._memory.unconfirmed[id]
                continue
            if self._line is not None:
                self._line.append(id)
            yield id, data

    def query(self, id: str, question: Any) -> bytes:
        """Return a query: an object with a `do`, the name of the query."""
        data = encode({"k": "query", "id": id, "question": question})
        if len(data) > MAX_FRAME:
            raise QueryFailed(f"it needs {len(data)} bytes; a frame has at most {MAX_FRAME}")
        return data

    def notice(self, data: Any) -> bytes:
        """Return a notice: an object with a `do`, like a query, but not answered."""
        return encode({"k": "notice", "notice": data})

    def ping(self) -> bytes:
        """Return a ping."""
        return encode({"k": "ping"})

    def acknowledge(self, token: Any) -> bytes:
        """Return the acknowledgement of a message."""
        return encode({"k": "got", "n": token})

    def login(self, answer: Any) -> bytes:
        """Return the pairing code that the user has entered."""
        return encode({"k": "login", "answer": str(answer)})

    def goodbye(self) -> bytes:
        """Return the frame that announces the end of the link."""
        return encode({"k": "bye"})

    # -- receiving -----------------------------------------------------------------------------

    def feed(self, data: bytes) -> Iterable[DialogueEvent]:
        """Yield the events of received bytes."""
        for frame in self._frames.feed(data):
            if self._over:
                return
            kind = frame["k"]
            if not self._ready and kind in _ONLY_WHEN_READY:
                raise ProtocolError(f"the server sent a {kind!r} frame before its welcome")
            yield self._event(kind, frame)

    def _event(self, kind: str, frame: Frame) -> DialogueEvent:
        match kind:
            case "welcome":
                return self._welcome(frame)
            case "pair":
                return LoginStep("pairing code", text_of(frame, "code"))
            case "paired":
                return self._paired(frame)
            case "ack":
                return Confirmed(self._settled(text_of(frame, "id")), frame.get("extra"))
            case "upto":
                return self._up_to(count_of(frame, "more"))
            case "nack":
                id = self._settled(text_of(frame, "id"))
                return Refused(id, frame.get("code"), _reason(frame))
            case "bounce":
                return Bounced(text_of(frame, "id"), frame.get("code"), _reason(frame))
            case "answer":
                return Answered(text_of(frame, "id"), frame.get("value"), frame.get("code"))
            case "message":
                id, number = text_of(frame, "id"), count_of(frame, "n")
                text_of(frame, "from")
                return Happening(frame, number, (id, number), again=True)
            case "receipt" | "presence" | "group":
                return Happening(frame)
            case "ping":
                return Greeting(encode({"k": "pong"}))
            case "pong":
                return Ignored()
            case "close":
                return self._close(frame)
        return Unhandled(kind[:64])

    def _welcome(self, frame: Frame) -> Ready:
        if self._ready:
            raise ProtocolError("the server sent a second welcome")
        window = frame.get("window")
        if window is not None:
            window = max(1, count_of(frame, "window"))
        resumed = frame.get("resumed") is True
        if self._memory is not None:
            self._memory.token = text_of(frame, "token")
            if not resumed:
                self._memory.unconfirmed.clear()
        self._ready = True
        return Ready(resumed and self._memory is not None, window)

    def _paired(self, frame: Frame) -> Accepted:
        try:
            return Accepted(bytes_of(frame.get("key")))
        except ValueError:
            raise ProtocolError("the server issued no valid credentials") from None

    def _settled(self, id: str) -> str:
        if self._memory is not None:
            self._memory.unconfirmed.pop(id, None)
        return id

    def _up_to(self, count: int) -> ConfirmedUpTo:
        line = self._line
        if line is None or count > len(line):
            raise ProtocolError("the server confirmed more sends than were written")
        for _ in range(count):
            self._settled(line.popleft())
        return ConfirmedUpTo(count)

    def _close(self, frame: Frame) -> Closing:
        self._over = True
        after = frame.get("retry_after")
        if isinstance(after, bool) or not isinstance(after, int | float) or not 0 <= after < 86_400:
            after = None
        kind = _CLASSES.get(str(frame.get("class")), CloseClass.TRANSIENT)
        return Closing(kind, frame.get("code"), _reason(frame), retry_after=after)


def _reason(frame: Frame) -> str:
    return text_of(frame, "reason") if "reason" in frame else ""


@dataclass(eq=False, repr=False)
class Demo(Protocol):
    """A small protocol with all features but subscriptions, for docs, demos and simulations."""

    #: A `DemoServer` of this process, or the endpoint of one.
    server: DemoServer | Endpoint
    _: KW_ONLY
    #: The server confirms by counts, not by ids.
    cumulative: bool = False
    #: Unconfirmed sends are resumed over the next link, and the server accepts each id once.
    resume: bool = False
    keepalive: float | None = 30.0
    patience: float = 5.0
    version: int = VERSION

    name = "demo"
    features = frozenset(Feature) - {Feature.SUBSCRIPTIONS}
    redelivers = "always"
    outlives = True

    def __post_init__(self) -> None:
        self.resumes = self.resume
        self.steps = _STEPS

    @property
    def endpoint(self) -> Endpoint:
        """The server to connect to."""
        endpoint = getattr(self.server, "endpoint", self.server)
        assert hasattr(endpoint, "dial")
        return endpoint

    def remember(self) -> DemoMemory | None:
        """Return the state that outlives a link; None if links do not resume."""
        return DemoMemory() if self.resumes else None

    def begin(
        self, profile: str, credentials: bytes | None, memory: DemoMemory | None
    ) -> DemoDialogue:
        """Return a dialogue for a new link."""
        return DemoDialogue(profile, credentials, memory, self.cumulative, self.version)

    def question(self, what: str, **details: Any) -> Any:
        """Return a query; a presence is a `Notice`, which is not answered."""
        question = super().question(what, **details)
        return Notice(question) if what == "presence" else question

    async def upload(self, session: Any, kind: str, data: bytes, caption: str) -> Media:
        """Upload bytes to the server, in one frame."""
        location = await session.query(self.question("upload", data=text_from(data)))
        return Media(kind, location, len(data), caption)

    async def download(self, session: Any, media: Media) -> bytes:
        """Download bytes from the server."""
        return bytes_of(await session.query(self.question("download", location=media.location)))

    def sandbox_check(self, profile: str, outgoing: Outgoing) -> None:
        """Raise `StepFailed` for content that cannot be written; for `offline=True`."""
        self.begin(profile, None, None).write(outgoing)

    def sandbox_answer(self, question: Any) -> Any:
        """Return the location of an upload; for `offline=True`."""
        return "sandbox" if question.get("do") == "upload" else None

    def sandbox_extra(self, outgoing: Outgoing) -> Any:
        """Return the secret of a poll; for `offline=True`."""
        return {"secret": "0" * 32} if isinstance(outgoing.content, Poll) else None

    def route(self, frame: Frame) -> str:
        """Return the kind of the frame as its tag."""
        kind: str = frame["k"]
        return kind if kind in ("message", "receipt", "presence", "group") else "unhandled"

    def interpret(self, tag: str, frame: Frame) -> Any:
        """Return the user's data for a frame."""
        match tag:
            case "message":
                kind, content = content_of(frame.get("content"))
                to = frame.get("to")
                return Msg(
                    kind,
                    content,
                    frame["id"],
                    frame["from"],
                    to=to if isinstance(to, str) else "",
                    duplicate=frame.get("again") is True,
                )
            case "receipt":
                ids = frame.get("ids")
                known = tuple(map(str, ids)) if isinstance(ids, list) else ()
                return Receipt(known, str(frame.get("kind", "")), str(frame.get("by", "")))
            case "presence":
                return Presence(str(frame.get("who", "")), str(frame.get("state", "")))
            case "group":
                return {key: value for key, value in frame.items() if key != "k"}
        return None


def _encode_step(outgoing: Outgoing, session: Any) -> Outgoing:
    outgoing.body = wire_form(outgoing.content)
    return outgoing


_STEPS = (("encode", _encode_step),)
