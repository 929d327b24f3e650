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
from functools import partial
from typing import NamedTuple

import psycopg

from moored.kernel import SECRETS

from .._errors import ConfigurationError, DecodeError, StateError, StreamEnded
from ._setup import SlotLost, StandbyServer

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

    verdict: FaultVerdict
    type: str
    #: What happened, and what to do about it.
    happened: str
    remedy: str = ""
    #: The rule matches an error with one of these SQLSTATEs …
    states: tuple[str, ...] = ()
    #: … or with one of these, which are too general, whose message contains one of the phrases …
    general: tuple[str, ...] = ()
    #: … or an error without a SQLSTATE whose message contains one of these phrases (lower case).
    words: tuple[str, ...] = ()
    errnos: tuple[int, ...] = ()
    #: The check of the doctor that finds it.
    check: str = ""

    def matches(self, state: str | None, text: str, number: int | None) -> bool:
        """Return whether the rule matches an error's SQLSTATE, lower-case text and errno."""
        if self.errnos and number in self.errnos:
            return True
        worded = any(words in text for words in self.words)
        if state is not None and (self.states or self.general):
            return state in self.states or (worded and state in self.general)
        return worded


class Diagnosis(NamedTuple):
    """An error's type, how to react to it, and its text for users."""

    type: str
    verdict: FaultVerdict
    #: What happened.
    message: str
    #: What to do about it.
    remedy: str
    #: The check of the doctor that finds it.
    check: str = ""

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        doctor = f"; `moored doctor URL` reports it as {self.check}" if self.check else ""
        return f"{self.message}: {self.remedy}{doctor}"


_RETRY, _FATAL, _DROP = FaultVerdict.RETRY, FaultVerdict.FATAL, FaultVerdict.DROP_SLOT
_retry, _drop = partial(Fault, _RETRY), partial(Fault, _DROP)
_fatal = partial(Fault, _FATAL, check="reachability")

