"""Images from encode groups: when sequences wait, which blocks are reserved, which sequence gives up
blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.scheduler.fake_runner import VOCAB, FakeRunner, kv_config, submit
from tests.scheduler.image_world import DIMS, MINE, Stream, Transfer, World, limits
from tests.scheduler.test_media import ask, image
from weft.common.errors import InvalidRequest
from weft.config.sections.all import SchedulerSection, TransferSection
from weft.scheduler import Scheduler
from weft.scheduler.sequence import Blocked, BlockedOnFirstSample, Running, Waiting
from weft.types import transfer as r
from weft.types.media_item import without_pixels
from weft.types.plan import Encode, GatherMedia
from weft.types.transfer import Peer, TransferKey, TransferParameters

SECTION = ("max_num_seqs", "long_prefill_token_threshold")


def world_of(depth: int = 1, **facts: object) -> World:
    """Return a world with transfers that the test moves by hand."""
    section = {name: facts.pop(name) for name in list(facts) if name in SECTION}
    world = World(kv_config(media=limits(**facts)), depth, **section)
    world.by_hand = True
    return world


def transfers_of(world: World, stream: Stream) -> list[Transfer]:
    return [
        transfer for key, transfer in sorted(world.transfers.items()) if key.transfer // 16 == stream.sequence
    ]


def state_of(world: World, stream: Stream) -> object:
    return world.scheduler._state.live[stream.sequence].state


def go(world: World, turns: int = 40) -> None:
    for _ in range(turns):
        world.turn()


def bring(world: World, transfer: Transfer) -> None:
    world.offer(transfer)
    assert transfer.state == "bound"
    world.land(transfer)


@pytest.mark.requirement("D15", "D16", "D17")
def test_a_sequence_waits_for_all_its_images_and_pins_nothing_meanwhile() -> None:
    """The images arrive in any order, in several transfers."""
    world = world_of()
    stream = world.ask(ask(0, [3], 4, [5], 1, [6]))
    one, two = transfers_of(world, stream)
    go(world)
    assert isinstance(state_of(world, stream), Blocked)
    assert not world.scheduler.has_work()
    assert world.scheduler.blocked
    stats = world.scheduler.stats()
    assert stats.free_blocks == (64,)
    assert stats.embedding_transfers is not None
    assert (stats.embedding_transfers.blocked, stats.embedding_transfers.fetching) == (1, 0)
    bring(world, two)
    go(world)
    assert isinstance(state_of(world, stream), Blocked)
    bring(world, one)
    assert isinstance(state_of(world, stream), Waiting)
    world.run()
    world.check_end()
    assert stream.attempts == 1
    assert not [op for plan in world.plans for op in plan.ops if isinstance(op, Encode)]


@pytest.mark.requirement("D16")
def test_blocks_are_there_for_all_images_of_a_sequence_or_for_none() -> None:
    """Two sequences need 4 and 2 + 2 of 6 blocks. The second gets no block while the first has some."""
    world = world_of(cache_bytes=18)
    first, second = world.ask(ask(0, [3], 4, [5])), world.ask(ask(0, 1, [3], 2, [5]))
    (one,), (two, three) = transfers_of(world, first), transfers_of(world, second)
    world.offer(one)
    world.offer(three)
    assert (one.state, three.state) == ("bound", "new")
    assert world.scheduler._state.media.cache.available == 2
    world.land(one)
    go(world)
    assert three.state == "bound"
    assert two.state == "new"
    world.offer(two)
    assert two.state == "bound"
    world.land(two)
    world.land(three)
    world.run()
    world.check_end()


@pytest.mark.requirement("D16")
def test_a_small_sequence_does_not_pass_an_older_one() -> None:
    """A small sequence waits as well. Otherwise the oldest sequence might never find enough blocks."""
    world = world_of(cache_bytes=18)
    held, large, small = (world.ask(ask(0, [3], name, [5])) for name in (1, 4, 3))
    (one,), (two,), (three,) = (transfers_of(world, stream) for stream in (held, large, small))
    world.offer(one)
    world.offer(three)
    assert three.state == "bound"
    world.offer(two)
    assert two.state == "new"
    late = world.ask(ask(0, [3], 2, [5], priority=0))
    (four,) = transfers_of(world, late)
    world.land(three)
    go(world, 10)
    world.offer(four)
    assert (two.state, four.state) == ("bound", "new")
    world.land(one)
    world.land(two)
    go(world)
    assert four.state == "bound"
    world.land(four)
    world.run()
    world.check_end()


@pytest.mark.requirement("D16")
@pytest.mark.parametrize("depth", [1, 2])
def test_images_that_are_encoded_here_leave_room_for_who_comes_before_them(depth: int) -> None:
    """One sequence waits for 6 of 6 blocks; the others each encode an image of 2 blocks here.

    Running sequences continue. Later local images wait until the first sequence has its blocks.
    """
    world = world_of(depth, tower=True, cache_bytes=18, max_num_seqs=8, long_prefill_token_threshold=1)
    for number in range(4):
        world.ask(ask(0, [3], 211 + 5 * number, [5]), here=True)
    go(world, 8)
    waits = world.ask(ask(0, [3], 4, [5], 1))
    one, two = transfers_of(world, waits)
    world.offer(one)
    world.offer(two)
    others = [world.ask(ask(0, [3], 11 + 5 * number, [5]), here=True) for number in range(38)]
    for _ in range(100):
        world.turn()
        if one.state == "bound":
            break
    assert (one.state, two.state) == ("bound", "bound")
    assert sum(other.finish is not None for other in others) <= 4
    world.land(one)
    world.land(two)
    world.run()
    world.check_end()
    assert waits.attempts == 1


@pytest.mark.requirement("D17")
def test_an_image_that_is_held_or_came_meanwhile_is_not_sent() -> None:
    world = world_of()
    first = world.ask(ask(0, [3], 4, [5]))
    second = world.ask(ask(0, [9], 4, [5]))
    (one,), (two,) = transfers_of(world, first), transfers_of(world, second)
    world.offer(two)
    world.offer(one)
    assert (two.state, one.state) == ("bound", "new")  # the image is arriving
    world.land(two)
    assert (one.state, one.start, one.blocks) == ("bound", 10, [])
    world.land(one)
    third = world.ask(ask(0, [8], 4, [5]))
    (three,) = transfers_of(world, third)
    world.offer(three)
    assert (three.state, three.start) == ("bound", 10)
    world.land(three)
    world.run()
    world.check_end()
    assert world.scheduler.stats().image_hits == 2


def test_when_what_comes_for_two_fails_the_other_transfer_gets_its_blocks_once_they_are_free() -> None:
    world = world_of(cache_bytes=12)
    first = world.ask(ask(0, [3], 4, [5]))
    second = world.ask(ask(0, [9], 4, [5]))
    (one,), (two,) = transfers_of(world, first), transfers_of(world, second)
    world.offer(one)
    world.offer(two)
    blocks = one.blocks
    world.fail(one)
    assert first.sequence == -1
    go(world, 20)
    assert two.state == "new"
    world.free(one)
    assert (two.state, two.blocks) == ("bound", blocks)
    world.land(two)
    go(world, 20)
    (again,) = transfers_of(world, first)
    bring(world, again)
    world.run()
    world.check_end()
    assert (first.attempts, second.attempts) == (2, 1)


@pytest.mark.parametrize("when", ["new", "bound", "some landed"])
def test_an_abort_frees_memory_after_the_last_write(when: str) -> None:
    world = world_of()
    stream = world.ask(ask(0, [3], 4, [5], 1, [6]))
    transfers = transfers_of(world, stream)
    if when == "some landed":
        bring(world, transfers[0])
    if when != "new":
        world.offer(transfers[1])
    world.abort(stream)
    assert all(transfer.state == "failing" for transfer in world.transfers.values())
    go(world, 3)
    cache = world.scheduler._state.media.cache
    assert cache.available == cache.blocks - {"new": 0, "bound": 2, "some landed": 6}[when]
    for transfer in list(world.transfers.values()):
        world.free(transfer)
    world.check_end()
    assert len(cache) == (when == "some landed")


def test_an_embedding_received_after_the_cancellation_is_reused() -> None:
    world = world_of()
    stream = world.ask(ask(0, [3], 4, [5], 1, [6]))
    one, two = transfers_of(world, stream)
    world.offer(one)
    world.offer(two)
    world.abort(stream)
    one.state = "bound"  # the reservation was in flight
    world.land(one)
    world.free(two)
    world.check_end()
    assert [held.key for held in world.scheduler._state.media.cache] == [image(4).key]


@pytest.mark.requirement("D16", "D19")
def test_images_that_are_late_end_the_attempt() -> None:
    world = world_of()
    stream = world.ask(ask(0, [3], 4, [5]))
    (transfer,) = transfers_of(world, stream)
    world.now = 7.0
    go(world, 5)
    assert stream.attempts == 1
    world.now = 8.0
    world.turn()
    assert stream.sequence == -1
    assert isinstance(world.asked[-1], r.CancelTransfer)
    world.free(transfer)
    go(world, 10)
    assert stream.attempts == 2
    (again,) = transfers_of(world, stream)
    bring(world, again)
    world.run()
    world.check_end()


def test_an_offer_is_kept_until_there_is_room() -> None:
    """The sender need not repeat the offer."""
    world = world_of(cache_bytes=12)
    first, second = world.ask(ask(0, [3], 4, [5])), world.ask(ask(0, [3], 9, [5]))
    (one,), (two,) = transfers_of(world, first), transfers_of(world, second)
    world.offer(one)
    world.offer(two)
    world.now += 5.0
    world.turn()
    assert [type(request) for request in world.asked] == [r.ReserveTransfer]
    world.land(one)
    go(world, 30)
    assert two.state == "bound"
    world.land(two)
    world.run()
    world.check_end()


def test_choices_wait_for_their_first_sample_and_share_its_images() -> None:
    world = world_of()
    streams = [
        world.ask(ask(0, [3], 4, [5], request=7, choice=choice), transfers=choice == 0) for choice in range(3)
    ]
    assert isinstance(state_of(world, streams[1]), BlockedOnFirstSample)
    (transfer,) = transfers_of(world, streams[0])
    bring(world, transfer)
    world.run()
    world.check_end()
    assert [stream.attempts for stream in streams] == [1, 1, 1]


def test_a_parallel_sample_whose_first_sample_left_goes_back_for_transfers_of_its_own() -> None:
    world = world_of()
    first_sample, parallel_sample = (
        world.ask(ask(0, [3], 4, [5], request=7, choice=choice), transfers=choice == 0) for choice in range(2)
    )
    (transfer,) = transfers_of(world, first_sample)
    world.abort(first_sample)
    world.free(transfer)
    go(world, 20)
    assert parallel_sample.attempts == 2
    (transfer,) = transfers_of(world, parallel_sample)
    bring(world, transfer)
    world.run()
    world.check_end()


def test_a_grammar_and_images_are_both_waited_for() -> None:
    from weft.types.grammar import Text

    for late in ("grammar", "image"):
        world = world_of()
        request = msgspec.structs.replace(ask(0, [3], 4, [5]), grammar=Text(text="x"))
        world.delay = lambda late=late: 0.2 if late == "grammar" else 0.0  # type: ignore[method-assign, misc]
        stream = world.ask(request)
        (transfer,) = transfers_of(world, stream)
        if late == "image":
            go(world, 10)
        bring(world, transfer)
        go(world, 3)
        world.run()
        world.check_end()


def test_lost_ranks_give_back_what_cannot_be_computed_again() -> None:
    world = world_of(max_num_seqs=2)
    ran, received, waits = (world.ask(ask(0, [3], name, [5], max_tokens=30)) for name in (4, 3, 2))
    bring(world, transfers_of(world, ran)[0])
    go(world, 8)
    assert isinstance(state_of(world, ran), Running)
    world.offer(transfers_of(world, received)[0])
    world.lose()
    assert (ran.sequence, received.sequence, waits.sequence) == (-1, -1, -1)
    cache = world.scheduler._state.media.cache
    assert (len(cache), cache.available) == (0, cache.blocks - 3)
    world.by_hand = False
    for transfer in list(world.transfers.values()):
        world.free(transfer)
    assert cache.settled == cache.blocks
    world.run()
    world.check_end()
    assert [stream.attempts for stream in (ran, received, waits)] == [2, 2, 2]


def test_shares_of_rows_are_exchanged_in_the_first_step_that_reads_them() -> None:
    world = world_of(shards=True)
    first = world.ask(ask(0, [3], 4, [5]))
    bring(world, transfers_of(world, first)[0])
    world.run()
    second = world.ask(ask(0, [9], 4, [5]))
    bring(world, transfers_of(world, second)[0])
    world.run()
    world.check_end()
    gathered = [plan.step for plan in world.plans for op in plan.ops if isinstance(op, GatherMedia)]
    assert len(gathered) == 1
    assert next(plan for plan in world.plans if plan.step == gathered[0]).prefill.rows


@pytest.mark.requirement("D7")
def test_an_embedding_on_the_host_is_lifted_instead_of_sent() -> None:
    world = world_of(cache_bytes=12, host_bytes=24)
    for name in (4, 9):
        stream = world.ask(ask(0, [3], name, [5]))
        world.offer(transfers_of(world, stream)[0])
        go(world, 10)  # eviction needs a separate plan
        world.land(transfers_of(world, stream)[0])
        world.run()
    third = world.ask(ask(0, [8], 4, [5]))
    (transfer,) = transfers_of(world, third)
    world.offer(transfer)
    go(world, 10)
    assert (transfer.state, transfer.start) == ("bound", 10)
    world.land(transfer)
    world.run()
    world.check_end()
    assert world.runner.moved == 3


def test_one_that_runs_gets_room_that_is_kept_for_one_that_waits() -> None:
    """The running sequence encodes an image here. The waiting sequence loses its image and requests a new
    one."""
    world = world_of(cache_bytes=12, tower=True, max_num_seqs=1)
    waits = world.ask(ask(0, [3], 4, [5]))
    (transfer,) = transfers_of(world, waits)
    local = msgspec.structs.replace(ask(0, [2] * 20, 9, [5]), priority=-1)
    bring(world, transfer)
    world.harm = 99.0  # encoded here
    runs = world.ask(local)
    world.harm = 0.0
    assert not transfers_of(world, runs)
    world.by_hand = False
    world.run()
    world.check_end()
    assert (runs.attempts, waits.attempts) == (1, 2)


def test_a_running_sequence_takes_memory_of_a_waiting_one() -> None:
    """The waiting sequence may be more urgent. Without this rule each would wait for the other."""
    world = world_of(cache_bytes=12, tower=True, max_num_seqs=1)
    world.harm = 99.0  # encoded here
    runs = world.ask(ask(0, [2] * 24, 9, [5]))
    world.harm = 0.0
    world.turn()
    assert isinstance(state_of(world, runs), Running)
    waits = world.ask(ask(0, [3], 4, [5], priority=-1))
    bring(world, transfers_of(world, waits)[0])
    world.by_hand = False
    world.run()
    world.check_end()
    assert (runs.attempts, waits.attempts) == (1, 2)


def test_one_that_runs_waits_for_room_that_a_transfer_may_write() -> None:
    """The wait is not reported as a lack of progress before the deadline."""
    world = world_of(cache_bytes=12, tower=True)
    coming = world.ask(ask(0, [3], 4, [5]))
    (transfer,) = transfers_of(world, coming)
    world.offer(transfer)
    world.harm = 99.0
    runs = world.ask(ask(0, [3], 9, [5]))
    world.harm = 0.0
    go(world, 300)
    assert runs.finish is None
    world.land(transfer)
    world.run()
    world.check_end()
    assert runs.attempts == 1


def test_a_cache_is_offered_to_who_decodes_only_once_all_images_are_there() -> None:
    """A prefill group first receives all images, and then offers the cache to the decode group."""
    kv = kv_config(media=limits())
    transfer = TransferSection(role="prefill", take_embeddings=True)
    scheduler = Scheduler(
        kv, SchedulerSection(max_num_seqs=4, max_num_batched_tokens=24), VOCAB, None, transfer
    )
    transfers = scheduler.embeddings
    assert transfers is not None
    runner = FakeRunner(kv)
    request = ask(0, [3], 4, [5])
    runner.media_of = lambda slot: request.media
    image_key, cache_key, peer = TransferKey(7, 0, 1), TransferKey(8, 0, 1), Peer("x", 1)
    (item,) = without_pixels(request.media)
    bare = msgspec.structs.replace(item, transfer=TransferParameters(image_key, False, peer, 10.0))
    parameters = TransferParameters(cache_key, True, peer, 10.0)
    scheduler.add(msgspec.structs.replace(request, media=(bare,), transfer=parameters), 0.0)
    assert scheduler.plan(0.0) is None
    assert scheduler.transfer_requests() == []
    transfers.transfer(r.TransferWanted(image_key, r.Admitted(key=image_key, num_prompt=10, dims=DIMS)), 0.0)
    (reserve,) = transfers.transfer_requests()
    assert isinstance(reserve, r.ReserveTransfer)
    for number, block in enumerate(np.frombuffer(reserve.blocks[0].ids, "<i4").tolist()):
        runner.images[block] = (request.media[0].pixels, number)
    transfers.transfer(r.TransferReceived(image_key), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [type(one) for one in scheduler.transfer_requests()] == [r.OfferTransfer]
    events = scheduler.commit(plan, runner.launch(plan), 0.0)
    assert events[-1].finish == "moved"
    scheduler.transfer(r.TransferReceived(cache_key), 0.0)
    assert scheduler.stats().free_blocks == (64,)


def test_a_sequence_waits_for_an_image_in_transfer_with_its_own_transfer() -> None:
    """The wait does not block the queue: another group decides how long the transfer takes."""
    world = world_of()
    first_sample, parallel_sample = (
        world.ask(ask(0, [3], 4, [5], request=7, choice=choice), transfers=choice == 0) for choice in range(2)
    )
    other, behind = world.ask(ask(0, [9], 4, [5])), world.ask(submit(0, [1, 2, 3], request=0))
    world.abort(first_sample)
    (transfer,) = transfers_of(world, other)
    world.offer(transfer)
    assert transfer.state == "bound"
    go(world, 30)
    assert (behind.finish, parallel_sample.attempts) == ("length", 2)
    (own,) = transfers_of(world, parallel_sample)
    world.offer(own)
    assert own.state == "new"
    world.land(transfer)
    assert (own.state, own.start) == ("bound", 10)
    world.by_hand = False
    world.land(own)
    for one in list(world.transfers.values()):
        world.free(one)
    world.run()
    world.check_end()


def refuse(world: World, why: str, **change: object) -> None:
    request = ask(0, [3], 4, [5])
    item = without_pixels(request.media)[0]
    parameters = TransferParameters(TransferKey(1, 0, 1), False, Peer("e", 1), 10.0)
    facts = {"transfer": parameters, **change}
    wrong = msgspec.structs.replace(request, media=(msgspec.structs.replace(item, **facts),))
    with pytest.raises(InvalidRequest, match=why):
        world.scheduler.add(wrong, 0.0)
    assert not world.scheduler._state.live
    assert not len(world.scheduler._state.images)


def test_what_cannot_be_is_refused_by_name() -> None:
    world = world_of()
    key, peer = TransferKey(1, 0, 1), Peer("e", 1)
    refuse(world, "encodes no images for others", transfer=TransferParameters(key, True, peer, 10.0))
    refuse(world, "seconds of an image transfer", transfer=TransferParameters(key, False, peer, 0.0))
    refuse(
        world, "this group encodes no images .--language-model-only", transfer=None, pixels=image(4).pixels
    )
    refuse(world_of(cache_bytes=9), "too large: use a smaller image .or raise --mm-cache-bytes")
    refuse(
        World(kv_config(media=limits(takes=False, tower=True))), "accepts no embeddings .--take-embeddings"
    )
    refuse(World(kv_config(media=limits(takes=False))), "takes no images")
    small = world_of(cache_bytes=15)
    with pytest.raises(InvalidRequest, match=r"the 2 images .* raise --mm-cache-bytes to 18"):
        small.ask(ask(0, 4, [3], 1))
    stream = world.ask(ask(0, [3], 4, [5]))
    refuse_known = transfers_of(world, stream)[0].key
    item = msgspec.structs.replace(
        without_pixels(ask(0, [3], 4, [5]).media)[0],
        transfer=TransferParameters(refuse_known, False, peer, 10.0),
    )
    again = msgspec.structs.replace(submit(99, [3] + [0] * 10 + [5]), media=(item,))
    with pytest.raises(InvalidRequest, match="exists already"):
        world.scheduler.add(again, 0.0)


def test_an_offer_of_something_else_is_refused() -> None:
    world = world_of()
    stream = world.ask(ask(0, [3], 4, [5]))
    (transfer,) = transfers_of(world, stream)
    transfer.asked = True
    offer = r.Admitted(key=transfer.key, num_prompt=11, dims=r.GroupDims(ranks=1, kinds=()))
    world.tell(r.TransferWanted(transfer.key, offer))
    assert isinstance(world.asked[0], r.RefuseTransfer)
    assert stream.sequence == -1
    world.free(transfer)
    stream.aborted = True
    go(world, 10)


def test_events_of_unknown_transfers_are_fine() -> None:
    world = world_of()
    key = TransferKey(99, 0, 1)
    for event in (
        r.TransferReceived(key),
        r.TransferFailed(key, MINE),
        r.TransferFreed(key),
        r.TransferBound(key, 0),
    ):
        world.tell(event)
    world.tell(r.TransferWanted(key, r.Admitted(key=key, num_prompt=1, dims=r.GroupDims(ranks=1, kinds=()))))
    assert isinstance(world.asked[-1], r.CancelTransfer)
