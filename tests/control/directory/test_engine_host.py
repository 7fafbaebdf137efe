"""The machine of a group that runs alone: publication, drain, and the end with each status."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from weft.control.directory import engine_host as h
from weft.control.directory.record import RENEW_S

PATIENCE = 30.0


class Played:
    """A machine with a clock, and all actions so far."""

    def __init__(self, *names: str) -> None:
        self.machine = h.EngineHost(names, PATIENCE)
        self.now = 0.0
        self.actions: list[h.Action] = []

    def on(self, *events: h.Event, after: float = 0.0) -> list[h.Action]:
        self.now += after
        made = [action for event in events for action in self.machine.on(event, self.now)]
        self.actions += made
        return made

    def pass_time(self, seconds: float, events: Iterable[h.Event] = ()) -> list[h.Action]:
        """Repeat ``events`` and a tick five times a second."""
        return [one for _ in range(round(seconds * 5)) for one in self.on(*events, h.Tick(), after=0.2)]


def serving(*names: str) -> Played:
    played = Played(*names)
    played.on(h.Tick(), *(h.Seen(name, True) for name in names))
    assert played.machine.ready
    return played


def test_records_are_published_at_the_start_and_renewed() -> None:
    played = Played("a", "b")
    assert played.on(h.Tick()) == [h.Publish(draining=False)]
    assert not played.machine.ready
    renewals = played.pass_time(10 * RENEW_S + 0.2)
    assert set(renewals) == {h.Publish(draining=False)}
    assert len(renewals) in (9, 10)  # a turn is a part of the interval


def test_a_group_serves_when_all_its_engines_answer() -> None:
    played = Played("a", "b")
    played.on(h.Seen("a", True), h.Tick())
    assert not played.machine.ready
    played.on(h.Seen("b", None))
    assert played.machine.ready


@pytest.mark.parametrize("order", [h.Stop(), h.Drain()])
def test_a_drain_is_published_before_an_idle_group_ends(order: h.Event) -> None:
    played = serving("a", "b")
    assert played.on(order) == [h.Publish(draining=True)]
    idle = [h.Seen("a", True), h.Seen("b", True)]
    assert h.Quit() not in played.pass_time(h.SETTLE_S - 0.4, idle)
    assert h.Quit() in played.pass_time(0.6, idle)
    assert played.on(h.Ended("a", 0)) == []
    assert played.on(h.Ended("b", 0)) == [h.Exit(0)]


def test_a_busy_engine_is_waited_for_up_to_the_drain_timeout() -> None:
    played = serving("a", "b")
    played.on(h.Stop())
    work = [h.Seen("a", True), h.Seen("b", False)]
    assert h.Quit() not in played.pass_time(PATIENCE - 1, work)
    assert h.Quit() in played.pass_time(1.2, work)


def test_only_reports_from_after_the_drain_count_as_idle() -> None:
    """An engine that was idle before the drain may have got a request in between."""
    played = serving("a")
    played.on(h.Seen("a", True), h.Stop())
    assert h.Quit() not in played.pass_time(h.SETTLE_S + 1, [h.Seen("a", None)])


@pytest.mark.parametrize(("status", "ends"), [(2, 2), (1, 1), (0, 1), (-9, 1)])
@pytest.mark.parametrize("drains", [False, True])
def test_an_engine_that_dies_ends_the_group(status: int, ends: int, drains: bool) -> None:
    played = serving("a", "b")
    if drains:
        played.on(h.Stop())
    assert played.on(h.Ended("a", status)) == [h.Exit(ends)]
    assert played.on(h.Ended("b", 0), h.Stop(), h.Tick(), after=100) == []


def test_a_second_signal_ends_the_group_at_once_and_a_second_order_does_not() -> None:
    played = serving("a")
    played.on(h.Drain(), h.Drain())
    assert h.Exit(130) not in played.actions
    assert played.on(h.Stop()) == [h.Exit(130)]


def test_a_signal_while_the_engines_load_ends_the_group() -> None:
    assert Played("a").on(h.Stop()) == [h.Exit(0)]


def test_an_order_while_the_engines_load_ends_the_group_too() -> None:
    played = Played("a", "b")
    assert h.Quit() in played.on(h.Drain()) + played.pass_time(0.4)


@pytest.mark.parametrize("order", [h.Stop(), h.Drain()])
def test_an_engine_that_serves_while_another_loads_finishes_its_requests(order: h.Event) -> None:
    played = Played("a", "b")
    played.on(h.Seen("a", True))
    assert played.on(order) == [h.Publish(draining=True)]
    assert h.Quit() not in played.pass_time(h.SETTLE_S + 1, [h.Seen("a", False)])
    assert h.Quit() in played.pass_time(0.4, [h.Seen("a", True)])


def test_engines_that_do_not_end_are_given_up() -> None:
    played = serving("a")
    played.on(h.Stop())
    played.pass_time(h.SETTLE_S + 0.4, [h.Seen("a", True)])
    assert h.Exit(0) in played.pass_time(h.QUIT_S + 0.4)


# ---- a group over several hosts


def waiting(*names: str) -> Played:
    played = Played(*names)
    played.machine = h.EngineHost(names, PATIENCE, waits=True)
    return played


def test_a_group_over_hosts_starts_its_engines_when_it_is_admitted() -> None:
    played = waiting("a")
    assert played.pass_time(60) == []  # nothing to publish, however late the other hosts are
    assert played.machine.phase is h.HostPhase.WAITING
    assert played.on(h.Admitted()) == [h.Start(), h.Publish(draining=False)]
    assert played.on(h.Admitted()) == []
    played.on(h.Seen("a", True), h.Admitted())
    assert played.machine.ready


@pytest.mark.parametrize("order", [h.Stop(), h.Drain()])
def test_an_order_before_the_hosts_have_met_ends_the_group(order: h.Event) -> None:
    assert waiting("a").on(order) == [h.Exit(0)]


def test_a_refused_host_ends_with_its_engines() -> None:
    assert waiting("a").on(h.Refused("other settings")) == [h.Exit(2)]
    played = waiting("a")
    played.on(h.Admitted(), h.Seen("a", True))
    assert played.on(h.Refused("the next head has other settings")) == [h.Exit(2)]
    assert played.on(h.Tick()) == []


def test_a_lost_host_ends_no_engine_of_another_host() -> None:
    """Without an admission the engines go on: the group forms again by itself."""
    played = waiting("a")
    played.on(h.Admitted(), h.Seen("a", True))
    actions = played.pass_time(60, [h.Seen("a", False)])
    assert set(actions) == {h.Publish(draining=False)}


def test_a_host_that_leaves_drains_the_group_which_can_start_again() -> None:
    played = serving("a")
    assert played.on(h.Leaving()) == [h.Publish(draining=True)]
    assert played.on(h.Leaving()) == []
    assert h.Quit() in played.pass_time(h.SETTLE_S + 0.4, [h.Seen("a", True)])
    assert played.on(h.Ended("a", 0)) == [h.Exit(1)]


def test_a_signal_to_all_hosts_ends_the_group_for_good() -> None:
    """Whichever host is first. A second signal ends the group at once."""
    played = serving("a")
    assert h.Exit(130) not in played.on(h.Leaving(), h.Stop())
    assert h.Quit() in played.pass_time(h.SETTLE_S + 0.4, [h.Seen("a", True)])
    assert played.on(h.Ended("a", 0)) == [h.Exit(0)]
    again = serving("a")
    assert h.Exit(130) in again.on(h.Leaving(), h.Stop(), h.Stop())


def test_an_idle_host_waits_for_the_requests_of_other_draining_hosts() -> None:
    """Replicas of an expert-parallel group step together, so the idle engines are needed."""
    played = serving("a")
    played.on(h.Stop())
    idle = h.Seen("a", True)
    assert h.Quit() not in played.pass_time(h.SETTLE_S + 5, [idle, h.Others(busy=True)])
    assert h.Quit() in played.pass_time(0.4, [idle, h.Others(busy=False)])
    again = serving("a")
    again.on(h.Stop())
    assert h.Quit() in again.pass_time(PATIENCE + 0.4, [idle, h.Others(busy=True)])


def test_a_host_that_leaves_before_the_start_is_waited_for() -> None:
    played = waiting("a")
    assert played.on(h.Leaving(), h.Tick()) == []
    assert played.machine.phase is h.HostPhase.WAITING
