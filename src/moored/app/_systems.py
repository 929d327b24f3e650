"""The systems of Moored as parts of an app."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from moored.broker import Broker, BrokerApp
from moored.broker.postgres import OutboxEvents
from moored.broker.prometheus import BrokerCollector
from moored.kernel import Child, Clock, Context, Tree, counted, describe, duration
from moored.leases import Leases
from moored.leases.prometheus import LeasesCollector
from moored.postgres import Outbox, Postgres
from moored.postgres.report import server_of
from moored.reservoir import AsyncConnectionPool, Statistics
from moored.reservoir.prometheus import ReservoirCollector
from moored.service import (
    BROKER_PATHS,
    DRAIN,
    Part,
    ShownPostgres,
    Wiring,
    broker_health,
    cost_words,
)
from moored.sessions import LastLoss, Sessions
from moored.sessions.prometheus import SessionsCollector

from ._parts import RETRY, STOP_TIMEOUT, Judgement, PartEntry, Shown, system_part
from ._sessions_routes import SESSIONS_PATH, sessions_routes
from ._shared_outbox import SharedOutbox

#: Seconds that the callers of a pool may wait before it is reported.
WAITING = 3.0
#: Seconds in which most sessions may be offline, because they reconnect, before it is reported.
RECONNECTING = 3.0
#: Sessions in the tree: there may be thousands.
SHOWN_SESSIONS = 5
#: Reasons for lost links in an explanation.
SHOWN_REASONS = 3

__all__ = [
    *("broker_part", "event_source", "leases_part", "pool_part"),
    *("postgres_part", "sessions_part"),
]


def pool_part(entry: PartEntry, pool: AsyncConnectionPool[Any], what: str) -> Part:
    """Return a part that keeps a pool of connections to a server, such as "PostgreSQL", open."""
    reservoir = pool.reservoir

    def judge() -> Judgement:
        now, upkeep = pool.statistics(), reservoir.upkeep
        connected = now.size + now.in_use
        if connected and now.silent:
            return "degraded", _waits(now, reservoir.place)
        if (error := upkeep.attempts.error) is not None:
            why = f"connecting fails: {describe(error)}"
            if connected:
                return "degraded", f"{connected} of {now.max_size} connections; {why}"
            return "starting", why
        if not connected and now.target:
            return "starting", "no connection is open yet"
        if now.longest_wait > WAITING:
            return "degraded", _waits(now, reservoir.place)
        return "active", f"{counted(connected, 'connection')} to {reservoir.place}"

    def numbers() -> dict[str, Any]:
        found = pool.statistics()._asdict()
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in found.items()}

    def costs() -> dict[str, int]:
        now = pool.statistics()
        return {"callers waited": now.queued, "checkouts failed": now.timeouts + now.refused}

    def fact() -> str:
        now = pool.statistics()
        return f"{now.in_use} of {now.max_size} in use"

    server = reservoir.recipe.server
    shown = Shown(
        numbers,
        lambda: f"  because  {reservoir.describe()}\n  because  {reservoir.whereabouts()}",
        costs=costs,
        links=lambda: [reservoir.link(server)],
        hanging=lambda: reservoir.hanging,
        fact=fact,
    )
    return system_part(
        entry,
        "pool",
        lambda: pool,
        shown,
        judge,
        collector=lambda: ReservoirCollector(pool),
        kind="pool",
        ties=[server],
        server=what,
    )


def _waits(now: Statistics, place: str) -> str:
    """Describe what the callers of a pool wait for, as far as it is known."""
    found = []
    if now.waiting:
        callers = "1 caller waits" if now.waiting == 1 else f"{now.waiting} callers wait"
        found.append(f"{callers}, the longest for {duration(now.longest_wait)}")
    found.append(f"{now.in_use} of {now.max_size} connections are in use")
    if now.silent:
        found.insert(0, f"{place} has not answered for {duration(now.silent)}")
    return "; ".join(found)


def sessions_part(entry: PartEntry, sessions: Sessions, *, server: str | None) -> Part:
    """Return a part that keeps the sessions of all accounts."""

    few_since: float | None = None
    most_online = 0
    last_look = 0.0

    def states() -> Counter[str]:
        return Counter(each.state for each in sessions)

    def judge() -> Judgement:
        nonlocal few_since, most_online, last_look
        now, online = Clock.current().monotonic(), states()["online"]
        most_online = min(most_online, len(sessions))
        lost, last_look = _losses(sessions, last_look), now
        if lost and len(lost) >= len(sessions) / 2:
            few_since = -math.inf  # at once, even if they are online again
        # A new maximum is the progress of a first sign-in, which may take minutes.
        elif online > most_online or online >= len(sessions) / 2:
            few_since, most_online = None, max(online, most_online)
        else:
            few_since = few_since or now
        late = few_since is not None and now - few_since > RECONNECTING
        text = f"{counted(len(sessions), 'session')}, {online} online"
        if late and lost:
            text += f"; {counted(len(lost), 'link')} lost: {lost[0].reason}"
        return ("degraded" if late else "active"), text

    def costs() -> dict[str, int]:
        totals = sessions.totals().values()
        return {
            "messages of unknown outcome": sum(each["unknown"] for each in totals),
            "messages not sent": sum(each["not_sent"] for each in totals),
        }

    def tree() -> Tree:
        whole = sessions.tree()
        rest = len(whole.children) - SHOWN_SESSIONS
        more = (Tree(f"{rest} more", whole.state, whole.since),) if rest > 0 else ()
        return replace(whole, children=(*whole.children[:SHOWN_SESSIONS], *more))

    def explain() -> str:
        losses = _described(_losses(sessions), Clock.current().monotonic())
        lines = [f"  lost     {each}" for each in losses]
        if lines and (cost := +Counter(costs())):
            lines.append(f"  cost     {cost_words(cost)}, since the start")
        return "\n".join(lines)

    def fact() -> str:
        return f"{states()['online']} of {len(sessions)} online"

    def numbers() -> dict[str, Any]:
        return {"states": states(), "totals": sessions.totals()}

    shown = Shown(numbers, explain, tree, costs, fact=fact)
    return system_part(
        entry,
        "sessions",
        lambda: sessions,
        shown,
        judge,
        collector=lambda: SessionsCollector(sessions),
        links=sessions,
        kind="sessions",
        ties=[] if server is None else [server],
        server="chat server",
        mounts={f"{SESSIONS_PATH}/{entry.name}": sessions_routes(sessions)},
    )


def _losses(sessions: Sessions, since: float = 0.0) -> list[LastLoss]:
    """Return the last loss of each session that has lost a link, the newest first."""
    found = [loss for each in sessions if (loss := each.last_loss) and loss.at >= since]
    return sorted(found, key=lambda loss: loss.at, reverse=True)


def _described(losses: Sequence[LastLoss], now: float) -> Iterator[str]:
    """Yield the losses by their reason, the newest reason first."""
    for reason in list(dict.fromkeys(each.reason for each in losses))[:SHOWN_REASONS]:
        same = [each for each in losses if each.reason == reason]
        longest = max(now - each.at if each.lasted is None else each.lasted for each in same)
        yield (
            f"{counted(len(same), 'link')} {duration(now - same[0].at)} ago, "
            f"for at most {duration(longest)}: {reason}"
        )


def leases_part(entry: PartEntry, leases: Leases, url: str) -> Part:
    """Return a part that keeps a client of a lease store open."""

    def judge() -> Judgement:
        now = leases.statistics()
        held = counted(now.held, "lease") + (f" ({now.local} local)" if now.local else "")
        if now.available:
            return "active", held
        return "degraded", f"the store does not answer; {held}"

    return system_part(
        entry,
        "leases",
        lambda: leases,
        Shown(lambda: leases.statistics()._asdict()),
        judge,
        collector=lambda: LeasesCollector(leases),
        kind="leases",
        ties=_store_of(url),
        server="lease store",
    )


def _store_of(url: str) -> list[str]:
    """Return the server of a lease store; a store in memory has none."""
    found = urlsplit(url)
    if found.scheme.startswith("postgres"):
        return [server_of(url)]
    if found.scheme == "dynamodb":
        return ["DynamoDB"]
    return [f"{found.hostname}:{found.port or 6379}"] if found.scheme.startswith("redis") else []


def event_source(source: Any) -> Any:
    """Return what a broker reads: a source as it is, or the events of an outbox."""
    if isinstance(source, Postgres):
        raise TypeError("app.broker() takes the outbox of a Postgres: app.broker(pg.outbox)")
    if isinstance(source, Outbox):
        return OutboxEvents(source)
    if source is not None and not hasattr(source, "events"):
        raise TypeError(f"{source!r} is no source of events: give app.broker() pg.outbox")
    return source


def broker_part(
    entry: PartEntry,
    broker: Broker,
    outbox: SharedOutbox | None,
    app: BrokerApp | None,
    ties: Iterable[str],
) -> Part:
    """Return a part that feeds a broker, and serves its streams if it has an app."""

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        if outbox is not None:
            await outbox.wait()
        async with broker:
            yield

    return system_part(
        entry,
        "broker",
        running,
        Shown(broker.status, tree=broker.tree),
        lambda: broker_health(broker),
        collector=lambda: BrokerCollector(broker),
        kind="broker",
        early=True,
        beside=None if outbox is None else outbox.child,
        before_stop=lambda: broker.drain(over=DRAIN),
        public={} if app is None else dict.fromkeys(BROKER_PATHS, app),
        streams=0 if app is None else broker.max_streams,
        ties=ties,
    )


def postgres_part(entry: PartEntry, pg: Postgres) -> Part:
    """Return a part that runs a connection manager."""

    def build(wiring: Wiring) -> Sequence[Child]:
        view = ShownPostgres(wiring, entry.name)

        async def run(ctx: Context) -> None:
            await entry.begin(ctx, wiring, early=False)
            await entry.opened(pg.open(), ctx, wiring, early=False)
            with view.shown(pg, ctx.path):
                try:
                    await asyncio.Event().wait()
                finally:
                    await pg.close()

        return [Child("manager", run, backoff=RETRY, shutdown=STOP_TIMEOUT)]

    urls = pg.settings.database_url, pg.settings.replication_url, pg.notify_url
    ties = [server_of(url) for url in urls if url]
    return entry.part(build, ties, kind="stream", server="PostgreSQL")
