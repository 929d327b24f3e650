"""The frames of the demo protocol: a length of four bytes, then one JSON object.

Every frame has a `k`, its kind. A frame that is too long is refused by its first four bytes, so
that the buffer of an incomplete one is bounded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from moored.sessions import Media, Poll, ProtocolError, StepFailed, Text

Frame: TypeAlias = dict[str, Any]

#: The longest frame, in bytes.
MAX_FRAME = 256 * 1024


def encode(frame: Frame) -> bytes:
    """Return a frame as bytes."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


def _broken(text: str) -> ProtocolError:
    return ProtocolError(text, encode({"k": "error", "reason": text}))


@dataclass(slots=True, eq=False, repr=False)
class DemoFrames:
    """Splits a stream of bytes into frames."""

    _rest: bytearray | None = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now; raises `ProtocolError` at an invalid one."""
        rest = self._rest
        if rest is not None:
            rest += data
            if len(rest) < 4 or len(rest) < 4 + _size(rest[:4]):
                return
            data, self._rest = bytes(rest), None
        begin, end = 0, len(data)
        while end - begin >= 4:
            stop = begin + 4 + _size(data[begin : begin + 4])
            if stop > end:
                break
            yield _decode(data[begin + 4 : stop])
            begin = stop
        if begin < end:
            self._rest = bytearray(data[begin:])


def _size(head: bytes | bytearray) -> int:
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME:
        raise _broken(f"a frame of {size} bytes is longer than {MAX_FRAME}")
    return size


def _decode(body: bytes) -> Frame:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError):
        raise _broken("a frame is not JSON") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("k"), str):
        raise _broken("a frame is not an object with a kind")
    return frame


def text_of(frame: Frame, key: str, longest: int = 1024) -> str:
    """Return a required string of a frame."""
    value = frame.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise _broken(f"a {frame['k'][:32]!r} frame needs a string {key!r} of at most {longest}")
    return value


def count_of(frame: Frame, key: str) -> int:
    """Return a required count of a frame."""
    value = frame.get(key)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise _broken(f"a {frame['k'][:32]!r} frame needs a count {key!r}")
    return value


def bytes_of(text: Any) -> bytes:
    """Return the bytes of a base64 string; raises `ValueError`."""
    if not isinstance(text, str):
        raise ValueError("not a string")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("not base64") from None


def text_from(data: bytes) -> str:
    """Return bytes as a base64 string."""
    return base64.b64encode(data).decode()


def wire_form(content: Any) -> dict[str, Any]:
    """Return a content as JSON data; raises `StepFailed` for unsupported types."""
    match content:
        case bytes() | bytearray() | memoryview():
            return {"type": "bytes", "data": text_from(bytes(content))}
        case str():
            return wire_form(Text(content))
        case Media():
            return {"type": "media", **asdict(content), "secret": text_from(content.secret)}
        case Text() | Poll():
            return {"type": type(content).__name__.lower(), **asdict(content)}
        case {"type": str()}:
            return dict(content)
    raise StepFailed(f"the demo protocol cannot send a {type(content).__name__}")


def content_of(form: Any) -> tuple[str, Any]:
    """Return the type and the content of JSON data; unexpected data is returned unchanged."""
    type = form.get("type") if isinstance(form, dict) else None
    if not isinstance(type, str):
        return "unknown", form
    try:
        match form:
            case {"type": "bytes", "data": data}:
                return type, bytes_of(data)
            case {"type": "text", "text": str(text)}:
                return type, Text(text)
            case {"type": "media", "kind": str(kind), "location": str(location)}:
                secret = bytes_of(form.get("secret", ""))
                size, caption = int(form.get("size", 0)), str(form.get("caption", ""))
                return type, Media(kind, location, size, caption, secret)
            case {"type": "poll", "question": str(question), "options": [*options]}:
                choices = int(form.get("choices", 1))
                return type, Poll(question, tuple(map(str, options)), choices)
    except (TypeError, ValueError, OverflowError):
        pass
    return type, form
