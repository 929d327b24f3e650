"""The front door: one object that starts, supervises, shows and stops all parts of a service.

Invariants:

- parts start in the order in which they were added, and stop in the reverse order;
- a part that is not ready delays no other part, except those that were added with `after=`;
- a part that fails is started again, by itself; the health of the app says which part and why;
- a consumer acknowledges an item after its function has returned, or after the item was parked;
- of several replicas, the one that streams runs the consumers, and the others say so.
"""

from moored.kernel import extra

with extra("service", "moored.App"):
    import starlette as _starlette  # noqa: F401

from ._app import App, AppError
from ._component import ComponentContext

__all__ = ["App", "AppError", "ComponentContext"]
