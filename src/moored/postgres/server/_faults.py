"""Classify errors: one table for the errors of the server, of libpq and of the operating system.

libpq does not report the SQLSTATE of an error that occurs while connecting, so most rules also
match the message text. The first rule that matches applies: specific rules come before general
ones.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import psycopg

from moored.kernel import SECRETS

from .._errors import ConfigurationError, DecodeError, StateError, StreamEnded
from ._setup import SlotLost

__all__ = ["FAULTS", "Diagnosis", "Fault", "FaultVerdict", "diagnose"]


class FaultVerdict(Enum):
    """How the manager reacts to an error."""

    #: It may be temporary: retry, with a backoff.
    RETRY = "retry"
    #: An operator must change something: stop, and report what. After the manager was active once,
    #: it is retried instead, because it may be temporary (a password that is being changed).
    FATAL = "fatal"
    #: The slot can never be read again: drop it, create a new one, and reset all consumers.
    DROP_SLOT = "drop slot and restart"


class Fault(NamedTuple):
    """One rule of the table."""

    type: str
    verdict: FaultVerdict
    #: What happened, and what to do about it.
    happened: str
    remedy: str
    #: The rule matches an error with one of these SQLSTATEs …
    states: tuple[str, ...] = ()
    #: … or an error without a SQLSTATE whose message contains one of these phrases (lower case).
    words: tuple[str, ...] = ()
    #: Whether an error with a SQLSTATE must contain a phrase, too: the SQLSTATE is too general.
    both: bool = False
    errnos: tuple[int, ...] = ()

    def matches(self, state: str | None, text: str, number: int | None) -> bool:
        """Return whether the rule matches an error's SQLSTATE, lower-case text and errno."""
        if self.errnos and number in self.errnos:
            return True
        worded = any(words in text for words in self.words)
        if self.states and state is not None:
            return state in self.states and (worded or not self.both)
        return worded


class Diagnosis(NamedTuple):
    """An error's type, how to react to it, and its text for users."""

    type: str
    verdict: FaultVerdict
    #: What happened.
    message: str
    #: What to do about it.
    remedy: str

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        fatal = self.verdict is FaultVerdict.FATAL
        doctor = "; `moored doctor URL` checks this and the rest" if fatal else ""
        return f"{self.message}: {self.remedy}{doctor}"


_RETRY, _FATAL, _DROP = FaultVerdict.RETRY, FaultVerdict.FATAL, FaultVerdict.DROP_SLOT