FAULTS: tuple[Fault, ...] = (
    _drop(
        "database_slot_exceeded_max_size",
        "the replication slot needed more WAL than max_slot_wal_keep_size allows",
        "a new slot is created and consumers get a Reset; raise max_slot_wal_keep_size, or consume "
        "faster",
        general=("55000",),
        words=("exceeded the maximum reserved size",),
    ),
    _drop(
        "database_slot_invalidated",
        "the server has invalidated the replication slot",
        "a new slot is created and consumers get a Reset; the server's log has the reason",
        general=("55000", "42704"),
        words=(
            "replication slot has been invalidated",
            "can no longer access replication slot",
            "can no longer get changes from replication slot",
            "cannot read from logical replication slot",
        ),
    ),
    _fatal(
        "wal_level_is_not_logical",
        "wal_level of the server is not logical",
        "set wal_level = logical in postgresql.conf (on RDS: rds.logical_replication = 1) and "
        "restart the server",
        general=("55000",),
        words=("logical decoding requires", "wal_level"),
        check="wal_level",
    ),
    _fatal(
        "insufficient_privileges",
        "this user lacks the REPLICATION privilege",
        "run ALTER ROLE … WITH REPLICATION (on RDS: GRANT rds_replication TO …)",
        general=("42501",),
        words=("wal sender", "walsender", "replication role", "replication attribute"),
        check="replication_privilege",
    ),
    _fatal(
        "insufficient_privileges",
        "this user lacks a privilege",
        "grant the privilege that the server's message names",
        states=("42501",),
        words=("permission denied", "must be owner", "must be superuser"),
        check="",
    ),
    _fatal(
        "invalid_username_or_password",
        "the server rejects the user name or the password",
        "check both in the URL; special characters of a password must be percent-encoded",
        states=("28P01",),
        words=("password authentication failed", "no password supplied"),
    ),
    _fatal(
        "client_certificate_required",
        "the server requires a client certificate that it trusts",
        "set sslcert and sslkey in the URL, to a certificate that is signed by a CA of the "
        "server's ssl_ca_file; only this user may have permission to read the key",
        words=(
            "requires a valid client certificate",
            "alert certificate required",
            "alert unknown ca",
            "alert bad certificate",
            "certificate present, but not private key",
            "private key file",
            "could not read certificate file",
        ),
    ),
    _fatal(
        "ssl_connection_required",
        "the server accepts only encrypted connections",
        "set sslmode=require in the URL, or remove sslmode from it",
        general=("28000",),
        words=("no encryption", "ssl off", "connection is insecure"),
    ),
    _fatal(
        "authorization_failure",
        "the server does not permit this user to log in from this address",
        "check pg_hba.conf for this user, database and address, and that the role has LOGIN",
        states=("28000",),
        words=("no pg_hba.conf entry", "is not permitted to log in", 'fatal:  role "'),
    ),
    _fatal(
        "endpoint_not_found",
        "the provider has no such endpoint",
        "check the host name in the URL",
        words=("endpoint could not be found", "endpoint id is not specified"),
    ),
    _fatal(
        "compute_quota_exceeded",
        "the provider's quota of compute time is used up",
        "raise the plan's limit, or wait for the next billing period",
        words=("compute time quota",),
    ),
    _fatal(
        "data_transfer_quota_exceeded",
        "the provider's quota of data transfer is used up",
        "raise the plan's limit, or wait for the next billing period",
        words=("data transfer quota",),
    ),
    _retry(
        "branch_does_not_exist",
        "the provider's branch does not exist (yet)",
        "if this persists, check the host name in the URL",
        words=("branch does not exist", "branch not found"),
    ),
    _retry(
        "database_not_accepting_connections",
        "the database does not accept connections",
        "if this persists, run ALTER DATABASE … ALLOW_CONNECTIONS true",
        general=("55000",),
        words=("not currently accepting connections",),
    ),
    _fatal(
        "database_does_not_exist",
        "the database does not exist",
        "check the database name in the URL, or create the database",
        states=("3D000",),
        words=('fatal:  database "',),
    ),
    _retry(
        "replication_slot_in_use",
        "another connection reads from the replication slot",
        "it may be an old connection of this service that the server has not closed yet; if this "
        "persists, find its pid in pg_replication_slots.active_pid",
        states=("55006",),
        words=("is active for pid",),
    ),
    _retry(
        "insufficient_resources",
        "all replication slots of the server are in use",
        "raise max_replication_slots, or drop unused slots (pg_replication_slots)",
        general=("53400",),
        words=("all replication slots are in use",),
        check="slots_left",
    ),
    _retry(
        "insufficient_resources",
        "all WAL senders of the server are in use",
        "raise max_wal_senders",
        general=("53300",),
        words=("number of requested standby connections",),
        check="senders_left",
    ),
    _retry(
        "insufficient_resources",
        "the connection limit of this role or this database is reached",
        "raise its CONNECTION LIMIT (ALTER ROLE, ALTER DATABASE), or use fewer connections",
        general=("53300",),
        words=("too many connections for role", "too many connections for database"),
        check="connections_left",
    ),
    _retry(
        "insufficient_resources",
        "the connection limit of the server is reached",
        "raise max_connections, or use fewer connections",
        states=("53300", "53400"),
        words=(
            "too many clients",
            "too many connections",
            "remaining connection slots",
            "no more connections allowed",
            "rate exceeded",
        ),
        check="connections_left",
    ),
    _retry("disk_full", "the server's disk is full", "free disk space there", states=("53100",)),
    _retry(
        "duplicate_slot_file",
        "the server has a left-over file of the replication slot",
        "if this persists, restart the server",
        states=("58P02",),
    ),
    _retry(
        "database_server_shutting_down",
        "the server is shutting down, or an administrator has terminated this connection",
        states=("57P01", "57P02"),
        words=("terminating connection due to administrator command", "is shutting down"),
    ),
    _retry(
        "database_server_unavailable",
        "the server is starting up or in recovery",
        states=("57P03",),
        words=("the database system is starting up", "is in recovery mode", "not yet accepting"),
    ),
    _retry(
        "pooler_login_failed",
        "the pooler has no connection to the server",
        "check the pooler's log: the server may be down, or the pooler's pool too small",
        words=(
            "server login has been failing",
            "pgbouncer cannot connect",
            "server login failed",
            "query_wait_timeout",
        ),
    ),
    _retry(
        "compute_node_unreachable",
        "the provider's compute node cannot be reached",
        words=("couldn't connect to compute node", "failed to connect to the compute"),
    ),
    _fatal(
        "syntax_error",
        "the server does not accept replication commands",
        "the URL leads to a pooler: set replication_url to the server itself",
        states=("42601",),
        words=('at or near "create_replication_slot"', 'at or near "identify_system"'),
        check="replication_connection",
    ),
    _retry(
        "missing_slot",
        "the replication slot does not exist",
        "a new slot is created with the next connection, and consumers get a Reset",
        general=("42704",),
        words=("replication slot",),
    ),
    # Where the publication did not exist, the WAL cannot be decoded.
    _drop(
        "missing_publication",
        "the publication does not exist, or did not for a time",
        "publication and slot are created again with the next connection, and consumers get a "
        "Reset",
        general=("42704",),
        words=('publication "',),
    ),
    _retry(
        "read_only_transactions",
        "this role or this database may only read",
        "set default_transaction_read_only = off for it (ALTER ROLE … SET, ALTER DATABASE … SET)",
        states=("25006",),
    ),
    _retry(
        "query_canceled",
        "the server canceled a command",
        "if it was a timeout, raise statement_timeout for this user",
        states=("57014",),
    ),
    # Retried: names of containers and services come and go with them.
    _retry(
        "nxdomain",
        "the host name cannot be resolved",
        "if this persists, check the host name in the URL",
        words=(
            "could not translate host name",
            "name or service not known",
            "nodename nor servname",
            "no address associated with hostname",
        ),
    ),
    _retry(
        "nxdomain_temporary",
        "the host name cannot be resolved at the moment",
        words=("temporary failure in name resolution",),
    ),
    _fatal(
        "ssl_not_available",
        "the server does not support TLS",
        "set sslmode=disable or sslmode=prefer in the URL, or enable ssl on the server",
        words=("server does not support ssl",),
    ),
    _fatal(
        "ssl_connection_failed",
        "the server's certificate cannot be verified",
        "check sslrootcert, and that the certificate is for the host name in the URL",
        words=(
            "certificate verify failed",
            "root certificate file",
            "does not match host name",
            "could not read root certificate",
        ),
    ),
    _fatal(
        "invalid_url",
        "the URL has a parameter with an invalid value",
        "check the port, and the parameters after the question mark",
        words=(
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
    _retry(
        "connection_timeout",
        "the server does not answer",
        "if this persists, check the host, the port and firewalls",
        words=(
            "timeout expired",
            "timed out",
            "connection timeout",
            "network is unreachable",
            "no route to host",
        ),
        errnos=(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH),
    ),
    _retry(
        "connection_refused",
        "the server's address refuses connections",
        "if this persists, check that the server runs, the host and the port",
        words=("connection refused",),
        errnos=(errno.ECONNREFUSED,),
    ),
    _fatal(
        "pooler_without_replication",
        "the URL leads to a pooler, which does not support replication",
        "set replication_url to the server itself; database_url may lead to the pooler",
        general=("08P01",),
        words=("unsupported startup parameter: replication", "replication connections are not"),
        check="replication_connection",
    ),
    _retry(
        "server_connection_crashed",
        "the server, or a pooler, reported a protocol violation and ended the connection",
        states=("08P01",),
    ),
    _retry("connection_failure", "the connection failed", states=("08006", "08001", "08003")),
    _retry(
        "connection_closed",
        "the connection was closed",
        words=(
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

_PRIMARY = (
    "set replication_url to the primary; if it has several hosts, add target_session_attrs="
    "read-write. Once this server is promoted, the next try succeeds"
)
_TIMEOUT = next(fault for fault in FAULTS if fault.type == "connection_timeout")


def diagnose(error: BaseException) -> Diagnosis:
    """Classify an error: its type, how to react to it, and what to do about it."""
    text = _first_line(error)
    if isinstance(error, ConfigurationError):
        return Diagnosis("config_error", _FATAL, text, "")
    if isinstance(error, SlotLost):
        return Diagnosis("irrecoverable_slot", _DROP, text, "a new slot is created")
    if isinstance(error, StandbyServer):
        return Diagnosis("standby_server", _RETRY, text, _PRIMARY, "standby")
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
                return Diagnosis(fault.type, fault.verdict, happened, fault.remedy, fault.check)
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
