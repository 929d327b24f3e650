"""Two threads change the same row: the transaction that fails is retried as a whole.

The isolation level is serializable. Aurora DSQL likewise refuses the second commit, with SQLSTATE
40001.

Expected output:

    5 ready, 0 in use
    2 withdrawals took 3 tries: 98 left
    an error rolls back: 98 left
"""

from threading import Barrier, Thread

import psycopg

from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import ConnectionPool, retry_transaction

SERIALIZABLE = {"options": "-c default_transaction_isolation=serializable"}
both_have_read = Barrier(2)
tries: list[int] = []


def balance(conn: psycopg.Connection) -> int:
    row = conn.execute("select balance from account").fetchone()
    assert row is not None
    return int(row[0])


def withdraw(conn: psycopg.Connection) -> None:
    tries.append(left := balance(conn))
    if len(tries) <= 2:
        both_have_read.wait()  # so that the first two conflict
    conn.execute("update account set balance = %s", [left - 1])


def main() -> None:
    with (
        SyncEmbeddedPostgres() as postgres,
        ConnectionPool(postgres.url, max_size=5, kwargs=SERIALIZABLE) as pool,
    ):
        pool.wait()
        print(f"{pool.statistics().size} ready, {pool.statistics().in_use} in use")
        with pool.connection() as conn:  # commits at the end of the block
            conn.execute("create table account as select 100 as balance")

        threads = [Thread(target=retry_transaction, args=(pool, withdraw)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pool.connection() as conn:
            print(f"2 withdrawals took {len(tries)} tries: {balance(conn)} left")

        try:
            with pool.connection() as conn:
                withdraw(conn)
                raise RuntimeError("cancel the withdrawal")
        except RuntimeError:
            with pool.connection() as conn:
                print(f"an error rolls back: {balance(conn)} left")


if __name__ == "__main__":
    main()
