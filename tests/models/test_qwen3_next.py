"""Qwen3-Next and Qwen3.5: coverage of the cases in tests/support/delta_models.py, and special features.

Parity with transformers is in test_parity.py.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.delta_models import CASES, FULL, LINEAR
from weft.attention.delta.delta_cpu import CpuDelta
from weft.attention.delta.delta_torch import TorchDelta
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.sizing.memory import weight_bytes
from weft.models.loader import load_model
from weft.models.registry import WEIGHTS
from weft.models.weights import Placement

CPU = torch.device("cpu")
VOCAB = 131


def _ids(count: int, seed: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(VOCAB) for _ in range(count)]


def test_what_the_cases_cover(checkpoints: Any) -> None:
    spec = load_spec(checkpoints("qwen3-next").folder)
    assert spec.delta is not None
    assert spec.moe is not None
    assert (spec.delta.layers, spec.moe.layers) == ((0, 1, 2), (0, 2, 3))
    assert (spec.moe.shared, spec.moe.shared_gate, spec.moe.renormalize) == (40, True, True)
    assert (spec.centred_norms, spec.output_gate, spec.qk_norm) == (True, True, True)
    assert (spec.rope.dim, spec.head_dim, spec.mtp_layers) == (4, 16, 0)
    assert [(c.kind, c.layers, c.form) for c in spec.caches] == [
        ("full", (3,), "gqa"),
        ("state", (0, 1, 2), "delta"),
    ]
    assert [(p.name, p.shape, p.wide) for p in spec.caches[1].parts] == [
        ("conv_q", (2, 3, 16), False),
        ("conv_k", (2, 3, 16), False),
        ("conv_v", (4, 3, 16), False),
        ("recurrent", (4, 16, 16), True),
    ]
    odd = load_spec(checkpoints("qwen3-next-odd-heads").folder)
    assert odd.moe is None
    assert (odd.tied, odd.qkv_bias, odd.o_bias) == (True, True, True)
    sparse = load_spec(checkpoints("qwen3-next-sparse-step").folder)
    assert sparse.moe is not None
    assert (sparse.moe.layers, sparse.moe.renormalize) == ((1, 3), False)
    assert load_spec(checkpoints("qwen3-5").folder).rope.dim == 8
    routed = load_spec(checkpoints("qwen3-5-moe").folder)
    assert routed.moe is not None
    assert (routed.moe.layers, routed.moe.renormalize) == ((0, 1, 2, 3), True)


@pytest.mark.parametrize("name", list(CASES))
def test_the_size_of_the_weights_is_known_before_they_are_read(name: str, checkpoints: Any) -> None:
    model = checkpoints(name).read()
    real = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(model.spec, "float32") == pytest.approx(real, rel=0.03)


@pytest.mark.usefixtures("extension")
def test_both_backends_are_tested(checkpoints: Any, paged: Any) -> None:
    """The parity tests in float32 use the C++ operations, except for unsupported heads."""
    for name, expected in (
        ("qwen3-next", CpuDelta),
        ("qwen3-5-moe", CpuDelta),
        ("qwen3-next-odd-heads", TorchDelta),
    ):
        assert type(paged(checkpoints(name).load()).backends["delta"]) is expected


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3-next-dense", "qwen3-5-tied"])
def test_half_precision_is_close_to_float32(
    name: str, dtype: torch.dtype, checkpoints: Any, paged: Any
) -> None:
    checkpoint, ids = checkpoints(name), _ids(40, 7)
    harness = paged(checkpoint.load(dtype))
    sequence = harness.sequence(ids)
    harness.step([(sequence, 30)])
    harness.step([], [(sequence, 3)])
    harness.step([(sequence, 7)])
    ours, theirs = torch.stack(sequence.logits).float(), checkpoint.expected(ids)
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < (0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-next-odd-heads", "qwen3-5"])
def test_rejected_drafts_leave_no_trace(
    name: str, dtype: torch.dtype, tolerance: float, checkpoints: Any, paged: Any
) -> None:
    """Verify rows beside prompts, of which random numbers of tokens are undone: right and wrong drafts."""
    model = checkpoints(name).load(dtype)
    ids = [_ids(40, 1), _ids(33, 2), _ids(50, 3)]
    whole = []
    for number, known in enumerate(ids):
        alone = paged(model, seed=number)
        sequence = alone.sequence(known)
        alone.step([(sequence, len(known))])
        whole.append(torch.stack(sequence.logits))
    harness, rng = paged(model, seed=5), random.Random(6)
    rows = [harness.sequence(known) for known in ids]
    harness.step([(rows[0], 9), (rows[1], 1)])
    undone = 0
    while any(row.computed < len(known) for row, known in zip(rows, ids, strict=True)):
        counts = [
            rng.randint(1, min(4, len(row.ids) - row.computed))
            for row in rows[:2]
            if row.computed < len(row.ids)
        ]
        decode = list(zip([row for row in rows[:2] if row.computed < len(row.ids)], counts, strict=True))
        left = len(ids[2]) - rows[2].computed
        drops = []
        for row, count in decode:
            drop = rng.randint(0, count - 1)
            for wrong in range(row.computed + count - drop, row.computed + count):
                row.ids[wrong] = (row.ids[wrong] + 1) % VOCAB
            drops.append(drop)
        harness.step([(rows[2], min(7, left))] if left else [], decode)
        for (row, _), drop in zip(decode, drops, strict=True):
            harness.reject(row, drop)
            undone += drop
            row.ids = list(ids[rows.index(row)])
    assert undone > 10
    for row, right in zip(rows, whole, strict=True):
        made = torch.stack(row.logits)
        assert (made - right).abs().max() <= tolerance * right.abs().max()


# --- checkpoints in published form ---


def _rewrite(source: str, folder: Path, extra: dict[str, torch.Tensor], **fields: Any) -> str:
    """A copy of the checkpoint with more tensors and other fields."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    (single,) = folder.glob("*.safetensors")
    save_file({**load_file(single), **extra}, single, metadata={"format": "pt"})
    return str(folder)


