"""Prepare a replication connection for streaming: the commands to send, and what answers mean.

The steps, in this order; those that are not necessary are skipped::

    connected → identify_system → query_pg_info → acquire_lock → check_existing
    → create_publication → drop_slot → create_slot → query_slot_flushed_lsn → alter_slot
    → identify_again → set_display_setting → ready_to_stream → start_streaming → streaming

`Setup` does no I/O: `command()` returns the command to send, `answered()` and `refused()` take the
server's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .._errors import ConfigurationError, DecodeError, PostgresError
from .._lsn import Lsn
from .._settings import Settings

__all__ = ["Findings", "Setup", "Step", "quoted"]

#: The first version that has `publish_generated_columns`, …
GENERATED_COLUMNS = 180000
#: … failover slots, …
FAILOVER_SLOTS = 170000
#: … and the options `binary` and `messages` of pgoutput.
BINARY_AND_MESSAGES = 140000

#: The longest `wal_sender_timeout` of a stream, in ms. While the server reads through a large
#: transaction of which the stream gets nothing, it answers only after half of this time: with the
#: server's default of 60 s each connection would be taken for dead there, again and again.
WAL_SENDER_TIMEOUT = 12_000
#: A server from version 14 looks so often, in ms, whether a standby that was killed is still there:
#: its request for the lock keeps a WAL sender.
STANDBY_CHECK = 5_000

#: The text format of values, independent of the settings of the database.
DISPLAY = (
    "SET client_encoding = 'UTF8'",
    "SET bytea_output = 'hex'",
    "SET DateStyle = 'ISO, DMY'",
    "SET TimeZone = 'UTC'",
    "SET extra_float_digits = 1",
    "SET IntervalStyle = 'postgres'",
)
#: Whether this stream can have created a slot: it is in this database, and for pgoutput.
_OURS = "coalesce(database = current_database() AND plugin = 'pgoutput', false)"


class Step(Enum):
    """A step of the setup, in the order in which they run."""

    CONNECTED = "connected"
    IDENTIFY_SYSTEM = "identify_system"
    QUERY_PG_INFO = "query_pg_info"
    ACQUIRE_LOCK = "acquire_lock"
    CHECK_EXISTING = "check_existing"
    CREATE_PUBLICATION = "create_publication"
    DROP_SLOT = "drop_slot"
    CREATE_SLOT = "create_slot"
    QUERY_SLOT_FLUSHED_LSN = "query_slot_flushed_lsn"
    ALTER_SLOT = "alter_slot"
    IDENTIFY_AGAIN = "identify_again"
    SET_DISPLAY_SETTING = "set_display_setting"
    READY_TO_STREAM = "ready_to_stream"
    START_STREAMING = "start_streaming"
    STREAMING = "streaming"


@dataclass
class Findings:
    """What the server has answered during the setup."""

    system_id: str = ""
    timeline_id: int = 0
    wal_position: Lsn = field(default_factory=lambda: Lsn(0))
    version: int = 0
    backend_pid: int = 0
    #: Seconds after which the server drops a client that sends nothing.
    wal_sender_timeout: float = 0.0
    #: Whether this setup has created the publication, and the slot.
    publication_created: bool = False
    slot_created: bool = False
    #: The slot's confirmed LSN: transactions that end before it are not sent again.
    confirmed: Lsn = field(default_factory=lambda: Lsn(0))


Row = Sequence[Any]


class Setup:
    """The setup of one connection: its current step, and what the server has answered."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.findings = Findings()
        self.step = Step.CONNECTED
        self._display = 0
        self._publication_exists = False
        self._slot_exists = False
        self._slot_fails_over = True
        self._advance()

    # -- commands ------------------------------------------------------------------------------

    def command(self) -> str | None:
        """Return the command to send now; None when the connection is ready to stream."""
        name = literal(self._settings.slot_name)
        match self.step:
            case Step.IDENTIFY_SYSTEM | Step.IDENTIFY_AGAIN:
                # A standby may have been promoted during the wait for the lock, and connections
                # survive that. At the second time it is a primary: see _check_existing().
                return "IDENTIFY_SYSTEM"
            case Step.QUERY_PG_INFO:
                return (
                    "SELECT current_setting('server_version_num'), pg_backend_pid(), ms FROM "
                    f"(SELECT CASE WHEN setting::int BETWEEN 1 AND {WAL_SENDER_TIMEOUT} "
                    f"THEN setting ELSE '{WAL_SENDER_TIMEOUT}' END AS ms "
                    "FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout') AS found, "
                    "set_config('wal_sender_timeout', ms, false) LEFT JOIN (SELECT "
                    f"set_config(name, '{STANDBY_CHECK}', false) FROM pg_catalog.pg_settings "
                    "WHERE name = 'client_connection_check_interval') AS checks ON true"
                )
            case Step.ACQUIRE_LOCK:
                return f"SELECT pg_advisory_lock(hashtext({name}))"
            case Step.CHECK_EXISTING:
                return self._check_existing()
            case Step.CREATE_PUBLICATION:
                generated = " WITH (publish_generated_columns = stored)"
                known = self.findings.version >= GENERATED_COLUMNS
                publication = quoted(self._settings.publication_name)
                return f"CREATE PUBLICATION {publication}{generated if known else ''}"
            case Step.DROP_SLOT:
                # Slot names are unique in the whole server: it may belong to another database.
                return (
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_catalog."
                    f"pg_replication_slots WHERE slot_name = {name} AND {_OURS}"
                )
            case Step.CREATE_SLOT:
                return self._create_slot()
            case Step.QUERY_SLOT_FLUSHED_LSN:
                fails_over = "failover" if self._failover_wanted else "true"
                return (
                    f"SELECT confirmed_flush_lsn, wal_status, {_OURS}, "
                    f"concat_ws(' ', slot_type, plugin, database), {fails_over} "
                    f"FROM pg_catalog.pg_replication_slots WHERE slot_name = {name}"
                )
            case Step.ALTER_SLOT:
                return f"ALTER_REPLICATION_SLOT {quoted(self._settings.slot_name)} (FAILOVER true)"
            case Step.SET_DISPLAY_SETTING:
                return DISPLAY[self._display]
        return None

    def _check_existing(self) -> str:
        """Query what exists: failing to create it would leave an ERROR in the server's log."""
        publication, slot = self._settings.publication_name, self._settings.slot_name
        return (
            "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_publication "
            f"WHERE pubname = {literal(publication)}), "
            "EXISTS (SELECT 1 FROM pg_catalog.pg_replication_slots "
            # A temporary slot of the last connection may vanish at any moment.
            f"WHERE slot_name = {literal(slot)} AND NOT temporary), pg_is_in_recovery()"
        )

    def _create_slot(self) -> str:
        settings = self._settings
        temporary = " TEMPORARY" if settings.temporary_slot else ""
        begin = f"CREATE_REPLICATION_SLOT {quoted(settings.slot_name)}{temporary} LOGICAL pgoutput"
        if self._failover_wanted:
            return f"{begin} (SNAPSHOT 'nothing', FAILOVER true)"
        return f"{begin} NOEXPORT_SNAPSHOT"

    @property
    def _failover_wanted(self) -> bool:
        """Whether standbys shall have a copy of the slot, and can."""
        settings, known = self._settings, self.findings.version >= FAILOVER_SLOTS
        return known and settings.failover_slot and not settings.temporary_slot

    @property
    def waits(self) -> bool:
        """Whether the command may wait for other sessions, without a time limit."""
        return self.step in (Step.ACQUIRE_LOCK, Step.DROP_SLOT, Step.CREATE_SLOT)

    def start_command(self) -> str:
        """Return the command that starts the stream at the slot's confirmed LSN."""
        settings = self._settings
        modern = self.findings.version >= BINARY_AND_MESSAGES
        options = [
            # Version 1: the server sends a large transaction after its commit, not in parts.
            ("proto_version", "1"),
            ("publication_names", quoted(settings.publication_name)),
        ]
        if settings.binary and modern:
            options.append(("binary", "true"))
        if modern:  # without `messages`, they wake outboxes, and report changes of the schema
            options.append(("messages", "true"))
        listed = ", ".join(f"{name} {literal(value)}" for name, value in options)
        return f"START_REPLICATION SLOT {quoted(settings.slot_name)} LOGICAL 0/0 ({listed})"

    # -- answers -------------------------------------------------------------------------------

    def answered(self, rows: Sequence[Row]) -> None:
        """Take the rows of a command that succeeded, and go to the next step."""
        try:
            self._answered(rows)
        except ValueError as error:
            raise DecodeError(f"the answer to {self.step.value} is invalid: {error}") from error

    def _answered(self, rows: Sequence[Row]) -> None:
        found = self.findings
        match self.step:
            case Step.IDENTIFY_SYSTEM | Step.IDENTIFY_AGAIN:
                row = _one(rows, 3)
                found.system_id, found.timeline_id = str(row[0]), int(row[1])
                found.wal_position = Lsn.parse(str(row[2]))
            case Step.QUERY_PG_INFO:
                row = _one(rows, 3)
                found.version, found.backend_pid = int(row[0]), int(row[1])
                found.wal_sender_timeout = int(row[2]) / 1000
            case Step.CHECK_EXISTING:
                answers = [value in (True, "t") for value in _one(rows, 3)]
                self._publication_exists, self._slot_exists, standby = answers
                if standby and not self._settings.manual_publication:
                    raise StandbyServer("the server is a standby: it is in recovery, and read-only")
                if self._settings.manual_publication and not self._publication_exists:
                    raise self._no_publication()
            case Step.CREATE_PUBLICATION:
                found.publication_created = True
            case Step.CREATE_SLOT:
                found.slot_created = True
                found.confirmed = Lsn.parse(str(_one(rows, 2)[1]))
            case Step.QUERY_SLOT_FLUSHED_LSN:
                self._check_slot(rows)
            case Step.SET_DISPLAY_SETTING if self._display + 1 < len(DISPLAY):
                self._display += 1
                return
        self._advance()

    def refused(self, sqlstate: str | None, error: Exception) -> None:
        """Take the error of a command that failed; raise it unless the setup can continue."""
        match self.step, sqlstate:
            case Step.ACQUIRE_LOCK, "57014":
                pass  # a statement timeout: request the lock again
            case Step.CREATE_PUBLICATION, "42501":
                more = "; `moored doctor URL` reports it as create_privilege"
                raise self._no_publication(more) from error
            # It was created, or dropped, since it was checked.
            case (Step.CREATE_PUBLICATION | Step.CREATE_SLOT, "42710") | (Step.DROP_SLOT, "42704"):
                self._advance()
            case Step.ALTER_SLOT, str():
                self._advance()  # the slot can be read also without standbys
            case _:
                raise error

    def _no_publication(self, more: str = "") -> ConfigurationError:
        name = self._settings.publication_name
        return ConfigurationError(
            f"the publication {name} does not exist, and may not be created here: run "
            f"CREATE PUBLICATION {quoted(name)} as the database's owner; or GRANT CREATE ON "
            f"DATABASE to this user, without manual_publication{more}"
        )

    def _check_slot(self, rows: Sequence[Row]) -> None:
        slot = self._settings.slot_name
        confirmed, wal_status, ours, kind, fails_over = _one(rows, 5)
        if ours not in (True, "t"):
            raise ConfigurationError(
                f"the slot {slot} exists and does not belong to this stream ({kind}): slot names "
                "are unique in the whole server, so choose another stream_id, or drop that slot; "
                "`moored doctor URL` reports it as slot_name"
            )
        if wal_status == "lost":
            raise SlotLost(f"the slot {slot} has lost WAL that it needs")
        if confirmed is None:
            raise SlotLost(f"the creation of the slot {slot} was never completed")
        self.findings.confirmed = Lsn.parse(str(confirmed))
        self._slot_fails_over = fails_over in (True, "t")

    # -- the next step -------------------------------------------------------------------------

    def _advance(self) -> None:
        order = list(Step)
        step = order[order.index(self.step) + 1]
        while not self._wanted(step):
            step = order[order.index(step) + 1]
        self.step = step

    def _wanted(self, step: Step) -> bool:
        match step:
            case Step.CREATE_PUBLICATION:
                return not self._publication_exists
            case Step.DROP_SLOT:
                # A slot that is older than its publication cannot be read: at earlier LSNs, the
                # publication does not exist.
                return self._settings.recreate_slot or self.findings.publication_created
            case Step.CREATE_SLOT:
                return not self._slot_exists or self._wanted(Step.DROP_SLOT)
            case Step.QUERY_SLOT_FLUSHED_LSN:
                return not self.findings.slot_created
            case Step.ALTER_SLOT:
                return not self._slot_fails_over
        return True


class SlotLost(PostgresError):
    """The slot can never be read again: it must be dropped and created again."""


class StandbyServer(PostgresError):
    """The server is a standby, where nothing can be published; it may be promoted."""


def quoted(name: str) -> str:
    """Quote an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote an SQL string; the replication protocol has no parameters."""
    return "'" + text.replace("'", "''") + "'"


def _one(rows: Sequence[Row], columns: int) -> Row:
    if len(rows) != 1 or len(rows[0]) < columns:
        raise DecodeError(f"expected one row of {columns} columns, got {rows!r}")
    return rows[0]
