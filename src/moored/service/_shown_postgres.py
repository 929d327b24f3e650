"""How a connection manager is shown: in status, metrics, page and health, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from psycopg.conninfo import conninfo_to_dict

from moored.kernel import SECRETS
from moored.postgres import Health, Postgres
from moored.postgres.listen.prometheus import ListenerCollector
from moored.postgres.outbox.prometheus import OutboxCollector
from moored.postgres.prometheus import PostgresCollector
from moored.postgres.report import reasons, server_of

from ._errors import ServiceError
from ._part import Wiring

__all__ = ["ShownPostgres", "place_of"]


class ShownPostgres:
    """Shows the managers of one part, one after the other.

    :param part: the name of the part, whose health is that of the manager.
    """

    def __init__(self, wiring: Wiring, part: str) -> None:
        self._wiring = wiring
        self._part = part
        self._collector = PostgresCollector()
        self._listeners = ListenerCollector()
        self._outboxes = OutboxCollector()
        self._reported_holder: int | None = None
        wiring.collectors.extend((self._collector, self._listeners, self._outboxes))

    @contextlib.contextmanager
    def shown(self, pg: Postgres, path: str) -> Iterator[None]:
        """Add the manager, which the child at `path` runs, to status, metrics and page."""
        wiring = self._wiring
        wiring.machines[pg.machine] = self._part
        wiring.systems[path] = pg
        self._collector.add(pg)
        self._outboxes.add(pg.outbox)
        pg.outbox.on_status = lambda: self._report_health(pg)
        unsubscribe = [pg.monitor.subscribe(lambda change: self._report_health(pg))]
        if (listener := pg.listener) is not None:
            if pg.notify_url:
                wiring.machines[listener.machine] = self._part
            self._listeners.add(listener)
            wiring.links.add(listener)
            unsubscribe.append(listener.monitor.subscribe(lambda _: self._report_health(pg)))
        self._report_health(pg)
        try:
            yield
        finally:
            for each in unsubscribe:
                each()
            self._collector.remove(pg)
            self._outboxes.remove(pg.outbox)
            pg.outbox.on_status = None
            if listener is not None:
                self._listeners.remove(listener)
                wiring.links.remove(listener)
                if pg.notify_url:
                    del wiring.machines[listener.machine]
            del wiring.systems[path]
            del wiring.machines[pg.machine]
            wiring.health(self._part, "starting", "the connection manager has stopped")

    def _report_health(self, pg: Postgres) -> None:
        """Report the health of the manager; called after each change of a condition."""
        if not pg.is_open:
            return
        health = pg.health
        if health is Health.ACTIVE and pg.outbox.delayed:
            self._wiring.health(self._part, "degraded", pg.outbox.delayed)
        else:
            self._wiring.health(self._part, health.value, self._reason(pg, health))
        if pg.fatal is not None:
            self._wiring.fail(ServiceError(pg.fatal))
        self._report_lock_holder(pg)

    def _reason(self, pg: Postgres, health: Health) -> str:
        if health is Health.FAILED:
            return pg.fatal or "the connection manager is closed"
        if health is Health.SLEEPING:
            return "all connections were closed after a time without use"
        now = pg.statistics()
        if health is Health.ACTIVE:
            server = now["server"]
            version = server["version"] if server is not None else "of unknown version"
            return f"PostgreSQL {version} at {place_of(pg.settings.database_url)}"
        if health is Health.WAITING:
            of = f"standby of {pg.standby_of}"
            return f"{of}; connections and outbox work here, changes are streamed there"
        if (outage := now["outage"]) is not None:
            return str(outage["last"])
        listener = now["listener"]
        if health is Health.DEGRADED and listener is not None and not listener["up"]:
            why = listener["failure"]
            return f"the listener is down: {why}" if why else "the listener is not connected yet"
        return next(iter(reasons(now)), "")

    def _report_lock_holder(self, pg: Postgres) -> None:
        """Print a notice, once for each other holder of the lock, and when it is taken over."""
        lock, reported = pg.statistics()["lock"], self._reported_holder
        if lock["held"] and reported is not None:
            self._wiring.say(f"PostgreSQL: taking over the stream from backend {reported}")
            self._reported_holder = None
        elif lock["holder"] is not None and lock["holder"]["pid"] != reported:
            why = pg.monitor.conditions()["pg_lock_acquired"].detail
            self._wiring.say(f"PostgreSQL: standing by, because {why}")
            self._reported_holder = lock["holder"]["pid"]


def place_of(url: str) -> str:
    """Return the hosts, ports and database of a connection string: "db:5432/orders"."""
    words = conninfo_to_dict(url)
    database = words.get("dbname") or words.get("user") or ""
    return SECRETS.hide(f"{server_of(url)}/{database}".rstrip("/"))
