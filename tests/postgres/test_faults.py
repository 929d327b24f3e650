"""Errors are classified by SQLSTATE, message text and errno."""

from __future__ import annotations

import errno
import socket

import psycopg
import pytest

from moored.postgres import ConfigurationError, DecodeError, StreamEnded
from moored.postgres.server._faults import FAULTS, FaultVerdict, diagnose
from moored.postgres.server._setup import SlotLost

pytestmark = pytest.mark.pure

RETRY, FATAL, DROP = FaultVerdict.RETRY, FaultVerdict.FATAL, FaultVerdict.DROP_SLOT


def said(text: str) -> psycopg.OperationalError:
    """An error while connecting, as libpq gives it: without a SQLSTATE."""
    return psycopg.OperationalError(f'connection failed: server at "db", port 5432 failed: {text}')


def coded(state: str, text: str = "it went wrong") -> psycopg.Error:
    """An error of a command, with its SQLSTATE."""
    kind = type("Coded", (psycopg.DatabaseError,), {"sqlstate": state})
    error = kind(text)
    assert isinstance(error, psycopg.Error)
    return error


WORDS = [
    ('FATAL:  password authentication failed for user "x"', "invalid_username_or_password", FATAL),
    ("fe_sendauth: no password supplied", "invalid_username_or_password", FATAL),
    (
        'FATAL:  no pg_hba.conf entry for host "1.2.3.4", user "x", database "y", no encryption',
        "ssl_connection_required",
        FATAL,
    ),
    (
        'FATAL:  no pg_hba.conf entry for replication connection from host "1.2.3.4"',
        "authorization_failure",
        FATAL,
    ),
    ('FATAL:  database "orders" does not exist', "database_does_not_exist", FATAL),
    ("FATAL:  The requested endpoint could not be found", "endpoint_not_found", FATAL),
    ("FATAL:  exceeded the compute time quota", "compute_quota_exceeded", FATAL),
    ("FATAL:  exceeded the data transfer quota", "data_transfer_quota_exceeded", FATAL),
    ("FATAL:  branch does not exist", "branch_does_not_exist", RETRY),
    ("FATAL:  sorry, too many clients already", "insufficient_resources", RETRY),
    (
        "FATAL:  remaining connection slots are reserved for roles",
        "insufficient_resources",
        RETRY,
    ),
    ("FATAL:  the database system is starting up", "database_server_unavailable", RETRY),
    ("FATAL:  the database system is shutting down", "database_server_shutting_down", RETRY),
    ("FATAL:  server login has been failing, try again later", "pooler_login_failed", RETRY),
    ("FATAL:  query_wait_timeout", "pooler_login_failed", RETRY),
    ("FATAL:  Couldn't connect to compute node", "compute_node_unreachable", RETRY),
    (
        'could not translate host name "nope" to address: Name or service not known',
        "nxdomain",
        RETRY,
    ),
    (
        'FATAL:  database "orders" is not currently accepting connections',
        "database_not_accepting_connections",
        RETRY,
    ),
    ("Temporary failure in name resolution", "nxdomain_temporary", RETRY),
    ("server does not support SSL, but SSL was required", "ssl_not_available", FATAL),
    ("SSL error: certificate verify failed", "ssl_connection_failed", FATAL),
    ('root certificate file "/x" does not exist', "ssl_connection_failed", FATAL),
    (
        "FATAL:  connection requires a valid client certificate\n"
        'connection to server failed: FATAL:  no pg_hba.conf entry for host "::1", no encryption',
        "client_certificate_required",
        FATAL,
    ),
    ("SSL error: tlsv1 alert unknown ca", "client_certificate_required", FATAL),
    ('private key file "/x" has group or world access', "client_certificate_required", FATAL),
    ("SSL error: unexpected eof while reading", "connection_closed", RETRY),
    ('invalid sslmode value: "maybe"', "invalid_url", FATAL),
    ("FATAL:  no more connections allowed (max_client_conn)", "insufficient_resources", RETRY),
    ("timeout expired", "connection_timeout", RETRY),
    ("Connection refused", "connection_refused", RETRY),
    ("server closed the connection unexpectedly", "connection_closed", RETRY),
    (
        "FATAL:  must be superuser or replication role to start walsender; permission denied",
        "insufficient_privileges",
        FATAL,
    ),
]


