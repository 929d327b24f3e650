"""A core set of the tests with the other versions of PostgreSQL: 15 as Debian 12 has it, and 16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres.outbox import Outbox
from moored.postgres.outbox.prometheus import OutboxCollector

from .conftest import Sql
from .reading import publishing
from .test_gap import test_nothing_is_missed_or_repeated_while_connections_are_killed
from .test_order import test_late_commits_are_not_skipped
from .test_publish import test_capture_publishes_every_change_of_a_table
from .test_retention import (
    no_background_upkeep,
    test_a_cursor_older_than_the_retention_is_a_reset,
    test_an_insert_without_a_partition_goes_to_the_default_partition,
    test_an_open_transaction_postpones_the_drop_and_not_the_publishers,
)
from .test_status import (
    test_grants_suffice_for_a_role_that_publishes_and_consumes,
    test_the_culprit_of_held_back_events_is_reported,
)

__all__ = [
    "no_background_upkeep",
    "test_a_cursor_older_than_the_retention_is_a_reset",
    "test_an_insert_without_a_partition_goes_to_the_default_partition",
    "test_an_open_transaction_postpones_the_drop_and_not_the_publishers",
    "test_capture_publishes_every_change_of_a_table",
    "test_grants_suffice_for_a_role_that_publishes_and_consumes",
    "test_late_commits_are_not_skipped",
    "test_nothing_is_missed_or_repeated_while_connections_are_killed",
    "test_the_culprit_of_held_back_events_is_reported",
]


SETTINGS = {"max_prepared_transactions": "4"}


#: Those that `make test` runs; the others differ less between versions.
QUICK = {
    "test_a_cursor_older_than_the_retention_is_a_reset",
    "test_a_prepared_transaction_is_reported_as_the_culprit",
    "test_grants_suffice_for_a_role_that_publishes_and_consumes",
    "test_late_commits_are_not_skipped",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    quick = [] if metafunc.function.__name__ in QUICK else [pytest.mark.soak]
    versions = [pytest.param("installed", marks=quick), pytest.param("16", marks=pytest.mark.soak)]
    metafunc.parametrize("postgres", versions, indirect=True, scope="module")


@pytest.fixture(scope="module")
def postgres(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """In the place of the newest one: a server of another version."""
    if request.param == "installed":
        bin_dir = Path(require_server("postgres")).parent
        server = SyncEmbeddedPostgres(bin_dir=bin_dir, options=SETTINGS)
    else:
        server = SyncEmbeddedPostgres(version=int(request.param), options=SETTINGS)
    with server:
        yield server


async def test_a_prepared_transaction_is_reported_as_the_culprit(url: str, sql: Sql) -> None:
    async with Outbox(url) as outbox:
        await outbox.install(wake="poll")  # a transaction with a NOTIFY cannot be prepared
        async with publishing(url) as culprit:
            await culprit.execute("prepare transaction 'forgotten'")
        try:
            await outbox.publish(sql, "orders", "1")
            held = (await outbox.status()).held_back
            assert held is not None
            assert (held.pid, held.gid) == (None, "forgotten")
            assert held.age is not None
            assert "for the end of the prepared transaction 'forgotten' in database" in str(held)
            registry = CollectorRegistry()
            registry.register(OutboxCollector(outbox))
            assert 'pid="",prepared="forgotten"' in generate_latest(registry).decode()
        finally:
            await sql.execute("rollback prepared 'forgotten'")
        assert (await outbox.status()).held_back is None
