"""The listening sockets, and the errors of an address that cannot be bound."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import pytest

from moored.service import CannotListen
from moored.service._listen import listen


def test_a_free_port_is_taken_and_listens() -> None:
    with ExitStack() as stack:
        (one,) = [stack.enter_context(each) for each in listen("127.0.0.1", 0)]
        with socket.create_connection(one.getsockname(), timeout=5):
            pass


def test_all_addresses_of_a_name_get_the_same_port() -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in listen("localhost", 0)]
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert len({each.family for each in sockets}) == len(sockets)


def test_the_error_of_a_taken_port_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            listen("127.0.0.1", port)
    message = str(caught.value)
    by = f"the port is in use by pid {os.getpid()} ("
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: {by}")
    assert message.endswith(", or choose another with --port.")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CannotListen, match="this machine does not have this address"):
        listen("192.0.2.1", 0)


def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    with pytest.raises(CannotListen, match="the name cannot be resolved"):
        listen("nobody.invalid", 0)
