"""A core set of the tests with the other versions of PostgreSQL: 15 as Debian 12 has it, and 16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres

from .test_gap import test_nothing_is_missed_or_repeated_while_connections_are_killed
from .test_order import (
    test_late_commits_are_not_skipped,
    test_transaction_ids_are_ordered_as_numbers,
)
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
    "test_transaction_ids_are_ordered_as_numbers",
]


@pytest.fixture(scope="module", params=["installed", pytest.param("16", marks=pytest.mark.soak)])
def postgres(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """In the place of the newest one: a server of another version."""
    if request.param == "installed":
        server = SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent)
    else:
        server = SyncEmbeddedPostgres(version=int(request.param))
    with server:
        yield server
