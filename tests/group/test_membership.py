"""Decisions of a group's engine, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from weft.common.errors import ConfigError, EngineDead
from weft.common.restarts import RestartBudget
from weft.group import types as t
from weft.group.liveness import Liveness
from weft.group.meeting import Meeting
from weft.group.membership import Membership
from weft.group.tries import TRIES
from weft.group.types import GroupLost
from weft.group.waits import HELLO_S
from weft.types import frames as f

SETTINGS = {"dtype": '"float64"'}


class Rig:
    """A group with healthy ranks, until a test changes a rank."""

    def __init__(
        self, ranks: int = 2, local: bool = True, meeting: Meeting | None = None, most: int = 9
    ) -> None:
        self.group = Membership(
            0,
            dict.fromkeys(range(1, ranks + 1), local),
            settings=SETTINGS,
            incarnation="head",
            stores="file:///stores",
            meeting=meeting,
            budget=RestartBudget(most, 600.0),
        )
        self.now, self.ranks = 0.0, range(1, ranks + 1)
        self.peers = {rank: b"%d.0" % rank for rank in self.ranks}

    def feed(self, *events: t.Event, after: float = 0.0) -> list[t.Action]:
        self.now += after
        return [action for event in events for action in self.group.on(event, self.now)]

    def hello(self, rank: int, epoch: int = -1, **settings: str) -> t.FrameReceived:
        hello = f.RankHello(
            version=f.VERSION, release="", rank=rank, pid=1, epoch=epoch, settings=settings or SETTINGS
        )
        return t.FrameReceived(self.peers[rank], hello)

    def says(self, rank: int, frame: f.ToEngine) -> t.FrameReceived:
        return t.FrameReceived(self.peers[rank], frame)

    def load(self, rank: int, epoch: int = -1) -> list[t.Action]:
        loaded = self.says(rank, f.Loaded(rank=rank, blocks=(8,)))
        return self.feed(self.hello(rank, epoch), loaded, self.says(rank, f.Ready(rank=rank)))

    def spawn(self, outlived: bool = False) -> None:
        self.feed(t.Own("started"))
        if all(member.local for member in self.group.members.values()):
            self.feed(*(t.Spawned(rank, outlived) for rank in self.ranks))

    def gather(self, outlived: bool = False) -> list[t.Action]:
        self.spawn(outlived)
        for rank in self.ranks:
            self.load(rank, 4 if outlived else -1)
        return self.feed(t.Own("loading"), t.Own("loaded", (8,)), t.Own("ready"))

    def form(self) -> list[t.Action]:
        self.feed(t.Connected(self.group.epoch))
        made = [action for rank in self.ranks for action in self.formed(rank)]
        assert self.group.phase == "running"
        return made

    def formed(self, rank: int) -> list[t.Action]:
        return self.feed(self.says(rank, f.Formed(rank=rank, epoch=self.group.epoch)))

    def run(self, outlived: bool = False) -> None:
        self.gather(outlived)
        self.form()

    def resume(self) -> list[t.Action]:
        return self.feed(t.Resume(GroupLost(None, "the engine")))


def kinds(actions: list[t.Action]) -> list[str]:
    return [type(action.frame if isinstance(action, t.SendFrame) else action).__name__ for action in actions]


def test_from_the_start_to_a_step() -> None:
    rig = Rig()
    assert rig.feed(t.Own("started")) == [t.Spawn(1, anew=False), t.Spawn(2, anew=False)]
    rig.feed(t.Spawned(1, False), t.Spawned(2, False))
    assert kinds(rig.load(1)) == ["RankWelcome"]
    assert kinds(rig.load(2)) == ["RankWelcome"]
    assert kinds(rig.feed(t.Own("loading"), t.Own("loaded", (5,)))) == ["Pools", "Pools"]
    assert rig.group.pools == (5,)
    *forms, connect = rig.feed(t.Own("ready"))
    assert connect == t.Connect(0, "file:///stores/epoch0-head", ())
    assert kinds(forms) == ["Form", "Form"]
    rig.feed(t.Connected(0))
    rig.formed(1)
    assert rig.group.phase == "forming"
    rig.formed(2)
    assert rig.group.phase == "running"
    rig.feed(t.OwnOutcome(0, 7), rig.says(1, f.StepOutcome(rank=1, epoch=0, step=0, checksum=7)))
    assert not rig.group.steps.settled(0)
    assert rig.group.next_deadline() == 8.0
    rig.feed(rig.says(2, f.StepOutcome(rank=2, epoch=0, step=0, checksum=7)))
    assert rig.group.steps.settled(0)
    assert rig.group.next_deadline() is None


def test_one_rank_alone_runs_at_once_and_has_nobody_to_lose() -> None:
    rig = Rig(0)
    assert rig.gather() == []
    assert rig.group.phase == "running"
    rig.resume()
    assert rig.group.phase == "ended"
    assert isinstance(rig.group.failed, GroupLost)


def test_lost_ranks_are_replaced_after_the_engine_has_dropped_its_steps() -> None:
    rig = Rig()
    rig.run()
    assert kinds(rig.feed(t.Gone(1, "its process ended"))) == ["Abort", "Abort", "Abort"]
    assert rig.feed(t.Gone(1, "again"), t.Gone(2, "too")) == []
    assert (rig.group.phase, rig.group.lost.rank) == ("lost", 1)  # type: ignore[union-attr]
    actions = rig.resume()
    assert [a for a in actions if isinstance(a, t.Spawn)] == [t.Spawn(1, anew=True), t.Spawn(2, anew=True)]
    old = rig.hello(1)
    rig.feed(t.Spawned(1, False), t.Spawned(2, False))
    assert kinds(rig.feed(old)) == ["RankRefused"], "it was given up"
    rig.peers = {1: b"1.1", 2: b"2.1"}
    rig.load(1)
    assert kinds(rig.load(2))[-1] == "Connect"
    assert rig.group.epoch == 1
    rig.form()


@pytest.mark.parametrize("collective", [False, True])
def test_a_rank_that_reported_its_failure_is_not_replaced(collective: bool) -> None:
    rig = Rig()
    rig.run()
    error = EngineDead("planted").info()
    told = [f.RankFailed(rank=rank, epoch=0, step=3, error=error, comm=collective) for rank in rig.ranks]
    rig.feed(*(rig.says(frame.rank, frame) for frame in told))
    assert rig.group.lost is not None
    assert rig.group.lost.rank == (None if collective else 1)
    assert kinds(rig.resume()) == ["Form", "Form", "Connect"]


def test_a_silent_rank_is_blamed_for_a_failed_collective() -> None:
    rig = Rig()
    rig.run()
    assert rig.feed(t.OwnFailure(0, "a peer is gone", collective=True)) == [t.Abort()]
    error = EngineDead("a peer is gone").info()
    rig.feed(rig.says(1, f.RankFailed(rank=1, epoch=0, step=3, error=error, comm=True)))
    assert rig.group.phase == "running"
    rig.feed(t.Read(), after=1.6)
    assert rig.group.lost is not None
    assert rig.group.lost.rank == 2
    assert t.Spawn(2, anew=True) in rig.resume()


def test_an_epoch_does_not_run_while_it_is_judged() -> None:
    rig = Rig()
    rig.gather()
    rig.feed(t.Connected(0))
    rig.formed(1)
    told = EngineDead("a peer is gone").info()
    rig.feed(rig.says(1, f.RankFailed(rank=1, epoch=0, step=0, error=told, comm=True)))
    rig.formed(2)
    assert rig.group.phase == "forming"
    rig.feed(t.Read(), after=1.6)
    assert rig.group.phase == "ended", "it never worked"


def test_no_two_epochs_are_formed_at_once() -> None:
    rig = Rig()
    rig.run()
    rig.feed(t.Gone(2, "it is not connected"))
    rig.peers[2] = b"2.1"
    rig.feed(rig.hello(2))
    rig.resume()
    assert kinds(rig.load(2))[-1] == "Connect"
    assert rig.group.epoch == 1
    rig.peers[2] = b"2.2"
    rig.load(2)  # the rank was restarted while this rank connects
    assert rig.group.phase == "gathering"
    assert rig.group.aborted == 1
    assert kinds(rig.feed(t.Connected(1))) == ["Abort", "Form", "Form", "Connect"]
    assert rig.group.epoch == 2


@pytest.mark.parametrize("outlived", [False, True])
def test_nothing_is_tried_twice_before_the_first_epoch(outlived: bool) -> None:
    """The starter of a group gets the reason of the failure. An engine that follows another one retries."""
    rig = Rig()
    rig.spawn(outlived)
    rig.load(1, 4 if outlived else -1)
    rig.feed(t.Gone(1, "its process ended with status 1"))
    assert (rig.group.phase == "ended") != outlived


def test_ranks_that_end_with_their_engine_are_replaced_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A new engine finds ranks that are ending, but have not ended yet."""
    rig = Rig()
    caplog.set_level("INFO")
    rig.spawn(outlived=True)
    assert t.Spawn(1, anew=True) in rig.feed(t.Gone(1, "its process ended with status 0"))
    rig.feed(t.Spawned(1, False))
    assert rig.group.phase == "gathering"
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(("error", "kind"), [(ConfigError("no"), ConfigError), (EngineDead("no"), GroupLost)])
def test_errors_of_a_rank_that_cannot_load(error: Any, kind: type[Exception]) -> None:
    rig = Rig()
    rig.spawn()
    rig.feed(rig.hello(1), rig.says(1, f.RankFailed(rank=1, epoch=-1, step=-1, error=error.info())))
    assert type(rig.group.failed) is kind


