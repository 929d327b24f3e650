"""Which tables of the store exist, and whether the role may use or create them."""

from __future__ import annotations

from dataclasses import dataclass

from .._errors import StoreMisconfigured
from ._sql import TABLES, ddl, grants

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The tables of one schema and the privileges of one role on them.

    The fields after `schema` are the columns of `Statements.layout`.
    """

    place: str
    schema: str
    has_schema: bool
    may_use_schema: bool
    tables: list[str]
    may_use_tables: bool
    role: str

    @property
    def is_complete(self) -> bool:
        """Whether all tables exist."""
        return set(self.tables).issuperset(TABLES)

    def check(self) -> None:
        """Raise `StoreMisconfigured` if the role may not use the tables."""
        if self.may_use_schema and self.may_use_tables:
            return
        raise StoreMisconfigured(
            f"role {self.role} may not use the tables in schema {self.schema} of {self.place}; "
            f"their owner must run:\n{grants(self.role, self.schema)}"
        )

    def refused(self, error: Exception) -> StoreMisconfigured:
        """Return the error for a role that may not create the missing tables."""
        missing = ", ".join(sorted(set(TABLES).difference(self.tables)))
        return StoreMisconfigured(
            f"role {self.role} may not create the missing tables in schema {self.schema} of "
            f"{self.place} ({missing}): {error}\nA role that may create them must run:\n"
            f"{ddl(self.schema)}\n{grants(self.role, self.schema)}"
        )
