"""Whether a failed attempt to connect is worth a retry, and the error for waiting callers.

Most failures are retried. Where no retry can help, waiting callers fail at once, not when their
timeout expires.
"""

from __future__ import annotations

import copy
import traceback
from enum import Enum

from moored.kernel import describe

from ._errors import ChannelError, ConfigError, TopologyRefused
from ._secrets import same_kind

__all__ = ["Verdict", "judge", "raised", "where"]

#: Errors of a wrong program. Others (ValueError, KeyError, RuntimeError, and those of libraries)
#: may depend on external state, and are retried.
MISTAKES = (
    AttributeError,
    ImportError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
)


class Verdict(Enum):
    """What to do after a failure."""

    RETRY = "the next attempt may succeed"
    MISTAKE = "no attempt can succeed until the program or its configuration is fixed"
    REFUSED = "the credentials were refused: retry rarely"


def judge(error: BaseException, *, made: bool) -> Verdict:
    """Return whether another attempt may help.

    :param made: whether a channel had been made; an error before that is the user's program's.
    """
    if isinstance(error, ConfigError) or (not made and isinstance(error, MISTAKES)):
        return Verdict.MISTAKE
    return Verdict.REFUSED if isinstance(error, TopologyRefused) else Verdict.RETRY


def raised(verdict: BaseException, address: str) -> ChannelError:
    """Return the error to raise in a waiting caller; each gets an instance of its own."""
    if isinstance(verdict, (ConfigError, TopologyRefused)):
        error: ChannelError = _another(verdict)
        error.__cause__ = verdict.__cause__
    else:
        error = ConfigError(f"no channel to {address} can be made: {describe(verdict)}")
        error.__cause__ = verdict
    return error


def _another(verdict: ChannelError) -> ChannelError:
    """Return a copy of an error; a user's own class may not support copying."""
    text = str(verdict)
    try:
        error = copy.copy(verdict)
        if error is not verdict and type(error) is type(verdict) and str(error) == text:
            return error
    except Exception:
        pass
    return same_kind(verdict, text)


def where(error: BaseException, verdict: Verdict) -> str:
    """Return the traceback of a mistake in the user's program; "" for other errors."""
    if verdict is not Verdict.MISTAKE or isinstance(error, ConfigError):
        return ""
    return f"no channel can be made\n{''.join(traceback.format_exception(error))}"
