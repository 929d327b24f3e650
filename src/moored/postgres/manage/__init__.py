"""The connection manager: its core, its children, its pools, and sleep."""

from ._manager import Manager
from ._manager_core import ManagerCore, Role
from ._pools import ManagedPool
from ._restarter import Restarter

__all__ = [
    "ManagedPool",
    "Manager",
    "ManagerCore",
    "Restarter",
    "Role",
]
