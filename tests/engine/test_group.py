"""An engine and workers: which ranks join, which events end an epoch, and that the next epoch works."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.engine.group_rig import SETTINGS, TIMEOUT, GroupRig, Ranks, TableRunner
from tests.scheduler.fake_runner import BAD_SEED, kv_config, submit
from tests.support.slowness import deadline
from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.common.folder import private_folder
from weft.engine.group import GroupExecutor
from weft.engine.group_links import GroupLinks, Share
from weft.engine.ranks.watch import EngineWatch, RankWatch
from weft.engine.ranks.worker import GivenUp
from weft.group import types as t
from weft.group.meeting import Meeting
from weft.group.membership import Membership
from weft.group.types import GroupLost
from weft.parallel.control import ZmqEngineChannel, ZmqRank
from weft.parallel.group_comm import CommLost
from weft.parallel.leases import FolderLeases
from weft.parallel.loopback import LinkFault, lose, repeat
from weft.parallel.mesh import Mesh
from weft.types import frames as f
from weft.types.grammar import Text
from weft.types.plan import AllocSlot, FreeSlot, Rebalance, StepPlan, TokenMasks


def make_rig(depth: int = 1, workers: int = 3, up: bool = True, **section: Any) -> GroupRig:
    rig = GroupRig(kv_config(copies=4), depth, **section)
    rig.join(Ranks(rig.kv, workers))
    if up:
        rig.ranks.up()
    return rig


def load(rig: GroupRig, many: int = 6) -> None:
    first = len(rig.outputs)
    for number in range(many):
        rig.submit(submit(first + number, [1 + number, 2, 3, 4, 5], max_tokens=6 + number))


def finish(rig: GroupRig) -> None:
    rig.drain()
    rig.ranks.engine.settle()
    rig.ranks.check_equal()
    rig.check_outputs()
    rig.check_idle()


# ---- joining


@pytest.mark.requirement("A17")
def test_a_group_of_one_rank_sends_nothing_and_works() -> None:
    rig = make_rig(workers=0)
    load(rig)
    finish(rig)
    rig.ranks.engine.close()
    assert rig.ranks.clock.now() == 0.0


def test_all_ranks_get_pools_that_each_has_room_for() -> None:
    kv = kv_config(copies=4, window=9)
    own = tuple(pool.num_blocks for pool in kv.pools)
    assert len(own) == 2
    less = (own[0] - 1, *own[1:])
    more, least = tuple(count + 5 for count in own), (less[0], *(count - 2 for count in own[1:]))
    ranks = Ranks(kv, transfers={1: less, 2: more, 3: (own[0], *least[1:])})
    ranks.up()
    found = {rank: tuple(p.num_blocks for p in runner.kv.pools) for rank, runner in ranks.runners.items()}
    assert found == dict.fromkeys(range(4), least)
    assert [p.cache for p in ranks.runners[2].kv.pools] == [p.cache for p in kv.pools]
    # One that is started anew has what the others have, whatever it has room for.
    ranks.transfers[2] = tuple(count - 3 for count in own)
    ranks.restart(2)
    with pytest.raises(GroupLost, match="restarted") as lost:
        ranks.engine.check()
    ranks.engine.recover(lost.value)
    assert ranks.engine.recovered(TIMEOUT)
    assert tuple(p.num_blocks for p in ranks.runners[2].kv.pools) == least


def test_ranks_with_other_caches_are_an_error() -> None:
    ranks = Ranks(kv_config(copies=4, window=9), transfers={2: (5,)})
    with pytest.raises(EngineDead, match="rank 2 has 1 KV cache groups"):
        ranks.up()


def test_a_rank_that_never_loads_is_named() -> None:
    rig = make_rig(up=False)
    rig.ranks.net.plant(LinkFault(peer=rig.ranks.peer(3), to_rank=False, at=1, deed=lose))
    with pytest.raises(GroupLost, match=r"rank 3 .* did not load within"):
        rig.ranks.up()


@pytest.mark.parametrize(
    ("error", "kind"), [(ConfigError("no room"), ConfigError), (EngineDead("no room"), GroupLost)]
)
def test_a_rank_that_cannot_load_its_configuration_is_a_config_error(
    error: WeftError, kind: type[WeftError]
) -> None:
    rig = make_rig(up=False)
    output = f.encode(f.RankFailed(rank=3, epoch=-1, step=-1, error=error.info()))
    rig.ranks.net.plant(LinkFault(peer=rig.ranks.peer(3), to_rank=False, at=1, deed=lambda data: [output]))
    with pytest.raises(kind, match=r"rank 3 of the group is lost: no room"):
        rig.ranks.up()


def test_a_read_that_is_interrupted_before_its_step_is_reported_can_be_called_again() -> None:
    rig = make_rig(workers=1)
    load(rig, 2)
    engine = rig.ranks.engine
    feed = engine._feed

    def interrupted(event: t.Event) -> None:
        if isinstance(event, t.OwnOutcome):
            engine._feed = feed  # type: ignore[method-assign]
            raise KeyboardInterrupt
        feed(event)

    rig.plan()
    engine._feed = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rig.commit()
    rig.commit()
    finish(rig)


@pytest.mark.requirement("A3", "A10")
@pytest.mark.parametrize("depth", [1, 2])
def test_all_ranks_carry_out_every_step(depth: int) -> None:
    rig = make_rig(depth)
    load(rig)
    finish(rig)
    steps = rig.ranks.engine.membership.steps.own
    assert steps > 5
    assert [worker.step for worker in rig.ranks.workers.values()] == [steps] * 3
    rig.ranks.engine.close()
    rig.ranks.settle()
    assert all(runner.closed for runner in rig.ranks.runners.values())


def test_a_plan_of_ops_alone_is_carried_out_by_both_ranks() -> None:
    """One frame, one digest, an outcome of every rank: among steps with rows, and with nothing else to do."""
    rig = make_rig(depth=2, workers=1)
    load(rig, 2)
    rig.step()
    rig.scheduler.enqueue(Rebalance())
    finish(rig)
    rig.scheduler.enqueue(Rebalance())
    finish(rig)
    assert [plan.rows for plan in rig.plans if Rebalance() in plan.ops][-1] == 0
    assert rig.ranks.workers[1].step == rig.ranks.engine.membership.steps.own == rig.plans[-1].step
    load(rig, 2)
    finish(rig)
    rig.ranks.engine.close()


def test_a_plan_of_ops_alone_counts_once_all_ranks_have_carried_it_out() -> None:
    """No collective of it keeps ranks together, and what it read may be given to a transfer from then on."""
    rig = make_rig(workers=2)
    load(rig, 2)
    finish(rig)
    rig.scheduler.enqueue(Rebalance())
    plan = rig.plan()
    assert plan is not None
    assert plan.rows == 0
    rig.commit()
    assert [worker.step for worker in rig.ranks.workers.values()] == [plan.step] * 2
    finish(rig)
    rig.ranks.engine.close()


@pytest.mark.requirement("A2")
def test_settings_that_differ_are_refused_by_name_with_both_values() -> None:
    ranks = Ranks(kv_config())
    ranks.kill(2)
    ranks.incarnations[2] += 1
    ranks.start(2, settings={**SETTINGS, "scheduler.max_num_seqs": "16"})
    with pytest.raises(ConfigError, match=r"max_num_seqs \(--max-num-seqs\).*engine has 8.*rank 2 has 16"):
        ranks.up()
    for more, match in (({}, "dtype"), ({**SETTINGS, "new": "1"}, "new.*no such setting.*rank 3 has 1")):
        ranks = Ranks(kv_config())
        ranks.kill(3)
        ranks.incarnations[3] += 1
        ranks.start(3, settings=more or {"scheduler.max_num_seqs": "8"})
        with pytest.raises(ConfigError, match=match):
            ranks.up()


@pytest.mark.requirement("A2")
def test_another_version_is_refused_and_both_are_named() -> None:
    ranks = Ranks(kv_config())
    ranks.kill(1)
    ranks.incarnations[1] += 1
    ranks.start(1, version=f.VERSION + 4)
    with pytest.raises(ConfigError, match=rf"version {f.VERSION + 4} .* version {f.VERSION}"):
        ranks.up()


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(kv_config())
    ranks.kill(3)
    with pytest.raises(GroupLost, match=r"rank 3 .* did not load") as lost:
        ranks.up()
    assert lost.value.rank == 3
    assert ranks.clock.now() <= 2 * TIMEOUT


@pytest.mark.requirement("F27")
def test_invalid_frames_and_unknown_peers_change_nothing() -> None:
    rig = make_rig()
    stranger = rig.ranks.net.rank(b"x")
    outcome = f.StepOutcome(rank=1, epoch=0, step=0, checksum=1)
    hello = f.RankHello(version=f.VERSION, release="1", rank=9, pid=1, epoch=-1, settings=SETTINGS)
    older = msgspec.structs.replace(hello, rank=1, version=f.VERSION + 1)
    other = msgspec.structs.replace(hello, rank=1, settings={**SETTINGS, "dtype": "float16"})
    frames = [outcome, f.Ready(rank=1), hello, older, other]
    for data in (b"", b"noise", *map(f.encode, frames)):
        stranger.send(data)
    load(rig)
    finish(rig)
    answers = [f.decode_to_rank(data) for data in iter(lambda: stranger.receive(0), None)]
    assert [type(answer) for answer in answers] == [f.RankRefused] * 5
    messages = [answer.error.message for answer in answers]  # type: ignore[union-attr]
    assert "rank 9 does not belong to this group" in messages[2]
    assert f"version {f.VERSION + 1}" in messages[3]
    assert "float16" in messages[4]


# ---- losing


def break_at(runner: TableRunner, step: int, error: Exception) -> None:
    """``runner`` raises ``error`` at ``step``, once."""
    launch, left = runner._launch, [error]

    def broken(plan: StepPlan) -> Any:
        if plan.step >= step and left:
            raise left.pop()
        return launch(plan)

    runner._launch = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("error", [EngineDead("planted"), ValueError("planted")])
def test_an_exception_in_any_rank_names_it_and_the_next_epoch_works(
    depth: int, rank: int, error: Exception
) -> None:
    rig = make_rig(depth)
    break_at(rig.ranks.runners[rank], 4, error)
    load(rig)
    with pytest.raises(GroupLost, match="planted") as lost:  # noqa: PT012
        rig.drain()
        rig.ranks.engine.settle()
    assert lost.value.rank == rank
    assert rig.ranks.clock.now() == 0.0, "it was waited for"
    with pytest.raises(EngineDead):
        rig.ranks.engine.forward(StepPlan(step=99))
    rig.recover()  # the very process goes on: weights and memory are kept
    assert [runner.resets for runner in rig.ranks.runners.values()] == [2, 2, 2, 2]
    finish(rig)


@pytest.mark.requirement("A5")
def test_a_failed_collective_is_blamed_on_the_silent_rank() -> None:
    rig = make_rig()
    for rank in (0, 1, 3):
        break_at(rig.ranks.runners[rank], 4, CommLost("a peer is gone"))
    load(rig)
    with pytest.raises(GroupLost, match="a peer is gone") as lost:  # noqa: PT012
        while rig.scheduler._step < 4:
            rig.step()
        rig.ranks.net.drive(rig.ranks.peer(2), lambda: False)  # stopped: connected, and does nothing
        rig.drain()
    assert lost.value.rank == 2
    assert rig.ranks.clock.now() <= TIMEOUT
    rig.recover(lost.value)
    finish(rig)


def test_a_collective_that_failed_on_all_ranks_blames_no_rank() -> None:
    rig = make_rig()
    for rank in range(4):
        break_at(rig.ranks.runners[rank], 4, CommLost("the link broke"))
    load(rig)
    with pytest.raises(GroupLost, match="the link broke") as lost:
        rig.drain()
    assert lost.value.rank is None
    rig.recover()
    finish(rig)


@pytest.mark.requirement("A5")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_rank_that_falls_silent_in_a_step_is_named_within_the_timeout(depth: int) -> None:
    rig = make_rig(depth)
    load(rig)
    for _ in range(3):
        rig.step()
    rig.ranks.net.drive(rig.ranks.peer(3), lambda: False)  # stopped: connected, and does nothing
    with pytest.raises(GroupLost, match="did not finish step") as lost:
        rig.drain()
    assert lost.value.rank == 3
    assert rig.ranks.clock.now() <= TIMEOUT
    rig.recover(lost.value)
    finish(rig)


def test_a_rank_that_is_gone_is_noticed_at_the_next_frame() -> None:
    rig = make_rig()
    load(rig)
    rig.step()
    rig.ranks.kill(1)
    with pytest.raises(GroupLost) as lost:
        rig.drain()
    assert lost.value.rank == 1
    rig.recover(lost.value)
    finish(rig)


def test_a_loss_found_by_the_watch_ends_the_epoch_at_the_next_step() -> None:
    rig = make_rig()
    load(rig)
    rig.step()
    rig.ranks.engine._feed(t.Gone(2, "it is not connected"))
    rig.ranks.engine._feed(t.Gone(2, "later"))
    with pytest.raises(GroupLost, match=r"rank 2 .* not connected") as lost:
        rig.step()
    rig.recover(lost.value)
    finish(rig)


def test_other_tokens_on_a_rank_are_noticed() -> None:
    rig = make_rig()
    runner = rig.ranks.runners[2]
    launch = runner._launch
    runner._launch = lambda plan: _other(launch(plan))  # type: ignore[method-assign]
    load(rig)
    with pytest.raises(GroupLost, match="sampled other tokens") as lost:
        rig.drain()
    assert lost.value.rank == 2


def _other(result: Any) -> Any:
    return replace(result, tokens=result.tokens + 1)


def test_a_rank_restarted_unnoticed_ends_the_epoch() -> None:
    rig = make_rig()
    load(rig)
    rig.step()
    rig.ranks.runners[1] = TableRunner(rig.kv, rig.ranks.commits)
    rig.ranks.incarnations[1] += 1
    rig.ranks.start(1)
    with pytest.raises(GroupLost, match=r"rank 1 .* restarted"):
        rig.drain()
    rig.recover()
    finish(rig)


def test_workers_that_lost_their_engine_work_for_the_next_one() -> None:
    rig = make_rig()
    load(rig)
    for _ in range(3):
        rig.step()
    rig.recover()  # so that there is a second epoch
    rig.step()
    workers = dict(rig.ranks.workers)
    rig.ranks.behead()
    rig.ranks.up()
    rig.resume()
    assert rig.ranks.workers == workers
    assert rig.ranks.epoch == 2, "no worker has seen it"
    finish(rig)
    assert [runner.resets for runner in rig.ranks.runners.values()] == [1, 3, 3, 3]


def test_a_worker_that_is_back_is_not_replaced() -> None:
    """Head or worker stood still for long, and both go on."""
    rig = make_rig()
    load(rig)
    rig.step()
    rig.ranks.kill(1)  # the connection alone
    rig.ranks.incarnations[1] += 1
    rig.ranks.start(1, worker=rig.ranks.workers[1])
    with pytest.raises(GroupLost, match="rank 1 had lost its engine process") as lost:
        rig.drain()
    assert lost.value.rank is None
    rig.recover()
    assert rig.ranks.epoch == 1
    finish(rig)


def test_a_hello_that_comes_twice_changes_nothing() -> None:
    rig = make_rig(up=False)
    ranks = rig.ranks
    for rank in ranks.incarnations:
        hello = f.RankHello(version=f.VERSION, release="test", rank=rank, pid=1, epoch=-1, settings=SETTINGS)
        ranks.net.put(ranks.peer(rank), False, f.encode(hello))
    ranks.up()
    load(rig)
    finish(rig)


def test_a_worker_that_its_engine_gives_up_ends() -> None:
    rig = make_rig()
    rig.ranks.engine._feed(t.Gone(2, "it is not connected"))
    rig.ranks.engine.recover(GroupLost(None, "it is known why"))
    with pytest.raises(GivenUp, match="replaced this process of the rank"):
        rig.ranks.engine.recovered(TIMEOUT)


class Books:
    """Ranks that somebody keeps, of whom nobody ends by himself."""

    outlive = True

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.killed: list[int] = []

    def spawn(self, rank: int) -> bool:
        if rank not in self.killed:
            return True
        self.ranks.restart(rank)
        return False

    def keeps(self, rank: int) -> bool:
        return True

    def dead(self) -> list[tuple[int, str]]:
        return []

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def close(self, seconds: float) -> None: ...


def test_a_worker_that_does_not_come_to_the_next_engine_is_started_again() -> None:
    rig = make_rig()
    load(rig)
    rig.step()
    del rig.ranks.workers[2]  # stopped: it says nothing
    rig.ranks.behead()
    books = rig.ranks.books = Books(rig.ranks)
    rig.ranks.up()  # with what two ranks hold, and the third has room for
    assert books.killed == [2]
    rig.resume()
    finish(rig)


# ---- frames that are not this step's


def test_a_frame_that_comes_twice_is_a_gap() -> None:
    rig = make_rig()
    rig.ranks.net.plant(LinkFault(rig.ranks.peer(1), to_rank=True, at=4, deed=repeat))
    load(rig)
    with pytest.raises(GroupLost, match=r"received step \d instead of step \d") as lost:
        rig.drain()
    assert lost.value.rank == 1


@pytest.mark.requirement("A4")
def test_frames_and_outcomes_of_an_epoch_that_ended_change_nothing() -> None:
    rig = make_rig()
    load(rig)
    rig.step()
    stale = f.StepFrame(step=1, epoch=0, plan=StepPlan(step=1), digest=0)
    break_at(rig.ranks.runners[3], 2, ValueError("planted"))
    with pytest.raises(GroupLost):
        rig.drain()
    rig.recover()
    peer = rig.ranks.peer(1)
    rig.ranks.net.put(peer, True, f.encode(stale))
    rig.ranks.net.put(peer, True, f.encode(f.Abort(epoch=0)))
    for old in (
        f.StepOutcome(rank=1, epoch=0, step=1, checksum=1),
        f.RankFailed(rank=1, epoch=0, step=1, error=EngineDead("old").info()),
        f.Formed(rank=1, epoch=0),
    ):
        rig.ranks.net.put(peer, False, f.encode(old))
    finish(rig)
    assert rig.ranks.epoch == 1


def constrained(rig: GroupRig, count: int = 3) -> None:
    """Some sequences with grammars, and one without."""
    for number in range(1, count + 1):
        rig.submit(submit(number, list(range(5, 12)), seed=number, max_tokens=9, grammar=Text("anything")))
    rig.submit(submit(99, [4, 5, 6], max_tokens=9))


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_reach_every_rank_in_a_frame_of_their_own(depth: int) -> None:
    rig = make_rig(depth=depth)
    constrained(rig)
    finish(rig)
    steps = [plan.step for plan in rig.plans if plan.constrained]
    assert steps
    assert sorted(rig.masks) == steps
    for runner in rig.ranks.runners.values():
        for plan in rig.plans:
            masks = runner.masks[plan.step]
            assert (masks is not None) == plan.constrained
            if masks is not None:
                assert masks.entries.tolist() == rig.masks[plan.step].entries.tolist()
                assert masks.words.tolist() == rig.masks[plan.step].words.tolist()
    assert any(runner.masks[steps[0]] is not rig.masks[steps[0]] for runner in rig.ranks.runners.values())


def test_a_plan_without_constrained_rows_sends_no_frame_more() -> None:
    rig = make_rig()
    rig.submit(submit(99, [4, 5, 6], max_tokens=9))
    peer = rig.ranks.peer(1)
    before = rig.ranks.net.sent(peer, True)
    finish(rig)
    assert rig.ranks.net.sent(peer, True) - before == len(rig.plans)


def test_masks_of_a_step_that_blocked_none_end_the_epoch() -> None:
    rig = make_rig()
    rig.ranks.net.put(rig.ranks.peer(1), True, f.encode(f.LateMasks(step=0, epoch=0, masks=TokenMasks())))
    load(rig)
    with pytest.raises(GroupLost, match="received masks of step 0, which needs none"):
        rig.drain()
    rig.recover()
    finish(rig)


def test_masks_of_an_epoch_that_has_ended_are_dropped() -> None:
    rig = make_rig()
    constrained(rig)
    rig.step()
    break_at(rig.ranks.runners[3], 2, ValueError("planted"))
    with pytest.raises(GroupLost):
        rig.drain()
    rig.recover()
    rig.ranks.net.put(rig.ranks.peer(1), True, f.encode(f.LateMasks(step=1, epoch=0, masks=TokenMasks())))
    finish(rig)
    assert rig.ranks.epoch == 1


def test_masks_that_are_lost_on_their_way_are_a_gap() -> None:
    """The rank without the masks refuses the next step. The group forms anew, and tokens are the same."""
    rig = make_rig()
    constrained(rig)
    rig.step()
    lost: list[bytes] = []

    def lose_masks(data: bytes) -> list[bytes]:
        if lost or not isinstance(f.decode_to_rank(data), f.LateMasks):
            return [data]
        lost.append(data)
        return []

    rig.ranks.net.plant(LinkFault(peer=rig.ranks.peer(2), to_rank=True, deed=lose_masks))
    with pytest.raises(GroupLost, match=r"rank 2 .* instead of the masks of step \d+") as caught:
        rig.drain()
    assert lost
    rig.recover(caught.value)
    finish(rig)


@pytest.mark.requirement("A7")
def test_a_plan_that_contradicts_the_table_is_never_sent() -> None:
    rig = make_rig()
    load(rig)
    rig.step()
    rig.ranks.settle()
    sent = rig.ranks.net.sent(rig.ranks.peer(1), True)
    with pytest.raises(EngineDead, match="slot that is free"):
        rig.ranks.engine.forward(StepPlan(step=1, ops=(FreeSlot(slot=11, gen=1),)))
    assert rig.ranks.net.sent(rig.ranks.peer(1), True) == sent


# ---- every way to start and end work


@pytest.mark.requirement("A3")
def test_finish_error_cancel_preemption_and_drain_all_travel_in_frames() -> None:
    rig = GroupRig(kv_config(blocks=12, slots=4), 2, max_num_seqs=4)
    rig.join(Ranks(rig.kv))
    rig.ranks.up()
    for number in range(8):
        seed = BAD_SEED if number == 3 else 1
        rig.submit(submit(number, [number + 1] * 9, max_tokens=14, seed=seed))
    for _ in range(9):
        rig.step()
        rig.ranks.check_equal()
    rig.finish(0)
    rig.finish(7)
    finish(rig)
    stats = rig.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.row_errors == 1
    assert {output.finish for output in rig.outputs.values()} == {"abort", "error", "length"}
    rig.submit(submit(50, [1, 2, 3], max_tokens=1))  # the plan that names the last sequences' ends
    finish(rig)


@pytest.mark.requirement("A8")
def test_sequences_stay_in_their_slots_whoever_finishes() -> None:
    rig = make_rig(max_num_seqs=4)
    load(rig, 4)
    where: dict[int, int] = {}
    while rig.scheduler.has_work():
        rig.step()
        for running in rig.scheduler._state.running:
            slot = running.state.slot  # type: ignore[union-attr]
            assert where.setdefault(running.id, slot) == slot, "a sequence moved"
    assert len(set(where.values())) == 4


@pytest.mark.requirement("A16")
def test_requests_beyond_the_slots_queue_and_all_finish() -> None:
    rig = make_rig(max_num_seqs=4)
    load(rig, 8)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting) == (4, 4)
    finish(rig)
    assert max(plan.rows for plan in rig.plans) <= 4


class StuckMesh(Mesh):
    """A mesh whose second epoch does not form before an abort."""

    stuck = threading.Event()
    freed = threading.Event()

    def connect(self, store: Any, epoch: int, timeout: float) -> None:
        if epoch:
            self.stuck.set()
            assert self.freed.wait(deadline(60.0))
            raise CommLost("it was aborted")

    def abort(self) -> None:
        if self.stuck.is_set():
            self.freed.set()


def test_a_group_can_be_closed_while_it_is_formed(tmp_path: Path) -> None:
    """With the threads that a server has; of a domain, which nobody else is in."""
    runner = TableRunner(kv_config(), {})
    stores, mesh = f"file://{tmp_path}", StuckMesh()
    membership = Membership(0, {}, settings=SETTINGS, stores=stores, meeting=Meeting(0, stores))
    links = GroupLinks(mesh=mesh, leases=FolderLeases(str(tmp_path), 0, 1))
    group = GroupExecutor(membership, lambda: Share(runner.kv, lambda kv: runner), links)
    group.recover(GroupLost(None, "planted"))
    until = time.monotonic() + deadline(60)
    while not mesh.stuck.is_set():
        assert time.monotonic() < until
        assert not group.recovered(0.05)
    group.close()
    assert mesh.freed.is_set()
    assert runner.closed
    assert runner.resets == 2
    with pytest.raises(EngineDead, match="closed"):
        group.recovered(0.0)


# ---- liveness


@pytest.mark.parametrize(
    "change", [{"incarnation": "b"}, {"given_up": True}], ids=lambda one: next(iter(one))
)
def test_a_rank_notices_that_it_must_join_again(change: dict[str, Any]) -> None:
    """Another head answers, or the head has given this rank up. Nobody is silent."""
    answers, gone = f.RankHeartbeat(rank=0, epoch=3, step=0, incarnation="a"), threading.Event()
    changed = threading.Event()
    heard: list[f.RankHeartbeat] = []

    def answer(heartbeat: f.RankHeartbeat) -> f.RankHeartbeat:
        heard.append(heartbeat)
        return replace(answers, **change) if changed.is_set() else answers

    folder = private_folder()
    engines = ZmqEngineChannel(f"ipc://{folder}/heartbeats")
    engine = EngineWatch(engines, 20.0, answer, lambda: None)
    rank = RankWatch(
        ZmqRank(engines.address, 1),
        20.0,
        lambda: f.RankHeartbeat(rank=1, epoch=3, step=0, incarnation="a"),
        lambda epoch: None,
        gone.set,
    )
    try:
        engine.start()
        rank.start()
        assert not gone.wait(0.7)
        changed.set()
        assert gone.wait(deadline(8.0))
        assert {heartbeat.rank for heartbeat in heard} == {1}
    finally:
        rank.close()
        engine.close()
        shutil.rmtree(folder)


@pytest.mark.requirement("A1")
def test_an_alloc_op_is_named_by_its_slot_alone() -> None:
    assert {"slot", "gen"} <= set(AllocSlot.__struct_fields__)
    assert not [name for name in AllocSlot.__struct_fields__ if "sequence" in name or "request" in name]
