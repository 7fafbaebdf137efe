"""Quantize a checkpoint to compressed-tensors' format: ``to_compressed.py MODEL OUT int8|int4``.

Every matrix of an attention or a feed-forward block is rounded to nearest. Embeddings, the head, routers and
norms stay unchanged, as in the recipes of the format.

int8    weights with a scale per row, activations rounded per token at run time (W8A8) int4    weights in
groups of 128 inputs (64 or 32 if 128 does not divide the inputs), with zero point 8 (W4A16)
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensor = torch.Tensor


def eight(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return codes and a scale per row."""
    scale = (weight.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 127).to(weight.dtype)
    codes = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}


def four(name: str, weight: Tensor, group: int) -> dict[str, Tensor]:
    """Return eight codes per word, the first in the low bits, and a scale per group."""
    rows, columns = weight.shape
    parts = weight.float().view(rows, columns // group, group)
    scale = parts.abs().amax(2, keepdim=True).clamp(min=1e-10) / 7
    scale = scale.to(weight.dtype)
    codes = ((parts / scale.float()).round().clamp(-8, 7) + 8).to(torch.int64).view(rows, columns // 8, 8)
    words = (codes << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {
        f"{name}.weight_packed": words,
        f"{name}.weight_scale": scale.squeeze(2),
        f"{name}.weight_shape": torch.tensor([rows, columns]),
    }


def chosen(name: str, tensor: Tensor) -> bool:
    """Return True for a matrix of an attention or feed-forward block."""
    return name.endswith("_proj.weight") and tensor.dim() == 2 and "conv" not in name


def description(kind: str, group: int, kept: list[str]) -> dict[str, object]:
    """Return the ``quantization_config`` of config.json."""
    weights = {"num_bits": 8 if kind == "int8" else 4, "type": "int", "symmetric": True, "dynamic": False}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    shape = {"strategy": "channel"} if kind == "int8" else {"strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**weights, **shape},
                "input_activations": tokens if kind == "int8" else None,
            }
        },
        "ignore": kept,
    }


def main() -> None:
    model, out, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = json.loads((model / "config.json").read_text())
    if config.get("quantization_config"):
        sys.exit("the checkpoint is quantized already")
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    widths = {tensor.shape[1] for name, tensor in tensors.items() if chosen(name, tensor)}
    group = next((size for size in (128, 64, 32) if all(width % size == 0 for width in widths)), 0)
    if kind == "int4" and not group:
        sys.exit(f"no group of 128, 64 or 32 divides inputs of {sorted(widths)}")
    made: dict[str, Tensor] = {}
    kept = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not chosen(name, tensor):
            made[name] = tensor
            if tensor.dim() == 2 and "embed" not in name:
                kept.append(module)
        else:
            made |= eight(module, tensor) if kind == "int8" else four(module, tensor, group)
    out.mkdir()
    save_file(made, out / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = description(kind, group, kept)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in model.iterdir():
        weights = file.name.startswith("model.safetensors")
        if file.suffix in (".json", ".jinja") and file.name != "config.json" and not weights:
            shutil.copy(file, out / file.name)


if __name__ == "__main__":
    main()
