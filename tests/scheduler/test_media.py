"""Images in the scheduler: no image position is computed without the embedding, and no embedding leaks."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.scheduler.fake_runner import BAD_SEED, VOCAB, kv_config, submit
from tests.scheduler.harness import Rig
from tests.support.slow import mostly_slow, seeds
from weft.common.errors import EngineDead, InvalidRequest
from weft.config.resolved import MediaLimits
from weft.kv.embeddings import EmbeddingCache
from weft.kv.hashing import media_keys
from weft.scheduler import state as state_module
from weft.scheduler.images.media_book import MediaBook
from weft.scheduler.images.whole_images import whole_end
from weft.types.media_item import MediaItem, items_within
from weft.types.messages import Submit
from weft.types.plan import BindMedia, Encode, MoveMedia, StepPlan

PAD = 0
SIZES = [(1, 2), (2, 2), (2, 3), (3, 3), (2, 5)]


def limits(**changes: object) -> MediaLimits:
    """Return limits with one row for each block: an embedding takes as many blocks as the image has
    tokens."""
    given = MediaLimits(
        patch=1,
        merge=1,
        row_bytes=1,
        cache_bytes=64,
        encode_patches=64,
        most_items=4,
        sections=True,
        block_rows=1,
    )
    return msgspec.structs.replace(given, **changes)


def image(name: int, start: int = 0) -> MediaItem:
    """Return one of a few images. ``name`` determines the pixels and the size."""
    rows, columns = SIZES[name % len(SIZES)]
    return MediaItem(
        key=name.to_bytes(16, "little"),
        start=start,
        count=rows * columns,
        grid=(1, rows, columns),
        pixels=bytes([name + 1]) * (rows * columns * 3),
    )


def prompt(*parts: int | list[int]) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return tokens and images. A part is the name of an image, or a list of tokens."""
    tokens: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            items.append(image(part, len(tokens)))
            tokens += [PAD] * items[-1].count
        else:
            tokens += part
    return tokens, tuple(items)


def ask(number: int, *parts: int | list[int], **more: object) -> Submit:
    tokens, media = prompt(*parts)
    return submit(number, tokens, media=media, **more)  # type: ignore[arg-type]


def ops(plan: StepPlan, *kinds: type) -> list[object]:
    return [op for op in plan.ops if isinstance(op, kinds)]


def book_of(rig: Rig) -> MediaBook:
    return rig.scheduler._state.media


def check_book(rig: Rig) -> None:
    """Check that the book and the runner agree, and that only sequences in slots use embeddings."""
    book = book_of(rig)
    cache = book.cache
    device = [held for held in cache if not held.on_host]
    host = [held for held in cache if held.on_host]
    assert (cache.nbytes, cache.host_nbytes) == tuple(
        sum(held.count for held in tier) for tier in (device, host)
    )
    taken = [block for held in device for block in held.blocks]
    assert len(set(taken)) == len(taken) == cache.blocks - cache.available
    assert len({block for held in host for block in held.blocks}) == sum(len(held.blocks) for held in host)
    running = {sequence.id for sequence in rig.scheduler._state.running}
    assert set(book._uses) <= running
    for sequence, keys in book._uses.items():
        for key in keys:
            assert cache.find(key) is not None
            assert sequence in book._users[key]
    assert sum(map(len, book._users.values())) == sum(map(len, book._uses.values()))
    if not cache.asks:
        for tier, images in ((device, rig.runner.images), (host, rig.runner.host_images)):
            for held in tier:
                assert [images[block][1] for block in held.blocks] == list(range(len(held.blocks)))
                assert len({images[block][0] for block in held.blocks}) == 1


def drain(rig: Rig) -> None:
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    check_book(rig)
    assert not book_of(rig)._uses
    assert book_of(rig).cache.settled == book_of(rig).cache.available


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [0, 1, 5])
def test_an_image_is_encoded_once_whatever_the_chunks(depth: int, chunk: int) -> None:
    rig = Rig(kv_config(media=limits()), depth, long_prefill_token_threshold=chunk)
    rig.submit(ask(0, [3, 4], 4, [5], 1, [6, 7, 8]))
    drain(rig)
    stats = rig.scheduler.stats()
    assert (rig.runner.encoded, stats.images_encoded, stats.image_hits) == (2, 2, 0)
    assert stats.embedding_bytes == 14