def test_a_rank_lost_during_loading_is_replaced_when_this_rank_is_ready() -> None:
    rig = Rig()
    rig.spawn(outlived=True)
    for rank in rig.ranks:
        rig.load(rank, 4)
    assert kinds(rig.feed(t.Own("loading"), t.Gone(2, "its process ended"))) == ["Abort"]
    assert kinds(rig.feed(t.Own("loaded", (8,)))) == ["Pools", "Pools"]
    assert t.Spawn(2, anew=True) in rig.feed(t.Own("ready"))


def test_tries_end() -> None:
    rig = Rig()
    rig.run()
    rig.feed(t.Gone(1, "it is not connected"))
    rig.resume()
    for number in range(TRIES):
        assert rig.group.phase == "gathering", number
        rig.feed(t.Spawned(1, False), t.Read())
        rig.feed(t.Read(), after=HELLO_S)
    assert rig.group.phase == "ended"
    assert "did not connect within" in str(rig.group.failed)


def test_a_group_that_is_lost_again_and_again_ends() -> None:
    rig = Rig(most=2)
    rig.run()
    for _ in range(2):
        rig.feed(t.OwnFailure(rig.group.epoch, "planted", collective=False))
        rig.resume()
        rig.form()
    rig.feed(t.OwnFailure(rig.group.epoch, "planted", collective=False))
    rig.resume()
    assert rig.group.phase == "ended"
    assert isinstance(rig.group.failed, GroupLost)


