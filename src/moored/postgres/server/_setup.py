"""How a connection becomes one that can stream: which command comes next, what an answer means.

The steps, in this order::

    connected → identify_system → query_pg_info → acquire_lock → create_publication → drop_slot
    → create_slot → query_slot_flushed_lsn → identify_again → set_display_setting
    → ready_to_stream → start_streaming → streaming

It does no I/O: `command()` says what to send, `answered()` and `refused()` take what came back.
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

#: From this version on the server can say which generated columns to publish, …
GENERATED_COLUMNS = 180000
#: … a slot can be kept in step on a standby, …
FAILOVER_SLOTS = 170000
#: … and the protocol knows large transactions in parts, and binary values.
STREAMING_AND_BINARY = 140000

#: How values are written as text, the same whatever the database is set to.
DISPLAY = (
    "SET client_encoding = 'UTF8'",
    "SET bytea_output = 'hex'",
    "SET DateStyle = 'ISO, DMY'",
    "SET TimeZone = 'UTC'",
    "SET extra_float_digits = 1",
    "SET IntervalStyle = 'postgres'",
)
#: Whether a slot is one that we can have made.
_OURS = "coalesce(database = current_database() AND plugin = 'pgoutput', false)"


class Step(Enum):
    """What the connection is doing."""

    CONNECTED = "connected"
    IDENTIFY_SYSTEM = "identify_system"
    QUERY_PG_INFO = "query_pg_info"
    ACQUIRE_LOCK = "acquire_lock"
    CREATE_PUBLICATION = "create_publication"
    CHECK_PUBLICATION = "check_publication"
    DROP_SLOT = "drop_slot"
    CREATE_SLOT = "create_slot"
    QUERY_SLOT_FLUSHED_LSN = "query_slot_flushed_lsn"
    IDENTIFY_AGAIN = "identify_again"
    SET_DISPLAY_SETTING = "set_display_setting"
    READY_TO_STREAM = "ready_to_stream"
    START_STREAMING = "start_streaming"
    STREAMING = "streaming"


@dataclass
class Findings:
    """What the setup has found out."""

    system_id: str = ""
    timeline_id: int = 0
    wal_position: Lsn = field(default_factory=lambda: Lsn(0))
    version: int = 0
    backend_pid: int = 0
    #: Seconds after which the server drops a silent client; 0 for never.
    wal_sender_timeout: float = 0.0
    #: Whether the publication, or the slot, did not exist before.
    publication_created: bool = False
    slot_created: bool = False
    #: Everything before this place is safe, and is not sent again.
    confirmed: Lsn = field(default_factory=lambda: Lsn(0))


Row = Sequence[Any]


class Setup:
    """The way from a new connection to a stream."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.findings = Findings()
        self.step = Step.CONNECTED
        #: How often the wait for the lock was cut short by the server's statement timeout.
        self.lock_timeouts = 0
        self._display = 0
        self._advance()

    # -- what to send --------------------------------------------------------------------------

    def command(self) -> str | None:
        """What to send now; None when nothing is left to do but to begin streaming."""
        settings = self._settings
        name, publication = literal(settings.slot_name), literal(settings.publication_name)
        match self.step:
            case Step.IDENTIFY_SYSTEM | Step.IDENTIFY_AGAIN:
                # The lock may have been waited for while a standby was promoted: connections
                # survive that. Who made a publication, or found one, is one no more.
                return "IDENTIFY_SYSTEM"
            case Step.QUERY_PG_INFO:
                return (
                    "SELECT current_setting('server_version_num'), pg_backend_pid(), (SELECT "
                    "setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout')"
                )
            case Step.ACQUIRE_LOCK:
                return f"SELECT pg_advisory_lock(hashtext({name}))"
            case Step.CREATE_PUBLICATION:
                generated = " WITH (publish_generated_columns = stored)"
                known = self.findings.version >= GENERATED_COLUMNS
                wanted = quoted(self._settings.publication_name)
                return f"CREATE PUBLICATION {wanted}{generated if known else ''}"
            case Step.CHECK_PUBLICATION:
                return f"SELECT 1 FROM pg_catalog.pg_publication WHERE pubname = {publication}"
            case Step.DROP_SLOT:
                # Names of slots are of the whole server: one of another database is not ours.
                return (
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_catalog."
                    f"pg_replication_slots WHERE slot_name = {name} AND {_OURS}"
                )
            case Step.CREATE_SLOT:
                return self._create_slot()
            case Step.QUERY_SLOT_FLUSHED_LSN:
                return (
                    f"SELECT confirmed_flush_lsn, wal_status, {_OURS}, "
                    "concat_ws(' ', slot_type, plugin, database) "
                    f"FROM pg_catalog.pg_replication_slots WHERE slot_name = {name}"
                )
            case Step.SET_DISPLAY_SETTING:
                return DISPLAY[self._display]
        return None

    def _create_slot(self) -> str:
        settings = self._settings
        temporary = " TEMPORARY" if settings.temporary_slot else ""
        begin = f"CREATE_REPLICATION_SLOT {quoted(settings.slot_name)}{temporary} LOGICAL pgoutput"
        if self.findings.version >= FAILOVER_SLOTS and settings.failover_slot and not temporary:
            return f"{begin} (SNAPSHOT 'nothing', FAILOVER true)"
        return f"{begin} NOEXPORT_SNAPSHOT"

    @property
    def waits(self) -> bool:
        """Whether the command waits for somebody else, for as long as that takes."""
        return self.step in (Step.ACQUIRE_LOCK, Step.DROP_SLOT, Step.CREATE_SLOT)

    def start_command(self) -> str:
        """What begins the stream: from where the slot stands, whatever that is."""
        settings = self._settings
        modern = self.findings.version >= STREAMING_AND_BINARY
        given = [
            # Large transactions come whole, after their commit: the server keeps them meanwhile.
            ("proto_version", "1"),
            ("publication_names", quoted(settings.publication_name)),
        ]
        if settings.binary and modern:
            given.append(("binary", "true"))
        if settings.messages and modern:
            given.append(("messages", "true"))
        listed = ", ".join(f"{name} {literal(value)}" for name, value in given)
        return f"START_REPLICATION SLOT {quoted(settings.slot_name)} LOGICAL 0/0 ({listed})"

    # -- what came back ------------------------------------------------------------------------

    def answered(self, rows: Sequence[Row]) -> None:
        """The command succeeded, with these rows."""
        try:
            self._answered(rows)
        except ValueError as error:
            raise DecodeError(f"the answer to {self.step.value} says {error}") from error

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
                found.wal_sender_timeout = int(row[2] or 0) / 1000
            case Step.CREATE_PUBLICATION:
                found.publication_created = True
            case Step.CHECK_PUBLICATION:
                self._check_publication(rows)
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
        """The command failed; raises the error again unless the next step is known all the same."""
        match self.step, sqlstate:
            case Step.ACQUIRE_LOCK, "57014":  # a statement timeout: the lock is still wanted
                self.lock_timeouts += 1
                return
            case Step.CREATE_PUBLICATION, "42710" | "42501":  # it exists, or is not ours to create
                self.step = Step.CHECK_PUBLICATION
                return
            case Step.DROP_SLOT, "42704":  # there was none
                self._advance()
                return
            case Step.CREATE_SLOT, "42710":  # it exists: go on where it stands
                self.step = Step.QUERY_SLOT_FLUSHED_LSN
                return
        raise error

    def _check_publication(self, rows: Sequence[Row]) -> None:
        name = self._settings.publication_name
        if not rows:
            raise ConfigurationError(
                f"the publication {name} does not exist, and is not made here: run "
                f"CREATE PUBLICATION {quoted(name)} as the database's owner; or GRANT CREATE ON "
                "DATABASE to this user, and leave manual_publication off"
            )

    def _check_slot(self, rows: Sequence[Row]) -> None:
        slot = self._settings.slot_name
        confirmed, wal_status, ours, what = _one(rows, 4)
        if ours not in (True, "t"):
            raise ConfigurationError(
                f"the slot {slot} is there, and is another one ({what}): the names of slots are of "
                "the whole server, so choose another stream_id, or drop that slot"
            )
        if wal_status == "lost":
            raise SlotLost(f"the slot {slot} has lost the log that it needs")
        if confirmed is None:
            raise SlotLost(f"the slot {slot} was never completed")
        self.findings.confirmed = Lsn.parse(str(confirmed))

    # -- which step is next --------------------------------------------------------------------

    def _advance(self) -> None:
        order = list(Step)
        step = order[order.index(self.step) + 1]
        while not self._wanted(step):
            step = order[order.index(step) + 1]
        self.step = step

    def _wanted(self, step: Step) -> bool:
        match step:
            case Step.CREATE_PUBLICATION:
                return not self._settings.manual_publication
            case Step.CHECK_PUBLICATION:  # one that was made just now is as it should be
                return self._settings.manual_publication
            case Step.DROP_SLOT:
                # A slot that is older than its publication cannot be read: at the places before
                # it, the publication does not exist.
                return self._settings.recreate_slot or self.findings.publication_created
            case Step.QUERY_SLOT_FLUSHED_LSN:
                return not self.findings.slot_created
        return True


class SlotLost(PostgresError):
    """The slot cannot be read any more: it must be made anew, and history with it."""


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as SQL has it; the replication protocol takes no parameters."""
    return "'" + text.replace("'", "''") + "'"


def _one(rows: Sequence[Row], columns: int) -> Row:
    if len(rows) != 1 or len(rows[0]) < columns:
        raise DecodeError(f"one row of {columns} columns was expected, and {rows!r} came")
    return rows[0]
