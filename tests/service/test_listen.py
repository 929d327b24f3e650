"""The listening sockets, and the errors that name the holder of a port."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import pytest

from moored.kernel import program_of
from moored.service import CannotListen
from moored.service._listen import holder_of, listen, listening_inodes

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F99 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
   1: 0100007F:1F99 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1
   2: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1
"""


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


def test_a_taken_port_names_its_holder_and_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(holder_of(port)).startswith(f"pid {os.getpid()} (")
        with pytest.raises(CannotListen) as caught:
            listen("127.0.0.1", port)
    message = str(caught.value)
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: the port is in use by pid ")
    assert message.endswith(". Stop it, or choose another with --port.")


def test_a_port_that_is_bound_without_listening_has_no_known_holder() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert holder_of(port) is None
        with pytest.raises(CannotListen, match=r"the port is in use\. Stop it"):
            listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CannotListen, match="this machine does not have this address"):
        listen("192.0.2.1", 0)


def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    with pytest.raises(CannotListen, match="the name cannot be resolved"):
        listen("nobody.invalid", 0)


def test_the_table_of_sockets_is_read() -> None:
    assert listening_inodes(TABLE, 0x1F99) == {"4711"}
    assert listening_inodes(TABLE, 80) == {"4713"}
    assert listening_inodes(TABLE, 81) == set()


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (b"/venv/bin/python3.11\0/venv/bin/moored\0serve\0--admin-token\0x\0", "moored serve"),
        (b"/usr/bin/python3\0-m\0http.server\x008089\0", "http.server"),
        (b"/usr/sbin/nginx\0-g\0daemon off;\0", "nginx"),
        (b"nginx: master process /usr/sbin/nginx\0", "nginx"),
        (b"redis-server *:6379\0", "redis-server *:6379"),
        (b"python3\0-c\0import secrets\0", "python3"),
        (b"python3\0", "python3"),
        (b"", ""),
    ],
)
def test_a_program_is_named_without_its_options(command: bytes, program: str) -> None:
    assert program_of(command) == program