def test_a_rank_that_does_not_come_to_the_next_engine_is_started_again() -> None:
    """The restart does not count as a try, however often it happens."""
    rig = Rig()
    rig.spawn(outlived=True)
    rig.load(1, 4)
    assert t.Spawn(2, anew=True) in rig.feed(t.Read(), after=10.0)
    rig.feed(t.Spawned(2, False))
    rig.load(2)
    rig.feed(t.Own("loading"), t.Own("loaded", (8,)), t.Own("ready"))
    assert rig.group.epoch == 5, "no rank has seen it"


def test_a_silent_rank_is_lost() -> None:
    rig = Rig()
    rig.run()
    heard = t.FrameReceived(b"", f.RankHeartbeat(rank=1, epoch=0, step=0, incarnation="head"))
    stale = t.FrameReceived(b"", f.RankHeartbeat(rank=2, epoch=0, step=0, incarnation="another"))
    while rig.now < 7.0 and rig.group.lost is None:
        rig.feed(heard, stale, t.Read(heartbeats=True), after=0.5)
    assert rig.group.lost is not None
    assert rig.group.lost.rank == 2


def test_engines_meet_before_an_epoch_and_notice_who_moved_on() -> None:
    rig = Rig(meeting=Meeting(0, "file:///stores", "wakeup0", "a"))
    assert kinds(rig.gather()) == ["Pools", "Pools"]
    assert rig.group.phase == "meeting"
    assert rig.group.leases_due(rig.now)
    other = t.Lease("b", 7, begun=False, wakeup="wakeup1")
    (proposed,) = rig.feed(t.LeasesRead((None, other)))
    assert isinstance(proposed, t.Renew)
    assert proposed.lease.epoch == 7
    connect = rig.feed(t.LeasesRead((proposed.lease, other)))[-1]
    assert isinstance(connect, t.Connect)
    assert (connect.epoch, connect.wakeups) == (7, ("wakeup0", "wakeup1"))
    (begun,) = rig.form()
    assert begun == t.Renew(t.Lease("a", 7, True, "wakeup0", "file:///stores"))
    rig.feed(t.LeasesRead((begun.lease, other)))
    assert rig.group.lost is None
    rig.feed(t.LeasesRead((begun.lease, t.Lease("c", 0, begun=False))))
    assert rig.group.lost is not None


