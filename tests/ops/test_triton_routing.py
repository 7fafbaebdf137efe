"""Router, choice of experts and tiles in Triton against torch: ties, odd sizes, no expert, NaN.

They run in the interpreter on the CPU, or on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.routed import routed, tokens
from tests.support.slow import mostly_slow
from weft.ops import moe as torch_moe
from weft.ops import triton as kernels
from weft.ops.moe import Routed
from weft.ops.routing import Rule, route

Tensor = torch.Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
READY = importlib.util.find_spec("triton") is not None and (DEVICE.type == "cuda" or kernels.interpreting())
pytestmark = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")

#: Rules of published routers, and odd numbers: (experts, rule, corrected).
RULES = {
    "qwen3": (128, Rule(8, renormalize=True), False),
    "plain": (13, Rule(3, scale=1.5), False),
    "all": (5, Rule(5), False),
    "deepseek_v2": (160, Rule(6, groups=8, top_groups=3, scale=16.0), False),
    "deepseek_v3": (
        256,
        Rule(8, "sigmoid", True, groups=8, top_groups=4, group_rule="top2", scale=2.5),
        True,
    ),
    "odd groups": (21, Rule(4, "sigmoid", True, groups=7, top_groups=2, group_rule="top2"), True),
    "groups of one": (6, Rule(2, "sigmoid", groups=6, top_groups=3, group_rule="top2"), False),
    "corrected softmax": (24, Rule(4, renormalize=True, groups=3, top_groups=2), True),
}


def given(experts: int, rule: Rule, corrected: bool, kind: str, rows: int = 6) -> tuple[Tensor, Routed]:
    """Return (logits [rows, experts], weights). ``kind``: values of the logits."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(rows, experts, generator=generator)
    if kind == "ties":
        logits = (2 * logits).round() / 2
        logits[0] = 0.5
    elif kind == "infinite":
        logits[0, ::2] = -torch.inf
        logits[1] = -torch.inf
        logits[2, 1] = torch.inf
    weights = routed("plain", torch.float32, experts=experts)
    correction = torch.randn(experts, generator=generator).round() / 4 if corrected else None
    weights = replace(weights, rule=rule, router=weights.router.to(DEVICE))
    return logits.to(DEVICE), replace(
        weights, correction=None if correction is None else correction.to(DEVICE)
    )


def chosen(logits: Tensor, weights: Routed) -> tuple[Tensor, Tensor]:
    """Return what the kernel chooses for ``logits``."""
    from weft.ops.triton import routing

    found, scales, share = routing.choose(logits, weights, lambda x, weight, bias: logits, own=False)
    assert share is None
    return found, scales


@mostly_slow("kind", ["random", "ties", "infinite"], ["ties"])
@mostly_slow("name", [*RULES], ["odd groups"])
def test_choice_equals_the_reference(name: str, kind: str) -> None:
    logits, weights = given(*RULES[name], kind)
    wanted, by = route(logits, weights.rule, weights.correction)
    found, scales = chosen(logits, weights)
    # Scores of a row without a finite logit are NaN in both.
    assert torch.equal(found, wanted)
    assert torch.allclose(scales, by, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.slow
def test_a_row_of_nan_has_valid_experts_and_changes_no_other_row() -> None:
    logits, weights = given(*RULES["deepseek_v3"], "random")
    found, scales = chosen(logits, weights)
    spoiled = logits.clone()
    spoiled[1] = float("nan")
    spoiled[3, 7] = float("nan")
    again, by = chosen(spoiled, weights)
    assert again.min() >= 0
    assert again.max() < 256
    assert all(len(set(row)) == 8 for row in again.tolist())
    assert by[1].isnan().all()
    others = [0, 2, 4, 5]
    assert torch.equal(again[others], found[others])
    assert torch.equal(by[others], scales[others])


@mostly_slow(
    ("kind", "dtype"),
    [("gated_shared", torch.bfloat16), ("biased", torch.float32), ("plain", torch.float16)],
    [("plain", torch.float16)],
)
def test_logits_of_few_tokens(kind: str, dtype: torch.dtype) -> None:
    """Logits and the shared gate equal the product in float64; a row does not depend on other rows."""
    from weft.ops.triton import routing

    weights = routed(kind, dtype, experts=9, hidden=2100)
    names = ("router", "router_bias", "shared_gate")
    held = {name: getattr(weights, name) for name in names}
    weights = replace(
        weights, **{name: None if one is None else one.to(DEVICE) for name, one in held.items()}
    )
    x = tokens(11, dtype, 2100)[0].to(DEVICE)
    logits, gate = routing._logits(x, weights, F.linear, True)
    bias = None if weights.router_bias is None else weights.router_bias.double()
    wanted = F.linear(x.double(), weights.router.double(), bias)
    assert torch.allclose(logits[:, :9].double(), wanted, atol=1e-5)
    assert (gate is None) == (weights.shared_gate is None)
    if gate is not None and weights.shared_gate is not None:
        assert torch.allclose(gate.double(), x.double() @ weights.shared_gate.double().T, atol=1e-5)
    alone, _ = routing._logits(x[9:10], weights, F.linear, True)
    assert torch.equal(alone[0], logits[9])


@pytest.mark.slow
def test_a_shared_expert_is_one_more_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many columns as the experts; the result equals the block with a separate shared expert."""
    from weft.ops.triton import moe

    monkeypatch.setattr(moe, "_table_form", lambda *_: "triton")
    weights = routed("gated_shared", torch.float32, shared=40)
    held = {n: getattr(weights, n).to(DEVICE) for n in ("router", "gate_up", "down", "shared_gate")}
    shared = {n: getattr(weights, n).to(DEVICE) for n in ("shared_gate_up", "shared_down")}
    weights = replace(weights, **held, **shared)
    x, ids = (one.to(DEVICE) for one in tokens(9, torch.float32))
    assert moe.joins(9, weights)
    assert not moe.joins(9, replace(weights, shared_down=shared["shared_down"][:, :24]))
    made = moe.moe(x, ids, weights)
    assert torch.allclose(made, torch_moe.moe(x, ids, weights), atol=2e-5)


def test_slots_without_an_expert_have_no_tile() -> None:
    """Covers ids of -1 and of the number of experts, and more slots than a program reads at once."""
    from weft.ops.triton import routing

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 6, (700, 3), generator=generator)
    tiles = routing.cut(ids.to(DEVICE), 5, 16)
    flat = ids.reshape(-1)
    begin = 0
    for expert in range(5):
        slots = (flat == expert).nonzero().reshape(-1)
        end = begin + len(slots)
        assert torch.equal(tiles.order[begin:end].cpu(), slots)
        assert int(tiles.ends[expert]) == end
        rows = tiles.rows[tiles.experts == expert].tolist()
        assert rows == [*range(begin, end, 16)]
        begin = end
    nobody = routing.cut(torch.full((3, 2), -1, device=DEVICE), 5, 16)
    assert nobody.experts.tolist() == [5] * len(nobody.experts)
