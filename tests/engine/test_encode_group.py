"""Encode groups and a computing group in one process: the tokens equal those of one engine that does both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.encode_rig import EncodeFleet
from tests.engine.pair_rig import submit, unified
from tests.engine.test_engine_server import Served
from tests.engine.test_images import GREEDY, SAMPLED, asked, config_of
from tests.support.seen import SeeingModels
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest, Overloaded
from weft.engine import build_encoder
from weft.engine.core import EngineCore
from weft.types import messages as m
from weft.types.transfer import Peer, TransferKey, TransferParameters

FAMILIES = ["qwen3-vl", "qwen3-5-vision", "kimi-k25", "qwen2-5-vl"]
#: Prompts with 1, 3 and 8 images.
MANY: list[list[int | tuple[int, int]]] = [
    [5, (2, 3), 4],
    [3, (3, 3), 2, (1, 4), 6, (2, 2), 1],
    [2, (1, 1), 1, (2, 2), (1, 2), 3, (2, 3), (3, 2), 1, (1, 5), (2, 1), 2, (4, 2), 5],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    return SeeingModels(tmp_path_factory.mktemp("encoders"))


@pytest.fixture
def fleets() -> Iterator[Callable[..., EncodeFleet]]:
    made: list[EncodeFleet] = []

    def one(*arguments: Any, **more: Any) -> EncodeFleet:
        made.append(EncodeFleet(*arguments, **more))
        return made[-1]

    yield one
    for fleet in made:
        fleet.close()


def encoder(folder: Path, **more: Any) -> Any:
    return config_of(folder, role="encode", **more)


def taker(folder: Path, **more: Any) -> Any:
    return config_of(folder, take_embeddings=True, language_model_only=True, **more)


def many(models: SeeingModels, name: str, first: int = 0, n: int = 1) -> list[m.Submit]:
    """Return prompts with 1, 3 and 8 images; the last prompt has ``n`` choices."""
    made = []
    for number, parts in enumerate(MANY):
        seen = models.seen(name, parts, number)
        for choice in range(n if number == len(MANY) - 1 else 1):
            params = SAMPLED if choice else GREEDY
            one = submit(
                first + 10 * number + choice,
                seen.ids,
                params,
                request=first + number,
                choice=choice,
                media=seen.media,
            )
            made.append(msgspec.structs.replace(one, seed=77 + number))
    return made


def check(fleet: EncodeFleet, submits: list[m.Submit], expected: dict[int, list[int]]) -> None:
    for one in submits:
        fleet.submit(one)
    fleet.run()
    assert fleet.answers() == expected
    fleet.check_given_back()


@pytest.mark.requirement("D24")
@mostly_slow("encoders", [1, 2], [2])
@mostly_slow("name", FAMILIES, FAMILIES[:3])
def test_tokens_are_those_of_one_engine(
    name: str, encoders: int, models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    """1, 3 and 8 images, n > 1, chunked prompts; then the same requests again, from both caches."""
    folder = models.folder(name)
    submits = many(models, name, n=3)
    expected = unified(config_of(folder), submits)
    fleet = fleets([encoder(folder)] * encoders, taker(folder, long_prefill_token_threshold=7))
    check(fleet, submits, expected)
    images = sum(core.stats().images_encoded for core in fleet.encoders)
    assert images == len({item.key for one in submits for item in one.media}) > 8
    assert fleet.compute.stats().images_encoded == 0
    again = [msgspec.structs.replace(one, sequence=900 + one.sequence) for one in submits]
    check(fleet, again, {**expected, **{900 + number: tokens for number, tokens in expected.items()}})
    assert sum(core.stats().images_encoded for core in fleet.encoders) == images
    assert not any(heard.attempt for heard in fleet.heard.values())


@mostly_slow("depth", [1, 2], [2])
@mostly_slow("name", FAMILIES, FAMILIES[:3])
def test_with_speculation(
    name: str, depth: int, models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    folder = models.folder(name)
    submits = asked(models, name, n=2)
    expected = unified(config_of(folder), submits)
    drafts = {"speculative_method": "ngram", "speculative_adaptive": False, "ngram_min_length": 1}
    compute = taker(folder, steps_in_flight=depth, long_prefill_token_threshold=5, **drafts)
    fleet = fleets([encoder(folder, steps_in_flight=depth)], compute)
    check(fleet, submits, expected)
    assert sum(fleet.compute.stats().drafts) > 0


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-5-vision"])
def test_three_groups(name: str, models: SeeingModels, fleets: Callable[..., EncodeFleet]) -> None:
    """Separate groups for encode, prefill and decode."""
    folder = models.folder(name)
    submits = many(models, name, n=2)
    expected = unified(config_of(folder), submits)
    fleet = fleets(
        [encoder(folder)],
        taker(folder, role="prefill", long_prefill_token_threshold=9),
        config_of(folder, role="decode", language_model_only=True),
    )
    check(fleet, submits, expected)
    assert fleet.decode is not None
    assert fleet.decode.stats().images_encoded == fleet.compute.stats().images_encoded == 0


def test_prefixes_that_are_cached_need_no_embedding(
    models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    name = "qwen3-vl"
    folder = models.folder(name)
    first = models.seen(name, [9, (3, 3), 8], 3)
    turn = models.seen(name, [4, (2, 3), 3], 4)
    one = submit(1, first.ids, GREEDY, media=first.media)
    answer = unified(config_of(folder), [one])[1]
    both = first.then(answer, turn)
    two = submit(2, both.ids, GREEDY, media=both.media)
    expected = unified(config_of(folder), [one, two])
    fleet = fleets([encoder(folder)], taker(folder))
    check(fleet, [one], {1: expected[1]})
    check(fleet, [two], expected)
    assert fleet.heard[2].cached > 0
    assert fleet.encoders[0].stats().images_encoded == 2


@pytest.mark.parametrize("host", [None, "128K"])
def test_small_pools_at_both_ends(
    host: str | None, models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    """Pools hold a few images, with many requests: no request fails, and no request waits forever."""
    name = "qwen3-vl"
    folder = models.folder(name)
    parts = [models.seen(name, MANY[number % 2], number) for number in range(12)]
    submits = [submit(n, seen.ids, GREEDY, media=seen.media) for n, seen in enumerate(parts)]
    expected = unified(config_of(folder), submits)
    small = str(4 * 64 * 48 * 3 * 8)
    more = {} if host is None else {"mm_host_cache_bytes": host}
    fleet = fleets(
        [encoder(folder, mm_cache_bytes=small, max_encode_items=2, **more)] * 2,
        taker(folder, mm_cache_bytes=small, **more),
    )
    for one in submits:
        fleet.submit(one)
    fleet.run()
    assert fleet.answers() == expected
    fleet.check_given_back()


@mostly_slow("name", FAMILIES, FAMILIES[:3])
def test_the_same_bits_with_deterministic(
    name: str, models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    """Logprobs in float32 are equal for images encoded elsewhere beside others, or locally and alone."""
    folder = models.folder(name)
    exact: dict[str, Any] = {"dtype": "float32", "deterministic": True}
    submits = [
        msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, logprobs=2))
        for one in many(models, name)
    ]
    fleet = fleets([encoder(folder, **exact)], taker(folder, **exact))
    assert all(core.deterministic for core in fleet.cores)
    for one in submits:
        fleet.submit(one)
    fleet.run()
    alone = EngineCore(config_of(folder, **exact), progress=False)
    try:
        for one in submits:
            found: list[list[float]] = []
            events = alone.submit(one)
            while alone.has_work():
                events += alone.step()
            for event in events:
                found += [] if event.logprobs is None else event.logprobs.arrays()[1].tolist()
            assert fleet.heard[one.sequence].values == found != []
    finally:
        alone.close()


@pytest.mark.requirement("D5")
def test_an_image_that_cannot_be_encoded_ends_its_request_alone(
    models: SeeingModels, fleets: Callable[..., EncodeFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qwen3-vl"
    folder = models.folder(name)
    submits = asked(models, name)
    expected = unified(config_of(folder), submits)
    fleet = fleets([encoder(folder)], taker(folder))
    tower = fleet.encoders[0].runner.runner._tower  # type: ignore[attr-defined]
    bad = submits[2].media[0].pixels
    batch = tower.embed_batch

    def embed_batch(images: list[torch.Tensor]) -> Any:
        if any(image.numpy().tobytes() == bad for image in images):
            raise RuntimeError("planted")
        return batch(images)

    monkeypatch.setattr(tower, "embed_batch", embed_batch)
    for one in submits:
        fleet.submit(one)
    fleet.run()
    failed = fleet.heard.pop(submits[2].sequence)
    assert failed.finish == "error"
    assert failed.error is not None
    assert (failed.error.code, failed.attempt) == ("image_failed", 0)
    del expected[submits[2].sequence]
    assert fleet.answers() == expected
    fleet.check_given_back()


@pytest.mark.requirement("D2")
def test_an_engine_answers_while_it_encodes(
    models: SeeingModels, fleets: Callable[..., EncodeFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New sequences, aborts and statistics continue during a long call of the tower, without busy waiting."""
    name = "qwen3-vl"
    folder = models.folder(name)
    fleet = fleets([encoder(folder)], taker(folder))
    engine = fleet.encoders[0]
    tower = engine.runner.runner._tower  # type: ignore[attr-defined]
    go, begun = threading.Event(), threading.Event()
    batch = tower.embed_batch

    def slow(images: list[torch.Tensor]) -> Any:
        begun.set()
        assert go.wait(deadline(60.0))
        return batch(images)

    monkeypatch.setattr(tower, "embed_batch", slow)
    submits = asked(models, name)
    fleet.submit(submits[0])
    while not begun.is_set():
        fleet.turn()
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        fleet.turn()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < deadline(0.5)
    assert engine.has_work()
    assert engine.wait_ms() > 0
    for one in submits[1:3]:
        fleet.submit(one)
    assert engine.stats().waiting == 3
    fleet.heard.pop(submits[1].sequence)
    assert [event.finish for event in engine.finish(submits[1].sequence)] == ["abort"]
    fleet.compute.finish(submits[1].sequence)
    go.set()
    fleet.run()
    expected = unified(config_of(folder), [submits[0], submits[2]])
    assert fleet.answers() == expected
    fleet.check_given_back()