def test_a_process_that_cannot_be_started_ends_the_group() -> None:
    rig = Rig()
    rig.run()
    rig.feed(t.Gone(1, "it ended"))
    rig.resume()
    rig.feed(t.Unable(EngineDead("the supervisor of the ranks is gone")))
    assert rig.group.phase == "ended"


@pytest.mark.parametrize("dismiss", [False, True])
def test_the_end(dismiss: bool) -> None:
    rig = Rig()
    rig.run()
    actions = rig.feed(t.Close(dismiss))
    assert kinds(actions) == ["RankShutdown"] * 2 * dismiss + ["Abort"] * 3
    assert rig.feed(t.Gone(1, "it ended")) == []


@pytest.mark.parametrize(("local", "leave", "ended"), [(False, True, 0), (True, True, 2), (False, False, 2)])
def test_ranks_of_other_hosts_outlive_an_engine_that_fails(local: bool, leave: bool, ended: int) -> None:
    rig = Rig(local=local)
    rig.run()
    assert kinds(rig.feed(t.Close(True, leave))).count("RankShutdown") == ended


def test_ranks_of_a_group_that_was_given_up_are_dismissed() -> None:
    rig = Rig()
    rig.run()
    rig.feed(t.Unable(EngineDead("planted")))
    assert kinds(rig.feed(t.Close(dismiss=True)))[:2] == ["RankShutdown"] * 2
    assert str(rig.group.failed) == "planted"


def test_silence_does_not_count_while_the_watcher_was_stopped() -> None:
    alive = Liveness(6.0)
    alive.expect([1, 2], 0.0)
    now = 0.0
    while now < 5.5:
        now += 0.5
        alive.heartbeat(1, now)
        alive.heartbeat(9, now)
        assert alive.silent(now) is None
    assert alive.silent(now + 1.0) == 2
    alive.expect([1, 2], 100.0)
    assert alive.silent(100.0) is None
    assert alive.silent(300.0) is None, "this process stood still, not the ranks"
    assert alive.silent(301.0) is None
    alive.expect([], 301.0)
    assert alive.silent(900.0) is None


