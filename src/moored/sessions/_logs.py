"""What a session says in the log: where it is and why, and never to whom it sends, or what.

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
    """The connection of a session has changed."""
    kind = "" if update.kind is None else f" ({update.kind.value})"
    why = f": {_line(update.reason)}" if update.reason else ""
    if update.state == "offline/refused":
        log.warning("%s is %s%s%s; it stays so until connect()", path, update.state, kind, why)
    else:
        log.info("%s is %s%s%s", path, update.state, kind, why)


def log_end(path: str, reason: str) -> None:
    """A session has ended, and nobody asked for it."""
    log.warning("%s has ended for good: %s", path, _line(reason))


def log_sender(path: str, text: str, error: BaseException, crashes: int) -> None:
    """A sender has crashed: where, but not with which words, which may be a message's."""
    if crashes <= MOST_LOGGED or not crashes & (crashes - 1):
        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        log.warning("%s: %s (%d so far)\n%s", path, text, crashes, where)


def log_not_kept(path: str, reason: str) -> None:
    """Credentials could not be written."""
    log.warning("%s could not keep its credentials: %s", path, _line(reason))


def log_forgetful(path: str) -> None:
    """Credentials were given that will not be there the next time."""
    log.warning(
        "%s was given credentials, and the storage forgets them with this process: it, and all "
        "that log in like it, will have to log in anew; Sessions(storage='accounts.db') keeps them",
        path,
    )


def _line(text: str) -> str:
    """On one line, whoever wrote it."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
