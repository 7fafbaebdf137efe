"""Plans of spans, carried out on numpy arrays and compared with a transfer of single elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.disagg.protocol.memory import KINDS, Group, local_cache, reference
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.disagg.protocol.coverage import BadSpans, Coverage
from weft.disagg.protocol.group_layout import compatible, group_dims, tensors_of
from weft.disagg.protocol.spans import SpanPlan, arriving, first_position, merged, split
from weft.types.transfer import TransferMessageError

BLOCKS = 24


def tables(rng: np.random.Generator, group: Group, end: int, first: list[int]) -> list[list[int]]:
    """Return random block tables, with null blocks before the block of position ``first``."""
    made = []
    for kind, spec in enumerate(group.caches):
        if spec.kind == "state":
            made.append([int(rng.integers(1, 4))])
            continue
        entries = -(-end // group.block_size)
        ids = (1 + rng.permutation(group.num_blocks)[:entries]).tolist()
        null = first[kind] // group.block_size
        made.append([0] * null + ids[null:])
    return made


def needed(sender: Group, receiver: Group, start: int, end: int) -> list[int]:
    pairs = zip(sender.dims.kinds, receiver.dims.kinds, strict=True)
    return [first_position(a, b, start, end) for a, b in pairs]


class Case:
    """Two groups, a sequence in both, and its plans."""

    def __init__(
        self,
        seed: int,
        kinds: list[str],
        ranks: tuple[int, int],
        blocks: tuple[int, int],
        start: int,
        end: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        caches = [KINDS[name] for name in kinds]
        self.sender = Group(caches, ranks[0], blocks[0], BLOCKS)
        self.receiver = Group(caches, ranks[1], blocks[1], BLOCKS, snapshots=True)
        self.sender.fill(rng)
        self.receiver.fill(rng)
        self.start, self.end = start, end
        first = needed(self.sender, self.receiver, start, end)
        self.positions = [range(begin, end) for begin in first]
        self.tables = tables(rng, self.sender, end, first), tables(rng, self.receiver, end, first)
        self.sides = (
            self.sender.side(self.tables[0], start, end),
            self.receiver.side(self.tables[1], start, end),
        )

    def plan(self, rank: int, to: int) -> SpanPlan:
        return SpanPlan(self.sides[0], rank, self.sides[1], to, self.start, self.end)

    def coverage(self, to: int) -> Coverage:
        return Coverage(arriving(self.sides[1], to, self.sender.dims, self.start, self.end))

    def expected(self) -> list[list[np.ndarray]]:
        return reference(self.sender, self.receiver, *self.tables, self.positions)

    def carry_out(
        self, rank: int, to: int, parts: object, coverage: Coverage, written: list[np.ndarray]
    ) -> None:
        for part in parts:  # type: ignore[attr-defined]
            coverage.check(part.target, part.spans[:, 1:])
            coverage.add(part.target, part.spans[:, 1:])
            for source, target, size in part.spans.tolist():
                data = self.sender.regions[rank][part.source][source : source + size]
                self.receiver.regions[to][part.target][target : target + size] = data
                written[part.target][target : target + size] += 1


def check(case: Case, chunks: list[int]) -> None:
    """Chunk by chunk and layer by layer, over all pairs of ranks."""
    expected = case.expected()
    for to in range(case.receiver.ranks):
        coverage = case.coverage(to)
        written = [np.zeros(len(region), np.int64) for region in case.receiver.regions[to]]
        for rank in range(case.sender.ranks):
            plan = case.plan(rank, to)
            for begin, end in zip([case.start, *chunks], [*chunks, case.end], strict=True):
                for kind, dims in enumerate(case.sender.dims.kinds):
                    for number in range(len(dims.layers)):
                        parts = plan.entries(kind, [number], begin, end)
                        case.carry_out(rank, to, parts, coverage, written)
            for kind, dims in enumerate(case.sender.dims.kinds):
                for number in range(len(dims.layers)):
                    case.carry_out(rank, to, plan.state(kind, [number]), coverage, written)
        assert coverage.complete()
        for region, counts in enumerate(written):
            assert counts.max(initial=0) <= 1
            assert (case.receiver.regions[to][region] == expected[to][region]).all(), (to, region)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, list[int]]:
    ranks = draw(st.sampled_from([(a, b) for a in (1, 2, 4) for b in (1, 2, 4)]))
    blocks = draw(st.sampled_from([(4, 4), (4, 8), (8, 4), (8, 8), (12, 8), (16, 4)]))
    end = draw(st.integers(1, 60))
    start = draw(st.integers(0, (end - 1) // blocks[1])) * blocks[1]
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    chunks = sorted(draw(st.lists(st.integers(start, end), max_size=3)))
    return Case(draw(st.integers(0, 1 << 30)), kinds, ranks, blocks, start, end), chunks


@settings(max_examples=250, deadline=None)
@given(cases())
def test_every_byte_goes_where_it_belongs_exactly_once(case: tuple[Case, list[int]]) -> None:
    check(*case)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_between_every_two_sizes(kind: str) -> None:
    for seed, ranks in enumerate([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (4, 4)]):
        check(Case(seed, [kind], ranks, (8, 4), 8, 37), [13, 20])


def test_equal_groups_exchange_whole_blocks() -> None:
    case = Case(0, ["full"], (1, 1), (8, 8), 0, 32)
    block = 2 * 4 * 8 * 3 * 2
    parts = list(case.plan(0, 0).everything())
    assert len(parts) == 1  # of one region, both layers
    assert all(set((part.spans[:, 2] % block).tolist()) == {0} for part in parts)
    assert sum(part.nbytes for part in parts) == 2 * 4 * block


def test_a_window_sends_what_the_next_token_reads_and_the_rest_of_its_blocks() -> None:
    case = Case(0, ["window"], (1, 1), (4, 4), 0, 50)
    assert needed(case.sender, case.receiver, 0, 50) == [40]  # 50 - 11 + 1
    case = Case(0, ["window"], (1, 1), (4, 8), 0, 55)
    assert needed(case.sender, case.receiver, 0, 55) == [44]  # 45, and the earlier part of the sender's block


def test_a_chunk_sends_what_the_next_token_reads_and_the_rest_of_its_blocks() -> None:
    case = Case(0, ["chunk"], (1, 1), (4, 4), 0, 57)
    assert needed(case.sender, case.receiver, 0, 57) == [48]  # 50, and the earlier part of the block
    assert needed(case.sender, case.receiver, 0, 60) == [60]  # the next token begins a chunk


def test_positions_in_the_null_block_are_an_error() -> None:
    case = Case(0, ["full"], (1, 1), (4, 4), 0, 20)
    case.tables[0][0][2] = 0
    side = case.sender.side(case.tables[0], 0, 20)
    with pytest.raises(TransferMessageError, match="null block"):
        list(SpanPlan(side, 0, case.sides[1], 0, 0, 20).everything())


@pytest.mark.requirement("F28")
@pytest.mark.parametrize(
    ("table", "message"),
    [([1, 2, 99], "outside its pool"), ([1, 2, 2], "twice"), ([1, 2], "end before"), ([1, -2, 3], "outside")],
)
def test_blocks_that_cannot_be_are_refused(table: list[int], message: str) -> None:
    group = Group([KINDS["full"]], 1, 4, BLOCKS)
    with pytest.raises(TransferMessageError, match=message):
        group.side([table], 0, 12)


def test_groups_of_other_models_are_not_compatible() -> None:
    one = Group([KINDS["full"]], 2, 4, BLOCKS)
    assert compatible(one.dims, Group([KINDS["full"]], 1, 8, 9).dims) is None
    for other in ("full, one head", "window", "full, two heads, fp8", "MTP layers"):
        assert compatible(one.dims, Group([KINDS[other]], 2, 4, BLOCKS).dims), other
    state = Group([KINDS["state"]], 2, 4, BLOCKS)
    assert compatible(state.dims, Group([KINDS["state"]], 4, 4, 9, snapshots=True).dims) is None


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_group_is_described_by_its_configuration(ranks: int) -> None:
    caches = [KINDS[name] for name in sorted(KINDS)]

    def config(specs: list[CacheSpec]) -> KVConfig:
        pools = tuple(PoolSpec(cache=spec, block_size=8, num_blocks=BLOCKS) for spec in specs)
        facts = {"block_size": 8, "enable_prefix_caching": True, "max_model_len": 64}
        return KVConfig(pools=pools, num_slots=2, copies=3, **facts)  # type: ignore[arg-type]

    local = config([local_cache(spec, ranks) for spec in caches])
    for snapshots in (False, True):
        dims = group_dims(config(caches), local, ranks, "bfloat16", snapshots)
        assert dims == Group(caches, ranks, 8, BLOCKS, snapshots).dims
        tensors_of(dims)
        sizes = [tensor.nbytes for tensors in tensors_of(dims) for tensor in tensors]
        assert sizes == [len(region) for region in Group(caches, ranks, 8, BLOCKS, snapshots).regions[0]]


def test_dims_that_contradict_a_kind_are_refused() -> None:
    import msgspec

    dims = Group([KINDS["full"]], 2, 4, BLOCKS).dims
    tensors_of(dims)
    kind = dims.kinds[0]
    tensor = kind.tensors[0]
    for wrong in (
        msgspec.structs.replace(kind, block_size=8),
        msgspec.structs.replace(kind, layers=(1, 2, 3)),
        msgspec.structs.replace(kind, kv_heads=1),
        msgspec.structs.replace(kind, tensors=(msgspec.structs.replace(tensor, dtype="object"),)),
        msgspec.structs.replace(kind, tensors=(msgspec.structs.replace(tensor, dims=()),)),
        msgspec.structs.replace(
            kind,
            tensors=(
                msgspec.structs.replace(tensor, dims=(("layer", 2), ("block", 1 << 47), ("head", 1 << 20))),
            ),
        ),
    ):
        with pytest.raises(TransferMessageError):
            tensors_of(msgspec.structs.replace(dims, kinds=(wrong,)))


def test_spans_are_merged_and_split() -> None:
    spans = np.array([[0, 10, 5], [5, 15, 5], [10, 30, 2], [12, 32, 3], [20, 35, 1]], np.int64)
    assert merged(spans).tolist() == [[0, 10, 10], [10, 30, 5], [20, 35, 1]]
    cut = split(merged(spans), 4)
    assert cut.tolist() == [[0, 10, 4], [4, 14, 4], [8, 18, 2], [10, 30, 4], [14, 34, 1], [20, 35, 1]]
    assert split(spans[:0], 4).shape == (0, 3)


class TestCoverage:
    def make(self) -> Coverage:
        return Coverage({0: np.array([[10, 20], [50, 5]], np.int64), 2: np.array([[0, 8]], np.int64)})

    @pytest.mark.parametrize(
        ("region", "spans"),
        [(1, [[0, 1]]), (0, [[9, 2]]), (0, [[10, 21]]), (0, [[29, 2]]), (0, [[40, 1]]), (0, [[-1, 3]]),
         (0, [[10, 0]]), (0, [[10, 1 << 62]]), (2, [[0, 8], [8, 1]]), (0, [[(1 << 63) - 1, 5]])],
    )  # fmt: skip
    def test_spans_outside_the_transfer_are_refused(self, region: int, spans: list[list[int]]) -> None:
        with pytest.raises(BadSpans):
            self.make().check(region, np.array(spans, np.int64))

    def test_bytes_that_come_twice_do_not_stand_for_others(self) -> None:
        coverage = self.make()
        coverage.add(2, np.array([[0, 8]]))
        coverage.add(0, np.array([[10, 20]]))
        assert not coverage.complete()
        coverage.add(0, np.array([[10, 5]]))
        with pytest.raises(BadSpans, match="twice"):
            coverage.complete()

    def test_everything_in_any_order(self) -> None:
        coverage = self.make()
        for region, span in ((0, [15, 15]), (2, [4, 4]), (0, [50, 5]), (2, [0, 4]), (0, [10, 5])):
            assert not coverage.complete()
            coverage.check(region, np.array([span]))
            coverage.add(region, np.array([span]))
        assert coverage.complete()
