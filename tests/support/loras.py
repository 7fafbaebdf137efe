"""Random LoRA adapters of a checkpoint, and the checkpoint with an adapter merged into its weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from weft.config.adapters import read_adapter

ATTENTION = r"self_attn\.(q|k|v|o)_proj$"
DENSE = r"(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)$"
TABLES = r"(self_attn\.q_proj|embed_tokens|lm_head)$"
LATENT = (
    r"(self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
    r"|layers\.0\.mlp\.(gate|up|down)_proj)$"
)
DELTA = (
    r"(linear_attn\.(in_proj_qkvz|in_proj_ba|out_proj)|self_attn\.(q|k|v|o)_proj|layers\.1\.mlp\.\w+_proj)$"
)
KIMI = r"(self_attn\.([qkvbo]_proj|[fg]_[ab]_proj|kv_a_proj_with_mqa)|shared_experts\.(gate|up|down)_proj)$"
CONV = r"(conv\.(in|out)_proj|self_attn\.(q|k|v)_proj|self_attn\.out_proj|layers\.0\.feed_forward\.w[123])$"
PARALLEL = r"(mamba\.(in|out)_proj|self_attn\.(q|k|v|o)_proj|feed_forward\.(gate|up|down)_proj)$"

EXPERTS = r"(self_attn\.(q|o)_proj|experts?\.(\d+\.)?(gate|up|down)_proj)$"
"""Matrices of routed and shared experts, and two of attention."""

MAMBA = r"mixer\.(in|out|q|k|v|o|up|down)_proj$"


def make_adapter(
    folder: Path,
    base: Path,
    targets: str = DENSE,
    *,
    rank: int = 3,
    alpha: float = 5,
    seed: int = 0,
    prefix: str = "base_model.model.",
    **settings: Any,
) -> Path:
    """Save a random adapter for the modules of ``base`` that match ``targets``. Return ``folder``."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module in settings.get("modules_to_save", ()):
            noise = torch.randn(weight.shape, generator=random)
            tensors[f"{prefix}{module}.weight"] = weight + noise * 0.1
            continue
        if weight.dim() != 2 or not re.search(targets, module):
            continue
        outputs, inputs = weight.shape
        own = next((r for key, r in settings.get("rank_pattern", {}).items() if re.search(key, module)), rank)
        a, b = (torch.randn(shape, generator=random) for shape in ((own, inputs), (outputs, own)))
        if module.endswith("embed_tokens"):
            tensors[f"{prefix}{module}.lora_embedding_A"] = b.T.contiguous() * 0.3
            tensors[f"{prefix}{module}.lora_embedding_B"] = a.T.contiguous() * 0.3
            continue
        tensors[f"{prefix}{module}.lora_A.weight"] = a * 0.3
        tensors[f"{prefix}{module}.lora_B.weight"] = b * 0.3
        if settings.get("use_dora"):
            lengths = weight.float().norm(dim=1) * (1 + torch.rand(outputs, generator=random))
            tensors[f"{prefix}{module}.lora_magnitude_vector"] = lengths
    assert tensors, "no module matches"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    made = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **settings}
    made["target_modules"] = sorted({name.split(".")[-3] for name in tensors if ".lora_" in name})
    (folder / "adapter_config.json").write_text(json.dumps(made))
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Save ``base`` with ``adapter`` added to its weights in float64. Return ``folder``."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    read = read_adapter(adapter)
    for saved in read.saved:
        weights[f"{saved.module}.weight"] = tensors[saved.tensor]
    for module in read.modules:
        product = tensors[module.b].double() @ tensors[module.a].double()
        product = product.T if module.table else product
        name = f"{module.module}.weight"
        made = weights[name].double() + module.scale * product
        if module.magnitude:
            made *= (tensors[module.magnitude].double() / made.norm(dim=1)).unsqueeze(1)
        weights[name] = made
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