def test_a_chunk_ends_before_an_image_that_the_step_cannot_encode() -> None:
    rig = Rig(kv_config(media=limits(encode_patches=10)), 1)
    rig.submit(ask(0, [3, 4], 4, 1, [5, 6]))
    drain(rig)
    plans = [plan for plan in rig.plans if plan.prefill.rows]
    assert [plan.prefill.count.tolist() for plan in plans] == [[12], [6]]
    assert [len(ops(plan, Encode)) for plan in plans] == [1, 1]


def test_one_image_alone_may_be_more_than_a_step_encodes() -> None:
    rig = Rig(kv_config(media=limits(encode_patches=1)), 1)
    rig.submit(ask(0, [3], 4, 1))
    drain(rig)
    assert rig.runner.encoded == 2


@pytest.mark.requirement("D28")
def test_the_same_image_is_found_and_another_one_in_its_place_is_not_shared() -> None:
    """Without a shared prefix only the embedding is found. With equal ids and another image nothing is
    found."""
    rig = Rig(kv_config(media=limits()), 1)
    rig.submit(ask(0, [3], 4, [5, 6, 7, 8]))
    drain(rig)
    rig.submit(ask(1, [9], 4, [5, 6, 7, 8]))
    drain(rig)
    assert (rig.runner.encoded, rig.scheduler.stats().image_hits) == (1, 1)
    rig.submit(ask(2, [3], 9, [5, 6, 7, 8]))  # the same size as the first image
    drain(rig)
    assert rig.outputs[2].num_cached == 0
    assert rig.outputs[2].tokens != rig.outputs[0].tokens
    rig.submit(ask(3, [3], 4, [5, 6, 7, 8]))
    drain(rig)
    assert rig.outputs[3].num_cached == 12
    assert rig.outputs[3].tokens == rig.outputs[0].tokens


def test_a_prefix_may_end_within_an_image() -> None:
    """Two blocks of the image's positions are cached. The other rows are read from the embedding."""
    rig = Rig(kv_config(media=limits()), 1)
    rig.submit(ask(0, [3], 4, [5], max_tokens=1))
    drain(rig)
    rig.submit(ask(1, [3], 4, [6, 7], max_tokens=1))
    drain(rig)
    assert rig.outputs[1].num_cached == 8
    binds = ops(rig.plans[-1], BindMedia)
    assert [(op.start, op.count) for op in binds] == [(1, 10)]  # type: ignore[attr-defined]
    assert rig.runner.encoded == 1


def test_the_same_tokens_and_images_in_other_places() -> None:
    """Two images touch. The hash includes the place where one image ends and the other begins."""
    rig = Rig(kv_config(media=limits()), 1)
    rig.submit(ask(0, 1, 4, [5, 6], max_tokens=1))
    drain(rig)
    rig.submit(ask(1, 4, 1, [5, 6], max_tokens=1))
    drain(rig)
    assert rig.outputs[1].num_cached == 0
    assert rig.runner.encoded == 2


@pytest.mark.requirement("D7")
def test_the_least_recently_used_goes() -> None:
    rig = Rig(kv_config(caching=False, media=limits(cache_bytes=20)), 1)
    for number, name in enumerate([4, 3, 4, 1, 2]):  # 10, 9, 10 again, 4, 6 bytes
        rig.submit(ask(number, [3], name, [5]))
        drain(rig)
    kept = [held.key[0] for held in book_of(rig).cache]
    assert kept == [4, 1, 2]
    assert rig.scheduler.stats().image_hits == 1


@pytest.mark.requirement("D7")
def test_evicted_embeddings_move_to_the_host_and_back() -> None:
    rig = Rig(kv_config(caching=False, media=limits(cache_bytes=12, host_bytes=24, block_rows=3)), 1)
    for number, name in enumerate([4, 1, 4, 2, 4, 1, 2]):  # 4, 2 and 2 blocks; 4 and 8 are there
        rig.submit(ask(number, [3], name, [5]))
        drain(rig)
    assert rig.runner.encoded == 3
    assert rig.scheduler.stats().image_hits == 4
    assert rig.runner.moved == 9
    assert [held.on_host for held in book_of(rig).cache] == [True, False, False]
    moves = [op for plan in rig.plans for op in ops(plan, MoveMedia)]
    assert [op.up for op in moves] == [False, False, True, False, False, True, False, True, True]  # type: ignore[attr-defined]


