"""Log lines of a session: its state and the reason, but no recipients and no contents.

Each change of a connection is one line.
"""

from __future__ import annotations

import logging
import traceback

from moored.kernel import duration

from ._content import ConnectionUpdate

__all__ = ["log_change", "log_end", "log_forgetful", "log_not_kept", "log_sender"]

log = logging.getLogger("moored.sessions")

#: The number of crashes of a session's senders that are each logged; then the 16th, 32nd, 64th …
MOST_LOGGED = 10
#: The longest part of a reason that is logged: a server may send a long one.
LONGEST = 300


def log_change(path: str, update: ConnectionUpdate, next_attempt_in: float | None) -> None:
    """Log a change of a session's connection, with its cause and the next attempt."""
    kind = "" if update.kind is None else f" ({update.kind.value})"
    why = f": {_line(update.reason)}" if update.reason else ""
    if update.state == "offline/refused":
        log.warning("%s is %s%s%s; call connect() to retry", path, update.state, kind, why)
    else:
        then = "" if next_attempt_in is None else f"; next attempt in {duration(next_attempt_in)}"
        log.info("%s is %s%s%s%s", path, update.state, kind, why, then)


def log_end(path: str, reason: str) -> None:
    """Log that a session has ended without being stopped."""
    log.warning("%s has ended and will not be restarted: %s", path, _line(reason))


def log_sender(path: str, text: str, error: BaseException, crashes: int) -> None:
    """Log the crash of a sender with its traceback, but without the error's text."""
    if crashes <= MOST_LOGGED or not crashes & (crashes - 1):
        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        log.warning("%s: %s (%d so far)\n%s", path, text, crashes, where)


def log_not_kept(path: str, reason: str) -> None:
    """Log that new credentials could not be stored."""
    log.warning("%s could not store its credentials: %s", path, _line(reason))


def log_forgetful(path: str) -> None:
    """Log that the storage keeps new credentials for this process only."""
    log.warning(
        "%s was issued credentials, which the storage loses with this process: this account, and "
        "others like it, must log in again then; Sessions(storage='accounts.db') keeps them",
        path,
    )


def _line(text: str) -> str:
    """Return the text on one line, cut to LONGEST."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
