"""Mutants: planting, restoring, and `assert_caught`."""

from __future__ import annotations

import asyncio

import pytest

from moored.testing import (
    Deadlock,
    MutantRejected,
    MutantSurvived,
    Sim,
    SimulationFailed,
    assert_caught,
    mutant,
    simulate,
)

pytestmark = pytest.mark.pure


class Sums:
    """The class that the mutants change."""

    factor = 1

    def double(self, number: int) -> int:
        return number * 2

    @staticmethod
    def half(number: int) -> int:
        return number // 2

    @classmethod
    def name(cls) -> str:
        return cls.__name__


class MoreSums(Sums):
    """Inherits everything."""


def wrong(self: Sums, number: int) -> int:
    return number * 3


def test_a_mutant_is_planted_in_its_block_only() -> None:
    planted = mutant(Sums, "double", wrong, name="three for two")
    assert repr(planted) == "<Mutant 'three for two' for Sums.double>"
    with planted:
        assert Sums().double(2) == 6
        assert repr(planted) == "<Mutant 'three for two' planted in Sums.double>"
    assert Sums().double(2) == 4


def test_the_original_is_restored_when_the_block_fails() -> None:
    with (
        pytest.raises(LookupError),
        mutant(Sums, "double", wrong, name="three for two"),
    ):
        raise LookupError
    assert Sums().double(2) == 4


def test_static_class_and_inherited_attributes_are_restored_as_they_were() -> None:
    before = {name: vars(Sums)[name] for name in ("half", "name", "factor")}
    with (
        mutant(Sums, "half", staticmethod(lambda number: 0), name="nothing"),
        mutant(Sums, "name", classmethod(lambda cls: "?"), name="nobody"),
        mutant(Sums, "factor", 2, name="twice"),
        mutant(MoreSums, "double", wrong, name="in the child only"),
    ):
        assert (Sums.half(4), Sums.name(), Sums.factor) == (0, "?", 2)
        assert (Sums().double(2), MoreSums().double(2)) == (4, 6)
    assert {name: vars(Sums)[name] for name in before} == before
    assert "double" not in vars(MoreSums)


def test_a_mutant_can_decorate_a_function() -> None:
    @mutant(Sums, "double", wrong, name="three for two")
    def double(number: int) -> int:
        return Sums().double(number)

    assert double(2) == 6
    assert Sums().double(2) == 4


async def test_a_mutant_can_decorate_a_coroutine_function() -> None:
    @mutant(Sums, "double", wrong, name="three for two")
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return Sums().double(number)

    assert await double(2) == 6
    assert Sums().double(2) == 4


def test_a_mutant_that_cannot_be_planted_is_rejected() -> None:
    with pytest.raises(MutantRejected, match=r"Sums\.triple does not exist; was it renamed"):
        mutant(Sums, "triple", wrong, name="typo")
    with pytest.raises(MutantRejected, match="is replaced with itself"):
        mutant(Sums, "double", Sums.double, name="no change")
    planted = mutant(Sums, "double", wrong, name="three for two")
    with planted, pytest.raises(MutantRejected, match="planted already"), planted:
        pass
    assert Sums().double(2) == 4


async def adds_up(sim: Sim) -> None:
    if sim.rng.random() < 0.1:
        assert Sums().double(2) == 4


def test_a_caught_mutant_names_the_schedule_and_the_seed() -> None:
    caught = assert_caught(adds_up, mutant(Sums, "double", wrong, name="three for two"))
    assert 1 <= caught.schedules < 200
    assert isinstance(caught.error, AssertionError)
    assert f"caught by schedule {caught.schedules} (seed {caught.seed})" in str(caught)
    assert Sums().double(2) == 4


def test_a_deadlock_counts_as_caught() -> None:
    async def forget(self: asyncio.Event) -> None:
        await asyncio.get_running_loop().create_future()

    async def scenario(sim: Sim) -> None:
        event = asyncio.Event()
        sim.at(1.0, event.set)
        await event.wait()

    planted = mutant(asyncio.Event, "wait", forget, name="a waiter that is forgotten")
    assert isinstance(assert_caught(scenario, planted).error, Deadlock)


def test_a_mutant_that_survives_is_an_error_with_its_name() -> None:
    def also_right(self: Sums, number: int) -> int:
        return number + number

    planted = mutant(Sums, "double", also_right, name="harmless")
    with pytest.raises(MutantSurvived, match="mutant 'harmless' survived 100 schedules"):
        assert_caught(adds_up, planted, within=100)


def test_a_scenario_must_pass_without_the_mutant() -> None:
    async def scenario(sim: Sim) -> None:
        raise LookupError

    with pytest.raises(SimulationFailed):
        assert_caught(scenario, mutant(Sums, "double", wrong, name="unused"))


def test_a_mutant_that_is_written_wrongly_is_rejected() -> None:
    def misspelt(self: Sums) -> int:
        return 0

    planted = mutant(Sums, "double", misspelt, name="takes no number")
    with pytest.raises(MutantRejected, match="seems to be written wrongly: TypeError"):
        assert_caught(adds_up, planted)
    assert isinstance(assert_caught(adds_up, planted, allow=(TypeError,)).error, TypeError)


def test_a_lost_update_across_an_await_is_found_by_drift_alone() -> None:
    """In asyncio's order the two tasks never overlap."""

    class Counter:
        value = 0

        async def add(self) -> None:
            value = self.value
            await asyncio.sleep(0)
            self.value = value + 1

    async def scenario(sim: Sim) -> None:
        counter = Counter()

        async def second() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            await counter.add()

        await asyncio.gather(counter.add(), second())
        assert counter.value == 2

    simulate(scenario, 200, drift=False)
    with pytest.raises(SimulationFailed, match="assert 1 == 2"):
        simulate(scenario, 200)