FAULTS: tuple[Fault, ...] = (
    Fault(
        "database_slot_exceeded_max_size",
        _DROP,
        "the replication slot needed more WAL than max_slot_wal_keep_size allows",
        "a new slot is created and consumers get a Reset; raise max_slot_wal_keep_size, or consume "
        "faster",
        ("55000",),
        ("exceeded the maximum reserved size",),
        both=True,
    ),
    Fault(
        "database_slot_invalidated",
        _DROP,
        "the server has invalidated the replication slot",
        "a new slot is created and consumers get a Reset; the server's log has the reason",
        ("55000", "42704"),
        (
            "replication slot has been invalidated",
            "can no longer access replication slot",
            "can no longer get changes from replication slot",
            "cannot read from logical replication slot",
        ),
        both=True,
    ),
    Fault(
        "wal_level_is_not_logical",
        _FATAL,
        "wal_level of the server is not logical",
        "set wal_level = logical in postgresql.conf (on RDS: rds.logical_replication = 1) and "
        "restart the server",
        ("55000",),
        ("logical decoding requires", "wal_level"),
        both=True,
    ),
    Fault(
        "insufficient_privileges",
        _FATAL,
        "this user lacks the REPLICATION privilege",
        "run ALTER ROLE … WITH REPLICATION (on RDS: GRANT rds_replication TO …)",
        ("42501",),
        ("wal sender", "walsender", "replication role", "replication attribute"),
        both=True,
    ),
    Fault(
        "insufficient_privileges",
        _FATAL,
        "this user lacks a privilege",
        "grant the privilege that the server's message names",
        ("42501",),
        ("permission denied", "must be owner", "must be superuser"),
    ),
    Fault(
        "invalid_username_or_password",
        _FATAL,
        "the server rejects the user name or the password",
        "check both in the URL; special characters of a password must be percent-encoded",
        ("28P01",),
        ("password authentication failed", "no password supplied"),
    ),
    Fault(
        "client_certificate_required",
        _FATAL,
        "the server requires a client certificate that it trusts",
        "set sslcert and sslkey in the URL, to a certificate that is signed by a CA of the "
        "server's ssl_ca_file; only this user may have permission to read the key",
        (),
        (
            "requires a valid client certificate",
            "alert certificate required",
            "alert unknown ca",
            "alert bad certificate",
            "certificate present, but not private key",
            "private key file",
            "could not read certificate file",
        ),
    ),
    Fault(
        "ssl_connection_required",
        _FATAL,
        "the server accepts only encrypted connections",
        "set sslmode=require in the URL, or remove sslmode from it",
        ("28000",),
        ("no encryption", "ssl off", "connection is insecure"),
        both=True,
    ),
    Fault(
        "authorization_failure",
        _FATAL,
        "the server does not permit this user to log in from this address",
        "check pg_hba.conf for this user, database and address, and that the role has LOGIN",
        ("28000",),
        ("no pg_hba.conf entry", "is not permitted to log in", 'fatal:  role "'),
    ),
    Fault(
        "endpoint_not_found",
        _FATAL,
        "the provider has no such endpoint",
        "check the host name in the URL",
        (),
        ("endpoint could not be found", "endpoint id is not specified"),
    ),
    Fault(
        "compute_quota_exceeded",
        _FATAL,
        "the provider's quota of compute time is used up",
        "raise the plan's limit, or wait for the next billing period",
        (),
        ("compute time quota",),
    ),
    Fault(
        "data_transfer_quota_exceeded",
        _FATAL,
        "the provider's quota of data transfer is used up",
        "raise the plan's limit, or wait for the next billing period",
        (),
        ("data transfer quota",),
    ),
    Fault(
        "branch_does_not_exist",
        _RETRY,
        "the provider's branch does not exist (yet)",
        "if this persists, check the host name in the URL",
        (),
        ("branch does not exist", "branch not found"),
    ),
    Fault(
        "database_not_accepting_connections",
        _RETRY,
        "the database does not accept connections",
        "if this persists, run ALTER DATABASE … ALLOW_CONNECTIONS true",
        ("55000",),
        ("not currently accepting connections",),
        both=True,
    ),
    Fault(
        "database_does_not_exist",
        _FATAL,
        "the database does not exist",
        "check the database name in the URL, or create the database",
        ("3D000",),
        ('fatal:  database "',),
    ),
    Fault(
        "replication_slot_in_use",
        _RETRY,
        "another connection reads from the replication slot",
        "it may be an old connection of this service that the server has not closed yet; if this "
        "persists, find its pid in pg_replication_slots.active_pid",
        ("55006",),
        ("is active for pid",),
    ),
    Fault(
        "insufficient_resources",
        _RETRY,
        "all replication slots of the server are in use",
        "raise max_replication_slots, or drop unused slots (pg_replication_slots)",
        ("53400",),
        ("all replication slots are in use",),
        both=True,
    ),
    Fault(
        "insufficient_resources",
        _RETRY,
        "the connection limit of this role or this database is reached",
        "raise its CONNECTION LIMIT (ALTER ROLE, ALTER DATABASE), or use fewer connections",
        ("53300",),
        ("too many connections for role", "too many connections for database"),
        both=True,
    ),
    Fault(
        "insufficient_resources",
        _RETRY,
        "the connection limit of the server is reached",
        "raise max_connections or max_wal_senders, or use fewer connections",
        ("53300", "53400"),
        (
            "too many clients",
            "too many connections",
            "remaining connection slots",
            "number of requested standby connections",
            "no more connections allowed",
            "rate exceeded",
        ),
    ),
    Fault("disk_full", _RETRY, "the server's disk is full", "free disk space there", ("53100",)),
    Fault(
        "duplicate_slot_file",
        _RETRY,
        "the server has a left-over file of the replication slot",
        "if this persists, restart the server",
        ("58P02",),
    ),
    Fault(
        "database_server_shutting_down",
        _RETRY,
        "the server is shutting down, or an administrator has terminated this connection",
        "",
        ("57P01", "57P02"),
        ("terminating connection due to administrator command", "is shutting down"),
    ),
    Fault(
        "database_server_unavailable",
        _RETRY,
        "the server is starting up or in recovery",
        "",
        ("57P03",),
        ("the database system is starting up", "is in recovery mode", "not yet accepting"),
    ),
    Fault(
        "pooler_login_failed",
        _RETRY,
        "the pooler has no connection to the server",
        "check the pooler's log: the server may be down, or the pooler's pool too small",
        (),
        (
            "server login has been failing",
            "pgbouncer cannot connect",
            "server login failed",
            "query_wait_timeout",
        ),
    ),
    Fault(
        "compute_node_unreachable",
        _RETRY,
        "the provider's compute node cannot be reached",
        "",
        (),
        ("couldn't connect to compute node", "failed to connect to the compute"),
    ),
    Fault(
        "syntax_error",
        _FATAL,
        "the server does not accept replication commands",
        "the URL leads to a pooler: set replication_url to the server itself",
        ("42601",),
        ('at or near "create_replication_slot"', 'at or near "identify_system"'),
    ),
    Fault(
        "missing_slot",
        _RETRY,
        "the replication slot does not exist",
        "a new slot is created with the next connection, and consumers get a Reset",
        ("42704",),
        ("replication slot",),
        both=True,
    ),
    Fault(
        "missing_publication",
        _DROP,  # where the publication did not exist, the WAL cannot be decoded
        "the publication does not exist, or did not for a time",
        "publication and slot are created again with the next connection, and consumers get a "
        "Reset",
        ("42704",),
        ('publication "',),
        both=True,
    ),
    Fault(
        "query_canceled",
        _RETRY,
        "the server canceled a command",
        "if it was a timeout, raise statement_timeout for this user",
        ("57014",),
    ),
    Fault(
        "nxdomain",
        _RETRY,  # names of containers and services come and go with them
        "the host name cannot be resolved",
        "if this persists, check the host name in the URL",
        (),
        (
            "could not translate host name",
            "name or service not known",
            "nodename nor servname",
            "no address associated with hostname",
        ),
    ),
    Fault(
        "nxdomain_temporary",
        _RETRY,
        "the host name cannot be resolved at the moment",
        "",
        (),
        ("temporary failure in name resolution",),
    ),
    Fault(
        "ssl_not_available",
        _FATAL,
        "the server does not support TLS",
        "set sslmode=disable or sslmode=prefer in the URL, or enable ssl on the server",
        (),
        ("server does not support ssl",),
    ),
    Fault(
        "ssl_connection_failed",
        _FATAL,
        "the server's certificate cannot be verified",
        "check sslrootcert, and that the certificate is for the host name in the URL",
        (),
        (
            "certificate verify failed",
            "root certificate file",
            "does not match host name",
            "could not read root certificate",
        ),
    ),
    Fault(
        "invalid_url",
        _FATAL,
        "the URL has a parameter with an invalid value",
        "check the port, and the parameters after the question mark",
        (),
        (
            "invalid sslmode value",
            "invalid sslnegotiation value",
            "invalid channel_binding value",
            "invalid gssencmode value",
            "weak sslmode",
            "invalid port number",
            "invalid integer value",
            "bad value for connect_timeout",
        ),
    ),
    Fault(
        "connection_timeout",
        _RETRY,
        "the server does not answer",
        "if this persists, check the host, the port and firewalls",
        (),
        (
            "timeout expired",
            "timed out",
            "connection timeout",
            "network is unreachable",
            "no route to host",
        ),
        errnos=(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH),
    ),
    Fault(
        "connection_refused",
        _RETRY,
        "the server's address refuses connections",
        "if this persists, check that the server runs, the host and the port",
        (),
        ("connection refused",),
        errnos=(errno.ECONNREFUSED,),
    ),
    Fault(
        "pooler_without_replication",
        _FATAL,
        "the URL leads to a pooler, which does not support replication",
        "set replication_url to the server itself; database_url may lead to the pooler",
        ("08P01",),
        ("unsupported startup parameter: replication", "replication connections are not"),
        both=True,
    ),
    Fault(
        "server_connection_crashed",
        _RETRY,
        "the server, or a pooler, reported a protocol violation and ended the connection",
        "",
        ("08P01",),
    ),
    Fault("connection_failure", _RETRY, "the connection failed", "", ("08006", "08001", "08003")),
    Fault(
        "connection_closed",
        _RETRY,
        "the connection was closed",
        "",
        (),
        (
            "server closed the connection",
            "connection is closed",
            "connection reset",
            "broken pipe",
            "no connection to the server",
            "terminating connection",
            "connection is lost",
            "eof detected",
            "unexpected eof",
            "ssl syscall error",
        ),
        errnos=(errno.ECONNRESET, errno.EPIPE),
    ),
)

