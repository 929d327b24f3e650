"""Log lines of a session: its state and why, but no recipients and no contents.

Each change of a connection is one line, so that a thousand accounts on a bad day can be read.
"""

from __future__ import annotations

import logging
import traceback

from ._content import ConnectionUpdate

__all__ = ["log_change", "log_end", "log_forgetful", "log_not_kept", "log_sender"]

log = logging.getLogger("moored.sessions")

#: So many crashes of a session's senders are logged, each; then those at 16, 32, 64 …
MOST_LOGGED = 10
#: How much of a reason is shown: a server may have much to say.
LONGEST = 300


def log_change(path: str, update: ConnectionUpdate) -> None:
    """Log a change of a session's connection."""
    kind = "" if update.kind is None else f" ({update.kind.value})"
    why = f": {_line(update.reason)}" if update.reason else ""
    if update.state == "offline/refused":
        log.warning("%s is %s%s%s; it stays so until connect()", path, update.state, kind, why)
    else:
        log.info("%s is %s%s%s", path, update.state, kind, why)


def log_end(path: str, reason: str) -> None:
    """Log that a session has ended without being stopped."""
    log.warning("%s has ended for good: %s", path, _line(reason))


def log_sender(path: str, text: str, error: BaseException, crashes: int) -> None:
    """Log the crash of a sender with its traceback, but without the error's text."""
    if crashes <= MOST_LOGGED or not crashes & (crashes - 1):
        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        log.warning("%s: %s (%d so far)\n%s", path, text, crashes, where)


def log_not_kept(path: str, reason: str) -> None:
    """Log that new credentials could not be stored."""
    log.warning("%s could not keep its credentials: %s", path, _line(reason))


def log_forgetful(path: str) -> None:
    """Log that the storage keeps new credentials for this process only."""
    log.warning(
        "%s was given credentials, and the storage forgets them with this process: it, and all "
        "that log in like it, will have to log in anew; Sessions(storage='accounts.db') keeps them",
        path,
    )


def _line(text: str) -> str:
    """The text on one line, cut to a limit."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
