"""The connection manager: its core, its children, its pools, and sleep."""

from ._manager import Manager
from ._manager_core import Role
from ._pools import ManagedPool
from ._restarter import Restarter
from ._stack import Stack

__all__ = [
    "ManagedPool",
    "Manager",
    "Restarter",
    "Role",
    "Stack",
]