def test_an_encoder_that_ends_is_replaced_by_another(
    models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    """Transfers of a closing engine fail at once. The next attempt uses another encoder and gives the same
    text."""
    name = "qwen3-vl"
    folder = models.folder(name)
    submits = many(models, name)
    expected = unified(config_of(folder), submits)
    fleet = fleets([encoder(folder)] * 2, taker(folder))
    gone = fleet.encoders[0]
    for one in submits:
        fleet.submit(one)
    fleet.encoders.remove(gone)
    gone.close()
    fleet.run()
    assert fleet.answers() == expected
    assert any(heard.attempt for heard in fleet.heard.values())
    fleet.check_given_back()


def test_requests_that_an_encode_group_refuses(
    models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    name = "qwen3-vl"
    folder = models.folder(name)
    engine = EngineCore(encoder(folder, max_queued_requests=1), progress=False)
    fleet = fleets([], taker(folder), made=[engine])
    one = asked(models, name)[0]
    with pytest.raises(InvalidRequest, match="needs a transfer"):
        engine.submit(one)
    with pytest.raises(InvalidRequest, match="needs images"):
        engine.submit(msgspec.structs.replace(one, media=()))
    fleet.submit(one)
    other = msgspec.structs.replace(asked(models, name)[1], sequence=5)
    heard = fleet.heard
    fleet.submit(other)
    assert heard[5].error is not None
    assert heard[5].error.code == Overloaded.code
    fleet.run()
    assert heard[one.sequence].finish == "length"


def test_the_welcome_of_encode_and_unified_groups(
    models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    folder = models.folder("qwen3-vl")
    fleet = fleets([encoder(folder)], taker(folder))
    ours, theirs = (core.welcome(1) for core in fleet.cores)
    assert (ours.role, ours.tower, ours.num_blocks, ours.transfer_address) == ("encode", True, (), "")
    assert (theirs.role, theirs.tower) == ("unified", False)
    assert ours.embeddings
    assert theirs.embeddings
    assert len(ours.tower_fingerprint) == 32
    assert ours.tower_fingerprint == theirs.tower_fingerprint


@pytest.mark.requirement("D6")
@pytest.mark.timeout(600)
@mostly_slow(("sends", "takes"), [(1, 2), (2, 1), (2, 2)], [(2, 2)])
def test_groups_of_several_ranks(
    sends: int, takes: int, models: SeeingModels, fleets: Callable[..., EncodeFleet]
) -> None:
    """All ranks of the encode group encode, and divide the receiver's ranks between them.

    Each rank of the receiver gets its shard of the rows.
    """
    name = "qwen3-vl"
    folder = models.folder(name)
    submits = many(models, name, n=2)
    expected = unified(config_of(folder), submits)
    fleet = fleets(
        [encoder(folder, tensor_parallel_size=sends)],
        taker(folder, tensor_parallel_size=takes, long_prefill_token_threshold=7),
    )
    check(fleet, submits, expected)
    assert fleet.encoders[0].stats().images_encoded > 8


@pytest.mark.parametrize(("ranks", "rank", "said"), [(1, 0, False), (2, 0, True), (2, 1, False)])
def test_ranks_that_encode_the_same_are_told_once(
    ranks: int, rank: int, said: bool, models: SeeingModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(build_encoder.log, "warning", lambda text, *values: told.append(text % values))
    mesh: Any = SimpleNamespace(rank=rank)
    build_encoder.load_encoder(
        encoder(models.folder("qwen3-vl"), tensor_parallel_size=ranks), progress=False, mesh=mesh
    )
    assert [("--data-parallel-size 2" in one) for one in told] == [True] * said


@pytest.mark.timeout(600)
def test_an_encoder_that_loses_a_rank_goes_on(
    models: SeeingModels, fleets: Callable[..., EncodeFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences are returned to the router, as for any lost group. The new group encodes everything again."""
    name = "qwen3-vl"
    folder = models.folder(name)
    submits = many(models, name)
    expected = unified(config_of(folder), submits)
    fleet = fleets([encoder(folder, tensor_parallel_size=2)], taker(folder))
    engine = fleet.encoders[0]
    processes = engine.runner.processes
    assert processes is not None
    check(fleet, submits[:1], {submits[0].sequence: expected[submits[0].sequence]})
    processes.kill(1)
    for one in submits[1:]:
        fleet.submit(one)
    fleet.run()
    assert fleet.answers() == expected
    assert engine.stats().images_encoded > 0
    fleet.check_given_back()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_encoder_that_loses_a_rank_while_it_encodes(
    models: SeeingModels, fleets: Callable[..., EncodeFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop also computes its sleep time when the awaited step is lost."""
    name = "qwen3-vl"
    folder = models.folder(name)
    submits = asked(models, name)[:1]
    fleet = fleets([encoder(folder, tensor_parallel_size=2)], taker(folder))
    engine = fleet.encoders[0]
    processes = engine.runner.processes
    assert processes is not None
    tower = engine.runner.runner._tower  # type: ignore[attr-defined]
    go, begun = threading.Event(), threading.Event()
    batch = tower.embed_batch

    def slow(images: list[torch.Tensor]) -> Any:
        begun.set()
        assert go.wait(deadline(60.0))
        return batch(images)

    monkeypatch.setattr(tower, "embed_batch", slow)
    fleet.submit(submits[0])
    while not begun.is_set():
        fleet.turn()
    fleet.turn()
    assert engine.wait_ms() > 0
    processes.kill(1)
    while not engine.recovering:
        fleet.turn()
    assert engine.wait_ms() == 0
    go.set()
    fleet.run()
    assert fleet.answers() == unified(config_of(folder), submits)
    fleet.check_given_back()


@pytest.mark.requirement("D2")
def test_heartbeats_leave_while_it_encodes(
    models: SeeingModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's loop over real sockets, which sleeps during the call of the tower."""
    engine = EngineCore(encoder(models.folder("qwen3-vl")), progress=False)
    tower = engine.runner.runner._tower  # type: ignore[attr-defined]
    go, begun = threading.Event(), threading.Event()
    batch = tower.embed_batch

    def slow(images: list[torch.Tensor]) -> Any:
        begun.set()
        assert go.wait(deadline(60.0))
        return batch(images)

    monkeypatch.setattr(tower, "embed_batch", slow)
    steps = 0
    step = engine.step

    def counted() -> list[m.TokenEvent]:
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(engine, "step", counted)
    served = Served(engine, f"ipc://{tmp_path}/head", wait_ms=engine.wait_ms)
    try:
        front = served.front()
        one = asked(models, "qwen3-vl")[0]
        transfer = TransferParameters(
            TransferKey(1, 0, engine.incarnation), True, Peer("ipc:///nowhere", 5), 60.0
        )
        media = (msgspec.structs.replace(one.media[0], transfer=transfer),)
        front.send(msgspec.structs.replace(one, prompt_ids=b"", media=media))
        assert begun.wait(deadline(60.0))
        before = steps
        began = time.monotonic()
        for _ in range(3):
            assert front.stats_when(lambda stats: stats.running + stats.waiting == 1).steps == 0
        spent = time.monotonic() - began
        assert steps - before < 100 * (1 + spent)
        front.send(m.Finish(sequence=one.sequence))
        assert front.events(one.sequence)[-1].finish == "abort"
        go.set()
        assert front.stats_when(lambda stats: stats.steps == 1).images_encoded == 1
    finally:
        go.set()
        served.close()
