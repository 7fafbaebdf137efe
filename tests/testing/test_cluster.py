"""A whole cluster on virtual time: invariants over many schedules, and detection of planted bugs.

``make simulate`` runs 10,000 schedules; this module runs a part.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testing.cluster import __main__ as explorer
from testing.cluster.check import Violation, output, token, token_key
from testing.cluster.cluster import simulate_cluster
from testing.cluster.explore import CHUNK, Exploration, explore, run_schedules
from testing.cluster.faults import KINDS, OF_MEMBERS
from testing.cluster.transfers.wires import SimTransport
from weft.common.errors import EndedElsewhere, EngineDead
from weft.control.directory.leases import Leases
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.control.fleet.fleet import _HANDLERS, Fleet
from weft.control.fleet.instance_table import InstanceTable
from weft.control.fleet.instances import Instance, InstanceState
from weft.control.fleet.ledger import LedgerEntry
from weft.control.processes import scaling
from weft.disagg.protocol.sender import TransferSender
from weft.disagg.protocol.spans import SpanPart, SpanPlan
from weft.disagg.protocol.transfer_table import Transfer, TransferTable
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.front import lifecycle
from weft.group.membership import Membership
from weft.group.roster import Roster
from weft.group.steps import Steps
from weft.kv.pool import BlockPool
from weft.types import messages as m
from weft.types import transfer as r
from weft.types.sampling import TokenParams
from weft.types.transfer import Peer, TransferKey

SCHEDULES = 360
"""In the default tests."""
BUDGET = 10_000
"""By default, of ``python -m testing.cluster``."""
SEEN = (94630, 3323, 5679, 4530, 9447, 10938)
"""Seeds that showed bugs, now fixed: a receiver returned a sequence after its sender had handed off and
ended; a receiver refused while its sender took one prompt alone; the check counted one loss twice, and once
more in another order; a decode group without a tower got images after the last encode group had left;
a prefill group left and ended while its messages were cut, and the decode group waited without end."""
FOUND_WITHIN = 1000
"""Schedules in which each planted bug is found."""
FOUND_BY = {
    "finish_before_all_ranks_reported": 20,
    "settled_by_one_report": 66,
    "a_given_up_rank_is_heard": 802,
    "blocks_on_hold_are_given_away": 61,
    "resurrected": 0,
    "one_front_says_shutdown": 124,
    "a_loss_counted_twice": 0,
    "a_retry_meets_its_earlier_attempt": 14,
    "a_new_connection_is_taken_for_the_old_one": 24,
    "no_hello_over_a_new_connection": 24,
    "an_engine_process_keeps_what_a_lost_connection_asked": 262,
    "an_end_at_the_other_end_is_an_eviction": 78,
    "an_engine_process_that_drains_is_gone": 34,
    "a_role_is_given_up_at_once": 293,
    "who_is_revived_is_not_heard": 73,
    "free_before_a_writer_ended": 33,
    "the_peer_is_not_told": 22,
    "reuse_before_the_fence": 349,
    "a_lease_that_ends_is_a_loss": 8,
    "who_leaves_gets_work": 15,
    "who_leaves_is_forgotten_at_once": 8,
    "the_record_that_was_read_last_counts": 171,
    "a_known_process_is_kept": 12,
    "room_counts_who_leaves": 8,
    "the_last_group_of_a_role_leaves": 4,
    "who_leaves_counts_as_one_that_serves": 50,
}
"""Bug -> the schedule that detected the bug, which runs first."""


def log_of(seed: int) -> list[str]:
    lines: list[str] = []
    simulate_cluster(seed, lambda now, line: lines.append(f"{now!r} {line}"))
    return lines


@pytest.fixture(scope="module")
def explored() -> Exploration:
    return explore(SCHEDULES)


@pytest.mark.requirement("F48")
def test_invariants_hold(explored: Exploration) -> None:
    assert explored.failures == []
    assert explored.schedules == SCHEDULES


@pytest.mark.requirement("F48")
def test_every_kind_of_fault_is_seen_to_happen(explored: Exploration) -> None:
    assert {kind for kind in (*KINDS, *OF_MEMBERS) if not explored.faults[kind]} == set()


@pytest.mark.parametrize(
    "what",
    [
        "abandoned",
        "blocks pinned over a loss",
        "ended by the text side",
        "ends that the other instance reported first",
        "epochs lost",
        "fail-overs",
        "failed: overloaded",
        "fronts failed",
        "fronts that joined later",
        "half-open instances",
        "clusters of two roles",
        "clusters that encode images apart",
        "embeddings failed",
        "embeddings received",
        "groups of several ranks",
        "images encoded apart",
        "images found where they are encoded",
        "late events",
        "messages of a link given up",
        "pauses",
        "connections made again",
        "sequences given back",
        "sequences whose images were late",
        "transfers done",
        "transfers failed",
        "requests done",
        "resumed",
        "retired",
        "revived",
        "retried elsewhere",
        "steps lost with their ranks",
        "upgraded",
    ],
)
def test_schedules_go_through_all_of_it(explored: Exploration, what: str) -> None:
    assert explored.counts[what] > 0


@pytest.mark.requirement("F48")
def test_a_third_of_the_schedules_have_groups_of_several_ranks(explored: Exploration) -> None:
    assert explored.counts["groups of several ranks"] > SCHEDULES / 3


@pytest.mark.parametrize("seed", SEEN)
def test_invariants_hold_where_they_once_did_not(seed: int) -> None:
    simulate_cluster(seed)


@pytest.mark.requirement("F48")
@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_invariants_hold_over_the_whole_budget() -> None:
    assert explore(BUDGET, jobs=2).failures == []


@pytest.mark.requirement("F48")
def test_a_schedule_is_a_function_of_its_seed() -> None:
    for seed in range(10):
        assert log_of(seed) == log_of(seed)
    assert log_of(1) != log_of(2)


def test_a_schedule_is_the_same_in_every_process() -> None:
    """The order of sets of strings must not matter."""
    code = (
        "import hashlib, sys; from tests.testing.test_cluster import log_of;"
        "print(hashlib.sha256(repr([log_of(seed) for seed in range(5)]).encode()).hexdigest())"
    )
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", code]
        root = Path(__file__).parents[2]
        ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        outputs.add(ran.stdout)
    assert len(outputs) == 1


@pytest.mark.slow
def test_processes_share_the_work() -> None:
    assert CHUNK < 60
    one, two = explore(60, seed=7), explore(60, seed=7, jobs=2)
    assert (one.counts, one.faults, one.events) == (two.counts, two.faults, two.events)


def test_the_output_that_is_due() -> None:
    key = token_key(m.ids_to_bytes([1, 2]), 3, 0)
    tokens, finish = output(key, 2, TokenParams(max_tokens=5), 24)
    assert (tokens, finish) == ([token(key, position) for position in range(2, 7)], "length")
    tokens, finish = output(key, 2, TokenParams(max_tokens=5, stop_ids=(tokens[2],)), 24)
    assert finish == "stop"
    assert len(output(key, 20, TokenParams(max_tokens=50), 24)[0]) == 4


# -- planted bugs


def finish_before_all_ranks_reported(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a step counts, and ends sequences, after the end on the engine's rank."""
    patch.setattr(Membership, "counts", lambda self, step: self.steps.own >= step)


