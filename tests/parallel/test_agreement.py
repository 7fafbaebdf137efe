"""The agreement of replicas: the decision and the waves as pure functions, and votes over gloo."""

from __future__ import annotations

import random
import threading

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from tests.support.ranks import ends_when_aborted
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import CommLost
from weft.parallel.secret import derive
from weft.parallel.wakeup import LocalWakeups, WakeupSocket
from weft.scheduler.votes import FIELDS, Vote, Waves, decide, to_row

BUSY = Vote(unfinished=True, launch=True, rows=3, tokens=7, overlap=True, micro_batch_tokens=4, drafts=1)
IDLE = Vote()


def decided(*votes: Vote):  # type: ignore[no-untyped-def]
    return decide(np.stack([to_row(vote) for vote in votes]))


def changed(vote: Vote, **fields: object) -> Vote:
    return msgspec.structs.replace(vote, **fields)


def test_every_field_is_an_int64() -> None:
    row = to_row(changed(BUSY, wave=2**62))
    assert (row.dtype, len(row)) == (np.int64, len(FIELDS))
    assert row[FIELDS.index("wave")] == 2**62


@pytest.mark.requirement("C2")
def test_an_idle_replica_votes_for_what_the_others_need() -> None:
    made = decided(BUSY, IDLE, changed(BUSY, tokens=2))
    assert (made.launch, made.sleep) == (True, False)
    agreed = made.agreed
    assert (agreed.padded_tokens, agreed.tokens, agreed.drafts) == (4, (7, 0, 2), 1)
    assert agreed.overlap


@pytest.mark.requirement("C2")
def test_one_plan_that_does_not_split_decides_for_all() -> None:
    """The decision is the minimum of the votes. Votes of idle replicas do not count."""
    assert decided(BUSY, BUSY, IDLE).agreed.overlap
    assert not decided(BUSY, changed(BUSY, overlap=False)).agreed.overlap
    assert decided(BUSY, changed(BUSY, micro_batch_tokens=5), IDLE).agreed.padded_tokens == 8
    assert decided(BUSY, changed(BUSY, overlap=False, micro_batch_tokens=0)).agreed.padded_tokens == 8
    assert decided(BUSY, changed(IDLE, overlap=False)).agreed.overlap
    assert not decided(IDLE, IDLE).agreed.overlap


def test_replicas_with_other_weights_run_no_step() -> None:
    made = decided(BUSY, changed(IDLE, weights=1))
    assert (made.launch, made.sleep, made.held, made.broken) == (False, False, True, True)
    made = decided(Vote(unfinished=True), changed(IDLE, weights=1))
    assert (made.launch, made.sleep, made.held, made.broken) == (False, False, True, False)
    made = decided(changed(BUSY, weights=1), changed(IDLE, weights=1))
    assert (made.launch, made.held) == (True, False)


def test_ops_alone_are_a_step_for_all() -> None:
    made = decided(IDLE, changed(IDLE, unfinished=True, launch=True), IDLE)
    assert (made.launch, made.sleep, made.agreed.tokens) == (True, False, (0, 0, 0))
    assert not made.agreed.overlap


def test_replicas_step_with_a_plan_and_sleep_without_work_only() -> None:
    waits = changed(IDLE, unfinished=True)
    assert (decided(IDLE, IDLE).launch, decided(IDLE, IDLE).sleep) == (False, True)
    assert (decided(waits, IDLE).launch, decided(waits, IDLE).sleep) == (False, False)
    assert decided(IDLE, waits, BUSY).launch


@pytest.mark.parametrize("name", ["version", "epoch", "step", "wave"])
def test_replicas_that_are_not_at_the_same_step_stop_loudly(name: str) -> None:
    with pytest.raises(EngineDead, match=f"{name} {getattr(BUSY, name)} in replica 0, 9 in replica 2"):
        decided(BUSY, BUSY, changed(IDLE, **{name: 9}))


def test_a_call_during_the_last_decision_of_a_wave_is_not_lost() -> None:
    slow, fast = Waves(), Waves()
    assert fast.begin() == 1
    assert fast.begin() is None
    slow.wake(1)
    assert slow.awake
    fast.sleep()
    assert not fast.awake
    assert fast.begin() == 2  # a request after the decision that the slow replica has yet to read
    slow.wake(2)
    assert (slow.awake, slow.wave) == (True, 1)
    slow.sleep()
    assert (slow.awake, slow.wave) == (True, 2)
    slow.wake(1)
    slow.wake(2)
    slow.sleep()
    assert not slow.awake
    with pytest.raises(EngineDead, match="wave 4"):
        slow.wake(4)


