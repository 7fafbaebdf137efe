"""KV cache events of a real engine, read by a router with its own declaration of vLLM's layout."""

from __future__ import annotations

import logging
import random
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.e0.rig import BLOCK, make_engine, run, submit
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config.sections.events_section import EventsSection, address_of, check_events, is_bound
from weft.engine.core import EngineCore
from weft.engine.kv_events import EventForm, KVEventPublisher
from weft.kv.block_events import Cleared, Removed, Stored
from weft.kv.hashing import prompt_hashes
from weft.types.sampling import TokenParams

WAIT_MS = round(deadline(10.0) * 1e3)
END = b"\xff" * 8


# The layout of vLLM, declared apart from the code under test.
class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class MapEvent(msgspec.Struct, tag=True, tag_field="type"):
    pass


class BlockStored(MapEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(MapEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(MapEvent, tag="AllBlocksCleared"):
    pass


class MapBatch(Batch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class OldStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class OldCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class OldBatch(Batch):
    events: list[OldStored | OldRemoved | OldCleared]


class Router:
    """Follows the events of one engine, and asks for the batches that are missing."""

    def __init__(self, section: EventsSection, layout: type[Batch] = MapBatch) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(section.kv_events_topic or "")
        self._sub.connect(section.kv_events_endpoint or "")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(section.kv_events_replay_endpoint or "")
        self._topic = (section.kv_events_topic or "").encode()
        self._decode = msgspec.msgpack.Decoder(layout).decode
        self.next = 0
        """Number of the next batch; 0 before the first batch."""
        self.replayed = 0
        self.paths: dict[int, list[int]] = {}
        """Hash of a cached block -> all token ids from the start of the sequence."""
        self.events: list[Any] = []

    def follow(self, end: int) -> None:
        """Apply batches until all batches with numbers below ``end`` are known."""
        while self.next < end:
            if not self._sub.poll(200):  # the subscription may have come after the last batch
                self._ask()
                continue
            topic, number, payload = self._sub.recv_multipart()
            assert topic == self._topic
            at = int.from_bytes(number, "big")
            if at > self.next:
                self._ask()
            if at == self.next:
                self._apply(at, payload)

    def _ask(self) -> None:
        """Ask for the batches from the first missing batch on."""
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(WAIT_MS), "no answer"
            _, number, payload = self._replay.recv_multipart()
            if number == END:
                assert payload == b""
                return
            at = int.from_bytes(number, "big")
            assert at >= self.next
            self.replayed += 1
            self._apply(at, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        batch = self._decode(payload)
        assert batch.ts > 1e9
        assert batch.data_parallel_rank == 0
        assert batch.events
        if number != self.next:  # the first batch of an engine process clears the cache
            assert isinstance(batch.events[0], AllBlocksCleared | OldCleared)
        self.next = number + 1
        for event in batch.events:
            self.events.append(event)
            if isinstance(event, BlockStored | OldStored):
                self._store(event)
            elif isinstance(event, BlockRemoved | OldRemoved):
                assert event.medium == "GPU"
                for key in event.block_hashes:
                    del self.paths[key]
            else:
                self.paths.clear()

    def _store(self, event: Any) -> None:
        assert event.block_size == BLOCK
        assert event.medium == "GPU"
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        path = [] if event.parent_block_hash is None else self.paths[event.parent_block_hash]
        for number, key in enumerate(event.block_hashes):
            assert key not in self.paths
            path = path + event.token_ids[number * BLOCK : (number + 1) * BLOCK]
            self.paths[key] = path

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def closing(*things: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for one in things:
            one.close()


def low(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def cached(engine: EngineCore) -> set[int]:
    """Return the hashes of all blocks in the prefix cache."""
    followed = engine.follow_prefixes()
    assert followed is not None
    return set(map(low, followed[0].keys))


def published(engine: EngineCore) -> int:
    """Return the number of the next batch."""
    assert engine._kv_events is not None
    return engine._kv_events._publisher._next


def section(folder: Path, **more: Any) -> EventsSection:
    return EventsSection(
        kv_events_endpoint=f"ipc://{folder}/events",
        kv_events_replay_endpoint=f"ipc://{folder}/replay",
        **more,
    )


def rounds(seed: int, count: int) -> list[list[Any]]:
    """Return submissions for ``run``: prompts that share prefixes, with outputs beyond a block."""
    rng = random.Random(seed)
    heads = [[rng.randrange(1, VOCAB) for _ in range(3 * BLOCK)] for _ in range(3)]
    made = []
    for number in range(count):
        ids = rng.choice(heads) + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 20))]
        params = TokenParams(temperature=0.0, max_tokens=2 * BLOCK)
        made.append([submit(number + 1, ids, params, request=number)])
        made += [[] for _ in range(rng.randrange(4))]
    return made


@pytest.mark.requirement("E36")
@pytest.mark.parametrize("shape", ["qwen2_windowed", "qwen3_next", "deepseek_v3", "deepseek_v4"])
def test_models_with_several_caches(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, shape: str
) -> None:
    """The events are those of the group with whole prefixes and the smallest blocks."""
    settings = section(tmp_path)
    engine, _ = make_engine(
        make_checkpoint(tmp_path_factory.mktemp("shapes"), shape), blocks=36, max_num_seqs=2, events=settings
    )
    router = Router(settings)
    with closing(engine, router):
        run(engine, rounds(6, 8))
        router.follow(published(engine))
        assert set(router.paths) == cached(engine)
        kinds = {event.kv_cache_spec_kind for event in router.events if isinstance(event, BlockStored)}
        assert kinds == {"mla_attention" if shape.startswith("deepseek") else "full_attention"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kv-events"), "llama")


@pytest.mark.requirement("E36")
@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_router_knows_the_cache_of_an_engine(folder: Path, tmp_path: Path, form: str, depth: int) -> None:
    """Stores and evictions arrive in order. The hashes chain, and name the tokens they stand for."""
    settings = section(tmp_path, kv_events_topic="kv@pod@m", kv_events_format=form)
    engine, _ = make_engine(folder, blocks=30, depth=depth, max_num_seqs=3, events=settings)
    router = Router(settings, MapBatch if form == "map" else OldBatch)
    with closing(engine, router):
        run(engine, rounds(1, 12))
        router.follow(published(engine))
        assert set(router.paths) == cached(engine)
        kinds = {type(event).__name__.removeprefix("Old").removeprefix("Block") for event in router.events}
        assert kinds > {"Stored", "Removed"}
        for key, path in router.paths.items():
            assert low(prompt_hashes(array("i", path).tobytes(), "", BLOCK)[-1]) == key


def test_a_router_that_comes_late_asks_for_the_missing_batches(folder: Path, tmp_path: Path) -> None:
    settings = section(tmp_path)
    engine, _ = make_engine(folder, blocks=30, events=settings)
    with closing(engine):
        begin = published(engine)
        run(engine, rounds(2, 6))
        before = published(engine)
        router = Router(settings)
        with closing(router):
            router.follow(before)
            assert router.replayed == before - begin + 1 > 3
            run(engine, rounds(3, 6))
            router.follow(published(engine))
            assert set(router.paths) == cached(engine)


@pytest.mark.requirement("E36")
def test_an_engine_that_replaces_another_is_followed(folder: Path, tmp_path: Path) -> None:
    """The numbers go on rising, and the first batch says that the cache is empty."""
    settings = section(tmp_path)
    router = Router(settings)
    with closing(router):
        for seed in (7, 8):
            engine, _ = make_engine(folder, blocks=30, events=settings)
            with closing(engine):
                run(engine, rounds(seed, 4))
                router.follow(published(engine))
                assert set(router.paths) == cached(engine) != set()


def test_batches_beyond_the_buffer_are_gone(folder: Path, tmp_path: Path) -> None:
    settings = section(tmp_path, kv_events_buffer=2)
    engine, _ = make_engine(folder, events=settings)
    context = zmq.Context()
    client = context.socket(zmq.REQ)
    client.connect(settings.kv_events_replay_endpoint or "")
    with closing(engine):
        run(engine, rounds(4, 5))
        count = published(engine)
        client.send((0).to_bytes(8, "big"))
        assert client.poll(WAIT_MS)
        number, _ = client.recv_multipart()
        assert int.from_bytes(number, "big") == count - 2
    context.destroy(linger=0)


def test_salt_is_an_extra_key_of_the_first_block(folder: Path, tmp_path: Path) -> None:
    settings = section(tmp_path)
    engine, _ = make_engine(folder, events=settings)
    router = Router(settings)
    with closing(engine, router):
        params = TokenParams(temperature=0.0, max_tokens=2)
        ids = list(range(1, 2 * BLOCK + 2))
        run(engine, [[submit(1, ids, params, request=1, salt="tenant")]])
        router.follow(published(engine))
        _, event = router.events
        assert event.extra_keys == [["tenant"], None]
        assert event.token_ids == ids[: 2 * BLOCK]
        assert (event.group_idx, event.kv_cache_spec_kind, event.lora_id) == (0, "full_attention", None)


def test_an_engine_without_events_records_nothing(folder: Path) -> None:
    engine, _ = make_engine(folder)
    with closing(engine):
        run(engine, rounds(5, 2))
        followed = engine.follow_prefixes()
        assert followed is not None
        assert followed[0].events is None


def test_without_prefix_caching_there_are_no_events(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = make_engine(folder, caching=False, events=section(tmp_path))
    engine.close()
    assert engine._kv_events is None
    assert "no KV cache events" in caplog.text


def test_the_bytes_are_those_of_vllm() -> None:
    """One event of each kind, in both forms."""
    events = [Stored([b"\1" * 16], None, [7, 8], [None]), Removed(b"\2" * 16), Removed(b"\3" * 16), Cleared()]
    key = int.from_bytes(b"\1" * 8, "big")
    gone = [int.from_bytes(bytes([n]) * 8, "big") for n in (2, 3)]
    pack = msgspec.msgpack
    assert pack.decode(pack.encode(EventForm("map", 2, "full_attention").of(events))) == [
        {
            "type": "BlockStored",
            "block_hashes": [key],
            "parent_block_hash": None,
            "token_ids": [7, 8],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
    assert pack.decode(pack.encode(EventForm("array", 2, "full_attention").of(events))) == [
        ["BlockStored", [key], None, [7, 8], 2, None, "GPU", None, [None], 0, "full_attention"],
        ["BlockRemoved", gone, "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_an_address_in_use_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        port = holder.getsockname()[1]
        holder.listen()
        settings = EventsSection(kv_events_endpoint=f"tcp://*:{port}")
        with caplog.at_level(logging.INFO):
            publisher = KVEventPublisher(settings, EventForm("map", BLOCK, "full_attention"), 0, 0)
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe("")
    sub.connect(f"tcp://127.0.0.1:{port}")
    number = -1
    for _ in range(round(WAIT_MS / 50)):
        publisher.publish([Cleared()])
        if sub.poll(50):
            number = int.from_bytes(sub.recv_multipart()[1], "big")
            break
    publisher.close()
    context.destroy(linger=0)
    assert "is in use" in caplog.text
    assert number >= 0


def test_addresses() -> None:
    assert address_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert address_of("tcp://*:5557", 3) == "tcp://*:5560"
    assert address_of("ipc:///run/events", 1) == "ipc:///run/events-1"
    assert [is_bound(one) for one in ("tcp://*:1", "tcp://[::]:1", "ipc://a", "tcp://router:1")] == [
        True,
        True,
        True,
        False,
    ]
    check_events(EventsSection(kv_events_endpoint="tcp://router:5557"))
    for wrong in ("5557", "tcp://*", "tcp://*:0", "tcp://*:70000", "udp://*:1", "ipc://"):
        with pytest.raises(ConfigError, match="--kv-events-endpoint"):
            check_events(EventsSection(kv_events_endpoint=wrong))
    with pytest.raises(ConfigError, match="needs --kv-events-endpoint"):
        check_events(EventsSection(kv_events_replay_endpoint="tcp://*:5558"))
