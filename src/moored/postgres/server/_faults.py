"""What an error means: one table for everything that a server, libpq or the system can say.

libpq keeps the SQLSTATE of an error while connecting to itself, so most rules also know the words.
The first rule that fits is taken; the order is from the particular to the general.
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
    """What to do about an error."""

    #: It may go away by itself: try again, with a backoff.
    RETRY = "retry"
    #: It does not go away before somebody changes something: stop, and say what. Once it
    #: was active it may pass all the same (a password that is being changed): try again.
    FATAL = "fatal"
    #: The slot can never be read again: drop it, reset everything, and begin anew.
    DROP_SLOT = "drop slot and restart"


class Fault(NamedTuple):
    """One line of the table."""

    type: str
    verdict: FaultVerdict
    #: What happened, and what to do about it.
    happened: str
    remedy: str
    #: It fits an error with one of these SQLSTATEs …
    states: tuple[str, ...] = ()
    #: … or one without a SQLSTATE that says one of these words, in small letters.
    words: tuple[str, ...] = ()
    #: Whether the words are needed with the SQLSTATE too, because that one says too little.
    both: bool = False
    errnos: tuple[int, ...] = ()

    def fits(self, state: str | None, text: str, number: int | None) -> bool:
        """Whether it is this."""
        if self.errnos and number in self.errnos:
            return True
        said = any(words in text for words in self.words)
        if self.states and state is not None:
            return state in self.states and (said or not self.both)
        return said


class Diagnosis(NamedTuple):
    """An error, understood."""

    type: str
    verdict: FaultVerdict
    #: What happened.
    message: str
    #: What to do about it.
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


_RETRY, _FATAL, _DROP = FaultVerdict.RETRY, FaultVerdict.FATAL, FaultVerdict.DROP_SLOT

FAULTS: tuple[Fault, ...] = (
    Fault(
        "database_slot_exceeded_max_size",
        _DROP,
        "the replication slot needed more log than the server may keep for it",
        "a new slot is made and consumers get a Reset; raise max_slot_wal_keep_size, or consume "
        "faster",
        ("55000",),
        ("exceeded the maximum reserved size",),
        both=True,
    ),
    Fault(
        "database_slot_invalidated",
        _DROP,
        "the server has invalidated the replication slot",
        "a new slot is made and consumers get a Reset; the server's log says why it did so",
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
        "the server does not write what logical replication needs",
        "set wal_level = logical in postgresql.conf (on RDS: rds.logical_replication = 1) and "
        "restart the server",
        ("55000",),
        ("logical decoding requires", "wal_level"),
        both=True,
    ),
    Fault(
        "insufficient_privileges",
        _FATAL,
        "this user may not replicate",
        "run ALTER ROLE … WITH REPLICATION (on RDS: GRANT rds_replication TO …)",
        ("42501",),
        ("wal sender", "walsender", "replication role", "replication attribute"),
        both=True,
    ),
    Fault(
        "insufficient_privileges",
        _FATAL,
        "this user lacks a privilege",
        "grant it; the server's own words say which",
        ("42501",),
        ("permission denied", "must be owner", "must be superuser"),
    ),
    Fault(
        "invalid_username_or_password",
        _FATAL,
        "the server does not accept the user name or the password",
        "check both in the URL; a password with special characters must be percent-encoded",
        ("28P01",),
        ("password authentication failed", "no password supplied"),
    ),
    Fault(
        "client_certificate_required",
        _FATAL,
        "the server lets in only who shows a certificate that it trusts",
        "set sslcert and sslkey in the URL, to a certificate that the server's ssl_ca_file has "
        "signed; the key must be readable by this user alone",
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
        "the server takes encrypted connections only",
        "set sslmode=require in the URL, or leave sslmode out",
        ("28000",),
        ("no encryption", "ssl off", "connection is insecure"),
        both=True,
    ),
    Fault(
        "authorization_failure",
        _FATAL,
        "the server does not let this user in from here",
        "check pg_hba.conf for this user, database and address",
        ("28000",),
        ("no pg_hba.conf entry", "is not permitted to log in", 'fatal:  role "'),
    ),
    Fault(
        "endpoint_not_found",
        _FATAL,
        "the provider knows no such endpoint",
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
        "the provider's branch does not exist, or not yet",
        "check the host name if this does not go away",
        (),
        ("branch does not exist", "branch not found"),
    ),
    Fault(
        "database_not_accepting_connections",
        _RETRY,
        "the database takes no connections for now",
        "if that was not meant to last, run ALTER DATABASE … ALLOW_CONNECTIONS true",
        ("55000",),
        ("not currently accepting connections",),
        both=True,
    ),
    Fault(
        "database_does_not_exist",
        _FATAL,
        "there is no such database",
        "check the name after the last slash of the URL, or create it",
        ("3D000",),
        ('fatal:  database "',),
    ),
    Fault(
        "replication_slot_in_use",
        _RETRY,
        "another connection reads from the slot",
        "an old connection of this service may not be gone yet; if it stays, look for the pid in "
        "pg_replication_slots.active_pid",
        ("55006",),
        ("is active for pid",),
    ),
    Fault(
        "insufficient_resources",
        _RETRY,
        "the server has no replication slot left",
        "raise max_replication_slots, or drop slots that nobody reads (pg_replication_slots)",
        ("53400",),
        ("all replication slots are in use",),
        both=True,
    ),
    Fault(
        "insufficient_resources",
        _RETRY,
        "this user, or this database, has no connection left",
        "raise its CONNECTION LIMIT (ALTER ROLE, ALTER DATABASE), or use fewer connections",
        ("53300",),
        ("too many connections for role", "too many connections for database"),
        both=True,
    ),
    Fault(
        "insufficient_resources",
        _RETRY,
        "the server has no connection left",
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
    Fault("disk_full", _RETRY, "the server's disk is full", "free some space there", ("53100",)),
    Fault(
        "duplicate_slot_file",
        _RETRY,
        "the server has a left-over file of the slot",
        "if it stays, restart the server",
        ("58P02",),
    ),
    Fault(
        "database_server_shutting_down",
        _RETRY,
        "the server shuts down, or somebody ended this connection there",
        "",
        ("57P01", "57P02"),
        ("terminating connection due to administrator command", "is shutting down"),
    ),
    Fault(
        "database_server_unavailable",
        _RETRY,
        "the server is starting, or recovering",
        "",
        ("57P03",),
        ("the database system is starting up", "is in recovery mode", "not yet accepting"),
    ),
    Fault(
        "pooler_login_failed",
        _RETRY,
        "the pooler got no connection to the server behind it",
        "look at the pooler's log: the server may be away, or the pooler's pool too small",
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
        "the provider's compute node does not answer",
        "",
        (),
        ("couldn't connect to compute node", "failed to connect to the compute"),
    ),
    Fault(
        "syntax_error",
        _FATAL,
        "the server does not understand the commands of replication",
        "the URL leads to a pooler, or the connection is not one for replication: set "
        "replication_url to the server itself",
        ("42601",),
        ('at or near "create_replication_slot"', 'at or near "identify_system"'),
    ),
    Fault(
        "missing_slot",
        _RETRY,
        "the replication slot does not exist",
        "it is made anew when the connection is set up again, and consumers get a Reset",
        ("42704",),
        ("replication slot",),
        both=True,
    ),
    Fault(
        "missing_publication",
        _RETRY,
        "the publication does not exist",
        "it is made anew, with the slot, when the connection is set up again",
        ("42704",),
        ("publication",),
        both=True,
    ),
    Fault(
        "query_canceled",
        _RETRY,
        "a command took longer than the server allows",
        "raise statement_timeout for this user",
        ("57014",),
    ),
    Fault(
        "nxdomain",
        _RETRY,  # names of containers and services come and go with them
        "the host name is not known",
        "check it in the URL, if this does not go away",
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
        "the host name could not be looked up right now",
        "",
        (),
        ("temporary failure in name resolution",),
    ),
    Fault(
        "ssl_not_available",
        _FATAL,
        "the server does not speak TLS",
        "set sslmode=disable, or prefer, in the URL; or switch ssl on at the server",
        (),
        ("server does not support ssl",),
    ),
    Fault(
        "ssl_connection_failed",
        _FATAL,
        "the server's certificate cannot be trusted",
        "check sslrootcert, and that the host name in the URL is the one in the certificate",
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
        "the URL says something that the driver does not know",
        "check the parameters after the question mark, and the port",
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
        "check the host, the port and the firewalls between, if this does not go away",
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
        "nobody listens at the server's address",
        "check the host and the port, if this does not go away",
        (),
        ("connection refused",),
        errnos=(errno.ECONNREFUSED,),
    ),
    Fault(
        "pooler_without_replication",
        _FATAL,
        "a pooler stands before the server, and does not pass replication on",
        "set replication_url to the server itself; database_url may lead to the pooler",
        ("08P01",),
        ("unsupported startup parameter: replication", "replication connections are not"),
        both=True,
    ),
    Fault(
        "server_connection_crashed",
        _RETRY,
        "the server, or a pooler before it, ended the connection in a way it should not",
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

_SILENT = next(fault for fault in FAULTS if fault.type == "connection_timeout")


def diagnose(error: BaseException) -> Diagnosis:
    """What an error means, and what to do about it."""
    said = _first_line(error)
    if isinstance(error, ConfigurationError):
        return Diagnosis("config_error", FaultVerdict.FATAL, said, "")
    if isinstance(error, SlotLost):
        return Diagnosis("irrecoverable_slot", FaultVerdict.DROP_SLOT, said, "a new slot is made")
    if isinstance(error, StateError):
        return Diagnosis("state_error", FaultVerdict.RETRY, said, "")
    if isinstance(error, DecodeError):
        return Diagnosis("protocol_error", FaultVerdict.RETRY, said, "")
    for link in _chain(error):
        state = getattr(link, "sqlstate", None)
        text = _whole_text(link).lower()
        for fault in FAULTS:
            if fault.fits(state, text, getattr(link, "errno", None)):
                return _of(fault, link)
    if isinstance(error, StreamEnded):
        return Diagnosis("connection_closed", FaultVerdict.RETRY, said, "")
    if isinstance(error, TimeoutError):
        return Diagnosis(_SILENT.type, _SILENT.verdict, _SILENT.happened, _SILENT.remedy)
    return Diagnosis("unknown", FaultVerdict.RETRY, said or type(error).__name__, "")


def _of(fault: Fault, error: BaseException) -> Diagnosis:
    return Diagnosis(
        fault.type, fault.verdict, f"{fault.happened} ({_first_line(error)})", fault.remedy
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return SECRETS.hide(line.removeprefix("connection failed: ")) or type(error).__name__


def _whole_text(error: BaseException) -> str:
    """The error's words, with the detail that only the diagnostics hold."""
    text = str(error)
    if isinstance(error, psycopg.Error) and error.diag.message_detail:
        text += "\n" + error.diag.message_detail
    if isinstance(error, socket.gaierror):
        text += "\nname or service not known" if error.errno == socket.EAI_NONAME else ""
    return text