@pytest.mark.requirement("C1")
@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_stranded(seed: int) -> None:
    """Replicas as state machines with calls of random duration. A vote waits for all replicas."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4])
    waves = [Waves() for _ in range(count)]
    mail: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(count)]  # [from][to], in order
    work = [0] * count
    voting: dict[int, Vote] = {}
    left, done, idle_turns = 200, 0, 0
    while left or any(work) or voting or any(w.awake for w in waves):
        idle_turns += 1
        assert idle_turns < 100_000, "the domain hangs"
        one = rng.randrange(count)
        if left and rng.random() < 0.1:
            work[one] += 1
            left -= 1
        sender = rng.randrange(count)
        if mail[sender][one] and rng.random() < 0.3 and one not in voting:
            waves[one].wake(mail[sender][one].pop(0))
        if one not in voting and (waves[one].awake or work[one]):
            called = waves[one].begin()
            if called is not None:
                for other in range(count):
                    if other != one:
                        mail[one][other].append(called)
            rows = min(work[one], 1)
            voting[one] = Vote(
                wave=waves[one].wave, unfinished=bool(work[one]), launch=rows > 0, rows=rows, tokens=rows
            )
        if len(voting) == count:
            decision = decided(*(voting[n] for n in range(count)))
            for number in rng.sample(range(count), count):
                if voting[number].rows:
                    work[number] -= 1
                    done += 1
                if decision.sleep:
                    waves[number].sleep()
            voting.clear()
    assert done == 200


def in_threads(count: int, work) -> list[object]:  # type: ignore[no-untyped-def]
    made: list[object] = [None] * count

    def run(number: int) -> None:
        try:
            made[number] = work(number)
        except Exception as error:
            made[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(60))
        assert not thread.is_alive(), "a replica hangs"
    return made


@pytest.mark.requirement("A5", "C2")
@pytest.mark.parametrize("kind", ["local", "ipc", "tcp"])
def test_votes_over_gloo(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    store, local = dist.HashStore(), LocalWakeups(3)
    addresses = [f"ipc://{tmp_path}/b{n}" if kind == "ipc" else "tcp://127.0.0.1:*" for n in range(3)]
    keys = derive(b"0123456789abcdef") if kind == "tcp" else None
    listening = [""] * 3
    done = threading.Barrier(3)

    def replica(number: int) -> list[int]:
        wakeup = local.of(number) if kind == "local" else WakeupSocket(addresses[number], number, keys)
        group = AgreementGroup(number, 3, wakeup)
        listening[number] = wakeup.address if isinstance(wakeup, WakeupSocket) else ""
        done.wait(deadline(60))
        group.connect(store, 0, 30, listening)
        seen = []
        work = 5 if number == 1 else 0
        try:
            while len(seen) < 4:
                if not (work or group.awake):
                    continue
                rows = int(work > 0)
                made = group.agree(Vote(unfinished=work > 0, launch=rows > 0, rows=rows, tokens=rows * work))
                work -= rows
                if made.sleep:
                    seen.append(made.agreed.wave)
                    work = 2 if number == made.agreed.wave % 3 else 0
            done.wait(deadline(60))  # all replicas stay until the last has read
            return seen
        finally:
            group.close()

    assert in_threads(3, replica) == [[1, 2, 3, 4]] * 3


def test_updates_reach_the_other_replicas_in_the_step_of_a_launch() -> None:
    store, wakeup = dist.HashStore(), LocalWakeups(3)
    sent = [b"one", b"", b"others have \0"]

    def replica(number: int) -> list[dict[int, bytes]]:
        group = AgreementGroup(number, 3, wakeup.of(number))
        group.connect(store, 0, 30)
        made = [group.agree(vote, sent[number]) for vote in (BUSY, BUSY)]
        made.append(group.agree(Vote(unfinished=True), sent[number]))  # no launch: the updates wait
        made.append(group.agree(BUSY))
        return [one.others for one in made]

    for number, made in enumerate(in_threads(3, replica)):
        due = {other: one for other, one in enumerate(sent) if one and other != number}
        assert made == [due, due, {}, {}]


def test_bells_follow_who_moves() -> None:
    """A restarted engine listens at a new address. Nothing is sent to the old address."""
    sockets = [WakeupSocket("tcp://127.0.0.1:*", number) for number in range(2)]
    sockets[0].reach([wakeup.address for wakeup in sockets])
    sockets[0].wake(0, 1)
    assert sockets[1].sockets[0].poll(10_000)
    assert sockets[1].received() == [(0, 1)]
    sockets.append(WakeupSocket("tcp://127.0.0.1:*", 1))
    sockets[0].reach([sockets[0].address, sockets[2].address])
    sockets[0].wake(1, 1)
    assert sockets[2].sockets[0].poll(10_000)
    assert sockets[2].received() == [(1, 1)]
    assert sockets[1].received() == []
    for wakeup in sockets:
        wakeup.close()


def test_an_engine_that_waits_for_others_to_come_stops_when_it_is_aborted() -> None:
    store, group = dist.HashStore(), AgreementGroup(0, 2, LocalWakeups(2).of(0))
    said = ends_when_aborted(lambda: group.connect(store, 0, deadline(60)), group.abort)
    assert said == "the engines group could not form: aborted before all ranks had connected"
    group.close()


@pytest.mark.slow
@pytest.mark.requirement("C13")
def test_a_missing_replica_is_awaited_with_a_limit() -> None:
    store, wakeup = dist.HashStore(), LocalWakeups(2)

    def replica(number: int) -> None:
        group = AgreementGroup(number, 2, wakeup.of(number))
        group.connect(store, 0, 2)
        group.agree(BUSY)
        if number == 0:
            group.agree(BUSY)

    assert isinstance(in_threads(2, replica)[0], CommLost)


def test_another_epoch_begins_asleep_and_ignores_calls_of_the_last() -> None:
    wakeup = LocalWakeups(2)
    stores = [dist.HashStore(), dist.HashStore()]
    both = threading.Barrier(2)

    def replica(number: int) -> int:
        group = AgreementGroup(number, 2, wakeup.of(number))
        group.connect(stores[0], 0, 30)
        group.agree(BUSY)
        both.wait(deadline(60))
        if number == 0:
            wakeup.of(0).wake(0, 2)  # of an epoch that is over on arrival
            wakeup.of(0).wake(1, 1)
        group.connect(stores[1], 1, 30)
        while not group.awake and number == 1:
            pass
        made = group.agree(IDLE)
        return made.agreed.wave

    assert in_threads(2, replica) == [1, 1]
