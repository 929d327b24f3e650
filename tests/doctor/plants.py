"""Problems to plant: each breaks a healthy server in one way, and returns what `examine` gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import free_port, require_server

from moored.kernel import Clock
from moored.postgres.outbox import ddl
from moored.postgres.parking import parking_ddl

from .world import World

__all__ = ["PLANTS", "Plant"]

PUBLICATION = "create publication moored_publication_default"

Options = dict[str, Any]


class Plant(NamedTuple):
    """A problem, and who repairs it if there is no statement."""

    name: str
    #: The checks that find it; the first one is repaired.
    checks: tuple[str, ...]
    plant: Callable[[World], Options]
    #: Holds resources; it is repeated after a restart.
    hold: Callable[[World], object]
    #: Follows the advice, and returns other options, if there is no statement.
    advised: Callable[[World], Options] | None
    #: Whether another one is like it.
    variant: bool


PLANTS: list[Plant] = []


def planted(
    *checks: str,
    hold: Callable[[World], object] = lambda world: None,
    advised: Callable[[World], Options] | None = None,
    variant: bool = False,
) -> Callable[[Callable[[World], Options | None]], None]:
    """Add a problem that these checks find."""

    def add(plant: Callable[[World], Options | None]) -> None:
        name = plant.__name__.removesuffix("_")
        made = Plant(name, checks, lambda world: plant(world) or {}, hold, advised, variant)
        PLANTS.append(made)

    return add


def right_url(world: World) -> Options:
    return {"database_url": world.url}


def direct_urls(world: World) -> Options:
    return {"replication_url": world.url, "notify_url": world.url}


# -- the way to the server -----------------------------------------------------------------------


@planted("reachability", advised=right_url, variant=True)
def unknown_host(world: World) -> Options:
    return {"database_url": world.url_with(host="no-such-host.invalid")}


@planted("reachability", advised=right_url)
def closed_port(world: World) -> Options:
    return {"database_url": world.url_with(port=free_port())}


@planted("reachability", advised=right_url)
def wrong_password(world: World) -> Options:
    return {"database_url": world.url_with(password="another-secret")}


@planted("reachability", variant=True)
def missing_database(world: World) -> Options:
    return {"database_url": world.url_with(dbname="missing")}


@planted("encryption", advised=right_url)
def no_encryption(world: World) -> Options:
    # This address means the machine itself, and is not a loopback address.
    return {"database_url": world.url_with(host="0.0.0.0")}


def pooled(world: World, mode: str) -> str:
    settings = f"pool_mode = {mode}"
    return world.held.enter_context(
        pgbouncer(require_server("pgbouncer"), world.url, settings=settings)
    )


@planted("pooler", advised=direct_urls)
def listener_behind_transaction_pooler(world: World) -> Options:
    return {"notify_url": pooled(world, "transaction")}


@planted("pooler", advised=direct_urls, variant=True)
def listener_behind_session_pooler(world: World) -> Options:
    return {"notify_url": pooled(world, "session")}


@planted("replication_connection", "pooler", advised=direct_urls)
def everything_behind_pooler(world: World) -> Options:
    return {"database_url": pooled(world, "transaction")}


@planted("clock_skew", advised=lambda world: {"clock": Clock.system()})
def wrong_clock(world: World) -> Options:
    return {"clock": Clock(wall=lambda: time.time() + 3600)}


# -- the server ----------------------------------------------------------------------------------


def promote(world: World) -> Options:
    world.admin.execute("select pg_promote()")
    return {}


@planted("standby", advised=promote)
def standby(world: World) -> None:
    data = world.server.data_dir / "data"
    (data / "standby.signal").touch()
    world.restart()


@planted("wal_level")
def wal_level(world: World) -> None:
    world.configure(wal_level="replica")
    world.restart()


@planted("slots_left")
def no_slot_left(world: World) -> None:
    for number in range(3):
        world.run(f"select pg_create_physical_replication_slot('used_{number}')")


def use_senders(world: World) -> None:
    for _ in range(3):
        world.connect(world.server.url, replication="database")


@planted("senders_left", hold=use_senders)
def no_sender_left(world: World) -> None:
    pass


@planted("connections_left", variant=True)
def pool_larger_than_server(world: World) -> Options:
    return {"pool_size": 150}


@planted("connections_left")
def limited_role(world: World) -> None:
    world.run("alter role app connection limit 9")


@planted("harmful_settings")
def read_only_role(world: World) -> None:
    world.run("alter role app set default_transaction_read_only = on")


@planted("harmful_settings", variant=True)
def read_only_database(world: World) -> None:
    world.run("alter database shop set default_transaction_read_only = on")


@planted("harmful_settings")
def idle_session_timeout(world: World) -> None:
    world.configure(idle_session_timeout="60s")


@planted("harmful_settings", variant=True)
def no_wal_sender_timeout(world: World) -> None:
    world.configure(wal_sender_timeout="0")


# -- privileges, the publication and its tables --------------------------------------------------


@planted("replication_privilege")
def no_replication_privilege(world: World) -> None:
    world.run("alter role app noreplication")


@planted("create_privilege")
def no_create_privilege(world: World) -> None:
    world.run("revoke create on database shop from app")


@planted("publication_owner")
def publication_of_another_role(world: World) -> None:
    world.run(PUBLICATION)


@planted("publication_operations")
def publication_without_deletes(world: World) -> None:
    world.own(f"{PUBLICATION} for table orders with (publish = 'insert, update')")


@planted("publication_filters")
def row_filter(world: World) -> None:
    world.own(f"{PUBLICATION} for table orders where (id > 5)")


@planted("publication_filters", variant=True)
def column_list(world: World) -> None:
    world.own("alter table orders add name text", f"{PUBLICATION} for table orders (id)")


@planted("named_tables", variant=True)
def unlogged_table(world: World) -> Options:
    world.own('create unlogged table "Scratch" (id int primary key)')
    return {"tables": ["public.Scratch"]}


@planted("named_tables", advised=lambda world: {"tables": ["orders"]})
def missing_table(world: World) -> Options:
    return {"tables": ["order"]}


def foreign_table(world: World) -> Options:
    world.run("create table bills (id int primary key)", "grant select on bills to app")
    return {"tables": ["bills", "orders"]}


@planted("table_owner")
def table_of_another_role(world: World) -> Options:
    return foreign_table(world)


@planted("table_owner", variant=True)
def table_of_another_role_beside_publication(world: World) -> Options:
    world.own(f"{PUBLICATION} for table orders")
    return foreign_table(world)


@planted("select_privilege")
def unreadable_table(world: World) -> None:
    world.run(
        "create schema vault",
        "create table vault.bills (id int primary key)",
        f"{PUBLICATION} for table vault.bills",
        "alter publication moored_publication_default owner to app",
    )


@planted("select_privilege", variant=True)
def unusable_schema(world: World) -> Options:
    world.run("revoke usage on schema public from public")
    return {"tables": ["orders"]}


@planted("row_security")
def row_security_of_a_published_table(world: World) -> None:
    world.own(
        f"{PUBLICATION} for table orders",
        "alter table orders enable row level security, force row level security",
    )


@planted("table_identity")
def published_table_without_key(world: World) -> None:
    world.own("create table log (line text)", f"{PUBLICATION} for table log")


@planted("table_identity", variant=True)
def wanted_table_without_key(world: World) -> Options:
    world.own("create table log (line text)")
    return {"tables": ["log"]}


@planted("table_identity", variant=True)
def partition_without_key(world: World) -> Options:
    world.own(
        "create table log (day int) partition by list (day)",
        "create table log_1 partition of log for values in (1)",
    )
    return {"tables": ["log"]}


@planted("table_identity", variant=True)
def identity_nothing(world: World) -> Options:
    world.own("alter table orders replica identity nothing")
    return {"tables": ["orders"]}


@planted("table_identity", variant=True)
def identity_full(world: World) -> Options:
    world.own("alter table orders replica identity full")
    return {"tables": ["orders"]}


# -- what goes on at the server ------------------------------------------------------------------


def drop_slots(world: World) -> Options:
    world.run("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
    return {}


@planted("slot_name", advised=drop_slots)
def slot_of_another_program(world: World) -> None:
    world.run("select pg_create_physical_replication_slot('moored_slot_default')")


def make_slot(world: World) -> None:
    world.run("select pg_create_logical_replication_slot('search', 'pgoutput')")


@planted("invalidated_slots")
def lost_slot(world: World) -> None:
    make_slot(world)
    world.configure(max_slot_wal_keep_size="16MB")
    world.write_wal(5)
    world.run("checkpoint")


@planted("retained_wal")
def slot_that_nothing_reads(world: World) -> None:
    make_slot(world)
    world.write_wal(5)


@planted("retained_wal", variant=True)
def slot_that_is_about_to_be_lost(world: World) -> None:
    make_slot(world)
    # The next checkpoint must not come by itself.
    world.configure(max_slot_wal_keep_size="16MB", max_wal_size="1GB", checkpoint_timeout="1d")
    world.write_wal(3)


@planted("stuck_lock")
def stuck_lock(world: World) -> None:
    world.own("select pg_advisory_lock(hashtext('moored_slot_default'))")


@planted("long_transactions")
def long_transaction(world: World) -> None:
    world.own("begin", "insert into orders values (1)")


@planted("long_transactions")
def prepared_transaction(world: World) -> None:
    world.own("begin", "insert into orders values (1)", "prepare transaction 'it''s'")


@planted("notify_queue")
def listener_in_transaction(world: World) -> None:
    world.own("listen a", "begin")
    world.run("select pg_notify('a', n || repeat('x', 4000)) from generate_series(1, 70) n")


def without_standby(world: World) -> Options:
    """Let the commits end, as an administrator would; the user would make them notify less."""
    world.admin.execute("alter system reset synchronous_standby_names")
    world.admin.execute("select pg_reload_conf()")
    return {}


@planted("notify_lock", "long_transactions", advised=without_standby)
def commits_that_notify_and_wait_for_each_other(world: World) -> None:
    """Each waits for a standby that does not exist, and holds the lock meanwhile."""
    world.configure(synchronous_standby_names="nobody")
    for number in range(2):
        statements = (
            "set synchronous_commit = on",
            "begin",
            f"insert into orders values ({number})",
        )
        publisher = world.own(*statements, "notify orders")
        publisher.pgconn.send_query(b"commit")
    waiting = "select count(*) from pg_locks where locktype = 'object' and not granted"
    ends = time.monotonic() + 30.0
    while world.admin.execute(waiting).fetchone() == (0,):
        assert time.monotonic() < ends
        time.sleep(0.02)


# -- outboxes and consumers ----------------------------------------------------------------------

PUBLISH = "select moored.outbox_publish('orders', 'a secret')"


@planted("outbox_delivery", "long_transactions")
def publisher_that_stays_open(world: World) -> None:
    world.own(ddl(), "begin", PUBLISH)
    world.own(PUBLISH)


@planted("outbox_delivery", "long_transactions", variant=True)
def prepared_publisher(world: World) -> None:
    # After a NOTIFY, no transaction can be prepared.
    world.own(ddl(wake="poll"), "begin", PUBLISH, "prepare transaction 'it''s'")
    world.own(PUBLISH)


def install_outbox(world: World) -> Options:
    world.own(ddl())
    return {}


@planted("outbox_delivery", advised=install_outbox)
def older_outbox(world: World) -> None:
    world.own(ddl(), "update moored.outbox_state set version = 2")


def without_cache(world: World) -> Options:
    world.own("alter table moored.outbox alter id set cache 1")
    return {}


@planted("outbox_delivery", advised=without_cache, variant=True)
def sequence_with_a_cache(world: World) -> None:
    world.own(ddl(), "alter table moored.outbox alter id set cache 20")


def drop_parked(world: World) -> Options:
    world.own("delete from moored.parked")
    return {}


@planted("parked_items", advised=drop_parked)
def parked_item(world: World) -> None:
    world.own(
        parking_ddl(),
        "insert into moored.parked (source, consumer, position, what, error, tries, content) "
        "values ('outbox moored', 'search', '1', 'event 1 in orders', 'a secret', 5, '')",
    )
