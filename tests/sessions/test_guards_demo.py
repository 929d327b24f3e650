"""Frames that the demo protocol refuses. Pure: no loop, no session."""

from __future__ import annotations

from typing import Any

import pytest

from moored.sessions import CloseClass
from moored.sessions._errors import ProtocolError
from moored.sessions._protocol import Closing
from moored.testing.demo._frames import bytes_of, count_of, encode, text_of
from moored.testing.demo._protocol import DemoDialogue

pytestmark = pytest.mark.pure


def test_string_of_a_frame_has_a_maximum_length() -> None:
    assert text_of({"k": "ack", "id": "x" * 1024}, "id")
    with pytest.raises(ProtocolError, match="of at most 1024"):
        text_of({"k": "ack", "id": "x" * 1025}, "id")


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 1 << 53])
def test_count_of_a_frame_must_be_a_non_negative_int(value: Any) -> None:
    with pytest.raises(ProtocolError, match="needs a count 'n'"):
        count_of({"k": "got", "n": value}, "n")


@pytest.mark.parametrize("value", [None, 5, b"AA==", "not base64"])
def test_bytes_of_a_frame_must_be_base64_in_a_str(value: Any) -> None:
    with pytest.raises(ValueError, match=r"not a string|not base64"):
        bytes_of(value)


def test_nothing_after_a_close_frame_is_read() -> None:
    dialogue = DemoDialogue("alice", None, None)
    close = encode({"k": "close", "class": "transient"})
    events = list(dialogue.feed(close + encode({"k": "ping"}) + close))
    assert events == [Closing(CloseClass.TRANSIENT, None, "")]


@pytest.mark.parametrize(
    ("cumulative", "more"), [(False, 0), (True, 1)], ids=["not cumulative", "too many"]
)
def test_count_of_sends_that_were_not_written_is_refused(cumulative: bool, more: int) -> None:
    dialogue = DemoDialogue("alice", None, None, cumulative=cumulative)
    list(dialogue.feed(encode({"k": "welcome"})))
    with pytest.raises(ProtocolError, match="confirmed more sends than were written"):
        list(dialogue.feed(encode({"k": "upto", "more": more})))


@pytest.mark.parametrize(
    ("after", "obeyed"), [(5, 5), (True, None), (-1, None), (86_400, None), ("5", None)]
)
def test_invalid_retry_after_is_ignored(after: Any, obeyed: Any) -> None:
    dialogue = DemoDialogue("alice", None, None)
    (closing,) = dialogue.feed(encode({"k": "close", "retry_after": after}))
    assert isinstance(closing, Closing)
    assert closing.retry_after == obeyed
    assert closing.retry_after is not True
