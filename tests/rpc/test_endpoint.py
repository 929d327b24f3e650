"""The state of an endpoint, without I/O: late, repeated or stale events change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from moored.kernel import Clock, Recorder
from moored.rpc import ConnectionConfig
from moored.rpc._endpoint import CHART, CLOSING, TOO_MANY, Act, Endpoint, Live, Orders
from moored.rpc._verdicts import Verdict

pytestmark = pytest.mark.pure

ERROR = OSError("refused")
CONFIG = ConnectionConfig.from_uri("http://north:1")
IDLE, GRACE = 30.0, 30.0


class Client:
    """A client object, for `client=`."""


def made(**options: Any) -> Endpoint:
    """Return an endpoint whose first attempt is in progress, with one waiting caller."""
    endpoint = Endpoint(CONFIG, Clock.system(), Recorder(), idle=IDLE, grace=GRACE, **options)
    assert acts(endpoint.waits(0.0)) == [Act.DIAL]
    return endpoint


def up(now: float = 100.0, **options: Any) -> Endpoint:
    """Return an endpoint that is connected: generation 1, of attempt 1, proven."""
    endpoint = made(**options)
    arrive(endpoint, 0.0)
    endpoint.leaves(now)
    endpoint.requested(now, now)
    return endpoint


def arrive(endpoint: Endpoint, now: float, address: str = CONFIG.address) -> Live:
    """End the attempt in progress with a channel."""
    assert endpoint.dialed(endpoint.link.dials, object(), address, now) is not None
    assert endpoint.live is not None
    return endpoint.live


def acts(orders: Orders | None) -> list[Act]:
    assert orders is not None
    return [order.act for order in orders]


def state(endpoint: Endpoint) -> str:
    return str(endpoint.machine.state)


def answered(endpoint: Endpoint, times: int, now: float) -> list[Act]:
    """Answer UNAVAILABLE several times over the live connection."""
    found: list[Act] = []
    for _ in range(times):
        assert endpoint.live is not None
        endpoint.live.unavailable.append(None)
        found += acts(endpoint.broken(endpoint.generation, ERROR, now, connected=True))
    return found


# -- stale events ----------------------------------------------------------------------------------


def test_probe_of_an_old_channel_changes_nothing() -> None:
    endpoint = up(0.0)
    assert acts(endpoint.requested(0.0, 100.0)) == [Act.PROBE]
    assert endpoint.probed(Live(0, None, ""), False, 100.0) == []
    assert state(endpoint) == "up/probing"
    assert endpoint.live is not None
    assert endpoint.probed(endpoint.live, True, 100.0) == []
    assert state(endpoint) == "up/serving"


def test_probe_result_outside_of_a_probe_changes_nothing() -> None:
    endpoint = up()
    assert endpoint.live is not None
    assert endpoint.probed(endpoint.live, False, 100.0) == []
    assert state(endpoint) == "up/serving"
    assert endpoint.counters.probes_unhealthy == 0


def test_error_of_an_old_generation_is_counted_and_ignored() -> None:
    endpoint = up()
    assert endpoint.broken(0, ERROR, 100.0) == []
    assert (state(endpoint), endpoint.counters.stale_errors) == ("up/serving", 1)


def test_second_error_of_a_generation_that_is_being_replaced_is_ignored() -> None:
    endpoint = up()
    assert acts(endpoint.broken(1, ERROR, 100.0)) == [Act.PUT, Act.RETIRE, Act.DIAL]
    assert endpoint.broken(1, ERROR, 100.0) == []
    assert endpoint.counters.recoveries == 1


def test_result_of_an_abandoned_attempt_is_discarded() -> None:
    endpoint = up()
    assert endpoint.dialed(1, object(), "", 100.0) is None
    assert endpoint.generation == 1
    closed = made()
    closed.close("enough", 0.0)
    assert closed.dialed(1, object(), "", 0.0) is None
    assert closed.closed


def test_end_of_an_old_attempt_changes_nothing() -> None:
    for verdict in Verdict:
        endpoint = up()
        assert endpoint.failed(1, ERROR, 100.0, verdict) == []
        assert (state(endpoint), endpoint.counters.connect_failures) == ("up/serving", 0)
        endpoint.broken(1, ERROR, 100.0)
        assert endpoint.failed(1, ERROR, 100.0, verdict) == [], "attempt 2 is in progress"
        assert state(endpoint) == "connecting/dialing"


def test_only_the_current_attempt_can_keep_the_connection() -> None:
    endpoint = up()
    assert endpoint.kept(1, 100.0) == []
    assert acts(endpoint.broken(1, ERROR, 100.0, keep=True)) == [Act.DIAL]
    endpoint.kept(1, 100.0)
    assert state(endpoint) == "connecting/dialing"
    endpoint.kept(2, 100.0)
    assert state(endpoint) == "up/serving"
    first = made()
    first.kept(1, 0.0)
    assert state(first) == "connecting/dialing", "a connection without a channel was kept"


def test_channel_that_the_strategy_does_not_keep_is_dropped() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0, keep=True)
    assert acts(endpoint.dropped(100.0)) == [Act.PUT, Act.RETIRE]
    assert endpoint.dropped(100.0) == [], "it has none any more"
    assert [each.number for each in endpoint.old] == [1]


# -- a server that answers UNAVAILABLE -------------------------------------------------------------


def test_connection_that_seems_up_is_checked_once() -> None:
    endpoint = up()
    live = endpoint.live
    assert live is not None
    assert answered(endpoint, 2, 100.0) == [Act.CHECK], "a second check was started"
    assert endpoint.checked(Live(0, None, ""), False, 100.0) == [], "that of another channel"
    assert state(endpoint) == "up/serving"
    assert endpoint.checked(live, True, 100.0) == []
    assert (state(endpoint), endpoint.counters.unavailable_answers) == ("up/serving", 1)
    assert answered(endpoint, 1, 100.0) == [Act.CHECK]
    assert acts(endpoint.checked(live, False, 100.0))[-1] is Act.DIAL
    assert endpoint.checked(live, False, 100.0) == []


def test_check_of_a_replaced_channel_changes_nothing() -> None:
    endpoint = up()
    live = endpoint.live
    assert live is not None
    answered(endpoint, 1, 100.0)
    endpoint.broken(1, ERROR, 100.0)
    arrive(endpoint, 100.0)
    assert endpoint.checked(live, False, 100.1) == []
    assert state(endpoint) == "up/serving"


def test_many_unavailable_answers_without_a_success_ask_for_a_connection_beside_it() -> None:
    endpoint = up()
    old = endpoint.live
    assert answered(endpoint, TOO_MANY, 100.0) == [Act.CHECK, Act.DIAL]
    assert (state(endpoint), endpoint.usable, endpoint.live) == ("up/renewing", True, old)
    assert endpoint.is_being_replaced
    new = arrive(endpoint, 100.1)
    assert (endpoint.live, endpoint.old, endpoint.generation) == (new, [old], 2)
    assert endpoint.counters.renewals == 1
    assert endpoint.counters.recoveries == 0


def test_a_success_begins_the_count_anew() -> None:
    endpoint = up()
    assert answered(endpoint, TOO_MANY - 1, 100.0) == [Act.CHECK]
    assert endpoint.live is not None
    endpoint.live.unavailable.clear()
    assert answered(endpoint, TOO_MANY - 1, 100.0) == []
    assert answered(endpoint, 1, 100.0) == [Act.DIAL]


def test_overloaded_server_gets_one_renewal_in_five_seconds() -> None:
    endpoint = up()
    answered(endpoint, TOO_MANY, 100.0)
    arrive(endpoint, 100.0)
    assert answered(endpoint, 100, 104.9) == [Act.CHECK]
    assert answered(endpoint, 1, 105.0) == [Act.DIAL]


def test_topology_is_asked_instead_of_the_same_server() -> None:
    endpoint = up()
    assert endpoint.live is not None
    endpoint.live.unavailable.extend([None] * TOO_MANY)
    assert acts(endpoint.broken(1, ERROR, 100.0, connected=True, follows=True)) == [Act.CHECK]


def test_error_that_asks_for_it_renews_a_live_connection_at_once() -> None:
    endpoint = up()
    assert Act.DIAL in acts(endpoint.broken(1, ERROR, 100.0, connected=True, renew=True))
    assert state(endpoint) == "up/renewing"


def test_loss_during_a_renewal_starts_no_second_attempt() -> None:
    endpoint = up()
    assert acts(endpoint.renew("asked", 100.0)) == [Act.DIAL]
    assert acts(endpoint.broken(1, ERROR, 100.0)) == [Act.PUT, Act.RETIRE]
    assert state(endpoint) == "connecting/dialing"
    arrive(endpoint, 100.1)
    assert (state(endpoint), endpoint.generation) == ("up/serving", 2)


def test_loss_during_a_renewal_that_fails_is_followed_by_a_pause() -> None:
    for verdict in Verdict:
        endpoint = up()
        endpoint.renew("asked", 100.0)
        endpoint.broken(1, ERROR, 100.0)
        endpoint.failed(2, ERROR, 100.0, verdict)
        assert state(endpoint) == "down/waiting"
        assert endpoint.next_at is not None
        assert endpoint.next_at > 100.1, verdict


def test_failed_renewal_leaves_the_channel_in_use() -> None:
    for verdict in Verdict:
        endpoint = up()
        live = endpoint.live
        assert acts(endpoint.renew("asked", 100.0)) == [Act.DIAL]
        assert endpoint.failed(2, ERROR, 100.0, verdict) == []
        assert (state(endpoint), endpoint.live) == ("up/serving", live)
        assert endpoint.verdict is None
        assert acts(endpoint.broken(1, ERROR, 100.0))[-1] is Act.DIAL, "its loss is not noticed"


def test_a_renewal_needs_a_connection() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    assert endpoint.renew("asked", 100.0) == []
    assert state(endpoint) == "connecting/dialing"


def test_old_channel_is_renewed_before_its_age() -> None:
    endpoint = up(max_age=50.0)
    assert endpoint.next_at is not None
    assert 45.0 <= endpoint.next_at <= 50.0
    assert acts(endpoint.due(50.0)) == [Act.DIAL]
    assert not endpoint.is_being_replaced, "no caller waits for that"
    endpoint.failed(2, ERROR, 50.0)
    assert 4.5 <= endpoint.next_at - 50.0 <= 5.0, "a failed renewal is retried soon"


# -- waiting callers -------------------------------------------------------------------------------


def test_new_caller_never_postpones_the_next_attempt() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    endpoint.waits(100.0)
    assert endpoint.failed(2, ERROR, 100.0) == []
    planned = endpoint.next_at
    assert planned is not None
    endpoint.waits(100.0)
    assert endpoint.next_at == planned
    assert endpoint.due(planned - 0.001) == []
    assert acts(endpoint.due(planned)) == [Act.DIAL]


def test_new_caller_brings_the_next_attempt_forward() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    planned = 0.0
    for number in range(2, 9):  # without callers, pauses grow
        endpoint.failed(number, ERROR, 100.0)
        planned = endpoint.next_at or 0.0
        endpoint.due(planned)
    endpoint.failed(9, ERROR, planned)
    assert endpoint.next_at is not None
    assert endpoint.next_at > planned + 5.0
    endpoint.waits(planned)
    assert endpoint.next_at == planned + 0.2


def test_request_to_connect_brings_the_next_attempt_forward() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    endpoint.failed(2, ERROR, 100.0)
    assert endpoint.connect(100.0) == []
    assert endpoint.next_at is not None
    assert endpoint.next_at <= 100.2
    assert acts(endpoint.connect(100.2)) == [Act.DIAL]


def test_eager_pauses_begin_anew_after_a_rest() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    endpoint.waits(100.0)
    for number in range(2, 8):
        endpoint.failed(number, ERROR, 100.0)
        assert endpoint.next_at is not None
        endpoint.due(endpoint.next_at)
    endpoint.unable(ERROR, 100.0)
    endpoint.waits(200.0)
    endpoint.failed(endpoint.link.dials, ERROR, 200.0)
    assert endpoint.next_at is not None
    assert endpoint.next_at < 200.03


def test_proven_connection_is_dialed_again_at_once_and_a_young_one_after_a_pause() -> None:
    endpoint = up()
    assert acts(endpoint.broken(1, ERROR, 100.0))[-1] is Act.DIAL
    arrive(endpoint, 100.0)
    assert Act.DIAL not in acts(endpoint.broken(2, ERROR, 104.9))
    assert state(endpoint) == "down/waiting"


def test_time_without_a_plan_does_nothing() -> None:
    endpoint = up()
    assert endpoint.next_at is None
    assert endpoint.due(200.0) == []
    assert endpoint.waits(200.0) == []


def test_refusal_lasts_until_its_pause_ends() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    assert acts(endpoint.failed(2, ERROR, 100.0, Verdict.REFUSED)) == [Act.FAIL]
    assert acts(endpoint.waits(100.0)) == [Act.FAIL], "a new caller waits in vain"
    assert endpoint.verdicts == 2
    assert endpoint.next_at is not None
    assert acts(endpoint.due(endpoint.next_at)) == [Act.DIAL]
    assert endpoint.waits(101.0) == []


def test_endpoint_that_was_refused_waits_for_a_caller_without_a_timer() -> None:
    endpoint = made()
    assert acts(endpoint.failed(1, ERROR, 0.0, Verdict.REFUSED)) == [Act.FAIL]
    assert endpoint.leaves(0.0) == [], "a new one would not know of the refusal"
    assert endpoint.next_at is None
    assert acts(endpoint.waits(0.0)) == [Act.FAIL]


def test_first_attempt_without_waiting_callers_is_abandoned() -> None:
    endpoint = made()
    endpoint.waits(0.0)
    assert endpoint.leaves(0.0) == [], "another caller still waits"
    assert Act.STOP in acts(endpoint.leaves(0.0))
    known = up()
    known.broken(1, ERROR, 100.0)
    known.waits(100.0)
    assert known.leaves(100.0) == [], "a recovery must continue without callers"


def test_first_attempt_of_a_channel_that_someone_holds_is_not_abandoned() -> None:
    endpoint = made()
    endpoint.taken(None)
    assert endpoint.leaves(0.0) == []
    assert acts(endpoint.failed(1, ERROR, 0.0, Verdict.MISTAKE)) == [Act.FAIL]
    assert endpoint.next_at is not None
    assert acts(endpoint.due(endpoint.next_at)) == [Act.DIAL]


def test_mistake_ends_a_connection_that_no_client_ever_got() -> None:
    endpoint = made()
    assert acts(endpoint.failed(1, ERROR, 0.0, Verdict.MISTAKE)) == [Act.STOP, Act.FAIL]
    assert endpoint.closed
    assert endpoint.leaves(0.0) == []


def test_caller_of_a_closed_endpoint_is_counted_until_it_leaves() -> None:
    endpoint = up()
    endpoint.close("enough", 100.0)
    assert acts(endpoint.waits(100.0)) == [Act.WAKE]
    assert endpoint.waiting == 1
    endpoint.leaves(100.0)
    assert endpoint.waiting == 0


def test_endpoint_without_a_strategy_rests_and_fails_its_callers() -> None:
    endpoint = made()
    assert acts(endpoint.unable(ERROR, 0.0)) == [Act.REST, Act.FAIL]
    assert (endpoint.resting, endpoint.verdict) == (True, ERROR)
    assert acts(endpoint.waits(0.0)) == [Act.DIAL]


# -- replaced channels -----------------------------------------------------------------------------


def replaced(address: str = CONFIG.address) -> tuple[Endpoint, Live]:
    """Return an endpoint with a replaced channel, over which a call goes on."""
    endpoint = up()
    old = endpoint.live
    assert old is not None
    old.calls.append(None)
    endpoint.broken(1, ERROR, 100.0)
    arrive(endpoint, 100.0, address)
    return endpoint, old


def test_replaced_channel_is_closed_after_its_last_call() -> None:
    endpoint, old = replaced()
    assert endpoint.ended(old, 100.0) == []
    old.calls.clear()
    assert acts(endpoint.ended(old, 100.0)) == [Act.CLOSE]
    assert endpoint.ended(old, 100.0) == [], "it is being closed"
    assert endpoint.old == [old]
    endpoint.gone(old)
    assert endpoint.old == []
    endpoint.gone(old)


def test_current_channel_is_not_closed_after_its_last_call() -> None:
    endpoint = up()
    assert endpoint.live is not None
    assert endpoint.ended(endpoint.live, 100.0) == []


def test_calls_of_a_replaced_channel_are_reviewed_after_each_grace() -> None:
    endpoint, old = replaced()
    assert endpoint.next_at == 100.0 + GRACE
    assert endpoint.due(129.9) == []
    assert acts(endpoint.due(130.0)) == [Act.REVIEW]
    assert endpoint.reviewed(old, True, 130.0) == []
    assert acts(endpoint.due(160.0)) == [Act.REVIEW]
    assert acts(endpoint.reviewed(old, False, 160.0)) == [Act.CLOSE]
    assert endpoint.due(200.0) == []
    assert endpoint.next_at is None


def test_calls_of_a_closed_endpoint_end_soon_whatever_their_grace() -> None:
    endpoint, old = replaced()
    current = endpoint.live
    assert current is not None
    current.calls.append(None)
    closing = acts(endpoint.close("enough", 100.0))
    assert closing == [Act.PUT, Act.RETIRE, Act.STOP, Act.WAKE]
    assert endpoint.next_at == 100.0 + CLOSING
    assert acts(endpoint.due(100.0 + CLOSING)) == [Act.CLOSE, Act.CLOSE]
    assert old.closed
    assert current.closed
    assert endpoint.close("enough", 100.0) == []


def test_calls_of_a_closed_endpoint_get_the_closing_time_although_their_grace_ends() -> None:
    endpoint, _ = replaced()
    endpoint.close("enough", 100.0 + GRACE - 1.0)
    assert endpoint.next_at == 100.0 + GRACE - 1.0 + CLOSING


def test_a_move_is_counted_and_a_restart_is_not() -> None:
    endpoint, _ = replaced()
    assert endpoint.counters.moves == 0
    endpoint, _ = replaced("south:1")
    assert (endpoint.counters.moves, endpoint.address) == (1, "south:1")


# -- clients, and rest -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", [str(state) for state in CHART.states])
def test_fast_checkout_agrees_with_the_state(where: str) -> None:
    endpoint, client = up(), Client()
    found = CHART.find(where)
    assert found is not None
    endpoint.machine._state = found
    assert endpoint.hand_out(client, 101.0) is endpoint.usable
    assert (client in endpoint.clients) is endpoint.usable
    assert endpoint.usable is (where in ("up/serving", "up/renewing"))


def test_checkout_counts_as_use_and_as_a_client() -> None:
    endpoint = up()
    assert endpoint.hand_out(None, 110.0)
    assert endpoint.statistics(0.0, 110.0)["idle_time"] == 0.0
    assert endpoint.statistics(0.0, 110.0)["client_count"] == 1
    assert endpoint.statistics(105.0, 112.0)["idle_time"] == 2.0


def test_idle_connection_is_not_handed_out_without_a_probe() -> None:
    endpoint, client = up(), Client()
    assert not endpoint.hand_out(client, 100.0 + IDLE + 1)
    assert len(endpoint.clients) == 0
    assert acts(endpoint.requested(0.0, 100.0 + IDLE + 1)) == [Act.PROBE]


def test_call_counts_as_use() -> None:
    endpoint = up()
    assert endpoint.requested(102.0, 100.0 + IDLE + 1) == []
    assert acts(endpoint.requested(102.0, 200.0)) == [Act.PROBE]


def test_unused_endpoint_rests_and_a_caller_wakes_it() -> None:
    endpoint = up()
    for now in (100.0, 159.9):
        assert endpoint.swept(0, 0.0, 60.0, now) == []
    assert acts(endpoint.swept(0, 0.0, 60.0, 160.0)) == [Act.PUT, Act.RETIRE, Act.REST]
    assert (endpoint.resting, endpoint.next_at) == (True, 160.0 + GRACE)
    assert acts(endpoint.waits(170.0)) == [Act.DIAL]
    arrive(endpoint, 170.0)
    assert endpoint.generation == 2
    assert endpoint.counters.moves == 0


def test_unused_endpoint_whose_server_hangs_rests_during_an_attempt() -> None:
    endpoint = up()
    endpoint.broken(1, ERROR, 100.0)
    assert state(endpoint) == "connecting/dialing"
    assert endpoint.swept(0, 0.0, 60.0, 100.0) == []
    assert acts(endpoint.swept(0, 0.0, 60.0, 160.0)) == [Act.REST]
    assert endpoint.dialed(2, object(), "", 161.0) is None


@pytest.mark.parametrize("use", ["client", "unnamed client", "call", "waiter", "recent call"])
def test_used_endpoint_does_not_rest(use: str) -> None:
    endpoint, client = up(), Client()
    if use == "client":
        endpoint.taken(client)
    elif use == "unnamed client":
        endpoint.taken(None)
    elif use == "waiter":
        endpoint.waits(100.0)
    calls, called_at = int(use == "call"), 150.0 if use == "recent call" else 0.0
    for now in (100.0, 200.0):
        assert endpoint.swept(calls, called_at, 60.0, now) == []


def test_dedicated_endpoint_ends_with_its_last_client() -> None:
    endpoint, client = up(dedicated=True), Client()
    endpoint.taken(client)
    endpoint.taken(None)
    assert not endpoint.is_last(client)
    assert endpoint.given_back(client, 100.0) == []
    assert endpoint.is_last(None)
    assert Act.STOP in acts(endpoint.given_back(None, 100.0))
    shared = up()
    shared.taken(None)
    for _ in range(3):  # a surplus release is harmless
        assert shared.given_back(None, 100.0) == []


def test_dedicated_endpoint_whose_unnamed_client_may_be_gone_rests() -> None:
    endpoint = up(dedicated=True)
    endpoint.taken(None)
    for now in (100.0, 159.9):
        assert endpoint.swept(0, 0.0, 60.0, now) == []
    assert Act.REST in acts(endpoint.swept(0, 0.0, 60.0, 160.0))


# -- errors without a generation, credentials, forks -----------------------------------------------


def test_undated_error_is_blamed_on_the_generation_before_a_young_one() -> None:
    endpoint = up()
    assert endpoint.blamed(0.0) == 1, "there is none before the first"
    endpoint.broken(1, ERROR, 100.0)
    arrive(endpoint, 100.0)
    assert endpoint.blamed(104.9) == 1
    assert endpoint.blamed(105.0) == 2


def test_refused_credentials_are_refreshed_once() -> None:
    endpoint = up(refreshable=True)
    assert acts(endpoint.refused(0, 100.0)) == [Act.REFRESH]
    assert endpoint.refused(0, 100.0) == []
    assert (endpoint.refreshes, endpoint.mended) == (True, False)
    assert acts(endpoint.refreshed(None, 100.1)) == [Act.PUT]
    assert (endpoint.refreshes, endpoint.mended, endpoint.credential) == (False, True, 1)
    assert endpoint.refused(0, 100.2) == [], "the refusal of old credentials"
    assert up().refused(0, 100.0) == [], "they cannot be refreshed"


def test_child_of_a_fork_begins_without_a_connection() -> None:
    endpoint = up()
    endpoint.forked()
    assert (endpoint.resting, endpoint.live, endpoint.generation) == (True, None, 1)
    assert acts(endpoint.waits(100.0)) == [Act.DIAL]
    endpoint.close("enough", 100.0)
    endpoint.forked()
    assert endpoint.closed


def test_child_of_a_fork_keeps_the_number_of_the_credentials() -> None:
    endpoint = up(refreshable=True)
    endpoint.refused(0, 100.0)
    endpoint.refreshed(None, 100.0)
    endpoint.refused(1, 200.0)
    assert endpoint.refreshes
    endpoint.forked()
    assert (endpoint.credential, endpoint.refreshes) == (1, False)