@pytest.mark.parametrize(("text", "kind", "verdict"), WORDS)
def test_errors_while_connecting_are_classified_by_their_text(
    text: str, kind: str, verdict: FaultVerdict
) -> None:
    found = diagnose(said(text))
    assert (found.type, found.verdict) == (kind, verdict)


CODES = [
    ("55000", "logical decoding requires wal_level >= logical", "wal_level_is_not_logical", FATAL),
    (
        "55000",
        'cannot read from logical replication slot "s": This slot has been invalidated because it '
        "exceeded the maximum reserved size.",
        "database_slot_exceeded_max_size",
        DROP,
    ),
    (
        "55000",
        'can no longer access replication slot "s"',
        "database_slot_invalidated",
        DROP,
    ),
    (
        "42501",
        "must be superuser or replication role to use slots",
        "insufficient_privileges",
        FATAL,
    ),
    ("42501", "permission denied for table orders", "insufficient_privileges", FATAL),
    ("28P01", "it went wrong", "invalid_username_or_password", FATAL),
    ("3D000", 'database "x" does not exist', "database_does_not_exist", FATAL),
    ("55006", "replication slot is active for PID 4711", "replication_slot_in_use", RETRY),
    ("53300", "too many connections for role", "insufficient_resources", RETRY),
    ("53100", "could not extend file: No space left", "disk_full", RETRY),
    ("58P02", "could not create file", "duplicate_slot_file", RETRY),
    (
        "57P01",
        "terminating connection due to administrator command",
        "database_server_shutting_down",
        RETRY,
    ),
    ("57P03", "the database system is starting up", "database_server_unavailable", RETRY),
    ("42601", 'syntax error at or near "IDENTIFY_SYSTEM"', "syntax_error", FATAL),
    ("42704", 'publication "p" does not exist', "missing_publication", DROP),
    ("42704", 'replication slot "p" does not exist', "missing_slot", RETRY),
    ("57014", "canceling statement due to statement timeout", "query_canceled", RETRY),
    ("08P01", "server conn crashed?", "server_connection_crashed", RETRY),
    ("08006", "it broke", "connection_failure", RETRY),
]


@pytest.mark.parametrize(("state", "text", "kind", "verdict"), CODES)
def test_errors_of_commands_are_classified_by_their_sqlstate(
    state: str, text: str, kind: str, verdict: FaultVerdict
) -> None:
    found = diagnose(coded(state, text))
    assert (found.type, found.verdict) == (kind, verdict)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "connection_refused"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "connection_closed"),
        (OSError(errno.EHOSTUNREACH, "no route"), "connection_timeout"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), "nxdomain"),
        (TimeoutError(), "connection_timeout"),
        (StreamEnded("the server has been silent for 10 s"), "connection_closed"),
        (DecodeError("a message is truncated"), "protocol_error"),
        (RuntimeError("surprise"), "unknown"),
    ],
)
def test_system_errors_and_errors_of_this_package_are_classified(
    error: Exception, kind: str
) -> None:
    assert diagnose(error).type == kind


def test_a_configuration_error_is_fatal_with_its_own_text() -> None:
    found = diagnose(ConfigurationError("the publication leaves out some changes"))
    assert found.verdict is FATAL
    assert str(found) == "the publication leaves out some changes"


def test_a_lost_slot_is_dropped_and_created_again() -> None:
    assert diagnose(SlotLost("the slot has lost WAL")).verdict is DROP


def test_the_cause_of_an_unknown_error_is_classified() -> None:
    wrapper = RuntimeError("could not start")
    wrapper.__cause__ = said('FATAL:  password authentication failed for user "x"')
    assert diagnose(wrapper).type == "invalid_username_or_password"


def test_every_fatal_error_has_a_remedy() -> None:
    assert all(fault.remedy for fault in FAULTS if fault.verdict is not RETRY)
