"""`simulate`: reproducible schedules, and errors that name the seed to repeat."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, lists

from moored.testing import (
    Report,
    Sim,
    SimulationError,
    SimulationFailed,
    Unretrieved,
    run_one,
    scaled,
    simulate,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOORED_SIM_SEED", raising=False)
    monkeypatch.delenv("MOORED_SIM_SEEDS", raising=False)


async def chat(sim: Sim) -> int:
    """Clients send five requests each to a server that is restarted meanwhile."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async def client(number: int) -> int:
        done = tries = 0
        while done < 5:
            tries += 1
            try:
                reader, writer = await asyncio.open_connection("server", 8000)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            try:
                while done < 5:
                    writer.write(b"%d\n" % number)
                    if not await reader.readline():
                        break
                    done += 1
                    await asyncio.sleep(sim.random(0, 1))
            except OSError:
                pass
            finally:
                writer.close()
        return tries

    server = await sim.serve(echo)
    sim.at(sim.random(0, 3), server.restart)
    return sum(await asyncio.gather(*(client(number) for number in range(5))))


async def unlucky(sim: Sim) -> None:
    await asyncio.sleep(sim.random(0, 1))
    assert sim.rng.random() > 0.02, "an unlucky seed"


def test_a_report_counts_the_schedules() -> None:
    report = simulate(chat, 10, first_seed=1, processes=1)
    assert isinstance(report, Report)
    assert (report.schedules, report.distinct, report.processes) == (10, 10, 1)
    assert report.schedules_per_s == pytest.approx(10 / report.seconds)
    assert "10 schedules, 10 distinct, in " in str(report)


def test_the_report_does_not_depend_on_the_number_of_processes() -> None:
    alone = simulate(chat, 32, first_seed=1, processes=1)
    shared = simulate(chat, 32, first_seed=1, processes=2)
    assert shared.processes == 2
    assert (alone.schedules, alone.distinct, alone.digest) == (
        shared.schedules,
        shared.distinct,
        shared.digest,
    )


def test_the_first_failing_seed_does_not_depend_on_the_number_of_processes() -> None:
    seeds = [seed for seed in range(300) if not run_one(unlucky, seed, check=False).ok]
    assert len(seeds) > 3, "too few seeds fail for this test"
    for processes in (1, 2, 3):
        with pytest.raises(SimulationFailed) as caught:
            simulate(unlucky, 300, first_seed=0, processes=processes)
        assert caught.value.seed == caught.value.position == seeds[0]


def test_a_failure_has_seed_trace_traceback_and_the_command_to_repeat_it() -> None:
    async def scenario(sim: Sim) -> None:
        sim.note("before the storm")
        await asyncio.sleep(1.25)
        assert sim.seed != 13, "it is Friday"

    with pytest.raises(SimulationFailed) as caught:
        simulate(scenario, range(10, 20))
    failed = caught.value
    text = str(failed)
    assert "seed 13 failed (4 of 10 schedules): AssertionError: it is Friday" in text
    assert "repeat it with: MOORED_SIM_SEED=13 pytest '" in text
    assert "::test_a_failure_has_seed_trace_traceback_and_the_command_to_repeat_it'" in text
    assert "before the storm" in failed.trace
    assert "1.250000  scenario                 runs at test_simulate.py:" in failed.trace
    assert "it is Friday" in failed.traceback
    assert "base_events.py" not in failed.traceback, "the frames of the event loop are removed"
    assert isinstance(failed.__cause__, AssertionError)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_that_cannot_be_repeated_is_reported_with_its_error(
    processes: int, tmp_path: Path
) -> None:
    async def scenario(sim: Sim) -> None:
        # A file, because the schedules may run in other processes.
        if sim.seed in (13, 15) and not (seen := tmp_path / str(sim.seed)).exists():
            seen.touch()
            raise AssertionError(f"only once: {sim.seed}")

    with pytest.raises(SimulationError, match=r"seed 13 failed, but passes") as caught:
        simulate(scenario, range(10, 60), processes=processes)
    assert "AssertionError: only once: 13" in str(caught.value)


def test_moored_sim_seed_runs_one_seed_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []

    async def scenario(sim: Sim) -> None:
        ran.append((sim.seed, os.getpid()))

    monkeypatch.setenv("MOORED_SIM_SEED", "4711")
    simulate(scenario, 5000)
    assert ran == [(4711, os.getpid())]


def test_moored_sim_seeds_overrides_the_number_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(sim: Sim) -> None:
        pass

    monkeypatch.setenv("MOORED_SIM_SEEDS", "3")
    assert simulate(scenario, 5000).schedules == 3
    assert simulate(scenario, [1, 2]).schedules == 2