def settled_by_one_report(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a step is settled after the report of any other rank."""
    take = Steps.take

    def take_for_all(self: Steps, rank: int, step: int, checksum: int, now: float) -> object:
        if rank != self._rank:
            for other in self._others:
                take(self, other, step, checksum, now)
        return take(self, rank, step, checksum, now)

    patch.setattr(Steps, "take", take_for_all)


def a_given_up_rank_is_heard(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: messages of a replaced process count for its rank."""
    patch.setattr(Roster, "of", lambda self, peer, rank: self.members.get(rank))


def blocks_on_hold_are_given_away(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: after a loss of the group all blocks are free, even with outside writers."""

    reset = BlockPool.reset

    def forget_holds(self: BlockPool) -> None:
        reset(self)
        self._references = [0] * (self.num_blocks + 1)
        self._free = list(range(self.num_blocks, 0, -1))

    patch.setattr(BlockPool, "reset", forget_holds)


def fleet_variant(patch: pytest.MonkeyPatch, change: Callable[[Fleet, e.Event], e.Event]) -> None:
    """Replace ``Fleet.on`` by a version with ``change``."""
    on = Fleet.on
    patch.setattr(Fleet, "on", lambda self, event, now: on(self, change(self, event), now))


def resurrected(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: any message of a failed engine brings the engine back."""

    def change(fleet: Fleet, event: e.Event) -> e.Event:
        if (
            isinstance(event, e.Received)
            and fleet.table.instances[event.instance].state is InstanceState.DOWN
        ):
            fleet.table.instances[event.instance].state = InstanceState.UP
        return event

    fleet_variant(patch, change)


def one_front_says_shutdown(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: an ending API server shuts down engines in use by others."""

    def change(fleet: Fleet, event: e.Event) -> e.Event:
        return e.Closing(shutdown=True) if isinstance(event, e.Closing) else event

    fleet_variant(patch, change)


def a_loss_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the end of a process and the break of its connection are two losses."""

    def change(fleet: Fleet, event: e.Event) -> e.Event:
        if isinstance(event, e.Lost):
            instance = fleet.table.instances[event.instance]
            if instance.state is InstanceState.DOWN and instance.link == event.link:
                instance.state = InstanceState.STARTING
        return event

    fleet_variant(patch, change)


def a_retry_meets_its_earlier_attempt(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: all events count for the present attempt."""

    def change(fleet: Fleet, event: e.Event) -> e.Event:
        if not isinstance(event, e.Received) or not isinstance(event.message, m.Tokens):
            return event
        told = []
        for token_event in event.message.events:
            entry = fleet.entries.get(token_event.sequence)
            attempt = token_event.attempt if entry is None else entry.attempt
            told.append(msgspec.structs.replace(token_event, attempt=attempt))
        return event._replace(message=msgspec.structs.replace(event.message, events=tuple(told)))

    fleet_variant(patch, change)


def a_new_connection_is_taken_for_the_old_one(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: an API server sends Hello again, and waits for tokens of the lost connection."""

    def greet_alone(self: Fleet, instance: Instance) -> None:
        self.table.listen(instance, self._now)
        self._send(instance, m.Hello(versions=(m.OLDEST, m.VERSION), front=self._front))

    patch.setattr(Fleet, "_greet", greet_alone)


def no_hello_over_a_new_connection(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: an API server sends sequences again over a connection that the engine does not know."""
    greet = Fleet._greet

    def silent(self: Fleet, instance: Instance) -> None:
        greet(self, instance)
        if instance.alive:
            self._actions[:] = [action for action in self._actions if not _is_hello(action)]

    patch.setattr(Fleet, "_greet", silent)


def _is_hello(action: e.Action) -> bool:
    return isinstance(action, e.Send) and isinstance(action.message, m.Hello)


def an_engine_process_keeps_what_a_lost_connection_asked(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a Hello of the same API server over another connection ends nothing."""
    patch.setattr(EngineProtocol, "_named", lambda self, connection, name: False)


def an_end_at_the_other_end_is_an_eviction(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a sequence is sent again after the decode instance drops it, although the prefill
    instance reports its end."""
    give_back = Fleet._take_back

    def change(self: Fleet, instance: Instance, entry: LedgerEntry, why: str) -> None:
        give_back(self, instance, entry, "" if why == EndedElsewhere.code else why)

    patch.setattr(Fleet, "_take_back", change)


def an_engine_process_that_drains_is_gone(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the waiting time of requests starts at the beginning of a planned restart."""
    serving = InstanceTable._serving
    patch.setattr(InstanceTable, "_serving", lambda self, draining=False: serving(self))


def a_role_is_given_up_at_once(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: requests wait as briefly for a restarting group as for a retired group."""
    patch.setattr(InstanceTable, "awaited", False)


def who_is_revived_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a retired group stays retired after its owner starts it again."""
    expect = InstanceTable.expect

    def change(self: InstanceTable, instance: Instance, *rest: Any) -> None:
        retired = instance.state is InstanceState.RETIRED
        expect(self, instance, *rest)
        if retired:
            instance.state = InstanceState.RETIRED

    patch.setattr(InstanceTable, "expect", change)


def free_before_a_writer_ended(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a transfer's memory is freed before all ranks have reported their stop."""
    settle = TransferTable._settle

    def at_once(self: TransferTable, transfer: Transfer, now: float) -> object:
        transfer.running.clear()
        return settle(self, transfer, now)

    patch.setattr(TransferTable, "_settle", at_once)


def the_peer_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the Fence of a failed transfer is not sent."""
    send = EngineTransfers._send

    def all_but_fences(self: EngineTransfers, peer: Peer, message: r.TransferMessage) -> None:
        if not isinstance(message, r.Fence):
            send(self, peer, message)

    patch.setattr(EngineTransfers, "_send", all_but_fences)


def reuse_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a sender does not wait for readers of its memory."""
    patch.setattr(TransferSender, "_needs_peer", lambda self, transfer: False)


def a_span_off_by_one_block(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the last run of a sequence is read one block too early."""
    entries = SpanPlan.entries

    def shifted(self: SpanPlan, kind: int, numbers: list[int], begin: int, end: int) -> list[SpanPart]:
        block = self._tensors[0][kind][0].block_stride
        parts = entries(self, kind, numbers, begin, end)
        for part in parts:
            if len(part.spans) and part.spans[-1, 0] >= block:
                part.spans[-1, 0] -= block
        return parts

    patch.setattr(SpanPlan, "entries", shifted)


def a_digest_of_the_wrong_attempt(patch: pytest.MonkeyPatch) -> None:
    """A sender makes digests as if every attempt were the first one."""
    digest = SimTransport.digest

    def of_the_first(self: SimTransport, key: TransferKey, peer: str, parts: list[SpanPart]) -> object:
        return digest(self, key._replace(attempt=0), peer, parts)

    patch.setattr(SimTransport, "digest", of_the_first)


def who_leaves_gets_work(patch: pytest.MonkeyPatch) -> None:
    """An instance that leaves the server does not drain."""

    def leave(self: InstanceTable, instance: Instance, now: float) -> None:
        instance.leaving = True
        self.leaving.add(instance.name)

    patch.setattr(InstanceTable, "leave", leave)


def who_leaves_is_forgotten_at_once(patch: pytest.MonkeyPatch) -> None:
    """An instance that leaves is forgotten before its sequences have ended."""

    def departed(self: InstanceTable, now: float) -> list[Instance]:
        gone = [self.instances.pop(name) for name in sorted(self.leaving)]
        self.leaving.clear()
        return gone

    patch.setattr(InstanceTable, "departed", departed)


def a_lease_that_ends_is_a_loss(patch: pytest.MonkeyPatch) -> None:
    """An engine whose lease ends is taken for dead, although the link to it lives."""

    def left(self: Fleet, event: e.Left) -> None:
        if (instance := self.table.instances.get(event.instance)) is not None:
            self.table.leave(instance, self._now)
            self._lose(instance, EngineDead("the lease has ended"))

    patch.setitem(_HANDLERS, e.Left, left)


def the_record_that_was_read_last_counts(patch: pytest.MonkeyPatch) -> None:
    """Two API servers adopt different incarnations of one engine, because each uses the last record."""
    patch.setattr(Leases, "_replaces", lambda self, record, seen, now: True)


def a_known_process_is_kept(patch: pytest.MonkeyPatch) -> None:
    """An API server keeps a living process although another process has the name now."""

    def expected(self: Fleet, event: e.Expected) -> None:
        if not self.table.instances[event.instance].alive:
            Fleet._expected(self, event)

    patch.setitem(_HANDLERS, e.Expected, expected)


def room_counts_who_leaves(patch: pytest.MonkeyPatch) -> None:
    """The limit on requests counts groups that drain and leave."""

    def places(instances: Iterable[Instance]) -> int:
        return sum(not (one.fresh or one.state is InstanceState.RETIRED) for one in instances)

    patch.setattr(lifecycle, "places", places)


def the_last_group_of_a_role_leaves(patch: pytest.MonkeyPatch) -> None:
    """An operator's order is carried out although no group is left that does the work."""
    patch.setattr(scaling, "_check_roles", lambda *rest: None)


def who_leaves_counts_as_one_that_serves(patch: pytest.MonkeyPatch) -> None:
    """A second removal is allowed, because the group of the first one still drains."""
    check = scaling._check_roles
    patch.setattr(
        scaling,
        "_check_roles",
        lambda names, members, absent, serves: check(names, members, frozenset(), serves),
    )


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.requirement("F48")
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (finish_before_all_ranks_reported, "counted before all ranks reported"),
        (settled_by_one_report, "counted before all ranks reported"),
        (a_given_up_rank_is_heard, "heard rank .*, which it had given up"),
        (blocks_on_hold_are_given_away, "which are pinned|a block without references was released"),
        (resurrected, "given up|link"),
        (one_front_says_shutdown, "was shut down while"),
        (a_loss_counted_twice, "given up twice|counted"),
        (a_retry_meets_its_earlier_attempt, "sequence .* (after|tokens?)"),
        (a_new_connection_is_taken_for_the_old_one, "not at an end|is at"),
        (no_hello_over_a_new_connection, "not at an end|nothing had happened to it"),
        (an_engine_process_keeps_what_a_lost_connection_asked, "another API server uses"),
        (an_end_at_the_other_end_is_an_eviction, "was sent again, and had ended"),
        (an_engine_process_that_drains_is_gone, "after .* seconds"),
        (a_role_is_given_up_at_once, "after .* seconds"),
        (who_is_revived_is_not_heard, "revived"),
        (free_before_a_writer_ended, "a write of .* lands in blocks"),
        (the_peer_is_not_told, "not at an end|nobody had changed"),
        (reuse_before_the_fence, "which has ended there|nobody had changed"),
        (a_span_off_by_one_block, "reads what is not its sequence's own|nobody had changed"),
        (a_digest_of_the_wrong_attempt, "digests of .* were wrong, and nobody had changed"),
        (who_leaves_gets_work, "was sent to one that has left"),
        (who_leaves_is_forgotten_at_once, "and sequences .* are there|'head"),
        (a_lease_that_ends_is_a_loss, "up, and nothing had happened to it"),
        (the_record_that_was_read_last_counts, "API servers use different processes of one engine"),
        (a_known_process_is_kept, "has lost .*, and .* serves|use different processes"),
        (room_counts_who_leaves, "room for requests of"),
        (the_last_group_of_a_role_leaves, "leave the server, and no group does the work"),
        (who_leaves_counts_as_one_that_serves, "leave the server, and no group does the work"),
    ],
)
def test_a_planted_bug_is_found(plant: Plant, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found_within(plant, says, FOUND_BY.get(plant.__name__, 0), monkeypatch)


def found_within(plant: Plant, says: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return True if schedule ``first``, or another one within the budget, detects the bug. Without the
    bug all pass."""
    plant(monkeypatch)
    chunks = [range(first, first + 1), *(range(at, at + 10) for at in range(0, FOUND_WITHIN, 10))]
    failures = next((found.failures for found in map(run_schedules, chunks) if found.failures), [])
    assert failures, f"not found within {FOUND_WITHIN} schedules"
    seed, what = failures[0]
    print(f"{plant.__name__}: found by schedule {seed + 1} of {BUDGET}: {what}")
    assert re.search(says, what)
    with pytest.raises(Violation):
        simulate_cluster(seed)
    monkeypatch.undo()
    simulate_cluster(seed)


# -- the commands


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        explorer.main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_explore_prints_what_schedules_went_through(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "--schedules", "30", "--seed", "100")
    assert (status, err) == (0, "")
    assert out.startswith("30 schedules, ")
    assert all(f"    {kind} " in out for kind in KINDS)
    assert out.endswith("all invariants held\n")


@pytest.mark.slow
@pytest.mark.requirement("F48")
def test_a_failure_prints_its_seed_and_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_front_says_shutdown(monkeypatch)
    status, out, _ = ran(capsys, "--schedules", "150")
    assert status == 1
    command = next(line for line in out.splitlines() if "python -m testing.cluster replay" in line)
    status, out, _ = ran(capsys, "replay", command.split()[-1])
    assert status == 1
    assert "fault ..   front closed" in out
    assert "was shut down while" in out.splitlines()[-1]


def test_replay_shows_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran(capsys, "replay", "3")
    assert status == 0
    assert "front0 -> head0#0  Hello(" in out
    assert "client => front" in out
    assert out.splitlines()[-1].startswith("all invariants held over ")


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ran(capsys, "--requests", "3")
    assert (status, out) == (2, "")
    assert "--requests" in err.splitlines()[-1]
