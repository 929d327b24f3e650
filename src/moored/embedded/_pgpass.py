"""The password file, in libpq's format, so that psql can use it."""

from __future__ import annotations

import re

__all__ = ["pgpass_line", "pgpass_passwords"]


def pgpass_line(user: str, password: str) -> str:
    """Return the line with the password of `user` for any host, port and database."""
    return ":".join(("*", "*", "*", _escaped(user), _escaped(password))) + "\n"


def pgpass_passwords(text: str) -> dict[str, str]:
    """Return the passwords by user."""
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