def test_moored_seed_is_the_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    async def scenario(sim: Sim) -> None:
        seeds.append(sim.seed)

    monkeypatch.setenv("MOORED_SEED", "100")
    simulate(scenario, 3)
    simulate(scenario, 2, first_seed=7)
    assert seeds == [100, 101, 102, 7, 8]


def test_a_simulation_without_seeds_is_an_error() -> None:
    with pytest.raises(SimulationError, match="would always pass"):
        simulate(chat, [])


def test_a_scenario_that_depends_on_more_than_its_seed_is_reported() -> None:
    runs = 0

    async def scenario(sim: Sim) -> None:
        nonlocal runs
        runs += 1
        assert runs != 2

    with pytest.raises(SimulationError, match="depends on more than its seed"):
        simulate(scenario, 5)


def test_a_worker_that_dies_is_reported() -> None:
    parent = os.getpid()

    async def scenario(sim: Sim) -> None:
        if os.getpid() != parent:
            os._exit(3)

    with pytest.raises(SimulationError, match="a worker died"):
        simulate(scenario, 100, processes=2)


def test_garbage_of_this_process_is_not_finalized_in_a_worker(tmp_path: Path) -> None:
    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    async def scenario(sim: Sim) -> None:
        gc.collect()

    gc.disable()
    try:
        Garbage()
        assert simulate(scenario, 32, processes=2).processes == 2
    finally:
        gc.enable()
    assert [each.name for each in tmp_path.iterdir()] == [str(os.getpid())]


async def test_a_simulation_inside_a_running_loop_is_refused() -> None:
    with pytest.raises(SimulationError, match="call it from a plain function"):
        run_one(unlucky, 1)
    with pytest.raises(SimulationError, match="call it from a plain function"):
        simulate(unlucky, 1000)


def test_unhandled_exceptions_are_notes_of_the_error_of_the_scenario() -> None:
    async def scenario(sim: Sim) -> None:
        sim.loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)
        raise LookupError("first")

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, LookupError)
    assert "ZeroDivisionError" in outcome.error.__notes__[0]
    with pytest.raises(LookupError):
        outcome.result()


def test_an_error_in_a_destructor_fails_the_seed() -> None:
    class Careless:
        def __del__(self) -> None:
            raise LookupError("on the way out")

    async def scenario(sim: Sim) -> None:
        Careless()

    error = run_one(scenario, 1, check=False).error
    assert isinstance(error, Unretrieved)
    assert "on the way out" in str(error)


@settings(max_examples=25, deadline=None)
@given(seed=integers(0, 2**32), pauses=lists(floats(0, 5), max_size=5))
def test_hypothesis_can_choose_the_seed(seed: int, pauses: list[float]) -> None:
    async def scenario(sim: Sim) -> float:
        for pause in pauses:
            await asyncio.sleep(pause)
        return sim.now

    assert run_one(scenario, seed).result() == pytest.approx(sum(pauses))


def test_a_trace_keeps_the_newest_events() -> None:
    async def scenario(sim: Sim) -> None:
        for number in range(500):
            sim.note(f"note {number}")

    trace = run_one(scenario, 1, trace=True).trace
    assert trace is not None
    assert repr(trace) == "<Trace of 501 events, 400 kept>"
    assert [event.what for event in trace][-1] == "note 499"
    assert len(trace.text(3).splitlines()) == 3
    assert run_one(scenario, 1).trace is None


# The source, because importing this module would import pytest and Hypothesis.
PROGRAM = f"""
import asyncio
from moored.testing import Sim, run_one
{inspect.getsource(chat)}
print([run_one(chat, seed).digest for seed in range(10)])
"""


@pytest.mark.parametrize(
    "hash_seed",
    ["1", *(pytest.param(each, marks=pytest.mark.soak) for each in ("0", "random"))],
)
def test_a_schedule_does_not_depend_on_the_hash_seed_of_the_process(hash_seed: str) -> None:
    here = [run_one(chat, seed).digest for seed in range(10)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert there.stdout.strip() == str(here), there.stderr


def test_a_hundred_schedules_take_a_few_seconds_at_most() -> None:
    count = scaled(100, least=30)
    # CPU time of this process, which does not depend on the load of the machine.
    begin = time.process_time()
    simulate(chat, count, processes=1)
    # The target is 130 per second on a free core; a third of that is the limit here.
    assert time.process_time() - begin < 3 * count / 130
