"""GPT-OSS: facts from config.json, and special features of its published weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.common.errors import ConfigError
from weft.config.families import load_spec


def _load(folder: Path, **changes: Any) -> Any:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "torch_dtype": "bfloat16",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(str(folder), None)


def test_facts_of_the_published_file(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    spec = _load(tmp_path, rope_theta=150000, rope_scaling=scaling, sliding_window=128, num_local_experts=32)
    assert [(c.kind, c.layers, c.window) for c in spec.caches] == [
        ("full", (1, 3), 0),
        ("window", (0, 2, 4), 128),
    ]
    assert (spec.kv_heads, spec.head_dim, spec.sinks, spec.qkv_bias, spec.o_bias) == (8, 64, True, True, True)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.truncate) == ("yarn", 32.0, False)
    moe = spec.moe
    assert (moe.experts, moe.top_k, moe.intermediate, moe.bias, moe.limit) == (32, 4, 48, True, 7.0)
    assert (moe.alpha, moe.renormalize, moe.scoring, moe.shared) == (1.702, True, "softmax", 0)


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        _load(tmp_path, sliding_window=None)
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        _load(tmp_path, num_local_experts=3)
    with pytest.raises(ConfigError, match="layer_types"):
        _load(tmp_path, layer_types=["full_attention"] * 4)


def test_experts_are_turned_and_their_halves_parted(checkpoints: Any) -> None:
    checkpoint = checkpoints("gpt-oss")
    published = dict(checkpoint.reference.named_parameters())
    ours = dict(checkpoint.read().named_parameters())
    theirs, mine = "model.layers.1.mlp.experts", "blocks.1.feed_forward.experts"
    n = ours[f"{mine}.down"].shape[2]
    gate_up = published[f"{theirs}.gate_up_proj"]
    for row in (0, 5, n - 1):
        assert torch.equal(ours[f"{mine}.gate_up"][2, row], gate_up[2, :, 2 * row])
        assert torch.equal(ours[f"{mine}.gate_up"][2, n + row], gate_up[2, :, 2 * row + 1])
        bias = published[f"{theirs}.gate_up_proj_bias"][3, 2 * row + 1]
        assert ours[f"{mine}.gate_up_bias"][3, n + row] == bias
    assert torch.equal(ours[f"{mine}.down"][4], published[f"{theirs}.down_proj"][4].T)
    assert torch.equal(ours["blocks.1.attention.sinks"], published["model.layers.1.self_attn.sinks"])


def test_sinks_matter(checkpoints: Any, paged: Any) -> None:
    """Removing the sinks changes the logits, so the parity tests cover sinks."""
    model = checkpoints("gpt-oss").load(torch.float64)
    made = []
    for _ in range(2):
        harness = paged(model)
        sequence = harness.sequence(list(range(40)))
        harness.step([(sequence, 40)])
        made.append(torch.stack(sequence.logits))
        for block in model.blocks:
            block.attention.sinks = None
    assert (made[0] - made[1]).abs().max() > 0.01 * made[0].abs().max()
