"""The fleet at the level of events and actions: no clock, no socket, no process."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.fleet.driver import DIED, PATIENCE, Driver, error_of, ids
from tests.control.fleet.pair_model import columns
from weft.common.errors import ErrorInfo
from weft.common.restarts import MOST_LOSSES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instance_table import HEALTHY_S
from weft.control.fleet.instances import InstanceState
from weft.control.fleet.open_sequences import LATE, MOST_REFUSALS
from weft.types import messages as m
from weft.types.grammar import Text

# -- one sequence


def test_a_sequence_from_its_opening_to_its_end() -> None:
    one = Driver("a")
    assert one.fleet.refusal() is not None
    one.up()
    assert one.of(e.Complete)
    assert one.fleet.refusal() is None
    assert one.open(5) == "a"
    (submit,) = one.sent()
    assert isinstance(submit, m.Submit)
    assert (submit.sequence, submit.attempt) == (5, 0)
    assert one.fleet.table.instances["a"].load > 1  # the prompt is still to be computed
    one.tokens("a", 5, 7, 8)
    assert [event.token_ids for event in one.delivered()] == [(7, 8)]
    assert one.loads() == [1]
    one.tokens("a", 5, 9, finish="length")
    assert [(event.token_ids, event.finish) for event in one.delivered()] == [((9,), "length")]
    assert (one.fleet.entries, one.loads()) == ({}, [0])
    one.tokens("a", 5, 9)
    assert (one.delivered(), one.fleet.late_events) == ([], 1)


def test_choices_of_a_prompt_go_together_and_others_to_the_least_loaded() -> None:
    one = Driver("a", "b").up()
    assert one.open(1, 2, 3) == "a"
    assert one.open(4, request=2) == "b"
    assert one.open(5, request=3) == "b"


def test_closing_a_sequence_notifies_its_instance_once() -> None:
    one = Driver("a").up()
    one.open(1)
    one.on(e.Closed((1,)))
    assert one.sent() == [m.Finish(sequence=1)]
    one.on(e.Closed((1,)))
    assert one.actions == []
    one.tokens("a", 1, 7)  # was in flight
    assert (one.delivered(), one.fleet.late_events, one.loads()) == ([], 1, [0])


# -- losses


def test_a_lost_instance_is_replaced_and_its_sequences_go_on_elsewhere() -> None:
    one = Driver("a", "b").up()
    one.open(1, 2)
    one.tokens("a", 1, 7, 8)
    one.lose("a")
    assert one.of(e.Unlink) == [e.Unlink("a", 1)]
    assert one.of(e.Replace) == [e.Replace("a", DIED)]
    assert [action.instance for action in one.of(e.Send)] == ["b", "b"]
    assert [ids(message) for message in one.sent()] == [[7, 8], []]
    assert one.fleet.failovers == 2
    assert one.delivered() == []
    one.tokens("b", 1, 9, finish="length")
    assert [(event.token_ids, event.finish) for event in one.delivered()] == [((9,), "length")]


def test_a_loss_reported_twice_counts_once() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.lose("a")
    one.lose("a")
    assert one.actions == []
    one.say("a", m.EngineFailed(error=DIED.info()))
    assert one.actions == []
    assert one.fleet.entries[1].losses == 1
    assert one.fleet.table.instances["a"].deaths == 1


def test_sequences_wait_where_none_lives_and_only_so_long() -> None:
    one = Driver("a").up()
    one.open(1)
    one.lose("a")
    assert one.sent() == []
    one.expect("a")
    one.on(e.Linked("a", one.link["a"]))
    one.say("a", one.welcome("a"))
    assert [message.attempt for message in one.sent() if isinstance(message, m.Submit)] == [1]
    assert one.fleet.table.restarts == 1
    one.lose("a")
    one.now += PATIENCE.recovery
    assert one.fleet.next_deadline() == one.now
    one.on(e.Tick())
    assert [error_of(event).message for event in one.delivered()] == [LATE]
    refusal = one.fleet.refusal()
    assert refusal is not None
    assert refusal.http_status == 503
    one.up("a")
    assert one.fleet.refusal() is None


def test_a_sequence_loses_only_so_many_instances() -> None:
    one = Driver("a").up()
    one.open(1)
    for _ in range(MOST_LOSSES):
        one.lose("a")
        assert one.delivered() == []
        one.up("a")
    one.lose("a")
    assert [error_of(event).code for event in one.delivered()] == ["engine_dead"]
    assert one.fleet.entries == {}


def test_messages_of_an_old_link_change_nothing() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    old = one.link["a"]
    one.lose("a")
    one.tokens("a", 1, 7, link=old)
    assert (one.delivered(), one.fleet.late_events) == ([], 1)
    one.expect("a")
    one.say("a", one.welcome("a"), link=old)
    assert one.fleet.table.instances["a"].state is InstanceState.STARTING
    one.say("a", m.EngineFailed(error=DIED.info()), link=old)
    assert one.fleet.table.instances["a"].state is InstanceState.STARTING


def test_another_process_may_be_expected_before_the_end_of_the_last_one_is_reported() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.tokens("a", 1, 7)
    old = one.link["a"]
    one.expect("a")
    assert one.of(e.Unlink) == [e.Unlink("a", old)]
    assert one.of(e.Replace) == []  # a process is there already
    assert [(action.instance, ids(action.message)) for action in one.of(e.Send)] == [("b", [7])]
    one.on(e.Lost("a", old, DIED))
    assert one.actions == []
    assert (
        one.fleet.entries[1].losses,
        one.fleet.table.instances["a"].deaths,
        one.fleet.table.restarts,
    ) == (1, 1, 1)


@pytest.mark.requirement("E2")
def test_silence_and_standing_still_count_as_death(caplog: pytest.LogCaptureFixture) -> None:
    """The log names which of the two happened."""
    one = Driver("a", "b").up()
    one.open(1)
    one.now += PATIENCE.engine / 2
    one.say("b", m.Heartbeat(idle=True, stats=m.EngineStats()))
    one.say("a", m.Heartbeat(idle=False, stats=m.EngineStats()))  # no step since the last one
    one.now += PATIENCE.engine / 2
    assert one.fleet.next_deadline() == one.now
    one.on(e.Tick())
    assert [action.instance for action in one.of(e.Replace)] == ["a"]
    assert "no step" in one.of(e.Replace)[0].error.message
    one.now += PATIENCE.engine
    one.on(e.Tick())
    assert "silent" in one.of(e.Replace)[0].error.message
    still, silent = [record.message for record in caplog.records if "is lost" in record.message]
    assert "engine a is lost" in still
    assert "no step" in still
    assert "engine b is lost" in silent
    assert "silent" in silent


@pytest.mark.parametrize("start", [0.1, 0.7, 100.3, 1e5 + 0.1])
def test_a_tick_at_the_deadline_does_what_is_due(start: float) -> None:
    """Rounding must not matter. Otherwise a shell that waits for the deadline would spin."""
    one = Driver("a", "b")
    one.now = start
    one.up()
    for _ in range(8):
        one.now = deadline = one.fleet.next_deadline()
        if deadline == float("inf"):
            break
        one.on(e.Tick())
        assert one.fleet.next_deadline() > deadline
        for name in one.fleet.table.instances:
            if one.fleet.table.instances[name].state is InstanceState.DOWN and one.links < 9:
                one.expect(name)


@pytest.mark.requirement("E2")
def test_a_process_that_does_not_listen_or_load_in_time_is_lost() -> None:
    one = Driver("a", "b").up()
    one.lose("a")
    one.expect("a")
    one.on(e.Located("a", one.link["a"]))
    one.wait(PATIENCE.listen)
    assert one.fleet.table.instances["a"].state is InstanceState.DOWN
    one.expect("a")
    one.on(e.Linked("a", one.link["a"]))
    one.wait(PATIENCE.load - 1)
    assert one.fleet.table.instances["a"].state is InstanceState.STARTING
    one.wait(1)
    assert one.fleet.table.instances["a"].state is InstanceState.DOWN


def test_one_that_died_twice_in_a_row_gets_one_prompt_at_a_time() -> None:
    one = Driver("a").up()
    for _ in range(2):
        one.lose("a")
        one.up("a")
    assert one.fleet.table.instances["a"].state is InstanceState.HALF_OPEN
    assert one.open(1) == "a"
    assert one.open(2, request=2) is None
    one.tokens("a", 1, 7, finish="length")
    assert one.fleet.table.instances["a"].state is InstanceState.UP
    assert [message.sequence for message in one.sent() if isinstance(message, m.Submit)] == [2]
    for _ in range(2):
        one.lose("a")
        one.up("a")
    one.wait(HEALTHY_S)
    assert one.fleet.table.instances["a"].state is InstanceState.UP
    one.lose("a")
    assert one.fleet.table.instances["a"].deaths == 1


def test_a_stall_of_the_front_itself_proves_nothing() -> None:
    one = Driver("a", "b").up()
    one.now += 50.0
    one.on(e.Stalled(50.0))
    one.on(e.Tick())
    assert one.of(e.Replace) == []


def test_a_stall_of_the_front_itself_does_not_use_patience_up() -> None:
    one = Driver("a").up()
    one.open(1)
    one.lose("a")
    one.expect("a")
    one.now += 50.0
    one.on(e.Stalled(50.0))
    one.on(e.Tick())
    assert one.delivered() == []
    one.on(e.Linked("a", one.link["a"]))
    one.say("a", one.welcome("a"))
    assert len(one.sent()) == 1


def test_one_that_was_retired_comes_back_when_it_is_revived() -> None:
    one = Driver("a", "b").up()
    one.lose("a")
    one.on(e.Retired("a", DIED))
    assert one.open(1) == "b"
    one.expect("a")
    assert one.fleet.table.restarts == 1
    one.on(e.Linked("a", one.link["a"]))
    one.say("a", one.welcome("a"))
    assert one.open(2, request=2) == "a"
    assert one.fleet.table.whole


def test_a_front_that_joins_knows_of_those_that_are_retired() -> None:
    one = Driver("a", "b", joining=True, retired=["a"]).up("b")
    assert one.open(1) == "b"
    assert not one.fleet.table.whole
    one.links += 1
    one.link["a"] = one.links
    one.on(e.Expected("a", one.links, expert_group="all"))
    one.on(e.Linked("a", one.link["a"]))
    one.say("a", one.welcome("a"))
    assert one.fleet.table.instances["a"].expert_group == "all"
    assert one.open(2, request=2) == "a"


def test_all_engines_retired_ends_the_fleet() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.lose("a")
    one.on(e.Retired("a", DIED))
    assert one.of(e.Failed) == []
    one.lose("b")
    one.on(e.Retired("b", DIED))
    assert one.of(e.Failed) == [e.Failed(DIED)]
    assert [error_of(event).code for event in one.delivered()] == ["engine_dead"]
    assert one.fleet.refusal() is not None
    assert one.fleet.next_deadline() > 0


def test_one_that_fails_to_start_fails_the_fleet() -> None:
    one = Driver("a", "b").up("a")
    one.expect("b")
    one.lose("b")
    assert one.of(e.Failed) == [e.Failed(DIED)]
    assert one.of(e.Replace) == []


@pytest.mark.requirement("E2")
def test_another_incarnation_behind_a_link_is_a_loss() -> None:
    one = Driver("a", "b").up()
    one.say("a", m.Heartbeat(idle=True, stats=m.EngineStats()))
    one.link["a"] += 10
    other = one.welcome("a")
    one.link["a"] -= 10
    one.say("a", other)
    assert [action.instance for action in one.of(e.Replace)] == ["a"]


def test_an_instance_of_another_version_is_a_loss_and_both_versions_are_named() -> None:
    one = Driver("a", "b").up()
    one.expect("a")
    one.on(e.Linked("a", one.link["a"]))
    newer = msgspec.structs.replace(one.welcome("a"), versions=(m.VERSION + 1, m.VERSION + 2))
    one.say("a", newer)
    (replace,) = one.of(e.Replace)
    assert f"the engine speaks versions {m.VERSION + 1} to {m.VERSION + 2}" in replace.error.message
    assert replace.error.message.endswith(f"versions {m.OLDEST} to {m.VERSION}: upgrade the API server")
    assert one.open(1) == "b"


# -- attempts


def test_a_sequence_continues_elsewhere_with_its_grammar() -> None:
    one = Driver("a", "b").up()
    assert one.open(1, grammar=Text("yes")) == "a"
    one.tokens("a", 1, 5)
    one.lose("a")
    (submit,) = [sent for sent in one.sent() if isinstance(sent, m.Submit)]
    assert (submit.grammar, ids(submit)) == (Text("yes"), [5])


def test_events_of_an_earlier_attempt_are_late() -> None:
    one = Driver("a").up()
    one.open(1)
    one.tokens("a", 1, 7)
    one.on(e.Paused((1,)))
    one.on(e.Resumed((1,)))
    assert [(ids(message), getattr(message, "attempt", None)) for message in one.sent()] == [([7], 1)]
    one.tokens("a", 1, 8, attempt=0)  # was in flight at the pause
    one.tokens("a", 1, finish="abort", attempt=0)
    assert (one.delivered(), one.fleet.late_events) == ([], 2)
    one.tokens("a", 1, 8, finish="length", attempt=1)
    assert [(event.token_ids, event.finish) for event in one.delivered()] == [((8,), "length")]


# -- refusals, evictions


def test_a_refused_sequence_goes_to_another_instance() -> None:
    one = Driver("a", "b").up()
    assert one.open(1) == "a"
    one.refuse("a", 1)
    assert one.delivered() == []
    assert [action.instance for action in one.of(e.Send)] == ["b"]
    one.refuse("b", 1)
    assert [error_of(event).http_status for event in one.delivered()] == [429]
    assert one.loads() == [0, 0]


def test_a_token_makes_refusals_forgotten() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.refuse("a", 1)
    one.tokens("b", 1, 7)
    one.lose("b")
    assert [(action.instance, ids(action.message)) for action in one.of(e.Send)] == [("a", [7])]


@pytest.mark.parametrize("how", ["moved", "evicted"])
def test_a_returned_sequence_continues_elsewhere(how: str) -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.tokens("a", 1, 7, finish=how)
    assert [(event.token_ids, event.finish) for event in one.delivered()] == [((7,), None)]
    assert [(action.instance, ids(action.message)) for action in one.of(e.Send)] == [("b", [7])]
    assert one.fleet.entries[1].losses == 0
    assert one.fleet.failovers == 0
    one.tokens("b", 1, 8, finish="stop", stop_id=8)
    assert [(event.token_ids, event.finish) for event in one.delivered()] == [((8,), "stop")]


def test_an_instance_that_gives_all_back_is_not_asked_for_ever() -> None:
    one = Driver("a").up()
    one.open(1)
    for _ in range(MOST_REFUSALS):
        one.give_back("a", 1)
        assert len(one.sent()) == 1
    one.tokens("a", 1, finish="evicted")
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]
    assert one.fleet.entries == {}


def test_an_error_of_the_request_itself_is_not_retried() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    wrong = ErrorInfo(code="invalid_request", message="no", blame="client", http_status=400)
    one.tokens("a", 1, finish="error", error=wrong)
    assert one.sent() == []
    assert [error_of(event) for event in one.delivered()] == [wrong]


# -- pauses


def test_paused_sequences_leave_the_engine_and_return() -> None:
    one = Driver("a").up()
    one.open(1, 2)
    one.tokens("a", 1, 7)
    one.on(e.Paused((1, 2)))
    assert one.sent() == [m.Finish(sequence=1), m.Finish(sequence=2)]
    assert (one.loads(), one.fleet.pauses) == ([0], 1)
    one.on(e.Paused((1, 2)))
    assert (one.actions, one.fleet.pauses) == ([], 1)
    one.on(e.Resumed((2,)))
    assert [message.sequence for message in one.sent() if isinstance(message, m.Submit)] == [2]
    one.on(e.Closed((1,)))
    assert one.actions == []
    one.on(e.Resumed((1,)))
    assert one.actions == []
    assert list(one.fleet.entries) == [2]


def test_begun_sequences_that_no_instance_has_are_counted() -> None:
    one = Driver("a").up()
    one.open(1, 2)
    one.tokens("a", 1, 7)
    assert one.fleet.open.kept == 0
    one.on(e.Paused((1, 2)))
    assert one.fleet.open.kept == 2
    one.on(e.Resumed((2,)))
    assert one.fleet.open.kept == 1
    one.lose("a")
    assert one.fleet.open.kept == 2  # sequence 2 waits for the next process
    one.open(3)
    assert one.fleet.open.kept == 2  # sequence 3 never began
    one.on(e.Closed((1, 2, 3)))
    assert one.fleet.open.kept == 0


def test_a_sequence_resumed_after_the_recovery_timeout_fails_at_once() -> None:
    one = Driver("a").up()
    one.open(1)
    one.on(e.Paused((1,)))
    one.lose("a")
    one.now += PATIENCE.recovery
    one.on(e.Tick())
    assert one.delivered() == []  # the client does not read
    one.on(e.Resumed((1,)))
    assert [error_of(event).message for event in one.delivered()] == [LATE]


# -- domains, draining, retirement


def test_those_of_an_expert_group_work_together_or_not_at_all() -> None:
    one = Driver("a", "b", expert_group="d").up()
    one.open(1)
    one.lose("b")
    assert one.open(2, request=2) is None
    assert not one.fleet.table.whole
    one.up("b")
    assert [message.sequence for message in one.sent() if isinstance(message, m.Submit)] == [2]
    one.lose("b")
    one.on(e.Retired("b", DIED))
    assert one.of(e.Failed)
    assert {instance.state for instance in one.fleet.table.instances.values()} == {InstanceState.RETIRED}
    assert sorted(event.sequence for event in one.delivered()) == [1, 2]


def test_one_that_drains_gets_nothing_new_and_finishes_what_it_has() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.on(e.Draining("a"))
    assert [one.open(2 + n, request=2 + n) for n in range(3)] == ["b", "b", "b"]
    one.tokens("a", 1, 7, finish="length")
    assert [event.finish for event in one.delivered()] == ["length"]
    one.lose("a")
    assert one.of(e.Replace)


def test_where_all_drain_sequences_wait_until_that_is_over_and_then_only_so_long() -> None:
    one = Driver("a").up()
    one.on(e.Draining("a"))
    assert one.open(1) is None
    one.wait(PATIENCE.recovery + 1)
    assert one.delivered() == []
    one.lose("a")
    one.wait(PATIENCE.recovery - 1)
    assert (one.delivered(), one.fleet.refusal()) == ([], None)
    one.wait(1)
    assert [error_of(event).message for event in one.delivered()] == [LATE]


# -- pinned sequences


def test_a_pinned_sequence_goes_nowhere_else_and_ends_with_its_instance() -> None:
    one = Driver("a", "b").up()
    assert one.open(1, pinned="b") == "b"
    one.refuse("b", 1)
    assert [error_of(event).http_status for event in one.delivered()] == [429]
    one.open(2, pinned="b")
    one.lose("b")
    assert one.sent() == []
    assert [error_of(event).message for event in one.delivered()] == ["it died"]


def test_a_pinned_sequence_does_not_wait_for_an_instance_that_is_gone() -> None:
    one = Driver("a", "b").up()
    one.lose("b")
    one.open(1, pinned="b")
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]
    one.on(e.Retired("b", DIED))
    one.open(2, pinned="b")
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]
    assert one.fleet.entries == {}


def test_a_pinned_sequence_that_waits_ends_with_its_instance() -> None:
    one = Driver("a", "b").up()
    one.open(1, pinned="b")
    one.on(e.Paused((1,)))
    one.lose("b")
    assert [error_of(event).message for event in one.delivered()] == ["it died"]
    one.on(e.Resumed((1,)))
    assert one.actions == []


# -- the end


@pytest.mark.parametrize(("shutdown", "message"), [(False, m.Goodbye()), (True, m.Shutdown())])
def test_closing_ends_open_sequences_and_notifies_instances(shutdown: bool, message: m.ToEngine) -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.on(e.Closing(shutdown))
    assert [sent for sent in one.sent() if not isinstance(sent, m.Finish)] == [message, message]
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]
    assert one.fleet.refusal() is not None
    one.lose("a")
    assert one.of(e.Replace) == []


def test_prompt_logprobs_are_reported_once() -> None:
    one = Driver("a", "b").up()
    one.open(1)
    one.tokens("a", 1, prompt_logprobs=columns(0, 1))
    one.lose("a")
    one.tokens("b", 1, prompt_logprobs=columns(0, 1))
    assert one.delivered() == []
    one.tokens("b", 1, 5, prompt_logprobs=columns(1, 1))
    (event,) = one.delivered()
    assert event.prompt_logprobs is not None
    assert event.prompt_logprobs.arrays()[2].tolist() == [1]


def test_a_front_that_joins_serves_with_what_lives_and_gives_up_for_no_loss() -> None:
    """Other API servers serve already: an instance that loads or dies is no reason to wait or to fail."""
    one = Driver("a", "b", "c", joining=True)
    one.expect("a")
    one.expect("b")
    one.expect("b")  # replaced while this API server began
    assert one.fleet.failure is None
    one.on(e.Retired("c", DIED))
    assert one.fleet.failure is None
    assert one.fleet.refusal() is not None
    one.on(e.Linked("a", one.link["a"]))
    one.say("a", one.welcome("a"))
    assert e.Complete() in one.actions
    assert one.open(1) == "a"
    one.lose("a")
    one.on(e.Retired("a", DIED))
    assert one.fleet.failure is None
    one.on(e.Retired("b", DIED))
    assert one.fleet.failure is not None


def test_an_expert_group_that_is_joined_is_waited_for() -> None:
    one = Driver("a", "b", expert_group="all", joining=True).up("a")
    assert one.fleet.refusal() is not None
    one.up("b")
    assert one.fleet.refusal() is None


def test_an_undrained_instance_gets_the_waiting_sequences() -> None:
    one = Driver("a").up()
    one.open(1)
    one.on(e.Draining("a"))
    one.open(2)
    assert 2 not in one.fleet.table.instances["a"].open
    one.on(e.Undrained("a"))
    assert [*one.fleet.table.instances["a"].open] == [1, 2]
    assert one.fleet.table.instances["a"].state is InstanceState.UP
    one.on(e.Undrained("a"))  # no effect on others
    assert one.fleet.table.instances["a"].state is InstanceState.UP


def test_an_undrained_instance_stays_half_open_after_deaths_in_a_row() -> None:
    one = Driver("a").up()
    for _ in range(2):
        one.lose("a")
        one.up("a")
    one.on(e.Draining("a"))
    one.on(e.Undrained("a"))
    assert one.fleet.table.instances["a"].state is InstanceState.HALF_OPEN
