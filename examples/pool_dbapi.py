"""A pool of pg8000 connections; any driver of the Python Database API (PEP 249) works likewise.

Such a driver cannot report whether a transaction is open, or whether a connection is dead. So each
checkout ends with a commit or a rollback, and after an ambiguous error the connection is pinged.

Expected output:

    <ConnectionPool 127.0.0.1:…/postgres: 2 of 2, 2 ready, 0 in use, 0 waiting, next expiry in …>
    ReservoirEmpty: no connection is ready: 2 of 2 in use; longest held … (checkout of thread …
    InterfaceError: network error
    <ConnectionPool 127.0.0.1:…/postgres: 2 of 2, 2 ready, 0 in use, 0 waiting, next expiry in …>
    refills: 3, discarded: {'bad': 1}
"""

import logging

import pg8000.dbapi  # type: ignore[import-untyped]
import psycopg

from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import ConnectionPool, ReservoirEmpty


def main(options: dict[str, object]) -> None:
    with ConnectionPool(connect=pg8000.dbapi.connect, kwargs=options, max_size=2) as pool:
        pool.wait()
        print(pool)
        with pool.connection(), pool.connection():
            try:
                pool.reservoir.try_checkout()  # never waits; pool.connection() would
            except ReservoirEmpty as error:
                print(f"ReservoirEmpty: {error}")
        try:
            with pool.connection() as conn:
                conn.cursor().execute("select pg_terminate_backend(pg_backend_pid())")
        except pg8000.dbapi.InterfaceError as error:
            print(f"InterfaceError: {error}")
        pool.wait()  # the dead connection is replaced
        print(pool)
        seen = pool.statistics()
        print(f"refills: {seen.refills}, discarded: {dict(seen.discards)}")


if __name__ == "__main__":
    logging.disable()  # a connection that dies in use is a warning
    with SyncEmbeddedPostgres() as postgres:
        with psycopg.connect(postgres.url) as admin:
            # pg8000 requires more SCRAM iterations than the embedded server uses by default.
            admin.execute("set scram_iterations = 4096")
            admin.execute("create role app login password 'secret'")
        address = {"host": postgres.host, "port": postgres.port, "database": "postgres"}
        main({**address, "user": "app", "password": "secret"})
