"""Planted defects, which prove that a simulation can fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, cast

from ._errors import MutantRejected, MutantSurvived, SimulationFailed
from ._run import Scenario
from ._scale import base_seed
from ._simulate import explore, simulate

__all__ = ["Caught", "Mutant", "assert_caught", "mutant"]

F = TypeVar("F", bound=Callable[..., Any])

_ABSENT: Any = object()
# A mutant that raises one of these is usually written wrongly.
_MISTAKES = (NameError, ImportError, SyntaxError, TypeError, AttributeError)


@dataclass(eq=False, repr=False)
class Mutant(ContextDecorator):
    """A named defect: a context manager and decorator that replaces `owner.attribute`.

    The original is restored in any case; an attribute that does not exist is an error.
    """

    owner: Any
    attribute: str
    replacement: Any
    _: KW_ONLY
    name: str
    _before: Any = field(default=None, init=False)
    _planted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        original = inspect.getattr_static(self.owner, self.attribute, _ABSENT)
        if original is _ABSENT:
            raise MutantRejected(
                f"mutant {self.name!r}: {self._where} does not exist; was it renamed?"
            )
        if original is self.replacement:
            raise MutantRejected(f"mutant {self.name!r}: {self._where} is replaced with itself")

    @property
    def _where(self) -> str:
        return f"{getattr(self.owner, '__name__', repr(self.owner))}.{self.attribute}"

    def __enter__(self) -> Mutant:
        if self._planted:
            raise MutantRejected(f"mutant {self.name!r} is planted already")
        # From vars(): getattr() would return a static or class method without its descriptor.
        self._before = vars(self.owner).get(self.attribute, _ABSENT)
        setattr(self.owner, self.attribute, self.replacement)
        self._planted = True
        return self

    def __exit__(self, *_: object) -> None:
        self._planted = False
        if self._before is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self._before)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function: plant the defect while it runs."""
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def planted(*args: Any, **options: Any) -> Any:
            with self:
                return await function(*args, **options)

        return cast(F, planted)

    def __repr__(self) -> str:
        state = "planted in" if self._planted else "for"
        return f"<Mutant {self.name!r} {state} {self._where}>"


#: Plant a defect: `with mutant(Pool, "release", lambda *_: None, name="leak"): …`.
mutant = Mutant


@dataclass(frozen=True)
class Caught:
    """A mutant with which a scenario failed."""

    #: The mutant's name.
    name: str
    #: The first seed that failed.
    seed: int
    #: The number of schedules that ran, including that one.
    schedules: int
    #: The error of the scenario.
    error: BaseException | None

    def __str__(self) -> str:
        return (
            f"mutant {self.name!r} caught by schedule {self.schedules:,} (seed {self.seed}): "
            f"{type(self.error).__name__}"
        )


def assert_caught(
    scenario: Scenario[Any],
    planted: Mutant,
    *,
    within: int = 1000,
    clean: int = 25,
    first_seed: int | None = None,
    allow: tuple[type[BaseException], ...] = (),
    **options: Any,
) -> Caught:
    """Assert that the scenario passes without the mutant, and fails with it within so many seeds.

    :param within: seeds of which one must fail with the mutant; the search stops there.
    :param clean: seeds that must pass without the mutant; 0 if another test runs the scenario.
    :param allow: error types to accept although they usually mean that the mutant is wrong
        (TypeError, AttributeError, NameError and the like).
    :param options: options of `simulate()`.
    """
    if clean:
        simulate(scenario, clean, first_seed=first_seed, **options)
    first = base_seed() if first_seed is None else first_seed
    try:
        # MOORED_SIM_SEED and --sim-seeds must not narrow the search.
        with planted:
            explore(scenario, range(first, first + within), **options)
    except SimulationFailed as failed:
        cause = failed.__cause__
        if isinstance(cause, _MISTAKES) and not isinstance(cause, allow):
            raise MutantRejected(
                f"mutant {planted.name!r} seems to be written wrongly: {cause!r}; correct it, "
                f"or accept this error with allow=({type(cause).__name__},)"
            ) from cause
        return Caught(planted.name, failed.seed, failed.position + 1, cause)
    raise MutantSurvived(
        f"mutant {planted.name!r} survived {within:,} schedules from seed {first}: "
        "the scenario does not test for this defect"
    )
