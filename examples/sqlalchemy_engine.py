"""An ORM on a reservoir: an idle connection expires and is replaced, without any error.

Connections expire after three seconds here.

Expected output:

    tea was ordered; 1 of 1, 1 ready, 0 in use, 0 waiting, next expiry in …
    discarded meanwhile: {'guard_on_scan': 1}
    coffee was ordered, by another connection: True
    ['tea', 'coffee']
    after dispose(): <ConnectionPool 127.0.0.1:…/postgres: new>
"""

import time

from sqlalchemy import select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import ReservoirConfig
from moored.reservoir.sqlalchemy import create_engine, reservoir_of

SHORT = ReservoirConfig(max_size=1, base_lifetime=3.0, lifetime_jitter=0.0, guard_window=1.0)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str]


def main() -> None:
    with SyncEmbeddedPostgres() as postgres:
        engine = create_engine(postgres.url, config=SHORT)
        Base.metadata.create_all(engine)

        def order(article: str) -> int:
            with Session(engine) as session:
                session.add(Order(article=article))
                by: int = session.scalars(text("select pg_backend_pid()")).one()
                session.commit()
            return by

        first = order("tea")
        pool = reservoir_of(engine)
        print("tea was ordered;", pool.reservoir.describe())

        while not pool.statistics().discards:
            time.sleep(0.05)
        print("discarded meanwhile:", dict(pool.statistics().discards))

        second = order("coffee")
        print("coffee was ordered, by another connection:", second != first)
        with Session(engine) as session:
            print(session.scalars(select(Order.article).order_by(Order.id)).all())

        engine.dispose()
        print("after dispose():", reservoir_of(engine))  # the next use opens a new one


if __name__ == "__main__":
    main()
