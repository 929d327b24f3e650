"""The proxy as a program: commands, help, signals and errors."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.programs import Program, run_program

from moored.testing._proxy_commands import HELP, run_command
from moored.testing.proxy import FaultProxy

PROGRAM = "moored.testing.proxy"


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    with Program(PROGRAM, *arguments, stderr=True) as process:
        try:
            yield process
        finally:
            process.kill()


def send_command(process: Program, line: str) -> str:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


def address(process: Program) -> tuple[str, int]:
    words = process.stdout.readline().split()
    assert words[:2] == ["listening", "on"]
    host, _, port = words[2].rstrip(",").rpartition(":")
    return host, int(port)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def name_of(server: socket.socket) -> str:
    return "{}:{}".format(*server.getsockname())


def test_commands_on_standard_input_switch_the_faults(server: socket.socket) -> None:
    with program(name_of(server)) as process:
        place = address(process)
        with socket.create_connection(place, timeout=30) as client:
            behind, _ = server.accept()
            with behind:
                client.sendall(b"hello")
                assert behind.recv(5) == b"hello"
                assert ": stalling; 1 open, 1 accepted>" in send_command(process, "stall")
                client.sendall(b"later")
                behind.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    behind.recv(5)
                behind.settimeout(30)
                assert "forwarding" in send_command(process, "resume")
                assert behind.recv(5) == b"later"
                assert "refusing" in send_command(process, "refuse on")
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(place)
                assert send_command(process, "reset") == "reset 1 connections\n"
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
        send_command(process, "status")
        assert process.stdout.readline() == (
            "accepted=1 refused=0 limited=0 open=0 resets=1 bytes_up=10 bytes_down=0 "
            "bytes_swallowed=0\n"
        )
        process.stdin.write("nonsense\n\nlatency much\n")
        process.stdin.close()
        assert process.wait(30) == 0
        assert process.stdout.read() == "ended\n"
        assert process.stderr.read() == (
            "moored: unknown command 'nonsense': try help\nmoored: 'much' is not a number\n"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program(server: socket.socket, number: signal.Signals) -> None:
    with program(name_of(server), "--no-input") as process:
        with socket.create_connection(address(process), timeout=30):
            server.accept()[0].close()
            process.send_signal(number)
            assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_quit_ends_the_program(server: socket.socket) -> None:
    with program(name_of(server)) as process:
        address(process)
        assert send_command(process, "quit") == "ended\n"
        assert process.wait(30) == 0


def test_do_runs_commands_before_the_first_connection(server: socket.socket) -> None:
    arguments = ["--do", "limit 0 0", "--do", "latency 0.01", "--answer", "53400"]
    with program(name_of(server), *arguments) as process:
        with socket.create_connection(address(process), timeout=30) as client:
            client.sendall(b"\0\0\0\x08\0\3\0\0")
            assert b"C53400\0" in client.recv(1000)
        assert "latency up 0.01 s" in send_command(process, "status")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(PROGRAM, *arguments, timeout=60)


def test_the_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert HELP in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere"], 2, "'nowhere' is not HOST:PORT"),
        (["127.0.0.1:1", "--do", "dance"], 2, "unknown command 'dance'"),
        (["127.0.0.1:1", "--answer", "1"], 2, "is not a SQLSTATE"),
        (["127.0.0.1:1", "--listen", "here"], 2, "'here' is not HOST:PORT"),
    ],
)
def test_wrong_arguments_are_one_line_on_stderr(arguments: list[str], code: int, text: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_line_on_stderr(server: socket.socket) -> None:
    done = run("127.0.0.1:1", "--listen", name_of(server))
    assert done.returncode == 1
    assert done.stderr == f"moored: cannot listen on {name_of(server)}: Address already in use\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("stall", ": stalling;"),
        ("black-hole", ": black hole;"),
        ("resume", ": forwarding;"),
        ("refuse on", ", refusing;"),
        ("limit 20", "limit 20/s with a burst of 20;"),
        ("limit 20 5", "limit 20/s with a burst of 5;"),
        ("limit off", ": forwarding;"),
        ("latency 0.2", "latency up 0.2 s, latency down 0.2 s;"),
        ("latency 0.2 down", ": forwarding, latency down 0.2 s;"),
        ("latency off", ": forwarding;"),
        ("throttle 1000 up", ": forwarding, throttle up 1000 bytes/s;"),
        ("cut 10 down", ": forwarding, reset after 10 bytes down;"),
        ("cut off", ": forwarding;"),
        ("heal", ": forwarding;"),
        ("reset", "reset 0 connections"),
        ("status", "accepted=0 "),
        ("help", HELP),
    ],
)
def test_a_command_reports_the_new_state(line: str, text: str) -> None:
    assert text in run_command(FaultProxy("127.0.0.1", 1), line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("stall now", "usage: stall  "),
        ("refuse", r"usage: refuse on\|off"),
        ("limit", "usage: limit RATE"),
        ("limit 1 2 3", "usage: limit RATE"),
        ("latency 1 left", "must be 'up' or 'down', not 'left'"),
        ("latency -1", "latency must be 0 or more"),
    ],
)
def test_a_wrong_command_names_the_mistake(line: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_command(FaultProxy("127.0.0.1", 1), line)