def test_an_epoch_that_is_lost_before_anybody_looked_at_it_waits_to_be_resumed() -> None:
    """A waiting caller may see the loss at once: the epoch has no steps to drop."""
    rig = Rig()
    rig.run()
    rig.feed(t.Gone(1, "killed"), after=0.01)
    rig.feed(t.Read(), t.Read(heartbeats=True), after=2000.0)
    assert rig.group.phase == "lost"
    assert rig.group.unresumed is rig.group.lost
    assert kinds(rig.feed(t.Resume(rig.group.lost))).count("Spawn") == 1  # type: ignore[arg-type]
    assert (rig.group.phase, rig.group.unresumed) == ("gathering", None)
    left = rig.group.tries._left
    assert rig.resume() == []
    assert (rig.group.phase, rig.group.tries._left) == ("gathering", left)


def test_no_rank_is_late_while_a_failed_connect_is_judged() -> None:
    rig = Rig(3)
    rig.run()
    rig.feed(t.Gone(3, "killed"), t.Resume(GroupLost(3, "killed")), t.Spawned(3, False), after=1.0)
    rig.peers[3] = b"3.1"
    rig.now += 30.0
    rig.load(3)
    assert rig.group.phase == "forming"
    rig.feed(t.OwnFailure(rig.group.epoch, "time-out", True), after=8.0)
    assert rig.feed(t.Read(), after=0.01) == []
    assert rig.group.phase == "forming"
    failed = EngineDead("time-out").info()
    for rank in rig.ranks:
        rig.feed(rig.says(rank, f.RankFailed(rank=rank, epoch=1, step=-1, error=failed, comm=True)))
    assert (rig.group.phase, rig.group.lost and rig.group.lost.rank) == ("gathering", None) or (
        rig.group.phase == "forming" and rig.group.epoch == 2
    )


def test_an_engine_that_stood_still_gives_ranks_their_time() -> None:
    rig = Rig(1)
    rig.run()
    rig.feed(t.Read())
    rig.feed(t.OwnOutcome(0, 7))
    rig.feed(t.OwnOutcome(1, 7), after=21.0)  # the launch of the own rank took so long
    rig.feed(t.Read(), after=0.01)
    assert rig.group.phase == "running"
    for _ in range(8):
        rig.feed(t.Read(), after=1.0)
    assert rig.group.phase == "lost"
    assert "finish step 0" in str(rig.group.lost)


def test_reports_of_an_ended_epoch_cost_no_try() -> None:
    rig = Rig(6)
    rig.run()
    rig.feed(t.Gone(1, "killed"), t.Resume(GroupLost(1, "killed")), t.Spawned(1, False), after=1.0)
    left = rig.group.tries._left
    failed = EngineDead("an error of the device").info()
    for rank in range(2, 7):
        rig.feed(rig.says(rank, f.RankFailed(rank=rank, epoch=0, step=0, error=failed, comm=False)))
    rig.feed(t.OwnFailure(0, "an error of the device", False))
    assert (rig.group.phase, rig.group.tries._left) == ("gathering", left)


def test_a_process_on_another_host_learns_from_heartbeats_that_the_engine_gave_it_up() -> None:
    """``Refused`` was lost with the connection. The process joins again over a new connection."""
    rig = Rig(local=False)
    rig.run()
    assert not rig.group.heartbeat(rig.peers[1]).given_up
    rig.feed(t.Gone(1, "its connection broke"))
    rig.feed(t.Resume(GroupLost(1, "the engine")))
    assert rig.group.phase == "gathering"
    assert rig.group.heartbeat(rig.peers[1]).given_up
    assert not rig.group.heartbeat(rig.peers[2]).given_up
    rig.peers[1] = b"1.1"
    rig.load(1, epoch=rig.group.epoch)
    assert not rig.group.heartbeat(rig.peers[1]).given_up
    assert rig.group.phase == "forming"
    rig.form()
