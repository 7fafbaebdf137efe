"""Experts divided over ranks: every form of dispatch gives the result of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.ranks import on_ranks
from tests.support.routed import routed, tokens
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.moe.exchange_cost import ExchangeShape
from weft.moe.expert_choice import Chooser
from weft.moe.parallel import DividedExperts, slice_of
from weft.moe.placement import Placement, in_order
from weft.ops import moe
from weft.ops.cpu import moe as cpu_moe
from weft.ops.moe import Routed
from weft.ops.torch_ops import Int8Weight
from weft.parallel.comm import Pending, drive
from weft.parallel.group_comm import GroupComm, Launcher
from weft.parallel.mesh import Mesh
from weft.types.exchange import Exchange
from weft.types.layout import Layout

Tensor = torch.Tensor

LAYOUTS = {
    "ep2": Layout(tensor=2, expert=True),
    "ep4": Layout(tensor=4, expert=True),
    "dp2": Layout(data=2, expert=True),
    "dp4": Layout(data=4, expert=True),
    "tp2dp2": Layout(tensor=2, data=2, expert=True),
}
FORMS = ("reduce", "gather", "low-latency", "throughput")
#: Tokens of each replica, in order; of fewer replicas the first ones.
UNEVEN = (7, 0, 1, 12)


def local(weights: Routed, placement: Placement, rank: int) -> Routed:
    """Return the part of ``weights`` on ``rank``."""
    mine = list(placement[rank])

    def part(of: Any) -> Any:
        if isinstance(of, Int8Weight):
            return Int8Weight(of.values[mine], of.scales[mine])
        return None if of is None else of[mine]

    return replace(
        weights,
        gate_up=part(weights.gate_up),
        down=part(weights.down),
        gate_up_bias=part(weights.gate_up_bias),
        down_bias=part(weights.down_bias),
    )


def divided(
    mesh: Mesh,
    weights: Routed,
    form: str,
    pieces: Any,
    *,
    exact: bool,
    placement: Placement | None = None,
    counts: bool = False,
) -> DividedExperts:
    experts, hidden = weights.router.shape
    placement = placement or in_order(experts, mesh.ep.size)
    shape = ExchangeShape(hidden, weights.rule.top_k, 8, exact)
    mine = local(weights, placement, mesh.rank)
    return DividedExperts(
        mesh,
        Chooser(mesh.layout, form, shape),
        pieces,
        cpu_moe.pack(mine) if pieces is cpu_moe.PARTS else mine,
        placement,
        exact=exact,
        counts=counts,
    )


def rows_of(layout: Layout, dtype: torch.dtype, counts: tuple[int, ...] = UNEVEN) -> list[Any]:
    """(x, ids) of each replica."""
    return [tokens(count, dtype, seed=10 + i) for i, count in enumerate(counts[: layout.data])]


def run(
    layout: Layout, form: str, weights: Routed, rows: list[Any], pieces: Any, *, exact: bool, **more: Any
) -> list[Tensor]:
    """Return the result of every rank."""
    most = max(len(x) for x, _ in rows)
    agreed = Exchange(form, most) if layout.data > 1 else Exchange()

    def work(mesh: Mesh) -> Tensor:
        block = divided(mesh, weights, form, pieces, exact=exact, **more)
        x, ids = rows[layout.replica(mesh.rank)]
        return drive(block.steps(x.clone(), ids, agreed))

    return on_ranks(layout, work)


def forms(layout: Layout) -> tuple[str, ...]:
    return FORMS if layout.data == 1 else FORMS[1:]


CASES = [(name, form) for name, layout in LAYOUTS.items() for form in forms(layout)]


@pytest.mark.parametrize(("name", "form"), CASES)
@mostly_slow("kind", ["hashed", "biased", "gated_shared", "corrected"], ["gated_shared"])
def test_float64_is_that_of_one_rank(name: str, form: str, kind: str) -> None:
    layout, weights = LAYOUTS[name], routed(kind, torch.float64)
    rows = rows_of(layout, torch.float64)
    for exact in (False, True):
        for rank, found in enumerate(run(layout, form, weights, rows, moe.PLAIN, exact=exact)):
            x, ids = rows[layout.replica(rank)]
            expected = moe.block(x, ids, weights, moe.PLAIN)
            assert found.shape == expected.shape
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.requirement("C7")
@pytest.mark.parametrize("name", LAYOUTS)
@mostly_slow("kind", ["corrected", "biased", "int8"], ["corrected"])
def test_bits_are_those_of_one_rank_where_experts_answer_one_by_one(name: str, kind: str) -> None:
    """E1, E2: with invariant products, in every form, for any neighbours."""
    layout, dtype = LAYOUTS[name], torch.float32
    weights = routed("plain" if kind == "int8" else kind, dtype, seed=3)
    pieces, alone = moe.TILED, moe.moe_tiled
    if kind == "int8":
        weights, pieces, alone = moe.quantized(weights), moe.TILED_INT8, moe.moe_tiled_int8
    rows = rows_of(layout, dtype)
    for form in forms(layout):
        for rank, found in enumerate(run(layout, form, weights, rows, pieces, exact=True)):
            x, ids = rows[layout.replica(rank)]
            assert torch.equal(found, alone(x, ids, weights)), form


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.grid), torch.bfloat16])
@mostly_slow("name", LAYOUTS, ["ep4", "dp2", "tp2dp2"])
def test_cpp_has_the_bits_of_its_whole_block(name: str, dtype: torch.dtype, extension: None) -> None:
    """The C++ operations compute the block of one rank in one call; the bits are equal in bf16 too."""
    layout = LAYOUTS[name]
    for kind in ("biased", "gated_shared"):
        weights, rows = routed(kind, dtype, seed=3), rows_of(layout, dtype)
        whole = cpu_moe.pack(weights)
        for form in forms(layout):
            for rank, found in enumerate(run(layout, form, weights, rows, cpu_moe.PARTS, exact=True)):
                x, ids = rows[layout.replica(rank)]
                assert torch.equal(found, cpu_moe.moe(x, ids, whole)), (kind, form)


@pytest.fixture(params=["torch", "cpp"])
def pieces(request: pytest.FixtureRequest) -> Any:
    """Yield the parts of invariant implementations."""
    if request.param == "torch":
        return moe.TILED
    request.getfixturevalue("extension")
    return cpu_moe.PARTS


@pytest.mark.requirement("C7")
@mostly_slow("dtype", [torch.float32, torch.bfloat16], [torch.bfloat16])
@mostly_slow("name", LAYOUTS, ["ep4", "dp2", "tp2dp2"])
def test_all_forms_give_the_same_bits(name: str, dtype: torch.dtype, pieces: Any) -> None:
    """The form of a step may depend on its content, so that all forms must have equal bits."""
    layout, weights = LAYOUTS[name], routed("gated_shared", dtype)
    rows = rows_of(layout, dtype)
    made = [run(layout, form, weights, rows, pieces, exact=False) for form in forms(layout)]
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.requirement("C7")
@mostly_slow("exact", [False, True], [False])
@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_neighbours(form: str, exact: bool, pieces: Any) -> None:
    """A row has equal bits alone and among others, for any rows of other replicas and any padding."""
    layout = LAYOUTS["ep2" if form == "reduce" else "tp2dp2"]
    weights = routed("corrected", torch.float32)
    x, ids = tokens(9, torch.float32)
    many = run(
        layout, form, weights, [(x, ids), tokens(3, torch.float32)][: layout.data], pieces, exact=exact
    )
    for row in (0, 4, 8):
        one = (x[row : row + 1], ids[row : row + 1])
        alone = run(
            layout, form, weights, [one, tokens(14, torch.float32)][: layout.data], pieces, exact=exact
        )
        assert torch.equal(alone[0][0], many[0][row])


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_single_row_of_an_odd_number_of_columns(form: str) -> None:
    """Extra data of a bfloat16 row, three pairs of places and scales, is no whole number of int64s."""
    layout, weights = LAYOUTS["dp2"], routed("plain", torch.bfloat16)
    rows = rows_of(layout, torch.bfloat16, (1, 0))
    alone = run(layout, form, weights, rows, moe.TILED, exact=False)
    rows[1] = tokens(6, torch.bfloat16)
    assert torch.equal(alone[0], run(layout, form, weights, rows, moe.TILED, exact=False)[0])


def test_large_sums_are_divided(pieces: Any) -> None:
    """Large sums are added in slices, with the shared expert only for each slice. The bits are equal."""
    layout, weights = LAYOUTS["ep4"], routed("gated_shared", torch.float32)
    x, ids = tokens(400, torch.float32)
    large = run(layout, "reduce", weights, [(x, ids)], pieces, exact=False)
    small = run(layout, "reduce", weights, [(x[:5], ids[:5])], pieces, exact=False)
    assert torch.equal(large[0][:5], small[0])
    assert all(torch.equal(large[0], one) for one in large[1:])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("name", "form"), [("ep4", "reduce"), ("dp2", "gather"), ("tp2dp2", "throughput")])
def test_redundant_copies_change_no_result(name: str, form: str, exact: bool) -> None:
    layout, weights = LAYOUTS[name], routed("corrected", torch.float64)
    rows = rows_of(layout, torch.float64)
    placement = in_order(16, layout.ranks, 5)
    for rank, found in enumerate(
        run(layout, form, weights, rows, moe.PLAIN, exact=exact, placement=placement)
    ):
        x, ids = rows[layout.replica(rank)]
        assert torch.allclose(found, moe.block(x, ids, weights, moe.PLAIN), rtol=0, atol=1e-12)


@pytest.mark.requirement("C7")
def test_ranks_without_experts_take_part() -> None:
    layout, weights = LAYOUTS["dp4"], routed("plain", torch.float64, experts=3)
    rows = rows_of(layout, torch.float64)
    for form in forms(layout):
        for rank, found in enumerate(run(layout, form, weights, rows, moe.PLAIN, exact=False)):
            x, ids = rows[rank]
            assert torch.allclose(found, moe.block(x, ids, weights, moe.PLAIN), rtol=0, atol=1e-12)


def test_nothing_agreed_is_exchanged() -> None:
    """A drafter's passes: replicas know nothing of each other's rows."""
    layout, weights = LAYOUTS["dp2"], routed("plain", torch.float64)
    rows = rows_of(layout, torch.float64, (11, 3))
    for form in ("gather", "low-latency", "auto"):

        def work(mesh: Mesh, form: str = form) -> Tensor:
            block = divided(mesh, weights, form, moe.PLAIN, exact=False)
            return drive(block.steps(*rows[mesh.rank], Exchange()))  # type: ignore[call-arg]

        for (x, ids), found in zip(rows, on_ranks(layout, work), strict=True):
            assert torch.allclose(found, moe.block(x, ids, weights, moe.PLAIN), rtol=0, atol=1e-12)


def test_more_rows_than_agreed_end_the_step() -> None:
    """No row is ever dropped."""
    layout, weights = LAYOUTS["dp2"], routed("plain", torch.float64)
    rows = rows_of(layout, torch.float64, (3, 3))

    def work(mesh: Mesh) -> Tensor:
        block = divided(mesh, weights, "low-latency", moe.PLAIN, exact=False)
        return drive(block.steps(*rows[mesh.rank], Exchange("low-latency", 2)))  # type: ignore[call-arg]

    with pytest.raises(EngineDead, match="3 rows in a step whose ranks agreed on 2"):
        on_ranks(layout, work, timeout=deadline(10.0))


class Counter(Launcher):
    launched = 0

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        self.launched += 1
        return super().launch(work)


#: Collectives of one layer: (a replica per rank, ranks that share rows).
COLLECTIVES = {"reduce": (1, 1), "gather": (2, 3), "low-latency": (2, 3), "throughput": (3, 4)}


@pytest.mark.requirement("A13")
@pytest.mark.parametrize("form", FORMS)
def test_collectives_of_a_layer_do_not_grow_with_its_rows(form: str) -> None:
    """A13: as many for 1 row as for 40, for idle ranks as for busy ones; each is one yield."""
    weights = routed("plain", torch.float64)
    for which, name in enumerate(("dp2", "tp2dp2")):
        layout = LAYOUTS["ep2" if form == "reduce" else name]
        for counts in ((1, 1), (40, 0)):
            rows = rows_of(layout, torch.float64, counts)
            agreed = Exchange(form, max(counts)) if layout.data > 1 else Exchange()

            def work(mesh: Mesh, rows: Any = rows, agreed: Exchange = agreed) -> tuple[int, int]:
                counter = Counter()
                for comm in (mesh.ep, mesh.tp):
                    if isinstance(comm, GroupComm):
                        comm._launcher = counter
                block = divided(mesh, weights, form, moe.PLAIN, exact=False)
                yields = len(list(block.steps(*rows[mesh.layout.replica(mesh.rank)], agreed)))  # type: ignore[call-arg]
                return yields, counter.launched

            expected = COLLECTIVES[form][which]
            assert on_ranks(layout, work) == [(expected, expected)] * layout.ranks


@pytest.mark.requirement("A14")
def test_outputs_are_no_inputs() -> None:
    """The returned tensor shares no memory with the input, nor with the next result."""
    layout, weights = LAYOUTS["ep2"], routed("corrected", torch.float64)
    x, ids = tokens(5, torch.float64)

    def work(mesh: Mesh) -> bool:
        for form in FORMS:
            block, mine = divided(mesh, weights, form, moe.PLAIN, exact=True), x.clone()
            first = drive(block.steps(mine, ids, Exchange()))
            kept, given = first.clone(), mine.clone()
            second = drive(block.steps(mine * 2, ids, Exchange()))
            assert torch.equal(first, kept)
            assert torch.equal(mine, given)
            spaces = {t.untyped_storage().data_ptr() for t in (first, second, mine)}
            assert len(spaces) == 3
        return True

    assert all(on_ranks(layout, work))


@pytest.mark.requirement("C7")
def test_the_shared_expert_is_computed_under_the_dispatch() -> None:
    """The shared expert runs after rows were sent and before any wait."""
    layout, weights = LAYOUTS["dp2"], routed("gated_shared", torch.float64)
    rows = rows_of(layout, torch.float64, (4, 2))

    def work(mesh: Mesh) -> dict[str, list[str]]:
        seen = {}
        for form in FORMS[1:]:
            events: list[str] = []

            def matrix(x: Tensor, weight: Tensor, bias: Tensor | None, events: list[str] = events) -> Tensor:
                events.append("shared")
                return torch.nn.functional.linear(x, weight, bias)

            def experts(x: Tensor, ids: Tensor, of: Routed, events: list[str] = events) -> Tensor:
                events.append("experts")
                return moe.by_table(x, ids, of)

            pieces = moe.PLAIN._replace(matrix=matrix, experts=experts)
            block = divided(mesh, weights, form, pieces, exact=False)
            for _ in block.steps(*rows[mesh.rank], Exchange(form, 4)):  # type: ignore[call-arg]
                events.append("wait")
            seen[form] = events
        return seen

    for seen in on_ranks(layout, work):
        for form, events in seen.items():
            assert events[-4:] == ["shared", "wait", "experts", "wait"] or events == [
                *(["wait"] if form == "throughput" else []),
                "shared",
                "shared",
                "wait",
                "experts",
                "wait",
            ]


def test_loads_are_counted_once() -> None:
    """The home rank of a row counts the row, for any form."""
    weights = routed("plain", torch.float64)
    for name, form in (("ep4", "reduce"), ("ep4", "throughput"), ("tp2dp2", "gather")):
        layout = LAYOUTS[name]
        rows = rows_of(layout, torch.float64, (9, 6))
        agreed = Exchange(form, 9) if layout.data > 1 else Exchange()

        def work(mesh: Mesh, form: str = form, rows: Any = rows, agreed: Exchange = agreed) -> Tensor:
            block = divided(mesh, weights, form, moe.PLAIN, exact=False, counts=True)
            drive(block.steps(*rows[mesh.layout.replica(mesh.rank)], agreed))  # type: ignore[call-arg]
            assert block.loads is not None
            return block.loads

        found = sum(on_ranks(layout, work))
        chosen = torch.cat(
            [moe.choose_experts(x, ids, weights, torch.nn.functional.linear)[0] for x, ids in rows]
        )
        assert torch.equal(found, torch.bincount(chosen.view(-1), minlength=16))


def test_slices_cover_all_rows() -> None:
    for rows in range(12):
        for ranks in (1, 2, 4, 5):
            parts = [slice_of(rows, rank, ranks) for rank in range(ranks)]
            assert parts[0].begin == 0
            assert parts[-1].end == rows
            assert all(a.end == b.begin for a, b in pairwise(parts))
            assert all(part.end - part.begin <= part.each for part in parts)
