"""When the keepalive sends a ping, waits, or declares the link lost."""

from __future__ import annotations

from moored.sessions.link._keepalive import Keepalive, KeepaliveStep


def test_shrinking_send_buffer_counts_as_a_sign_of_life() -> None:
    keepalive = Keepalive(30.0, 5.0, 0.0)
    assert keepalive.check(30.0, 1000) == (KeepaliveStep.PING, 35.0)
    assert keepalive.check(35.0, 600) == (KeepaliveStep.WAIT, 40.0)
    assert keepalive.check(40.0, 0) == (KeepaliveStep.WAIT, 45.0)
    assert keepalive.check(45.0, 0) == (KeepaliveStep.LOST, 45.0)


def test_unchanged_send_buffer_and_no_answer_lose_the_link() -> None:
    keepalive = Keepalive(30.0, 5.0, 0.0)
    assert keepalive.check(30.0, 1000) == (KeepaliveStep.PING, 35.0)
    assert keepalive.check(35.0, 1000) == (KeepaliveStep.LOST, 35.0)


def test_pings_continue_while_an_answer_is_awaited() -> None:
    keepalive = Keepalive(2.0, 5.0, 0.0)
    assert keepalive.check(2.0) == (KeepaliveStep.PING, 4.0)
    assert keepalive.check(4.0) == (KeepaliveStep.PING, 6.0)
    keepalive.sent_at = 5.0
    assert keepalive.check(6.0) == (KeepaliveStep.WAIT, 7.0)
    assert keepalive.check(7.0) == (KeepaliveStep.LOST, 7.0)


def test_answer_ends_the_wait_and_the_next_ping_is_on_time() -> None:
    keepalive = Keepalive(2.0, 5.0, 0.0)
    assert keepalive.check(2.0) == (KeepaliveStep.PING, 4.0)
    keepalive.received_at = 2.1
    assert keepalive.check(4.0) == (KeepaliveStep.PING, 6.0)
    keepalive.received_at = 4.1
    keepalive.sent_at = 5.0
    assert keepalive.check(6.0) == (KeepaliveStep.WAIT, 6.1)