_TIMEOUT = next(fault for fault in FAULTS if fault.type == "connection_timeout")


def diagnose(error: BaseException) -> Diagnosis:
    """Classify an error: its type, how to react to it, and what to do about it."""
    text = _first_line(error)
    if isinstance(error, ConfigurationError):
        return Diagnosis("config_error", _FATAL, text, "")
    if isinstance(error, SlotLost):
        return Diagnosis("irrecoverable_slot", _DROP, text, "a new slot is created")
    if isinstance(error, StateError):
        return Diagnosis("state_error", _RETRY, text, "")
    if isinstance(error, DecodeError):
        return Diagnosis("protocol_error", _RETRY, text, "")
    for cause in _chain(error):
        state, number = getattr(cause, "sqlstate", None), getattr(cause, "errno", None)
        whole = _whole_text(cause).lower()
        for fault in FAULTS:
            if fault.matches(state, whole, number):
                happened = f"{fault.happened} ({_first_line(cause)})"
                return Diagnosis(fault.type, fault.verdict, happened, fault.remedy)
    if isinstance(error, StreamEnded):
        return Diagnosis("connection_closed", _RETRY, text, "")
    if isinstance(error, TimeoutError):
        return Diagnosis(_TIMEOUT.type, _RETRY, _TIMEOUT.happened, _TIMEOUT.remedy)
    return Diagnosis("unknown", _RETRY, text, "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its explicit causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _first_line(error: BaseException) -> str:
    """Return the first line of the error's text without secrets; its class name if it has none."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return SECRETS.hide(line.removeprefix("connection failed: ")) or type(error).__name__


def _whole_text(error: BaseException) -> str:
    """Return the error's text, with its DETAIL, which str() may leave out."""
    text = str(error)
    if isinstance(error, psycopg.Error) and error.diag.message_detail:
        text += "\n" + error.diag.message_detail
    if isinstance(error, socket.gaierror):
        text += "\nname or service not known" if error.errno == socket.EAI_NONAME else ""
    return text
