"""Choice of experts: plain Python, every published class, ties, and non-finite values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models import deepseek_v2, deepseek_v3, deepseek_v4, gpt_oss, mixtral, qwen3_next

from tests.support.routed import KINDS, chosen, routed, tokens
from weft.ops.routing import Rule, route

Tensor = torch.Tensor


@pytest.mark.parametrize("kind", KINDS)
def test_rules_by_plain_python(kind: str) -> None:
    weights = routed(kind, torch.float64)
    x, ids = tokens(60, torch.float64)
    logits = x @ weights.router.T
    table = None if weights.table is None else weights.table[ids]
    found, scales = route(logits, weights.rule, weights.correction, table)
    for row, token in enumerate(ids.tolist()):
        expected, by = chosen(logits[row].tolist(), weights, token)
        assert found[row].tolist() == expected
        assert torch.allclose(scales[row], torch.tensor(by, dtype=torch.float64), rtol=1e-12)


def _config(module: Any, name: str, **settings: Any) -> Any:
    return getattr(module, name)(hidden_size=48, num_attention_heads=4, num_experts_per_tok=3, **settings)


_GROUPED: dict[str, Any] = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
#: Class -> (module, config, Weft's rule).
PUBLISHED: dict[str, tuple[Any, Any, Rule]] = {
    "DeepseekV2TopkRouter": (
        deepseek_v2.modeling_deepseek_v2,
        _config(deepseek_v2, "DeepseekV2Config", topk_method="group_limited_greedy", **_GROUPED),
        Rule(3, groups=4, top_groups=2, scale=2.5),
    ),
    "DeepseekV3TopkRouter": (
        deepseek_v3.modeling_deepseek_v3,
        _config(deepseek_v3, "DeepseekV3Config", norm_topk_prob=True, **_GROUPED),
        Rule(3, "sigmoid", True, groups=4, top_groups=2, group_rule="top2", scale=2.5),
    ),
    "DeepseekV4TopKRouter": (
        deepseek_v4.modeling_deepseek_v4,
        _config(deepseek_v4, "DeepseekV4Config", num_local_experts=16, routed_scaling_factor=1.5),
        Rule(3, "sqrtsoftplus", True, scale=1.5),
    ),
    "GptOssTopKRouter": (
        gpt_oss.modeling_gpt_oss,
        _config(gpt_oss, "GptOssConfig", num_local_experts=16),
        Rule(3, renormalize=True),
    ),
    "MixtralTopKRouter": (
        mixtral.modeling_mixtral,
        _config(mixtral, "MixtralConfig", num_local_experts=16),
        Rule(3, renormalize=True),
    ),
    "Qwen3NextTopKRouter": (
        qwen3_next.modeling_qwen3_next,
        _config(qwen3_next, "Qwen3NextConfig", num_experts=16, norm_topk_prob=False),
        Rule(3),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rules_equal_published_classes(name: str) -> None:
    module, config, rule = PUBLISHED[name]
    torch.manual_seed(3)
    theirs = getattr(module, name)(config)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.data.normal_(0, 0.3)
    x = torch.randn(200, 48)
    _, weights, ids = theirs(x)
    logits = x @ theirs.weight.T + (theirs.bias if hasattr(theirs, "bias") else 0)
    found, scales = route(logits, rule, getattr(theirs, "e_score_correction_bias", None))
    order, expected = ids.sort(-1).indices, found.sort(-1)
    assert torch.equal(ids.gather(1, order), expected.values)
    assert torch.allclose(weights.gather(1, order), scales.gather(1, expected.indices), rtol=2e-5, atol=1e-6)


def test_the_published_hash_router() -> None:
    config = _config(deepseek_v4, "DeepseekV4Config", num_local_experts=16, vocab_size=20)
    theirs = deepseek_v4.modeling_deepseek_v4.DeepseekV4HashRouter(config).double()
    torch.nn.init.normal_(theirs.weight)
    theirs.tid2eid.copy_(torch.stack([torch.randperm(16)[:3] for _ in range(20)]))
    x, ids = torch.randn(30, 48, dtype=torch.float64), torch.randint(0, 20, (30,))
    _, weights, experts = theirs(x, ids)
    rule = Rule(3, "sqrtsoftplus", True, scale=config.routed_scaling_factor)
    found, scales = route(x @ theirs.weight.T, rule, None, theirs.tid2eid[ids])
    assert torch.equal(found, experts)
    assert torch.allclose(scales, weights, rtol=1e-12)


def test_ties_go_to_the_lowest_expert() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0] * 5, [0.0, 0.0, 5.0, 0.0, 5.0]])
    ids, weights = route(logits, Rule(2, renormalize=True))
    assert ids.tolist() == [[1, 2], [0, 1], [2, 4]]
    assert torch.allclose(weights, torch.full((3, 2), 0.5))
    many = torch.zeros(300, 128)
    ids, weights = route(many, Rule(8))
    assert torch.equal(ids, torch.arange(8).expand(300, 8))
    assert torch.allclose(weights, torch.full((300, 8), 1 / 128))


@pytest.mark.parametrize("group_rule", ["max", "top2"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_ties_go_to_the_lowest_group(scoring: str, group_rule: str) -> None:
    rule = Rule(3, scoring, True, groups=4, top_groups=2, group_rule=group_rule)
    # Groups 1, 2 and 3 are equal, with equal experts.
    logits = torch.tensor([[-1.0] * 4 + [1.0] * 12]).expand(200, 16)
    ids, weights = route(logits, rule)
    assert torch.equal(ids, torch.tensor([[4, 5, 6]]).expand(200, 3))
    assert torch.allclose(weights, torch.full((200, 3), 1 / 3))


def test_two_good_experts_outweigh_the_best_one() -> None:
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.0, 1.9, -9.0]])
    for group_rule, expected in (("max", [0, 1]), ("top2", [3, 4])):
        rule = Rule(2, "sqrtsoftplus", groups=2, top_groups=1, group_rule=group_rule)
        assert route(logits, rule)[0].tolist() == [expected]


def test_correction_chooses_and_does_not_weight() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64)
    correction = torch.tensor([0.0, -9.0, 9.0], dtype=torch.float64)
    ids, weights = route(logits, Rule(2, "sigmoid"), correction)
    assert ids.tolist() == [[2, 0]]
    assert torch.allclose(weights, torch.sigmoid(logits)[:, [2, 0]])


def test_the_router_computes_wide() -> None:
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        rule = Rule(2, scoring, True)
        assert route(torch.zeros(1, 4, dtype=torch.bfloat16), rule)[1].dtype == torch.float32
        assert route(torch.zeros(1, 4, dtype=torch.float64), rule)[1].dtype == torch.float64


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_far_logits_stay_finite(scoring: str) -> None:
    logits = torch.tensor([[1e4, -1e4, 300.0, -300.0, 0.0]])
    _, weights = route(logits, Rule(4, scoring, True))
    assert torch.isfinite(weights).all()
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_row_spoils_itself_alone(kind: str) -> None:
    weights = routed(kind, torch.float32)
    x, ids = tokens(20, torch.float32)
    logits = x @ weights.router.T
    table = None if weights.table is None else weights.table[ids]
    whole = route(logits, weights.rule, weights.correction, table)
    logits[::2] = float("nan")
    spoiled = route(logits, weights.rule, weights.correction, table)
    for a, b in zip(whole, spoiled, strict=True):
        assert torch.equal(a[1::2], b[1::2])
    assert ((spoiled[0] >= 0) & (spoiled[0] < 16)).all()
