"""The machine of a host that joins: which events start, replace and end rank processes."""

from __future__ import annotations

import pytest

from weft.control.directory import joined_host as j

TIMEOUT, DRAIN = 8.0, 60.0
HEAD, ENGINE = 7, "tcp://10.0.0.1:1"


class Played:
    """A machine with a clock."""

    def __init__(self, *ranks: int) -> None:
        self.machine = j.JoinedHost(ranks, TIMEOUT, DRAIN)
        self.now = 0.0

    def on(self, event: j.Event, after: float = 0.2) -> list[j.Action]:
        self.now += after
        return self.machine.on(event, self.now)


def accepted(head: int = HEAD, engine: str = ENGINE) -> j.Answered:
    return j.Answered(head, "", engine)


def serving(*ranks: int) -> Played:
    played = Played(*ranks)
    assert played.on(accepted()) == [j.StartRank(rank) for rank in ranks]
    return played


def test_ranks_wait_for_the_head_the_decision_and_the_engine() -> None:
    played = Played(2, 3)
    early: list[j.Event] = [j.Silent(), j.Answered(0, None), j.Answered(HEAD, None), j.Answered(HEAD, "")]
    assert [played.on(event) for event in early] == [[], [], [], []]
    assert played.machine.phase is j.JoinPhase.CALLING
    assert played.on(accepted()) == [j.StartRank(2), j.StartRank(3)]
    assert played.machine.phase is j.JoinPhase.SERVING
    assert played.on(accepted()) == []


def test_a_refusal_ends_the_host_at_any_time() -> None:
    for played in (Played(1), serving(1)):
        (action,) = played.on(j.Answered(HEAD, "other settings"))
        assert action == j.Exit(2, "the head refused this host: other settings")
        assert played.on(accepted()) == []


def test_a_rank_that_fails_is_started_again() -> None:
    played = serving(1)
    assert played.on(j.RankEnded(1, -9)) == [j.StartRank(1, "its process ended with status -9")]
    assert played.on(accepted()) == []


def test_ranks_stay_when_the_head_is_silent_and_are_not_started_meanwhile() -> None:
    """A rank follows the next engine by itself. A rank that gives up starts again with the next engine."""
    played = serving(1, 2)
    assert played.on(j.Silent()) == []
    assert played.machine.phase is j.JoinPhase.CALLING
    assert played.on(j.RankEnded(1, j.NO_ENGINE), after=120) == []
    assert played.on(j.RankEnded(2, 1)) == []
    assert played.on(accepted(8, "tcp://10.0.0.1:2")) == [
        j.StartRank(1),
        j.StartRank(2, "its process ended with status 1"),
    ]


def test_another_head_with_the_same_settings_takes_the_ranks_over() -> None:
    played = serving(1)
    assert played.on(j.Answered(8, None)) == []  # the next head has not decided
    assert played.on(accepted(8, "tcp://10.0.0.1:2")) == []


def test_a_rank_that_the_engine_ended_waits_for_another_engine() -> None:
    played = serving(1)
    assert played.on(j.RankEnded(1, 0)) == []
    assert played.on(accepted()) == []
    assert played.on(j.Silent()) == []
    assert played.on(accepted()) == []
    assert played.on(accepted(8)) == [j.StartRank(1)]


def test_another_engine_of_the_same_head_counts_too() -> None:
    """In an expert-parallel group the engine may be on a third host."""
    played = serving(1)
    played.on(j.RankEnded(1, 0))
    assert played.on(accepted(HEAD, "tcp://10.0.0.3:5")) == [j.StartRank(1)]


def test_ranks_without_an_engine_are_no_failures() -> None:
    played = serving(1)
    for _ in range(10 * j.RESTARTS):
        assert played.on(j.RankEnded(1, j.NO_ENGINE), after=1.0) == [j.StartRank(1)]


def test_too_many_failures_end_the_host() -> None:
    played = serving(1)
    for _ in range(j.RESTARTS):
        assert played.on(j.RankEnded(1, 2))
    (action,) = played.on(j.RankEnded(1, 2))
    assert action == j.Exit(1, "21 ranks ended within 10 minutes")


def test_failures_long_ago_do_not_count() -> None:
    played = serving(1)
    for _ in range(3 * j.RESTARTS):
        assert played.on(j.RankEnded(1, 2), after=j.WINDOW_S / j.RESTARTS + 1) != []
    assert played.machine.phase is j.JoinPhase.SERVING


def test_a_suspended_rank_is_killed_after_the_rank_timeout() -> None:
    played = serving(1)
    made = [played.on(j.RankSuspended(1)) for _ in range(round(TIMEOUT * 5))]
    assert made == [[]] * len(made)
    played.on(accepted(), after=TIMEOUT)  # the rank ran in between
    assert played.on(j.RankSuspended(1)) == []
    for _ in range(round(TIMEOUT * 5) + 1):
        last = played.on(j.RankSuspended(1))
    assert last == [j.KillRank(1)]
    assert played.on(j.RankEnded(1, -9)) == [j.StartRank(1, "its process ended with status -9")]


def test_a_signal_before_the_engine_listens_ends_the_host() -> None:
    for early in (j.Silent(), j.Answered(HEAD, None), j.Answered(HEAD, "")):
        played = Played(1)
        played.on(early)
        assert played.on(j.Stop()) == [j.Exit(0)]
        assert played.on(j.Stop()) == []


def test_a_host_with_a_signal_waits_until_the_engine_has_ended_its_ranks() -> None:
    played = serving(1, 2)
    assert played.on(j.Stop()) == [j.Leave()]
    assert played.on(accepted(), after=DRAIN / 2) == []
    assert played.on(j.RankEnded(1, 0)) == []
    assert played.on(accepted()) == []  # no rank is started again
    assert played.on(j.RankEnded(2, -9)) == [j.StartRank(2, "its process ended with status -9")]
    assert played.on(j.RankEnded(2, 0)) == [j.Exit(0)]


@pytest.mark.parametrize(
    ("event", "after", "status"),
    [(accepted(8), 0.2, 0), (accepted(), DRAIN + j.LEAVE_S, 0), (j.Stop(), 0.2, 130)],
    ids=["another head", "time-out", "second signal"],
)
def test_a_host_with_a_signal_does_not_wait_in_vain(event: j.Event, after: float, status: int) -> None:
    played = serving(1)
    played.on(j.Stop())
    assert played.on(event, after=after) == [j.Exit(status)]


def test_a_host_with_a_signal_survives_a_short_silence_of_the_head() -> None:
    played = serving(1)
    played.on(j.Stop())
    for event in (j.Silent(), accepted()) * 3:
        assert played.on(event, after=TIMEOUT - 1) == []
    assert played.on(j.Silent()) == []
    assert played.on(j.Silent(), after=TIMEOUT - 1) == []
    assert played.on(j.Silent(), after=1) == [j.Exit(0)]


def test_a_rank_that_ends_late_serves_the_next_engine() -> None:
    played = serving(1, 2)
    played.on(j.Silent(), after=100)
    assert played.on(accepted(8)) == []
    assert played.on(j.RankEnded(1, 0)) == [j.StartRank(1)]
    assert played.on(accepted(8), after=j.LATE_S) == []
    assert played.on(j.RankEnded(2, 0)) == []  # the present engine has ended this rank
    assert played.on(accepted(9)) == [j.StartRank(2)]