@pytest.mark.requirement("D7")
def test_the_host_keeps_what_somebody_waits_for() -> None:
    book = MediaBook(limits(cache_bytes=3, host_bytes=6, block_rows=3))
    keys = [bytes([number]) * 16 for number in range(5)]
    waits: Any = SimpleNamespace(id=1, key=(0, 0, 0))
    for number, name in enumerate(keys):
        assert book.cache.add(name, 3) is not None
        if number == 0:
            book.want(waits, name)
    assert [held.key for held in book.cache if held.on_host] == [keys[0], keys[3]]
    book.leave(waits)
    assert book.cache.add(bytes(15) + b"x", 3) is not None
    assert [held.key for held in book.cache if held.on_host] == [keys[3], keys[4]]


def test_an_urgent_sequence_takes_memory_of_a_later_one() -> None:
    """An urgent sequence needs space while a later sequence is in the middle of an image."""
    rig = Rig(kv_config(media=limits(cache_bytes=10)), 1, long_prefill_token_threshold=2)
    rig.submit(ask(0, 4, [5, 6], max_tokens=2))
    rig.step()
    rig.submit(ask(1, [4, 5], 3, priority=-1, max_tokens=2))
    drain(rig)
    assert rig.runner.encoded == 3
    assert rig.runner.overwritten > 0


def test_two_rows_of_a_plan_share_an_image_and_it_stays() -> None:
    rig = Rig(kv_config(media=limits(cache_bytes=12)), 2)
    for number in range(3):
        rig.submit(ask(number, [number], 4, [5]))
    rig.submit(ask(3, [9], 3))
    drain(rig)
    assert rig.runner.encoded == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_read_what_their_first_sample_encoded(depth: int) -> None:
    rig = Rig(kv_config(caching=False, media=limits()), depth)
    for choice in range(3):
        rig.submit(ask(choice, [3], 4, [5], 2, [7], request=1, choice=choice))
    drain(rig)
    assert rig.runner.encoded == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_lost_ranks_encode_again(depth: int) -> None:
    rig = Rig(kv_config(media=limits()), depth, max_num_batched_tokens=12)
    rig.submit(ask(0, [3, 4], 4, [5, 6, 7], 3, [8]))
    rig.step()
    rig.lose()
    check_book(rig)
    assert rig.scheduler.stats().embedding_bytes == 0
    drain(rig)
    assert rig.runner.encoded == 2 + depth


def test_the_image_of_a_failed_sequence_is_not_reused() -> None:
    rig = Rig(kv_config(media=limits()), 1)
    rig.submit(ask(0, [3], 4, [5], seed=BAD_SEED))
    drain(rig)
    rig.submit(ask(1, [3], 4, [5]))
    drain(rig)
    assert rig.runner.encoded == 2


def test_pixels_stay_until_the_end_and_not_longer() -> None:
    rig = Rig(kv_config(media=limits()), 1)
    rig.submit(ask(0, [3], 4, [5]))
    rig.step()
    assert rig.scheduler._state.live[0].media[0].pixels
    rig.finish(0)
    drain(rig)


