"""Routed blocks: exact in float64, close in C++, and independent of other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops.test_coded import FORMS, codes_of, rounds
from tests.support.routed import KINDS, VOCAB, chosen, doubled, routed, tokens
from tests.support.slow import mostly_slow
from weft.ops import moe, torch_ops
from weft.ops.coded import dequantize
from weft.ops.cpu import moe as ops
from weft.ops.cpu.structs import coding_struct, struct
from weft.ops.ggml import Coding
from weft.ops.moe import Routed

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float32)
ROWS = (0, *range(1, 20), 31, 32, 33, 64, 100)
FEW_ROWS = (1, 2, 3, 8, 9, 17, 33, 64, 100)
"""Row counts for several threads."""
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def expert(
    x: Tensor, weights: Routed, gate_up: Tensor, down: Tensor, bias: tuple[Any, Any], eps: float, half: float
) -> tuple[Tensor, Tensor]:
    """Return (expert output for token x [hidden] in float64, error bound for sums of precision ``eps``).

    ``half`` is the rounding error of the inner values.
    """
    inner = gate_up @ x + (0 if bias[0] is None else bias[0])
    slack = (len(x) + 3) * eps * (gate_up.abs() @ x.abs() + (0 if bias[0] is None else bias[0].abs()))
    first, second = inner.chunk(2)
    miss_first, miss_second = slack.chunk(2)
    gate = weights.gate
    if gate.limit:
        first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
    if gate.alpha:
        act = first * torch.sigmoid(gate.alpha * first) * (second + 1)
        second = second + 1
    else:
        act = torch_ops.gated(torch.cat((first, second)), gate.activation)
    # No activation here is steeper than 1.2; exponentials are within 3e-7 (float64: 1e-15).
    miss = 1.2 * miss_first * (second.abs() + miss_second) + miss_second * (first.abs() + 1)
    miss = miss + max(1e-6 * (eps > 1e-10), 1e-15) * (first * second).abs() + 1.01 * half * act.abs()
    made = down @ act + (0 if bias[1] is None else bias[1])
    sums = (len(act) + 3) * eps * (down.abs() @ act.abs() + made.abs())
    return made, down.abs() @ miss + sums


def assert_block(made: Tensor, x: Tensor, ids: Tensor, weights: Routed) -> None:
    """Assert that ``made`` is within rounding of the float64 block."""
    eps = 2.0**-52 if x.dtype == torch.float64 else 2.0**-23
    half, exact = HALF_ULP[x.dtype], doubled(weights)
    assert made.dtype == x.dtype
    assert made.shape == x.shape
    for row, token in enumerate(ids.tolist()):
        one = x[row].double()
        logits = exact.router @ one + (0 if exact.router_bias is None else exact.router_bias)
        picked, scales = chosen(logits.tolist(), exact, token)
        loose = ((len(one) + 3) * eps * (exact.router.abs() @ one.abs())).max() * 4 + 8 * eps
        total, bound = torch.zeros_like(one), torch.zeros_like(one)
        for e, scale in zip(picked, scales, strict=True):
            first, second = exact.gate_up_bias, exact.down_bias
            bias = (None if first is None else first[e], None if second is None else second[e])
            out, miss = expert(one, exact, exact.gate_up[e], exact.down[e], bias, eps, half)
            total += scale * out
            bound += scale * miss + (loose + 4 * eps) * scale * out.abs()
        if exact.shared_gate_up is not None:
            out, miss = expert(one, exact, exact.shared_gate_up, exact.shared_down, (None, None), eps, half)
            share = 1.0
            if exact.shared_gate is not None:
                share = torch.sigmoid(exact.shared_gate[0] @ one).item()
            total += share * out
            bound += share * miss + (loose + 4 * eps) * out.abs()
        assert ((made[row].double() - total).abs() <= bound + 1.01 * half * (total.abs() + bound)).all()


# --- torch ---


@pytest.mark.parametrize("form", ["by_expert", "by_gather"])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_is_exact(kind: str, dtype: torch.dtype, form: str) -> None:
    weights = routed(kind, dtype)
    for count in (1, 2, 23):
        x, ids = tokens(count, dtype)
        made = moe.block(x, ids, weights, moe.PLAIN._replace(experts=getattr(moe, form)))
        if dtype == torch.bfloat16:  # torch rounds each step on the way
            wanted = moe.moe(x.double(), ids, doubled(weights))
            assert (made.double() - wanted).abs().max() <= 0.04 * wanted.abs().max()
        else:
            assert_block(made, x, ids, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_equal_single_ones(kind: str) -> None:
    weights = routed(kind, torch.bfloat16)
    for count in (1, 23):
        x, ids = tokens(count, torch.bfloat16)
        single = moe.block(x, ids, weights, moe.PLAIN._replace(experts=moe.by_expert)).double()
        made = moe.block(x, ids, weights, moe.PLAIN._replace(experts=moe.by_group)).double()
        assert (made - single).abs().max() <= 0.03 * single.abs().max()


@pytest.mark.parametrize("run", [moe.moe, moe.moe_tiled])
def test_torch_takes_no_tokens(run: Any) -> None:
    for kind in KINDS:
        x, ids = tokens(0, torch.float32)
        assert run(x, ids, routed(kind, torch.float32)).shape == (0, 48)


def test_combination_adds_in_top_k_order() -> None:
    """Only the top-k order gives 1e16 - 1e16 + 1 = 1."""
    out = torch.tensor([[[1e16], [-1e16], [1.0]]], dtype=torch.float64)
    ones = torch.ones(1, 3, dtype=torch.float64)
    assert moe.combine(out, ones).item() == 1.0
    assert moe.combine(out[:, [0, 2, 1]], ones).item() == 0.0


# --- the extension ---

PACKS = {"int8": ops.pack_int8, "int4": ops.pack_int4, "w8a8": ops.pack_w8a8, "w4a8": ops.pack_w4a8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cpp_is_close_to_float64(kind: str, dtype: torch.dtype, kernel: str) -> None:
    weights = routed(kind, dtype, seed=2)
    for count in (1, 3, 70):
        x, ids = tokens(count, dtype)
        assert_block(ops.moe(x, ids, ops.pack(weights)), x, ids, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "shared"), [(16, 33, 5, 3), (20, 70, 49, 1), (64, 128, 17, 130)]
)
def test_cpp_takes_any_shape(
    dtype: torch.dtype, experts: int, hidden: int, inner: int, shared: int, kernel: str
) -> None:
    for kind in ("corrected", "biased", "gated_shared"):
        weights = routed(kind, dtype, experts=experts, hidden=hidden, inner=inner, shared=shared)
        x, ids = tokens(9, dtype, hidden)
        assert_block(ops.moe(x, ids, ops.pack(weights)), x, ids, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["corrected", "biased", "gated_shared"])
def test_cpp_int8_is_its_quantized_matrices(kind: str, dtype: torch.dtype, kernel: str) -> None:
    weights = routed(kind, dtype)
    quantized = moe.quantized(weights)

    def used(matrix: Any) -> Any:
        return None if matrix is None else matrix.values.double() * matrix.scales.double()

    names = ("gate_up", "down", "shared_gate_up", "shared_down")
    plain = replace(weights, **{name: used(getattr(quantized, name)) for name in names})
    for count in (1, 37):
        x, ids = tokens(count, dtype)
        assert_block(ops.moe(x, ids, ops.pack_int8(weights)), x, ids, plain)
        wanted = moe.moe(x.double(), ids, doubled(plain))
        for run in (moe.moe_int8, moe.moe_tiled_int8):
            made = run(x, ids, quantized).double()
            most = 0.04 if dtype == torch.bfloat16 else 1e-5
            assert (made - wanted).abs().max() <= most * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["corrected", "biased", "gated_shared"])
@pytest.mark.parametrize("form", ["w8a8", "w4a8"])
def test_cpp_rounds_rows_of_tokens(form: str, kind: str, dtype: torch.dtype, kernel: str) -> None:
    """C++ matches a reference that shares only the codes of weights, and differs from unrounded rows."""
    weights = routed(kind, dtype)
    reference = moe.with_rounded_rows(weights) if form == "w8a8" else moe.in_w4a8(weights)
    if form == "w8a8":
        assert (reference.gate_up.group, reference.down.group) == (0, 64)
    else:
        assert reference.gate_up.row_bits == reference.down.row_bits == 8
    runs = (moe.moe_int8, moe.moe_tiled_int8) if form == "w8a8" else (moe.moe, moe.moe_tiled)
    for count in (1, 37):
        x, ids = tokens(count, dtype)
        made = ops.moe(x, ids, PACKS[form](weights)).double()
        most = 0.02 if dtype == torch.bfloat16 else 0.002  # of rows between halves some round otherwise
        for run in runs:
            wanted = run(x, ids, reference).double()
            assert (made - wanted).abs().max() <= most * wanted.abs().max()
        plain = ops.moe(x, ids, ops.pack_int8(weights) if form == "w8a8" else ops.pack_int4(weights)).double()
        assert 1e-4 < ((made - plain).abs().max() / plain.abs().max()) < 0.05


def test_halves_are_rounded_by_themselves() -> None:
    weights = routed("gated_shared", torch.float32)
    for inner, shared in ((64, 0), (0, 64)):
        chosen = replace(weights, inner_group=inner, shared_inner_group=shared)
        made = moe.in_w4a8(chosen)
        assert made.gate_up.row_bits == made.shared_gate_up.row_bits == 8
        assert (made.down.row_bits, made.shared_down.row_bits) == (
            8 if inner else None,
            8 if shared else None,
        )
        made = moe.with_rounded_rows(chosen)
        assert (made.down.group, made.shared_down.group) == (inner or None, shared or None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["corrected", "hashed", "biased", "gated_shared", *PACKS])
def test_bits_of_a_row_are_its_own(kind: str, dtype: torch.dtype, kernel: str, kept_threads: None) -> None:
    """Bits depend on neither row count, place, other rows nor threads."""
    weights = routed("corrected" if kind in PACKS else kind, dtype)
    packed = PACKS.get(kind, ops.pack)(weights)
    x, ids = tokens(1500, dtype)
    whole = ops.moe(x, ids, packed)
    assert torch.isfinite(whole).all()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(ops.moe(x, ids, packed), whole)
        for rows in ROWS if count == 1 else FEW_ROWS:
            part = slice(rows % 7, rows % 7 + rows)
            assert torch.equal(ops.moe(x[part], ids[part], packed), whole[part]), (count, rows)
    spoiled = x[:64].clone()
    spoiled[1::2] = float("nan")
    assert torch.equal(ops.moe(spoiled, ids[:64], packed)[::2], whole[:64:2])


def test_more_tokens_than_one_part_holds(extension: None) -> None:
    """32 MiB of float32 rows: 26,214 tokens of 5 * 64."""
    weights = routed("gated_shared", torch.bfloat16, hidden=64, inner=16, shared=16)
    packed = ops.pack(weights)
    x, ids = tokens(27_001, torch.bfloat16, 64)
    whole = ops.moe(x, ids, packed)
    for begin in (0, 13_400, 13_501, 26_990):
        part = slice(begin, begin + 11)
        assert torch.equal(ops.moe(x[part], ids[part], packed), whole[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_need_not_be_adjacent(dtype: torch.dtype, extension: None) -> None:
    packed = ops.pack(routed("gated_shared", dtype))
    x, _ = tokens(20, dtype)
    wanted = ops.moe(x, None, packed)
    wide = torch.full((40, 60), float("nan"), dtype=dtype)
    wide[::2, 3:51] = x
    assert torch.equal(ops.moe(wide[::2, 3:51], None, packed), wanted)
    assert torch.equal(ops.moe(x.T.contiguous().T, None, packed), wanted)


def test_equal_scores_go_to_the_lowest_expert(extension: None) -> None:
    """With a zero router the first experts win, or the first of the first group."""
    for kind, experts in (("renormalized", [0, 1]), ("grouped_by_best", [0, 1, 2])):
        weights = replace(routed(kind, torch.float32), shared_gate_up=None, shared_down=None)
        weights = replace(weights, router=torch.zeros_like(weights.router))
        x, ids = tokens(40, torch.float32)
        part = 1 / len(experts) if weights.rule.renormalize else weights.rule.scale / 16
        wanted = torch.zeros_like(x)
        for e in experts:
            inner = torch_ops.gated(F.linear(x, weights.gate_up[e]), weights.gate.activation)
            wanted += part * F.linear(inner, weights.down[e])
        assert torch.allclose(ops.moe(x, ids, ops.pack(weights)), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_cpp_chooses_what_torch_chooses(kind: str, extension: None) -> None:
    """With many tokens near ties would show: sums are exact, so float32 logits are equal."""
    weights = routed(kind, torch.float32, experts=64)
    weights = replace(weights, router=(weights.router * 64).round() / 64, gate=replace_gate(weights))
    x, ids = tokens(3000, torch.float32)
    x = (x * 8).round() / 8
    wanted = moe.moe(x, ids, weights)
    made = ops.moe(x, ids, ops.pack(weights))
    assert (made - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def replace_gate(weights: Routed) -> Any:
    return weights.gate._replace(activation="silu")


def test_every_expert_alone(extension: None) -> None:
    """All tokens go to one expert in turn, so all other experts are empty."""
    base = routed("hashed", torch.float32)
    for e in range(16):
        table = torch.stack([torch.tensor([e, (e + 1) % 16, (e + 2) % 16])] * VOCAB)
        weights = replace(base, table=table)
        x, ids = tokens(5, torch.float32)
        assert_block(ops.moe(x, ids, ops.pack(weights)), x, ids, weights)


def test_a_router_that_is_not_bf16_is_kept_wide(extension: None) -> None:
    weights = routed("corrected", torch.bfloat16)
    weights = replace(weights, router=weights.router + torch.randn_like(weights.router) * 1e-4)
    x, ids = tokens(50, torch.bfloat16)
    assert_block(ops.moe(x, ids, ops.pack(weights)), x, ids, weights)


def test_wrong_inputs_are_refused(extension: None) -> None:
    packed = ops.pack(routed("hashed", torch.bfloat16))
    x, ids = tokens(3, torch.bfloat16)
    with pytest.raises(RuntimeError, match="x must be"):
        ops.moe(x[:, :40], ids, packed)
    with pytest.raises(RuntimeError, match="another dtype"):
        ops.moe(x.float(), ids, packed)
    with pytest.raises(RuntimeError, match="token ids"):
        ops.moe(x, None, packed)
    with pytest.raises(IndexError, match="token id 50"):
        ops.moe(x, ids.new_tensor([0, VOCAB, 1]), packed)
    wrong = routed("hashed", torch.bfloat16)
    assert wrong.table is not None
    with pytest.raises(RuntimeError, match="expert 16 of 16"):
        ops.pack(replace(wrong, table=wrong.table + 1))
    grouped = routed("grouped_by_best", torch.bfloat16)
    with pytest.raises(RuntimeError, match="groups"):
        ops.pack(replace(grouped, rule=grouped.rule._replace(top_groups=5)))
    with pytest.raises(KeyError):
        ops.pack(replace(grouped, gate=grouped.gate._replace(activation="tanh")))


# --- codes ---


def coded_block(kind: str, dtype: torch.dtype, form: str) -> tuple[Routed, Routed]:
    """Return (block of codes, its float64 matrices). The shared expert has another form."""
    plain = routed(kind, dtype)
    names = {"gate_up": form, "down": form, "shared_gate_up": "int4 zeros", "shared_down": "fp8 blocks"}
    codes, meant = {}, {}
    for seed, (name, of) in enumerate(names.items()):
        matrix = getattr(plain, name)
        if matrix is not None:
            codes[name] = codes_of(of, tuple(matrix.shape), seed)
            meant[name] = dequantize(codes[name], torch.float64)
    return replace(plain, **codes, dtype=dtype), replace(plain, **meant)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", list(FORMS))
@mostly_slow("kind", ["corrected", "biased", "gated_shared"], ["gated_shared"])
def test_codes_are_the_matrices_that_they_mean(kind: str, form: str, dtype: torch.dtype, kernel: str) -> None:
    if rounds(form, 64, dtype, kernel):
        pytest.skip("rounds the weights: needs AMX, and groups of 32 inputs (tests/ops/test_coded.py)")
    codes, meant = coded_block(kind, dtype, form)
    packed = ops.pack(codes)
    for count in (1, 37):
        x, ids = tokens(count, dtype)
        assert_block(ops.moe(x, ids, packed), x, ids, meant)
        wanted = moe.moe(x.double(), ids, doubled(meant))
        for run in (moe.moe, moe.moe_tiled):
            made = run(x.double(), ids, replace(doubled(codes), dtype=torch.float64))
            assert (made - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["int4 zeros", "nvfp4", "fp8"])
def test_bits_of_a_row_of_codes_are_its_own(
    form: str, dtype: torch.dtype, kernel: str, kept_threads: None
) -> None:
    packed = ops.pack(coded_block("corrected", dtype, form)[0])
    x, ids = tokens(500, dtype)
    whole = ops.moe(x, ids, packed)
    assert torch.isfinite(whole).all()
    for count in (1, 3):
        torch.set_num_threads(count)
        for rows in ROWS if count == 1 else FEW_ROWS:
            part = slice(rows % 7, rows % 7 + rows)
            assert torch.equal(ops.moe(x[part], ids[part], packed), whole[part]), (count, rows)


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_experts_are_rounded(form: str, extension: None) -> None:
    """Under --quantization the block has the values of its rounded matrices, in C++ and on torch."""
    weights = routed("gated_shared", torch.bfloat16)
    rounded = {"int4": moe.in_int4, "fp8": moe.in_fp8}[form](weights)
    meant = replace(
        weights,
        **{
            name: dequantize(getattr(rounded, name), torch.float64)
            for name in ("gate_up", "down", "shared_gate_up", "shared_down")
        },
    )
    x, ids = tokens(9, torch.bfloat16)
    pack = {"int4": ops.pack_int4, "fp8": ops.pack_fp8}[form]
    wanted = moe.moe(x.double(), ids, doubled(meant))
    for made in (ops.moe(x, ids, pack(weights)), moe.moe(x, ids, rounded)):
        assert (made.double() - wanted).abs().max() <= 0.04 * wanted.abs().max()


@pytest.mark.usefixtures("extension")
def test_structs_take_known_names_and_numbers() -> None:
    assert struct("MoeSpec", hidden=64, scale=2.5).get("hidden") == 64
    with pytest.raises(RuntimeError, match="MoeSpec"):
        struct("MoeSpec", hiden=64)
    with pytest.raises(RuntimeError, match="'int'"):
        struct("MoeSpec", hidden=64.5)
    with pytest.raises(RuntimeError, match="no coding of numbers 0"):
        coding_struct(Coding(numbers=0, scales=0, zeros=0, group=32))
