"""When a pool probes its server, and when it reports that the server is silent."""

from __future__ import annotations

from itertools import pairwise

import pytest

from moored.reservoir._silence import LOOK, QUIET, Silence

pytestmark = pytest.mark.pure


class Looks:
    """Looks at regular times, at a server that answers probes or not."""

    def __init__(self, *, ready: bool = False) -> None:
        self.silence = Silence()
        self.ready = ready
        #: Whether a ready connection takes too long to answer.
        self.slow = False
        self.now = 100.0
        self.answers = True
        self.probes: list[float] = []

    def look(self, *, stuck: bool, times: int = 1) -> float:
        """Look so many times; return for how long the server is silent then."""
        for _ in range(times):
            self.now += LOOK
            if self.silence.look(self.now, stuck=stuck, ready=self.ready):
                self.probes.append(self.now)
                self.silence.asked(self.now)
                if self.answers:
                    pinged, opened = self.ready, self.slow or not self.ready
                    self.silence.probed(self.now, pinged=pinged, opened=opened)
        return self.silence.seconds(self.now)

    @property
    def pauses(self) -> list[float]:
        """The seconds between the probes, which are forgotten then."""
        probes, self.probes = self.probes, []
        return [after - before for before, after in pairwise(probes)]


def test_a_server_whose_statements_end_is_never_probed() -> None:
    looks = Looks()
    assert looks.look(stuck=False, times=100) == 0.0
    assert looks.probes == []


def test_a_server_that_answers_probes_is_not_silent_however_long_its_statements_run() -> None:
    looks = Looks()
    assert looks.look(stuck=True, times=200) == 0.0
    # Connections are opened less often, the longer this lasts.
    assert looks.pauses == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0]
    looks.look(stuck=False, times=QUIET - 1)
    looks.look(stuck=True, times=100)
    assert min(looks.pauses) == 16.0, "statements that have ended for a moment change nothing"
    looks.look(stuck=False, times=QUIET)
    looks.look(stuck=True, times=10)
    assert looks.pauses == [2.0]


def test_a_ready_connection_is_pinged_every_second() -> None:
    looks = Looks(ready=True)
    looks.look(stuck=True, times=200)
    assert set(looks.pauses) == {1.0}


def test_an_overloaded_server_is_not_pinged_every_second() -> None:
    """Each ping that takes too long costs a ready connection."""
    looks = Looks(ready=True)
    looks.slow = True
    looks.look(stuck=True, times=100)
    assert looks.pauses == [2.0, 4.0, 8.0, 16.0, 16.0]


def test_the_time_that_a_probe_waits_for_the_rate_limit_is_no_silence() -> None:
    looks = Looks()
    looks.answers, looks.silence.held = False, True
    assert looks.look(stuck=True, times=100) == 0.0
    looks.silence.held = False
    assert looks.look(stuck=True, times=3) == 0.0
    assert looks.look(stuck=True) > 0.0


def test_a_server_without_answers_is_silent_after_four_looks() -> None:
    looks = Looks()
    looks.answers = False
    assert looks.look(stuck=True, times=4) == 0.0
    assert looks.look(stuck=True) == 2.0
    assert looks.look(stuck=False) == 2.5, "callers that gave up are no answer"
    looks.answers = True
    assert looks.look(stuck=False) == 0.0, "the next probe was answered"


def test_a_statement_that_ends_is_an_answer_to_a_probe_that_waits() -> None:
    looks = Looks()
    looks.answers = False
    for _ in range(100):
        assert looks.look(stuck=True, times=4) == 0.0
        looks.silence.answered()


def test_a_blocked_loop_is_no_silence_of_the_server() -> None:
    looks = Looks()
    looks.answers = False
    looks.look(stuck=True)
    looks.now += 60.0  # the loop did not run; the answer waits in the socket
    assert looks.look(stuck=True) == 0.0
