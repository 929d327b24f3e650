"""The password file, in the form that libpq reads: anyone may use it with psql, as it is."""

from __future__ import annotations

import re

__all__ = ["pgpass_line", "pgpass_passwords"]


def pgpass_line(user: str, password: str) -> str:
    """The line that holds the password of `user` on any host, port and database."""
    return ":".join(("*", "*", "*", _escaped(user), _escaped(password))) + "\n"


def pgpass_passwords(text: str) -> dict[str, str]:
    """The passwords by user."""
    fields = [
        re.findall(r"((?:\\.|[^\\:])*)(?::|$)", line)[:5]
        for line in text.splitlines()
        if line[:1] != "#"
    ]
    return {_plain(parts[3]): _plain(parts[4]) for parts in fields if len(parts) == 5}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
