"""Parked items: what a consumer could not handle, kept in the database until an operator decides.

Invariants:

- an item is committed to the table before it is acknowledged, so it is never in neither place;
- a parked item stays until it was handled, or an operator drops it: a retry that fails or is
  interrupted changes nothing of that.
"""

from ._parking import (
    ParkedItem,
    Parking,
    drop_parked,
    list_parked,
    parking_ddl,
    parking_grants,
    parking_refused,
    retry_parked,
)

__all__ = [
    "ParkedItem",
    "Parking",
    "drop_parked",
    "list_parked",
    "parking_ddl",
    "parking_grants",
    "parking_refused",
    "retry_parked",
]
