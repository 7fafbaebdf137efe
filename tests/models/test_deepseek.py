"""DeepSeek V2 and V3: coverage of the cases in tests/support/latent_models.py, and special features.

Parity with transformers is in test_parity.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.attention.base import Backends, CoreInput
from weft.attention.mla.latent import LatentInput
from weft.attention.mla.latent_torch import TorchLatent
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.families.deepseek import with_mtp
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.deepseek.model import make_block
from weft.models.deepseek.weights import weight_map
from weft.models.loader import load_model

CPU = torch.device("cpu")


def _spec(name: str, checkpoints: Any) -> ModelSpec:
    return load_spec(checkpoints(name).folder, None)


def test_what_the_cases_cover(checkpoints: Any) -> None:
    v3 = _spec("deepseek-v3", checkpoints)
    assert v3.mla is not None
    assert v3.moe is not None
    assert (v3.mla.q_lora, v3.mla.kv_lora, v3.mla.rope) == (20, 24, 8)
    assert v3.caches[0].width == 32
    assert (v3.moe.groups, v3.moe.top_groups, v3.moe.group_rule) == (4, 2, "top2")
    assert (v3.moe.layers, v3.moe.shared, v3.moe.correction) == ((1, 2), 24, True)
    assert v3.mtp_layers == 0
    full = _spec("deepseek-v3-full-queries-yarn", checkpoints)
    assert full.mla is not None
    assert full.mla.q_lora is None
    assert full.mla.scale != pytest.approx(20**-0.5)
    assert full.norm_eps != full.mla.norm_eps
    bias = _spec("deepseek-v3-full-queries-bias", checkpoints)
    assert bias.mla is not None
    assert bias.mla.q_lora is None
    assert bias.mla.bias
    assert bias.o_bias
    halves = _spec("deepseek-v3-dense-halves", checkpoints)
    assert halves.moe is None
    assert halves.mla is not None
    assert not halves.mla.interleaved
    v2 = _spec("deepseek-v2-groups-yarn", checkpoints)
    assert v2.moe is not None
    assert (v2.moe.scoring, v2.moe.group_rule, v2.moe.groups, v2.moe.correction) == (
        "softmax",
        "max",
        4,
        False,
    )
    greedy = _spec("deepseek-v2-greedy", checkpoints)
    assert greedy.moe is not None
    assert (greedy.moe.groups, greedy.moe.scale, greedy.moe.shared) == (1, 1.5, 48)


def _changed(checkpoints: Any, name: str, folder: Path, **changes: Any) -> str:
    """Copy a checkpoint with changed fields of config.json; None removes a field. Return the folder."""
    shutil.copytree(checkpoints(name).folder, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(folder)


def test_kimi_k2s_text(checkpoints: Any, tmp_path: Path) -> None:
    """The published files have a special model type, the old form of rope, and code that is never run."""
    rope = {
        "type": "yarn",
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    }
    folder = _changed(
        checkpoints,
        "deepseek-v3",
        tmp_path,
        model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_parameters=None,
        rope_scaling=rope,
        rope_theta=50000.0,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        head_dim=None,
    )
    spec = load_spec(folder, None, trust_remote_code=True)
    assert (spec.rope.kind, spec.rope.dim, spec.rope.theta) == ("yarn", 8, 50000.0)
    assert spec.mla is not None
    assert spec.mla.scale == pytest.approx(20**-0.5 * 1.3465735902799727**2)
    load_model(folder, spec, torch.float32, CPU, progress=False)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("deepseek-v3", "topk_method", "greedy"),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "topk_group", 9),
        ("deepseek-v3", "num_experts_per_tok", 5),
        ("deepseek-v3", "n_group", 3),
        ("deepseek-v3", "num_experts_per_tok", 9),
        ("deepseek-v2-greedy", "norm_topk_prob", True),
        ("deepseek-v2-greedy", "topk_method", "noaux_tc"),
        ("deepseek-v2-greedy", "mlp_bias", True),
    ],
)
def test_what_would_be_served_wrongly_is_refused(
    name: str, field: str, value: Any, checkpoints: Any, tmp_path: Path
) -> None:
    folder = _changed(checkpoints, name, tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=field if field != "num_experts_per_tok" else "num_experts"):
        load_spec(folder, None)


def test_every_other_layer_can_be_dense(checkpoints: Any, tmp_path: Path) -> None:
    spec = load_spec(_changed(checkpoints, "deepseek-v3", tmp_path, moe_layer_freq=2), None)
    assert spec.moe is not None
    assert spec.moe.layers == (2,)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-sixteens", "deepseek-v2-groups-yarn"])
def test_one_form_gives_the_same_logits(name: str, checkpoints: Any, paged: Any) -> None:
    """Absorbed everywhere, as under --deterministic, against expanded prefill."""
    results = []
    for invariant in (False, True):
        model = checkpoints(name).load(torch.float64, invariant=invariant)
        assert ("latent_forms (expanded and absorbed)" in model.varying) is not invariant
        harness = paged(model)
        sequence = harness.sequence([7 * i % 131 for i in range(40)])
        harness.step([(sequence, 29)])
        harness.step([(sequence, 8)])
        harness.step([], [(sequence, 3)])
        results.append(torch.stack(sequence.logits))
    assert torch.allclose(results[0], results[1], rtol=1e-11, atol=1e-11)


def _with_module(checkpoints: Any, folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Return a checkpoint with an MTP module: a scaled copy of layer 2 and four tensors of its own."""
    _changed(checkpoints, "deepseek-v3", folder, num_nextn_predict_layers=1)
    path = folder / "model.safetensors"
    weights = load_file(path)
    block = {
        name.replace("layers.2.", "layers.3."): value * 1.5
        for name, value in weights.items()
        if "layers.2." in name
    }
    own = {
        "model.layers.3.enorm.weight": torch.rand(48),
        "model.layers.3.hnorm.weight": torch.rand(48),
        "model.layers.3.eh_proj.weight": torch.rand(48, 96),
        "model.layers.3.shared_head.norm.weight": torch.rand(48),
        "model.layers.3.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    save_file({**weights, **block, **own}, str(path), {"format": "pt"})
    return str(folder), {**block, **own}


def test_modules_that_predict_ahead_are_left_out_unless_asked_for(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = _with_module(checkpoints, tmp_path)
    spec = load_spec(folder, None)
    assert spec.mtp_layers == 0
    load_model(folder, spec, torch.float32, CPU, progress=False)
    load_model(folder, load_spec(folder, 2), torch.float32, CPU, progress=False)


def test_every_name_of_a_module_has_its_place(checkpoints: Any, tmp_path: Path) -> None:
    folder, published = _with_module(checkpoints, tmp_path)
    spec = with_mtp(load_spec(folder, None), 1)
    assert spec.mtp_layers == 1
    assert spec.caches[0].layers == (0, 1, 2, 3)
    assert spec.moe is not None
    assert spec.moe.layers == (1, 2, 3)
    made = weight_map(spec)
    for name in published:
        assert name in made.placements or name in made.same_as
    placed = {name: made.placements[name].parameter for name in published if name in made.placements}
    assert placed["model.layers.3.enorm.weight"] == "mtp.0.embedding_norm.weight"
    assert placed["model.layers.3.hnorm.weight"] == "mtp.0.hidden_norm.weight"
    assert placed["model.layers.3.eh_proj.weight"] == "mtp.0.project.weight"
    assert placed["model.layers.3.shared_head.norm.weight"] == "mtp.0.norm.weight"
    assert placed["model.layers.3.self_attn.kv_b_proj.weight"] == "mtp.0.block.attention.kv_up.weight"
    assert placed["model.layers.3.mlp.gate.weight"] == "mtp.0.block.feed_forward.router.weight"


def test_a_dense_last_layer_makes_a_dense_module() -> None:
    spec = msgspec.convert(
        {
            "family": "deepseek",
            "architecture": "DeepseekV3ForCausalLM",
            "vocab_size": 10,
            "hidden": 32,
            "layers": 2,
            "heads": 2,
            "kv_heads": 2,
            "head_dim": 20,
            "intermediate": 8,
            "rope": {"dim": 8},
            "caches": [{"kind": "latent", "layers": [0, 1], "width": 32, "form": "latent"}],
            "moe": {"experts": 4, "top_k": 2, "intermediate": 8, "renormalize": True, "layers": [0]},
            "max_position": 64,
        },
        ModelSpec,
    )
    made = with_mtp(spec, 2)
    assert made.caches[0].layers == (0, 1, 2, 3)
    assert made.moe is not None
    assert made.moe.layers == (0,)


def test_a_module_is_an_ordinary_block_behind_the_last(checkpoints: Any) -> None:
    spec = with_mtp(_spec("deepseek-v3", checkpoints), 1)
    build = Build(dtype=torch.float32, device=CPU)
    block = make_block(spec, 3, build)
    last = make_block(spec, 2, build)
    assert [(n, p.shape) for n, p in block.named_parameters()] == [
        (n, p.shape) for n, p in last.named_parameters()
    ]


class _Watched(TorchLatent):
    """Keeps which form every segment was computed in."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def attend(self, q: Any, out: Any, core: CoreInput, latent: LatentInput) -> None:
        self.seen.append((latent.form, core.segment.tokens))
        super().attend(q, out, core, latent)


@pytest.mark.requirement("B12")
def test_prompts_are_expanded_and_decodes_absorbed_in_one_step(checkpoints: Any, paged: Any) -> None:
    for invariant, prompts in ((False, "expanded"), (True, "absorbed")):
        harness = paged(checkpoints("deepseek-v3").load(invariant=invariant))
        harness.backends = Backends([watched := _Watched()])
        one, two = harness.sequence([1, 2, 3, 4]), harness.sequence([5, 6, 7])
        harness.step([(one, 3)])
        watched.seen.clear()
        harness.step([(two, 3)], [(one, 1)])
        assert watched.seen == [(prompts, 3), ("absorbed", 1)] * 3


def test_eight_bits_are_close(checkpoints: Any, paged: Any) -> None:
    """Key and value matrices stay unquantized; the other matrices lose little."""
    results = []
    for quantization in ("none", "int8"):
        harness = paged(checkpoints("deepseek-v3-dense-halves").load(quantization=quantization))
        sequence = harness.sequence([3 * i % 131 for i in range(30)])
        harness.step([(sequence, 25)])
        harness.step([], [(sequence, 5)])
        results.append(torch.stack(sequence.logits))
    assert 0 < (results[0] - results[1]).abs().mean() / results[0].abs().mean() < 0.1