def _module_weights(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """Return the weights of an MTP module: a copy of layer ``layer``, and the tensors around the copy."""
    hidden = tensors["model.norm.weight"].shape[0]
    made = {
        name.replace(f"model.layers.{layer}.", "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    made["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        made[f"mtp.{name}.weight"] = torch.randn(hidden)
    return made


@pytest.mark.parametrize(("name", "field"), [("qwen3-next", None), ("qwen3-5-moe", "mtp_num_hidden_layers")])
def test_a_predicting_module_is_found_by_its_weights(
    name: str, field: str | None, checkpoints: Any, tmp_path: Path
) -> None:
    checkpoint = checkpoints(name)
    (single,) = Path(checkpoint.folder).glob("*.safetensors")
    extra = _module_weights(load_file(single), 3)
    folder = _rewrite(checkpoint.folder, tmp_path / "with", extra, **({field: 1} if field else {}))
    spec = load_spec(folder, mtp=1)
    assert spec.mtp_layers == 1
    assert spec.caches[0].layers == (3, 4)
    assert spec.moe is not None
    assert spec.moe.layers[-1] == 4
    placements = WEIGHTS.get(spec.family)(spec).placements
    fused = {"mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"}
    assert {n for n in placements if n.startswith("mtp.")} - fused == set(extra)
    model = load_model(folder, spec, torch.float32, CPU, progress=False, pack=False)
    ours = dict(model.named_parameters())
    assert {p.parameter for n, p in placements.items() if n.startswith("mtp.")} == {
        n for n in ours if n.startswith("mtp.")
    }
    assert torch.equal(ours["mtp.0.project.weight"], extra["mtp.fc.weight"])
    for theirs, mine in (
        ("pre_fc_norm_embedding", "embedding_norm"),
        ("pre_fc_norm_hidden", "hidden_norm"),
        ("norm", "norm"),
        ("layers.0.self_attn.q_norm", "block.attention.q_norm"),
    ):
        assert torch.equal(ours[f"mtp.0.{mine}.weight"], 1 + extra[f"mtp.{theirs}.weight"])
    # Without the module the loader skips the module's weights.
    load_model(folder, load_spec(folder), torch.float32, CPU, progress=False)
    # A field without weights means that the checkpoint lost the weights.
    if field:
        lost = _rewrite(checkpoint.folder, tmp_path / "lost", {}, **{field: 1})
        off = _rewrite(checkpoint.folder, tmp_path / "off", extra, **{field: 0})
        for without in (lost, off):
            load_model(without, load_spec(without), torch.float32, CPU, progress=False)
            with pytest.raises(ConfigError, match="no multi-token prediction"):
                load_spec(without, mtp=1)
        with pytest.raises(ConfigError, match=field):
            load_spec(_rewrite(checkpoint.folder, tmp_path / "many", extra, **{field: 2}))


@pytest.mark.parametrize("routed", [False, True])
@torch.no_grad()
def test_the_text_of_a_checkpoint_that_sees(routed: bool, tmp_path: Path, paged: Any) -> None:
    """Published Qwen3.5 checkpoints have the text model inside, beside a vision tower."""
    kind = "Qwen3_5Moe" if routed else "Qwen3_5"
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    if routed:
        text |= {"num_experts": 4, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    else:
        text["intermediate_size"] = 64
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    reference = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for weight in reference.parameters():
        weight.normal_(0.0, 0.25)
    reference.save_pretrained(tmp_path)
    (single,) = tmp_path.glob("*.safetensors")
    assert any(name.startswith("model.visual.") for name in load_file(single))
    spec = load_spec(str(tmp_path), language_model_only=True)
    assert (spec.architecture, spec.vocab_size) == (f"{kind}ForConditionalGeneration", VOCAB)
    harness = paged(load_model(str(tmp_path), spec, torch.float32, CPU, progress=False))
    ids = _ids(29, 9)
    sequence = harness.sequence(ids)
    harness.step([(sequence, 20)])
    harness.step([], [(sequence, 1)])
    harness.step([(sequence, 8)])
    theirs = reference(torch.tensor([ids]), use_cache=False).logits[0]
    ours = torch.stack(sequence.logits)
    assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3-next", {"layer_types": [LINEAR, "sliding_attention", FULL, FULL]}, "layer_types"),
        ("qwen3-next", {"layer_types": [LINEAR]}, "layer_types has 1 entries for 4 layers"),
        ("qwen3-next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3-next", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more"),
        ("qwen3-next", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ("qwen3-next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3-next", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "head_dim"),
        ("qwen3-5", {"vision_config": {"depth": 1}}, "vision_config"),
        ("qwen3-5", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("qwen3-5", {"architectures": ["Qwen3_5ForConditionalGeneration"]}, "text_config"),
    ],
)
def test_refusals_name_the_field(
    name: str, changes: dict[str, Any], named: str, checkpoints: Any, tmp_path: Path
) -> None:
    folder = _rewrite(checkpoints(name).folder, tmp_path / "changed", {}, **changes)
    with pytest.raises(ConfigError, match=named):
        load_spec(folder)


def test_layers_by_interval(checkpoints: Any, tmp_path: Path) -> None:
    """The published configuration has an interval of layers and ``partial_rotary_factor`` at the top
    level.
    """
    folder = _rewrite(
        checkpoints("qwen3-next").folder,
        tmp_path / "published",
        {},
        layer_types=None,
        full_attention_interval=3,
        rope_parameters=None,
        rope_theta=500.0,
        partial_rotary_factor=0.5,
        rope_scaling=None,
    )
    spec = load_spec(folder)
    assert spec.delta is not None
    assert (spec.delta.layers, spec.rope.dim, spec.rope.theta) == ((0, 1, 3), 8, 500.0)


def test_weights_that_do_not_fit_are_named(checkpoints: Any, tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    folder = _rewrite(checkpoints("qwen3-next").folder, tmp_path / "short", {name: torch.zeros(190, 48)})
    with pytest.raises(ConfigError, match=r"in_proj_qkvz.weight has shape \[190, 48\].*\[192, 48\]"):
        load_model(folder, load_spec(folder), torch.float32, CPU, progress=False)


def test_rows_in_groups_are_sorted_by_part() -> None:
    rows = torch.arange(12.0).view(12, 1)
    made = Placement("w", groups=2, parts=((2, 6), (0, 2)), offset=1.0).arranged(rows, torch.float64)
    assert made.flatten().tolist() == [3, 4, 5, 6, 9, 10, 11, 12, 1, 2, 7, 8]
    assert made.dtype == torch.float64
    with pytest.raises(ValueError, match="12 rows"):
        Placement("w", groups=2, parts=((0, 5),)).arranged(rows, torch.float32)