WRONG = [
    ({"key": b"short"}, "16 bytes"),
    ({"count": 9}, "does not match its tokens"),
    ({"grid": (1, 5, 0)}, "does not match its tokens"),
    ({"start": 9}, "outside of the prompt"),
    ({"start": -1}, "outside of the prompt"),
    ({"pixels": b""}, "do not match its grid"),
    ({"pixels": bytes(31)}, "do not match its grid"),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_what_cannot_be_is_refused(change: dict[str, object], why: str) -> None:
    rig = Rig(kv_config(media=limits()), 1)
    one = ask(0, [3], 4, [5])
    wrong = msgspec.structs.replace(one, media=(msgspec.structs.replace(one.media[0], **change),))
    with pytest.raises(InvalidRequest, match=why):
        rig.scheduler.add(wrong, 0.0)
    assert not rig.scheduler._state.live


def test_a_larger_cache_is_no_advice_for_pixels_beyond_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.scheduler.images.media_book.MOST_PIXELS", 1)
    rig = Rig(kv_config(media=limits()), 1)
    with pytest.raises(InvalidRequest, match=r"too large: use a smaller image$"):
        rig.scheduler.add(ask(0, [3], 4, [5]), 0.0)


def test_limits_are_reported() -> None:
    rig = Rig(kv_config(media=limits(most_items=2, cache_bytes=9)), 1)
    with pytest.raises(InvalidRequest, match="has 3 images; at most 2"):
        rig.scheduler.add(ask(0, 1, [3], 1, [3], 1), 0.0)
    with pytest.raises(InvalidRequest, match="an image of 5 x 2 pixels is too large"):
        rig.scheduler.add(ask(0, [3], 4), 0.0)
    one = ask(0, 1, [3, 3, 3, 3], 2)
    touching = msgspec.structs.replace(one.media[1], start=2)
    with pytest.raises(InvalidRequest, match="outside of the prompt"):
        rig.scheduler.add(msgspec.structs.replace(one, media=(one.media[0], touching)), 0.0)
    without = Rig(kv_config(), 1)
    with pytest.raises(InvalidRequest, match="takes no images"):
        without.scheduler.add(ask(0, [3], 4), 0.0)


class Counted(tuple[Any, ...]):
    """A prompt's images, with a count of the reads by the scheduler (the fake runner also reads)."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        Counted.reads += _is_weft(sys._getframe(1))
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        counts = _is_weft(sys._getframe(1))
        for item in super().__iter__():
            Counted.reads += counts
            yield item


def _is_weft(frame: Any) -> bool:
    return str(frame.f_globals["__name__"]).startswith("weft.")


@pytest.mark.parametrize(("chunk", "whole"), [(3, 0), (0, 10)])
def test_work_is_linear_in_the_images_of_a_prompt(
    chunk: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of items, and sorts of victims, per image: equal for 40 images and for 160."""
    victims = [0]
    sorted_ = EmbeddingCache.victims
    monkeypatch.setattr(EmbeddingCache, "victims", lambda cache: victims.append(1) or sorted_(cache))
    per_image = []
    for number in (40, 160):
        settings = limits(cache_bytes=2048, most_items=number, encode_patches=8, whole=whole)
        config = kv_config(blocks=400, max_model_len=1200, media=settings)
        rig = Rig(config, 1, long_prefill_token_threshold=chunk)
        tokens, media = prompt(*range(number))
        Counted.reads = 0
        rig.submit(submit(0, tokens, media=Counted(media), max_tokens=1))
        drain(rig)
        assert rig.runner.encoded == number
        per_image.append(Counted.reads / number)
    # Four times as many images: two more steps of each binary search.
    assert per_image[1] < per_image[0] + 20, per_image
    assert len(victims) == 1, "victims were sorted with free blocks"


@pytest.mark.parametrize("seed", range(20))
def test_images_of_a_stretch_are_found_at_all_edges(seed: int) -> None:
    """Images touch each other and the ends of the prompt; stretches begin and end at and within images."""
    rng = random.Random(seed)
    media, end = [], 0
    for number in range(rng.randint(0, 6)):
        start, count = end + rng.choice([0, 0, 1, 3]), rng.choice([1, 2, 5])
        media.append(MediaItem(key=bytes([number]) * 16, start=start, count=count, grid=(1, 2, 2)))
        end = start + count
    sequence: Any = SimpleNamespace(media=tuple(media))
    every: Any = SimpleNamespace(whole=5)
    for first in range(end + 2):
        for last in range(first, end + 3):
            within = [item for item in media if item.start < last and first < item.start + item.count]
            assert list(items_within(media, first, last)) == within
            cut = [item for item in media if item.start < last < item.start + item.count]
            for room in (1, 5):
                due = last
                if cut and last > first:
                    behind = cut[0].start + cut[0].count
                    begun = behind if behind - first <= room else first
                    due = cut[0].start if cut[0].start > first else begun
                assert whole_end(sequence, first, last, room, every) == due


def random_ask(rng: random.Random, number: int, request: int, choice: int, parts: list) -> Submit:
    return ask(
        number,
        *parts,
        request=request,
        choice=choice,
        seed=rng.choice([1, 1, 1, 2, BAD_SEED]),
        priority=rng.choice([0, 0, 0, 1]),
        salt=rng.choice(["", "", "x"]),
        max_tokens=rng.randint(1, 12),
        prompt_logprobs=rng.choice([-1, -1, 1]),
    )


def random_parts(rng: random.Random) -> list[int | list[int]]:
    """Return few distinct images and texts, so that prompts often differ only in an image."""
    parts: list[int | list[int]] = []
    length = 0
    for _ in range(rng.randint(1, 6)):
        part = rng.choice(
            [rng.randrange(7), rng.randrange(7), [1, 2, 3], [PAD] * rng.randint(1, 4), [rng.randrange(VOCAB)]]
        )
        more = image(part).count if isinstance(part, int) else len(part)
        if length + more <= 36 and sum(isinstance(p, int) for p in parts) < 4:
            parts.append(part)
            length += more
    return parts or [[1]]


def random_load(seed: int, depth: int) -> Rig:
    """Run a random load: small pools, aborts, lost ranks, drafts and recurrent states."""
    rng = random.Random(seed)
    kv = kv_config(
        blocks=rng.choice([12, 18, 64]),
        window=rng.choice([None, None, 6]),
        slots=rng.choice([4, 12]),
        caching=rng.random() < 0.7,
        states=rng.choice([0, 0, 5]),
        copies=rng.choice([1, 1, 3]),
        media=limits(
            cache_bytes=rng.choice([12, 16, 40]),
            encode_patches=rng.choice([1, 8, 40]),
            block_rows=rng.choice([1, 3, 4]),
            host_bytes=rng.choice([0, 0, 16]),
        ),
    )
    rig = Rig(
        kv,
        depth,
        step_policy=rng.choice(["mixed", "exclusive"]),
        long_prefill_token_threshold=rng.choice([0, 1, 3, 7]),
        max_num_seqs=rng.choice([2, 8]),
    )
    earlier = [random_parts(rng)]
    for request in range(25):
        parts = rng.choice(earlier)[: rng.randint(1, 6)] if rng.random() < 0.5 else random_parts(rng)
        earlier.append(parts)
        for choice in range(rng.choice([1, 1, 2])):
            rig.submit(random_ask(rng, len(rig.outputs), request, choice, parts))
        for _ in range(rng.randint(0, 5)):
            rig.step()
            rig.audit()
            check_book(rig)
        if rng.random() < 0.1:
            rig.finish(rng.randrange(len(rig.outputs)))
        if rng.random() < 0.05:
            rig.lose()
    drain(rig)
    return rig


@seeds((2, 8, 15, 21), 30, 120)
@mostly_slow("depth", [1, 2], [2])
def test_random_loads(depth: int, seeds: Sequence[int]) -> None:
    preempted = hits = cached = encoded = overwritten = moved = 0
    for seed in seeds:
        rig = random_load(seed, depth)
        stats = rig.scheduler.stats()
        preempted += stats.preemptions
        hits += stats.image_hits
        cached += stats.prefix_hits
        encoded += rig.runner.encoded
        overwritten += rig.runner.overwritten
        moved += rig.runner.moved
    assert min(preempted, hits, cached, encoded, overwritten, moved) > 0


def _never_over(book: MediaBook, sequence: Any, key: bytes) -> Any:
    use = _USE(book, sequence, key)
    use.order = (-9, 0, 0)
    return use


def _without_moves(cache: EmbeddingCache, step: int) -> list[Any]:
    return [op for op in _TAKE_OPS(cache, step) if not isinstance(op, MoveMedia)]


_USE = MediaBook._use_of
_TAKE_OPS = EmbeddingCache.take_ops
#: Bug -> (object, attribute, replacement).
BUGS: dict[str, tuple[Any, str, Any]] = {
    "images are not in the hashes": (state_module, "media_keys", lambda items, block: {}),
    "where they begin is not in the hashes": (
        state_module,
        "media_keys",
        lambda items, block: {
            number: tuple(part[:16] for part in parts) for number, parts in media_keys(items, block).items()
        },
    ),
    "what the same plan reads is forgotten": (MediaBook, "_may_go", lambda book, key, order: True),
    "a chunk may have any image": (MediaBook, "reach", lambda book, sequence, start, end, step: end),
    "a step encodes without end": (MediaBook, "_begin", lambda book, step: setattr(book, "_patches", -999)),
    "who has read it uses it for ever": (MediaBook, "_use_of", _never_over),
    "who has left still uses it": (MediaBook, "leave", lambda book, sequence: None),
    "new ranks have what the old ones had": (MediaBook, "clear", lambda book: None),
    "what the host gets is not moved": (EmbeddingCache, "take_ops", _without_moves),
}


def random_loads(seeds: Sequence[int]) -> None:
    for seed in seeds:
        random_load(seed, 1 + seed % 2)


@pytest.mark.requirement("D28")
@pytest.mark.parametrize("bug", list(BUGS))
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random loads above detect each planted bug."""
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises((AssertionError, EngineDead, KeyError)):
        random_loads(range(40))
