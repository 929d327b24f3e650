"""The data of the demo server: accounts, their mail, groups and media. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ._frames import Frame

__all__ = ["DemoAccount", "Denied", "World"]


class Denied(Exception):
    """The server refuses a send or a query."""

    def __init__(self, code: object, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True, eq=False, repr=False)
class DemoAccount:
    """One account."""

    name: str
    #: Its credentials; None if it needs none.
    key: bytes | None = None
    banned: bool = False
    #: Unacknowledged messages, by number.
    mail: dict[int, Frame] = field(default_factory=dict)
    count: int = 0
    #: The token for resuming the last link.
    resumable: str | None = None
    watchers: set[str] = field(default_factory=set)


class World:
    """The accounts, groups and media of the server.

    :param tell: sends a frame to an account, if it is online.
    """

    def __init__(self, rng: random.Random, tell: Callable[[str, Frame], None]) -> None:
        self._rng = rng
        self._tell = tell
        self.accounts: dict[str, DemoAccount] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self._media: dict[str, str] = {}

    def token(self, size: int = 16) -> str:
        """Return a random token."""
        return self._rng.randbytes(size).hex()

    def account(self, name: str) -> DemoAccount:
        """Return the account of that name, created if it is new."""
        return self.accounts.setdefault(name, DemoAccount(name))

    # -- mail ----------------------------------------------------------------------------------

    def members(self, sender: str, recipient: str) -> list[str]:
        """Return the accounts that get a send; raises `Denied` for a group of others."""
        group = self.groups.get(recipient)
        if group is None:
            return [recipient]
        if sender not in group["members"]:
            raise Denied(403, "not a member of the group")
        return [member for member in group["members"] if member != sender]

    def post(self, name: str, frame: Frame) -> None:
        """Keep and send a message until it is acknowledged; dropped for an unknown account."""
        account = self.accounts.get(name)
        if account is not None:
            account.count += 1
            account.mail[account.count] = {**frame, "n": account.count}
            self._tell(name, account.mail[account.count])

    def got(self, name: str, number: int) -> None:
        """Remove an acknowledged message, and send its sender a receipt."""
        frame = self.accounts[name].mail.pop(number, None)
        if frame is not None:
            self._tell(
                frame["from"],
                {"k": "receipt", "ids": [frame["id"]], "kind": "delivered", "by": name},
            )

    # -- queries -------------------------------------------------------------------------------

    def answer(self, who: str, question: Any) -> Any:
        """Return the answer to a query, or raise `Denied`."""
        if not isinstance(question, dict) or not isinstance(question.get("do"), str):
            raise Denied(400, "a query must be an object with a `do`")
        method = getattr(self, f"_do_{question['do']}", None)
        if method is None:
            raise Denied(404, f"there is no query {question['do'][:64]!r}")
        return method(who, question)

    def _do_echo(self, who: str, question: Frame) -> Any:
        return question.get("value")

    def _do_devices(self, who: str, question: Frame) -> list[str]:
        return [f"{_word(question, 'of')}/1"]

    def _do_presence(self, who: str, question: Frame) -> None:
        self.appear(who, _word(question, "state"))

    def appear(self, who: str, state: str) -> None:
        """Send the presence of an account to its watchers."""
        for watcher in sorted(self.account(who).watchers):
            self._tell(watcher, {"k": "presence", "who": who, "state": state})

    def _do_watch(self, who: str, question: Frame) -> None:
        watched = self.accounts.get(_word(question, "who"))
        if watched is None:
            raise Denied(404, "there is no such account")
        watched.watchers.add(who)

    def _do_read(self, who: str, question: Frame) -> None:
        ids = _words(question, "ids")
        self._tell(_word(question, "of"), {"k": "receipt", "ids": ids, "kind": "read", "by": who})

    def _do_group_create(self, who: str, question: Frame) -> str:
        members = list(dict.fromkeys([who, *_words(question, "members")]))
        id = f"group-{len(self.groups) + 1}"
        self.groups[id] = {"id": id, "name": _word(question, "name"), "members": members}
        self._announce(id, "created", who)
        return id

    def _do_group_info(self, who: str, question: Frame) -> Any:
        return self._group(who, question)

    def _do_group_add(self, who: str, question: Frame) -> None:
        group, new = self._group(who, question), _word(question, "who")
        if new not in group["members"]:
            group["members"].append(new)
            self._announce(group["id"], "added", new)

    def _do_group_remove(self, who: str, question: Frame) -> None:
        group, old = self._group(who, question), _word(question, "who")
        if old in group["members"]:
            self._announce(group["id"], "removed", old)
            group["members"].remove(old)

    def _group(self, who: str, question: Frame) -> Any:
        group = self.groups.get(_word(question, "group"))
        if group is None or who not in group["members"]:
            raise Denied(404, "no such group, or not a member of it")
        return group

    def _announce(self, id: str, what: str, who: str) -> None:
        group = self.groups[id]
        for member in group["members"]:
            self._tell(member, {"k": "group", "group": id, "name": group["name"], what: who})

    def _do_upload(self, who: str, question: Frame) -> str:
        location = f"media-{len(self._media) + 1}"
        self._media[location] = str(question.get("data"))
        return location

    def _do_download(self, who: str, question: Frame) -> str:
        data = self._media.get(_word(question, "location"))
        if data is None:
            raise Denied(404, "no such media")
        return data


def _word(question: Frame, key: str) -> str:
    value = question.get(key)
    if not isinstance(value, str) or len(value) > 1024:
        raise Denied(400, f"{key!r} must be a string")
    return value


def _words(question: Frame, key: str) -> list[str]:
    value = question.get(key)
    if not isinstance(value, list) or len(value) > 1024:
        raise Denied(400, f"{key!r} must be a list")
    return [str(each)[:1024] for each in value]
