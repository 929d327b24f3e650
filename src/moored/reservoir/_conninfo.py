"""What a conninfo means, as libpq reads it: with services, the environment and its defaults."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["resolve"]


def resolve(conninfo: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of a connection, by libpq's order: given, of the service, of the environment.

    Raises `psycopg.ProgrammingError` if it is not a conninfo of libpq's.
    """
    from psycopg.conninfo import conninfo_to_dict

    given = {**conninfo_to_dict(conninfo), **options}
    given = {name: value for name, value in given.items() if value not in (None, "")}
    service = given.get("service")
    named = {} if service is None else _service(str(service))
    return {**_defaults(), **named, **given}


def _defaults() -> dict[str, str]:
    """The environment's parameters, those of the service PGSERVICE, and what libpq has besides."""
    from psycopg import pq

    found = pq.Conninfo.get_defaults()
    return {one.keyword.decode(): one.val.decode() for one in found if one.val}


def _service(name: str) -> dict[str, str]:
    """The parameters of a service, from the files in which libpq looks for it."""
    for path in _service_files():
        parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeError):
            continue  # libpq will say so
        if parser.has_section(name):
            return dict(parser.items(name))
    return {}


def _service_files() -> Iterator[Path]:
    yield Path(os.environ.get("PGSERVICEFILE") or Path.home() / ".pg_service.conf")
    if directory := os.environ.get("PGSYSCONFDIR"):
        yield Path(directory) / "pg_service.conf"
