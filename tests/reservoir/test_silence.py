"""When a pool probes its server, and when it reports that the server is silent."""

from __future__ import annotations

import pytest

from moored.reservoir._silence import DOUBT, LOOK, Silence

pytestmark = pytest.mark.pure


class Looks:
    """Looks at regular times, at a server that answers probes or not."""

    def __init__(self) -> None:
        self.silence = Silence()
        self.now = 100.0
        self.answers = True
        self.probes: list[float] = []

    def look(self, oldest: float | None, times: int = 1) -> float:
        """Look so many times; return for how long the server is silent then."""
        for _ in range(times):
            self.now += LOOK
            if self.silence.look(self.now, oldest):
                self.probes.append(self.now)
                self.silence.asked(self.now)
                if self.answers:
                    self.silence.answered(self.now)
                self.silence.probing = False
        return self.silence.seconds(self.now)


def test_a_server_without_statements_in_progress_is_never_probed() -> None:
    looks = Looks()
    assert looks.look(None, times=100) == 0.0
    assert looks.probes == []


def test_a_statement_that_runs_for_a_moment_sends_no_probe() -> None:
    looks = Looks()
    for _ in range(100):
        assert looks.look(looks.now) == 0.0
    assert looks.probes == []


def test_a_server_that_answers_probes_is_not_silent_however_long_its_statements_run() -> None:
    looks = Looks()
    assert looks.look(looks.now, times=200) == 0.0
    # It is probed less often, the longer this lasts.
    pauses = [after - before for before, after in zip(looks.probes, looks.probes[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (2.0, 16.0)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_server_without_answers_is_silent_within_five_seconds(before: int) -> None:
    looks = Looks()
    looks.look(None, times=before)
    looks.answers = False
    began = looks.now
    while not looks.look(began + 0.01):
        assert looks.now - began < 5.0
    silent = looks.look(began)
    looks.answers = True
    assert silent >= 2.0
    assert looks.look(began) == 0.0, "the next probe was answered"


def test_a_stop_of_a_second_raises_no_alarm() -> None:
    looks = Looks()
    looks.answers = False
    began = looks.now
    while looks.now - began < DOUBT + 1.0:
        assert looks.look(began) == 0.0
    looks.answers = True
    assert looks.look(None) == 0.0


def test_a_blocked_loop_is_no_silence_of_the_server() -> None:
    looks = Looks()
    looks.answers = False
    looks.look(looks.now, times=2)
    looks.now += 60.0  # the loop did not run; the answer waits in the socket
    assert looks.look(None) == 0.0
