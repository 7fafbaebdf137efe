"""The memory plan covers what torch allocates: in steps of each family, in experts, and in vision towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.allocated import most_allocated
from tests.support.slow import mostly_slow
from tests.support.vision_models import CASES as VISION_CASES
from tests.support.vision_models import random_image
from tests.support.whole_image_models import CASES as IMAGE_CASES
from weft.cli.verify.tiny import FAMILIES, write_family
from weft.config.families import load_spec
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.memory import activation_bytes, encoding_bytes
from weft.layers.build import Build, Packs
from weft.models.loader import load_model
from weft.models.vision.build import make_tower
from weft.ops.moe import Gate, Routed

pytestmark = pytest.mark.usefixtures("kept_threads")

CPU = torch.device("cpu")
TOKENS = 512
SCHEDULER = SchedulerSection(max_num_batched_tokens=TOKENS, max_num_seqs=8, steps_in_flight=1)
#: Sizes of layers in the proportions of published models, with few logits.
SIZES = {
    **{"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 64},
    **{"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    **{"v_head_dim": 64, "index_head_dim": 64, "o_lora_rank": 64, "moe_intermediate_size": 256},
    **{"shared_expert_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512},
    **{"shared_intermediate_size": 1024, "intermediate_size_mlp": 1024},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    **{"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2},
    **{"mamba_n_heads": 16, "mamba_d_state": 64, "mamba_d_ssm": 1024},
}
#: Sizes of one family, whose configuration has own names.
OWN = {"mamba2": {"num_heads": 16, "num_attention_heads": 16, "state_size": 64}}
#: Recurrent mixers in torch, which leave the rest of the plan to other steps.
TORCH = ("lfm2_moe",)


def wide_family(folder: Path, family: str) -> str:
    """Write the configuration of ``family`` with ``SIZES``. Return the folder."""
    path = write_family(folder, family)
    config = json.loads((path / "config.json").read_text())
    config |= {name: size for name, size in SIZES.items() if config.get(name) is not None}
    config |= OWN.get(family, {})
    if "linear_attn_config" in config:
        config["linear_attn_config"]["head_dim"] = 64
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_step_stays_within_the_plan(family: str, tmp_path: Path, paged: Any, extension: None) -> None:
    """With the C++ operations, which have small buffers of their own beside torch's."""
    folder = wide_family(tmp_path, family)
    spec = load_spec(folder)
    model = load_model(folder, spec, torch.bfloat16, CPU, "dummy", progress=False)
    planned = activation_bytes(spec, "bfloat16", SCHEDULER)
    for rows in (8, 1):
        harness = paged(model, 16, 100, copies=1)
        sequences = [
            harness.sequence([(7 * row + n) % 64 for n in range(TOKENS // rows)]) for row in range(rows)
        ]
        used = most_allocated(lambda: harness.step([(one, len(one.ids)) for one in sequences]))  # noqa: B023
        assert used <= planned
        if family in TORCH:
            assert used >= 0.4 * planned, "the plan takes memory from the caches"


@pytest.mark.parametrize("gate", [Gate(), Gate(activation="gelu")], ids=["silu", "gelu"])
def test_the_plan_covers_experts_of_gpus(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors beside the kernels of routed experts, which do not run here: a row for each chosen expert."""
    pytest.importorskip("triton")
    from weft.ops.triton import moe

    folder = write_family(tmp_path, "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 512, "moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 10}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, "vocab_size": 64}))
    planned = activation_bytes(load_spec(str(folder)), "bfloat16", SCHEDULER)
    monkeypatch.setattr(moe, "cut", lambda *_: None)
    monkeypatch.setattr(moe, "_product", lambda *_, **__: None)
    monkeypatch.setattr(moe, "activate", lambda x, *_: x.new_empty(len(x), x.shape[1] // 2))
    rule: Any = None
    weights = Routed(
        rule=rule,
        gate=gate,
        router=torch.empty(16, 512),
        gate_up=torch.empty(16, 192, 512, dtype=torch.bfloat16),
        down=torch.empty(16, 512, 96, dtype=torch.bfloat16),
    )
    x = torch.empty(TOKENS, 512, dtype=torch.bfloat16)
    ids = torch.zeros(TOKENS, 10, dtype=torch.int64)
    around = 3 * x.nbytes  # the stream, its norm, and the sum of the experts
    used = most_allocated(lambda: moe.by_tiles(x, ids, weights)) + around
    assert 0.5 * planned <= used <= planned


#: Sizes of towers: with them pixels, positions or blocks need most memory.
TOWERS = [(256, 1024, 4), (384, 1024, 14), (64, 128, 14)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3-vl-levels", "kimi-k25"])
def test_the_plan_covers_towers(name: str, dtype: str, seeing: Any) -> None:
    vision = load_spec(seeing(name).folder).vision
    assert vision is not None
    for hidden, inner, patch in TOWERS:
        media = msgspec.structs.replace(vision.media, patch=patch)
        heads = hidden // 64
        wide = msgspec.structs.replace(
            vision, hidden=hidden, intermediate=inner, heads=heads, output=256, media=media
        )
        tower = make_tower(wide, Build(dtype=getattr(torch, dtype), device=CPU))
        for weight in tower.parameters():
            weight.data = torch.zeros_like(weight)
        for layer in tower.modules():
            if isinstance(layer, Packs):
                layer.pack()
        image = random_image(14 * patch, 14 * patch, seed=0)
        with torch.inference_mode():
            used = most_allocated(lambda: tower.embed(image))  # noqa: B023
        planned = encoding_bytes(wide, dtype, 196) * 196 // max(196, media.most_patches)
        assert 0.5 * planned <= used <= planned


@mostly_slow("name", [*VISION_CASES, *IMAGE_CASES], ["gemma3"])
def test_the_plan_covers_small_towers(name: str, seeing: Any) -> None:
    """Also towers with modules of transformers."""
    checkpoint = seeing(name)
    for dtype in ("float32", "bfloat16"):
        model = checkpoint.load(getattr(torch, dtype))
        media = model.spec.vision.media
        side = 24 if media.kind not in ("area", "patches") else 14 * media.patch
        image = random_image(side, side, seed=0)
        with torch.inference_mode():
            used = most_allocated(lambda: model.vision.embed(image))  # noqa: B023
        assert used <= encoding_bytes(model.spec.vision, dtype, (side // media.patch) ** 2)
