"""What is there of the layout, what this role may do with it, and the words for what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._errors import StoreMisconfigured
from ._config import PostgresConfig
from ._sql import TABLES, ddl, grants

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The tables of one schema, as one role sees them."""

    place: str
    schema: str
    role: str
    has_schema: bool
    may_use_schema: bool
    tables: frozenset[str]
    may_use_tables: bool

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]], config: PostgresConfig) -> Layout:
        """What the server answered to the question of the layout."""
        ((has_schema, may_use_schema, tables, may_use_tables, role),) = rows
        return cls(
            place=config.place,
            schema=config.schema,
            role=role,
            has_schema=has_schema,
            may_use_schema=may_use_schema,
            tables=frozenset(tables),
            may_use_tables=may_use_tables,
        )

    @property
    def is_missing(self) -> bool:
        """Whether anything must be made."""
        return not self.tables.issuperset(TABLES)

    def check(self) -> None:
        """Raise `StoreMisconfigured` if the role may not use what is there."""
        if self.may_use_schema and self.may_use_tables:
            return
        raise StoreMisconfigured(
            f"{self.role} may not use the tables in schema {self.schema} of {self.place}; "
            f"their owner must run:\n{grants(self.role, self.schema)}"
        )

    def refused(self, error: Exception) -> StoreMisconfigured:
        """The error for a role that may not make what is missing."""
        missing = ", ".join(sorted(set(TABLES) - self.tables))
        return StoreMisconfigured(
            f"{self.role} may not make what is missing in schema {self.schema} of {self.place} "
            f"({missing}): {error}\nSomebody who may must run:\n"
            f"{ddl(self.schema)}\n{grants(self.role, self.schema)}"
        )
