"""The order in which an encode group takes images, and the ends of sequences."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.scheduler.encode.world import FAULT, World, ids, limits, play, submit
from weft.common.errors import EngineDead, InvalidRequest, Overloaded
from weft.config.sections.all import SchedulerSection
from weft.types.media_item import without_pixels
from weft.types.plan import Encode, MoveMedia, SendMedia, StepPlan
from weft.types.transfer import OfferTransfer, TransferKey


def key(sequence: int, number: int = 0) -> TransferKey:
    return TransferKey(100 * sequence + number, 0, 7)


def encoded(plan: StepPlan) -> list[int]:
    return [op.pixels[0] for op in plan.ops if isinstance(op, Encode)]


def sent(plan: StepPlan) -> list[int]:
    return [op.key.transfer for op in plan.ops if isinstance(op, SendMedia)]


def step(world: World) -> StepPlan:
    assert world.launch()
    world.commit()
    return world.all[-1]


class TestOneSequence:
    def test_transfers_are_offered_at_once(self) -> None:
        world = World(limits())
        world.scheduler.add(submit(1, [(5, 3), (6, 2)]), 0.0)
        assert world.scheduler.transfer_requests() == [
            OfferTransfer(key=key(1), num_prompt=3, num_cached=0),
            OfferTransfer(key=key(1, 1), num_prompt=2, num_cached=0),
        ]

    def test_it_has_moved_when_all_of_its_transfers_have_received(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(5, 3), (6, 2)]))
        for number in (0, 1):
            world.bind(key(1, number))
        plan = step(world)
        assert [type(op) for op in plan.ops] == [Encode, SendMedia, Encode, SendMedia]
        world.land(key(1, 1))
        assert world.finishes(1) == []
        world.land(key(1))
        assert world.finishes(1) == ["moved"]
        world.check_idle()

    def test_it_is_encoded_before_its_receiver_is_ready_and_leaves_then(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(5, 3)]))
        assert encoded(step(world)) == [5]
        assert not world.launch()
        assert world.scheduler.blocked
        world.bind(key(1))
        plan = step(world)
        assert [type(op) for op in plan.ops] == [SendMedia]
        assert world.scheduler.transfer_blocks(key(1))[0].ids == plan.ops[0].blocks  # type: ignore[union-attr]
        world.settle()
        assert world.finishes(1) == ["moved"]

    def test_part_of_a_video_is_encoded_alone(self) -> None:
        """The group in front may be encoded elsewhere: here a lag has no meaning."""
        world = World(limits())
        one = submit(1, [(5, 3), (6, 3)])
        world.submit(
            msgspec.structs.replace(one, media=(msgspec.structs.replace(one.media[1], lag=4, start=40),))
        )
        world.bind(key(1, 1))
        assert encoded(step(world)) == [6]
        world.land(key(1, 1))
        assert world.finishes(1) == ["moved"]
        world.check_idle()

    def test_embeddings_of_the_receiver_are_neither_encoded_nor_sent(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(5, 3)]))
        world.bind(key(1), start=3)
        assert not world.launch()
        world.land(key(1))
        assert world.finishes(1) == ["moved"]
        assert world.all == []
        world.check_idle()

    def test_a_transfer_that_fails_ends_all_of_them(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(5, 3), (6, 2)]))
        world.bind(key(1))
        step(world)
        world.fail(key(1))
        assert [(e.finish, e.error) for e in world.events] == [("evicted", FAULT)]
        assert world.transfers[key(1, 1)].failing == FAULT
        world.settle()
        assert world.finishes(1) == ["evicted"]
        world.check_idle()

    @pytest.mark.requirement("D9")
    def test_its_blocks_stay_until_nobody_reads_them(self) -> None:
        """An embedding takes the whole pool. The next one waits for the fence."""
        world = World(limits(blocks=3))
        world.submit(submit(1, [(5, 12)]))
        world.bind(key(1))
        step(world)
        world.submit(submit(2, [(6, 12)]))
        world.bind(key(2))
        assert not world.launch()
        world.fail(key(1))
        assert not world.launch()
        world.free(key(1))
        assert encoded(step(world)) == [6]

    def test_its_front_ends_it(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(5, 3), (6, 2)]))
        world.bind(key(1))
        step(world)
        (event,) = world.finish(1)
        assert (event.finish, event.error) == ("abort", None)
        assert {far.failing.code for far in world.transfers.values() if far.failing} == {"cancelled"}
        assert world.finish(1) == []
        assert world.finish(99) == []
        world.settle()
        assert world.finishes(1) == ["abort"]
        world.check_idle()

    def test_an_unreported_end_is_reported_once(self) -> None:
        """A second report would end a later attempt with the same id."""
        world = World(limits())
        world.submit(submit(1, [(5, 3)]))
        world.scheduler.lose()
        assert [e.finish for e in world.scheduler.finish(1)] == ["evicted"]
        assert world.scheduler.expire(1.0) == []


class TestBatches:
    @pytest.mark.requirement("D3")
    def test_by_patches_and_items(self) -> None:
        world = World(limits(encode_patches=40, encode_items=3))
        world.submit(submit(1, [(1, 4), (2, 4), (3, 3), (4, 1), (5, 1), (6, 1), (7, 1)]))
        assert [encoded(step(world)) for _ in range(3)] == [[1, 2], [3, 4, 5], [6, 7]]

    @pytest.mark.requirement("D3")
    def test_a_large_one_goes_alone(self) -> None:
        world = World(limits(encode_patches=16))
        world.submit(submit(1, [(1, 2), (2, 9), (3, 2), (4, 2)]))
        assert [encoded(step(world)) for _ in range(3)] == [[1], [2], [3, 4]]

    @pytest.mark.requirement("D3")
    def test_in_order_of_sequences_and_of_their_images(self) -> None:
        """Independent of the order in which receivers are ready."""
        world = World(limits(encode_items=2))
        for number in (1, 2, 3):
            world.submit(submit(number, [(10 * number, 1), (10 * number + 1, 1)]))
        world.submit(submit(4, [(40, 1)], priority=-1))
        assert [encoded(step(world)) for _ in range(4)] == [[40, 10], [11, 20], [21, 30], [31]]

    def test_bound_ones_first(self) -> None:
        world = World(limits(encode_items=2))
        for number in (1, 2, 3):
            world.submit(submit(number, [(number, 1)]))
        world.bind(key(3))
        world.bind(key(2))
        assert encoded(step(world)) == [2, 3]
        assert encoded(step(world)) == [1]

    @pytest.mark.requirement("D3")
    def test_an_image_is_encoded_once_for_all_that_want_it(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(5, 3), (5, 3)]))
        world.submit(submit(2, [(5, 3)]))
        for transfer in list(world.transfers):
            world.bind(transfer)
        plan = step(world)
        assert encoded(plan) == [5]
        assert sent(plan) == [100, 101, 200]
        world.settle()
        stats = world.scheduler.stats()
        assert (stats.images_encoded, stats.image_hits) == (1, 2)
        world.check_idle()

    @pytest.mark.requirement("D7")
    def test_stored_embeddings_leave_before_others_are_encoded(self) -> None:
        """D7: without the tower."""
        world = World(limits())
        world.submit(submit(1, [(5, 3)]))
        world.settle()
        world.submit(submit(2, [(6, 3)]))
        world.submit(submit(3, [(5, 3)]))
        world.bind(key(2))
        world.bind(key(3))
        assert [type(op) for op in step(world).ops] == [SendMedia]
        assert [type(op) for op in step(world).ops] == [Encode, SendMedia]
        assert world.scheduler.stats().image_hits == 1
        world.settle()
        world.check_idle()

    def test_hits_do_not_starve_images_that_wait_for_the_tower(self) -> None:
        """In a stream of hits every second image waits for the tower, if any image waits."""
        world = World(limits())
        world.submit(submit(1, [(5, 3)]))
        world.settle()
        for number in range(2, 5):
            world.submit(submit(number, [(4 + number, 3)]))
            world.bind(key(number))
        kinds = []
        for number in range(10, 16):
            world.submit(submit(number, [(5, 3)]))
            world.bind(key(number))
            kinds.append(encoded(step(world)))
        assert kinds[:2] == [[], [6, 7, 8]]
        world.settle()
        world.check_idle()

    @pytest.mark.parametrize("seed", range(5))
    def test_the_same_whatever_else_is_random(self, seed: int) -> None:
        """Plans depend only on the received events."""
        first, second = World(limits(host=4)), World(limits(host=4))
        play(first, seed)
        play(second, seed)
        assert first.all == second.all


class TestTransfer:
    @pytest.mark.requirement("D9")
    def test_a_full_pool_defers_and_recovers(self) -> None:
        """No sequence is passed by meanwhile."""
        world = World(limits(blocks=3))
        for number, tokens in ((1, 8), (2, 8), (3, 4)):
            world.submit(submit(number, [(number, tokens)]))
            world.bind(key(number))
        assert encoded(step(world)) == [1]
        assert not world.launch()
        world.land(key(1))
        assert encoded(step(world)) == [2, 3]
        world.settle()
        assert [world.finishes(n) for n in (1, 2, 3)] == [["moved"]] * 3
        world.check_idle()

    def test_hits_do_not_starve_sequences_that_wait_for_memory(self) -> None:
        """Cached images come again and again. A large image gets its turn after the earlier images were
        received."""
        world = World(limits(blocks=4))
        world.submit(submit(1, [(1, 8)]))
        world.settle()
        world.submit(submit(2, [(1, 8)]))
        world.bind(key(2))
        step(world)
        world.submit(submit(3, [(3, 16)]))
        world.bind(key(3))
        assert not world.launch()
        world.submit(submit(4, [(1, 8)]))
        world.bind(key(4))
        assert not world.launch()
        world.land(key(2))
        assert encoded(step(world)) == [3]
        world.settle()
        assert [world.finishes(n) for n in (2, 3, 4)] == [["moved"]] * 3

    def test_encoding_ahead_takes_no_memory_of_bound_transfers(self) -> None:
        world = World(limits(blocks=3))
        world.submit(submit(1, [(1, 8)]))
        assert encoded(step(world)) == [1]
        world.submit(submit(2, [(2, 8)]))
        assert not world.launch()
        world.bind(key(2))
        assert encoded(step(world)) == [2]
        world.land(key(2))
        world.bind(key(1))
        assert encoded(step(world)) == [1]
        world.land(key(1))
        world.check_idle()

    def test_two_groups_do_not_wait_for_each_others_memory(self) -> None:
        """Each receiver has space for the images of one sequence, each of two encoders for one image.

        Each encoder has encoded an image of the other sequence first.
        """
        one, other = World(limits(blocks=2)), World(limits(blocks=2))
        one.submit(submit(1, [(1, 8)]))
        other.submit(submit(2, [(2, 8)]))
        step(one)
        step(other)
        one.submit(submit(2, [(3, 8)]))
        other.submit(submit(1, [(4, 8)]))
        for sequence in (1, 2):
            for world in (one, other):
                world.bind(key(sequence))
            for world in (one, other):
                while not world.can_land(key(sequence)):
                    step(world)
                world.land(key(sequence))
        for world in (one, other):
            assert world.finishes(1) == world.finishes(2) == ["moved"]

    @pytest.mark.requirement("D7")
    def test_a_second_tier_saves_the_tower(self) -> None:
        """Evicted embeddings move to host memory, and a hit brings the embedding back."""
        world = World(limits(blocks=3, host=6))
        for number in (1, 2):
            world.submit(submit(number, [(number, 12)]))
            world.settle()
        world.submit(submit(3, [(1, 12)]))
        world.bind(key(3))
        plan = step(world)
        assert [type(op) for op in plan.ops] == [MoveMedia, MoveMedia, SendMedia]
        assert [op.up for op in plan.ops if isinstance(op, MoveMedia)] == [False, True]
        world.settle()
        stats = world.scheduler.stats()
        assert (stats.images_encoded, stats.image_hits) == (2, 1)
        world.check_idle()

    @pytest.mark.requirement("D9")
    def test_an_image_that_never_fits_is_refused_by_name(self) -> None:
        world = World(limits(blocks=3))
        with pytest.raises(InvalidRequest, match="--mm-cache-bytes"):
            world.submit(submit(1, [(1, 13)]))
        world.check_idle()


class TestFailures:
    @pytest.mark.requirement("D5")
    def test_an_image_that_cannot_be_encoded_ends_its_sequences_alone(self) -> None:
        world = World(limits(), bad={5})
        world.submit(submit(1, [(4, 2), (5, 2)]))
        world.submit(submit(2, [(4, 2)]))
        world.submit(submit(3, [(5, 2)]))
        world.settle()
        assert [world.finishes(n) for n in (1, 2, 3)] == [["error"], ["moved"], ["evicted"]]
        assert {e.error.code for e in world.events if e.error} == {"image_failed"}
        world.submit(submit(4, [(5, 2)]))
        world.settle()
        assert world.finishes(4) == ["error"]
        world.check_idle()

    def test_an_unreported_failure_is_encoded_again(self) -> None:
        """The image was encoded before its receiver was ready, and the failure was never reported."""
        world = World(limits(), bad={5})
        world.submit(submit(1, [(5, 2)]))
        assert encoded(step(world)) == [5]
        world.finish(1)
        world.bad.clear()
        world.submit(submit(2, [(5, 2)]))
        world.settle()
        assert world.finishes(2) == ["evicted"]
        world.submit(submit(3, [(5, 2)]))
        world.settle()
        assert world.finishes(3) == ["moved"]
        world.check_idle()

    def test_a_failed_image_is_encoded_again_for_a_later_sequence(self) -> None:
        world = World(limits(), bad={5})
        world.submit(submit(1, [(5, 2)]))
        world.settle()
        world.bad.clear()
        world.submit(submit(2, [(5, 2)]))
        world.settle()
        assert world.finishes(2) == ["moved"]

    def test_lost_ranks_give_everything_back(self) -> None:
        world = World(limits(), depth=2)
        for number in range(1, 6):
            world.submit(submit(number, [(number, 4)]))
            world.bind(key(number))
        world.launch()
        world.scheduler.lose()
        world.events += world.scheduler.requeue_all()
        world.plans.clear()
        world.device.clear()
        world.ask()
        assert [world.finishes(n) for n in range(1, 6)] == [["evicted"]] * 5
        assert {e.error.code for e in world.events if e.error} == {"group_lost"}
        world.submit(submit(1, [(1, 4)], attempt=1))  # while old rooms are still to be fenced
        world.settle()
        assert world.finishes(1) == ["evicted", "moved"]
        assert [plan.step for plan in world.all] == list(range(len(world.all)))
        world.check_idle()

    def test_sequences_wait_while_the_group_forms(self) -> None:
        world = World(limits())
        world.submit(submit(1, [(1, 4)]))
        world.scheduler.lose()
        world.submit(submit(2, [(2, 4)]))
        assert world.transfers.keys() == {key(1)}
        world.events += world.scheduler.requeue_all()
        world.ask()
        assert world.transfers.keys() == {key(1), key(2)}
        world.settle()
        assert (world.finishes(1), world.finishes(2)) == (["evicted"], ["moved"])
        world.check_idle()

    @pytest.mark.requirement("D9")
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("seed", range(30))
    def test_random_lives(self, seed: int, depth: int) -> None:
        """No block leaks, no sequence waits forever, and no block is written while it is read."""
        source = random.Random(seed)
        world = World(
            limits(
                blocks=source.choice([5, 8, 20]),
                host=source.choice([0, 0, 6]),
                encode_items=source.choice([1, 3, 8]),
                encode_patches=source.choice([8, 64]),
            ),
            depth=depth,
            bad=set(source.sample(range(40), 2)) if seed % 3 == 0 else set(),
        )
        play(world, seed, faults=seed % 2 == 0)
        ended = [event.sequence for event in world.events]
        assert sorted(ended) == list(range(1000 - 25, 1000))
        if seed % 2 and not world.bad:
            assert {event.finish for event in world.events} == {"moved"}
        world.check_idle()


class TestSubmits:
    def test_invalid_submits_are_refused(self) -> None:
        world = World(limits())
        good = submit(1, [(1, 2)])
        (image,) = good.media
        assert image.transfer is not None
        receives = msgspec.structs.replace(image.transfer, sends=False)
        forever = msgspec.structs.replace(image.transfer, seconds=1e9)
        change = msgspec.structs.replace
        for wrong, problem in (
            (change(good, media=()), "needs images"),
            (change(good, transfer=image.transfer), "generates no tokens"),
            (change(good, pooling="last"), "generates no tokens"),
            (change(good, media=(change(image, transfer=None),)), "needs a transfer"),
            (change(good, media=(change(image, transfer=receives),)), "needs a transfer"),
            (change(good, media=(change(image, transfer=forever),)), "seconds"),
            (change(good, media=without_pixels(good.media)), "pixels of an image"),
            (change(good, media=(change(image, key=b"x"),)), "16 bytes"),
            (change(good, media=(change(image, grid=(1, 3, 4)),)), "grid"),
            (change(good, media=(image, change(image, start=2))), "transfer with this key exists"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                world.submit(wrong)
        world.check_idle()
        world.submit(good)
        with pytest.raises(InvalidRequest, match="this id is running"):
            world.submit(submit(1, [(1, 2)], attempt=1))
        with pytest.raises(InvalidRequest, match="transfer with this key exists"):
            world.submit(change(good, sequence=2))

    def test_too_many_are_refused(self) -> None:
        world = World(limits(), section=SchedulerSection(max_queued_requests=2))
        world.submit(submit(1, [(1, 2)]))
        world.submit(submit(2, [(2, 2)]))
        with pytest.raises(Overloaded, match="2 sequences"):
            world.submit(submit(3, [(3, 2)]))
        world.settle()
        world.submit(submit(3, [(3, 2)]))

    def test_so_are_too_many_pixels(self) -> None:
        world = World(limits())
        size = len(submit(1, [(1, 2)]).media[0].pixels)
        world.scheduler._most_pixels = 2 * size
        world.submit(submit(1, [(1, 8)]))  # more is allowed for a single sequence
        with pytest.raises(Overloaded):
            world.submit(submit(2, [(2, 2)]))
        world.settle()
        world.submit(submit(3, [(3, 2)]))
        world.submit(submit(4, [(4, 2)]))
        with pytest.raises(Overloaded):
            world.submit(submit(5, [(5, 2)]))


def test_transfers_that_outlive_their_sequence_keep_no_pixels() -> None:
    """Receivers may read for long after the end. The limit counts the stored pixels."""
    world = World(limits())
    for number in (1, 2, 3):
        world.submit(submit(number, [(1, 2), (2, 2)]))
        world.bind(key(number))
        world.launch()
        world.finish(number)
        if world.plans:
            world.commit()
    book = world.scheduler._book
    assert len(book._transfers) == 3
    assert sum(len(transfer.item.pixels) for transfer in book._transfers.values()) == book.pixels == 0
    world.settle()
    world.check_idle()


def test_steps_out_of_turn() -> None:
    world = World(limits(), depth=2)
    world.submit(submit(1, [(1, 2)]))
    builder = world.scheduler.build(0.0)
    assert builder is not None
    with pytest.raises(EngineDead, match="never frozen"):
        world.scheduler.build(0.0)
    plan = world.scheduler.freeze(builder)
    assert world.scheduler.admitted(plan) == [1]
    with pytest.raises(EngineDead, match="was built last"):
        world.scheduler.freeze(builder)
    assert ids(plan.ops[0].blocks) == (1,)  # type: ignore[union-attr]
    idle = world.scheduler.freeze(world.scheduler.idle())
    assert (idle.ops, idle.step) == ((), plan.step + 1)
    with pytest.raises(EngineDead, match="in flight already"):
        world.scheduler.build(0.0)
