"""Publish an event with Django's ORM: the row and the event are committed, or neither.

Expected output:

    an order was paid, and one was not: "paid"
    events: ['{"id":1,"state":"paid"}']
"""

from __future__ import annotations

import asyncio
from typing import Any

import django  # type: ignore[import-untyped]
from django.conf import settings  # type: ignore[import-untyped]
from django.db import connection, migrations, models, transaction  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Outbox
from moored.postgres.outbox import ddl


def pay(outbox: Outbox, order: Any) -> None:
    """Change the row and publish the event, in one transaction."""
    with transaction.atomic():
        order.state = "paid"
        order.save()
        with connection.cursor() as cursor:
            outbox.publish(cursor, "orders", {"id": order.pk, "state": order.state}, tenant="acme")


def configure(url: str) -> type[Any]:
    """Do what a project's settings, its models and its migrations do."""
    known = conninfo_to_dict(url)
    database = {name.upper(): str(known[name]) for name in ("user", "password", "host", "port")}
    engine = {"ENGINE": "django.db.backends.postgresql", "NAME": str(known["dbname"])}
    settings.configure(DATABASES={"default": {**engine, **database}})
    django.setup()

    class Order(models.Model):  # type: ignore[misc]
        state = models.TextField()

        class Meta:
            app_label = "shop"

    with connection.schema_editor() as editor:
        editor.create_model(Order)
        # As in a migration: operations = [migrations.RunSQL(…)].
        migrations.RunSQL(ddl()).database_forwards("shop", editor, None, None)
    return Order


async def stored(url: str) -> list[str]:
    """Return the payloads of all events."""
    async with Outbox(url, retain=None) as outbox:
        return [event.payload for event in (await outbox.read()).events]


def main() -> None:
    with SyncEmbeddedPostgres() as server:
        order = configure(server.url)
        outbox = Outbox(server.url)
        paid, other = order.objects.create(state="new"), order.objects.create(state="new")
        pay(outbox, paid)
        try:
            with transaction.atomic():
                pay(outbox, other)
                raise TimeoutError("the bank does not answer")
        except TimeoutError:
            states = " and ".join(f'"{each.state}"' for each in order.objects.filter(state="paid"))
            print(f"an order was paid, and one was not: {states}")
        connection.close()
        print("events:", asyncio.run(stored(server.url)))


if __name__ == "__main__":
    main()
