"""Resolves a conninfo as libpq does: with service files, the environment and defaults."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

__all__ = ["resolve", "server_of"]


def resolve(conninfo: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all connection parameters: those given, then the service's, then the environment's.

    Raise `psycopg.ProgrammingError` if libpq cannot parse the conninfo.
    """
    given = {**conninfo_to_dict(conninfo), **options}
    given = {name: value for name, value in given.items() if value not in (None, "")}
    service = given.get("service")
    named = {} if service is None else _service(str(service))
    return {**_defaults(), **named, **given}


def server_of(parameters: Mapping[str, Any]) -> str:
    """Return the address of the server: "db:5432", "one:5432,two:5433", "run/postgresql:5432"."""
    hosts = str(parameters.get("host") or parameters.get("hostaddr") or "localhost").split(",")
    ports = str(parameters.get("port") or 5432).split(",")
    found = zip(hosts, [*ports, *ports[-1:] * len(hosts)], strict=False)
    return ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host.strip('/')}:{port}" for host, port in found
    )


def _defaults() -> dict[str, str]:
    """The parameters of the environment and of PGSERVICE, and libpq's own defaults."""
    found = pq.Conninfo.get_defaults()
    return {one.keyword.decode(): one.val.decode() for one in found if one.val}


def _service(name: str) -> dict[str, str]:
    """The parameters of a service, from libpq's service files."""
    for path in _service_files():
        parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeError):
            continue  # libpq will report it
        if parser.has_section(name):
            return dict(parser.items(name))
    return {}


def _service_files() -> Iterator[Path]:
    yield Path(os.environ.get("PGSERVICEFILE") or Path.home() / ".pg_service.conf")
    if directory := os.environ.get("PGSYSCONFDIR"):
        yield Path(directory) / "pg_service.conf"
