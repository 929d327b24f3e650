"""Run all checks, over one connection for each URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moored.kernel import SECRETS, Clock, describe

from .._settings import Settings
from ..consume._tables import parse_table
from . import _activity, _links, _outboxes, _publication, _server
from ._check import Check, Connected, Examined, Finding, Purpose, Severity

__all__ = ["CHECKS", "Examination", "examine"]

#: All checks, in the order in which they run.
CHECKS: list[type[Check]] = [
    found
    for module in (_links, _server, _publication, _activity, _outboxes)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Check) and found is not Check
]


class Examination(NamedTuple):
    """The result of `examine()`."""

    connections: list[Connected]
    #: The worst first.
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether nothing stops a part of Moored."""
        return not any(each.severity is Severity.STOPS for each in self.findings)

    def plain(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        findings = [{**each._asdict(), "severity": each.severity.value} for each in self.findings]
        connected = [each._asdict() for each in self.connections]
        return {"ok": self.ok, "connections": connected, "findings": findings}


async def examine(
    database_url: str,
    *,
    replication_url: str | None = None,
    notify_url: str | None = None,
    tables: Sequence[str] = (),
    clock: Clock | None = None,
    **names: Any,
) -> Examination:
    """Check a database for everything that Moored needs, without writing to it.

    :param tables: tables that should be followed; those that are published are checked, too.
    :param clock: the clock that the server's is compared with.
    :param names: `stream_id`, `slot`, `publication` and `pool_size`, as of `Postgres`.
    """
    direct = replication_url or database_url
    settings = Settings(
        database_url=database_url, replication_url=direct, state_dir=Path(), **names
    )
    SECRETS.add_from(notify_url or "")
    followed = [parse_table(name) for name in tables]
    found = Examination([], [])
    urls = _urls(settings, notify_url)
    for url, purposes in urls.items():
        on = Examined(url, purposes, settings, followed, clock or Clock.current())
        on.notify_given = notify_url is not None
        try:
            findings = await _run_checks(on)
            found.connections.extend(on.connected)
        finally:
            await on.close()
        where = f"{purposes[0]}: " if len(urls) > 1 else ""
        found.findings.extend(each._replace(problem=where + each.problem) for each in findings)
    found.findings.sort(key=lambda each: list(Severity).index(each.severity))
    return found


def _urls(settings: Settings, notify_url: str | None) -> dict[str, list[Purpose]]:
    """Return what each URL is used for; an empty `notify_url` means that there is no listener."""
    urls: dict[str, list[Purpose]] = {}
    urls.setdefault(settings.database_url, []).append("database_url")
    urls.setdefault(settings.replication_url, []).append("replication_url")
    if notify_url != "":
        urls.setdefault(notify_url or settings.database_url, []).append("notify_url")
    return urls


async def _run_checks(on: Examined) -> list[Finding]:
    findings: list[Finding] = []
    for check in CHECKS:
        if check.purpose not in (None, *on.purposes):
            continue
        try:
            findings += await check().run(on)
        except _links.ERRORS as error:
            problem = f"the check could not run: {describe(error)}"
            findings.append(Finding(check.name, Severity.WARNS, problem))
            findings += await _links.Reachability().run(on)
        if findings and findings[-1].check == _links.Reachability.name:
            break
    return findings
