"""Write checkpoints of 8 and 4 bits in every published format, large enough for weights to dominate memory.

Sizes and types equal the output of each format's tools. Codes are random and scales are constant: memory does
not depend on the values. ``bench.gguf`` makes GGUF files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.peers.to_compressed import description
from weft.bench import gpt_oss
from weft.bench.checkpoints import qwen3_shapes

Tensor = torch.Tensor
Parts = dict[str, Tensor]
Shape = tuple[int, ...]

_COMMON = {
    "vocab_size": 16_384,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "rope_theta": 1_000_000.0,
}
LAYERS = 12
_TINY = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_local_experts": 4,
}
#: Fields of config.json. ``LAYERS`` layers have about 650 M parameters.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt-oss": {
        **gpt_oss.ABOUT,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
    },
}


def _bytes(*shape: int) -> Tensor:
    """Return random bytes, never the NaN of E4M3."""
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def _words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)


def _plain(*shape: int) -> Tensor:
    """bfloat16 of either sign and of about 2^-7."""
    bits = torch.randint(0x3BE0, 0x3C20, shape, dtype=torch.int16)
    return (bits | (torch.randint(0, 2, shape, dtype=torch.int16) << 15)).view(torch.bfloat16)


def _fp8(n: int, k: int) -> Parts:
    scales = torch.full((n // 128, k // 128), 2.0**-10)
    return {"weight": _bytes(n, k).view(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _int8(n: int, k: int) -> Parts:
    return {"weight": _bytes(n, k).view(torch.int8), "weight_scale": torch.full((n, 1), 2.0**-14).bfloat16()}


def _packed(n: int, k: int) -> Parts:
    scales = torch.full((n, k // 128), 2.0**-10).bfloat16()
    return {
        "weight_packed": _words(n, k // 8),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }


def _mxfp4(n: int, k: int) -> Parts:
    scales = torch.full((n, k // 32), 118, dtype=torch.uint8)
    return {"weight_packed": _bytes(n, k // 2), "weight_scale": scales}


def _nvfp4(n: int, k: int) -> Parts:
    scales = torch.full((n, k // 16), 2.0**-4).to(torch.float8_e4m3fn)
    return {"weight": _bytes(n, k // 2), "weight_scale": scales, "weight_scale_2": torch.tensor(2.0**-6)}


def _awq(n: int, k: int) -> Parts:
    scales = torch.full((k // 128, n), 2.0**-10).half()
    return {"qweight": _words(k, n // 8), "qzeros": _words(k // 128, n // 8), "scales": scales}


def _gptq(bits: int) -> Callable[[int, int], Parts]:
    def made(n: int, k: int) -> Parts:
        return {
            "qweight": _words(k * bits // 32, n),
            "qzeros": _words(k // 128, n * bits // 32),
            "scales": torch.full((k // 128, n), 2.0**-6 / (1 << bits)).half(),
            "g_idx": (torch.arange(k) // 128).to(torch.int32),
        }

    return made


_GPTQ = {"quant_method": "gptq", "group_size": 128, "desc_act": False}
#: How a matrix is written, and config.json's ``quantization_config``.
FORMATS: dict[str, tuple[Callable[[int, int], Parts], dict[str, Any] | None]] = {
    "16 bits": (lambda n, k: {"weight": _plain(n, k)}, None),
    "FP8": (_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "INT8": (_int8, description("int8", 0, [])),
    "GPTQ 8 bits": (_gptq(8), {**_GPTQ, "bits": 8}),
    "GPTQ": (_gptq(4), {**_GPTQ, "bits": 4}),
    "AWQ": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}),
    "packed 4 bits": (_packed, description("int4", 128, [])),
    "NVFP4": (_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "MXFP4": (_mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
}


def shapes_of(model: str, config: dict[str, Any]) -> dict[str, Shape]:
    """Return the name and the shape of every tensor. Shapes of matrices count numbers, not packed bytes."""
    if model == "gpt-oss":
        return gpt_oss.shapes(config)
    shapes = qwen3_shapes(config)
    if model == "dense":
        return shapes
    found = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp"
        found[f"{mlp}.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for part, shape in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            ):
                found[f"{mlp}.experts.{expert}.{part}_proj.weight"] = shape
    return found


def write(folder: Path, model: str, form: str, *, tiny: bool) -> None:
    """Write checkpoint ``model`` with its matrices in format ``form``. With ``tiny`` the sizes are
    minimal.
    """
    layers = 2 if tiny else LAYERS
    config = {**_COMMON, **MODELS[model], "num_hidden_layers": layers}
    if tiny:
        config |= {name: size for name, size in _TINY.items() if name in config}
    if model == "gpt-oss":
        config["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    matrix, about = FORMATS[form]
    if about is not None and model != "gpt-oss":
        config["quantization_config"] = about
    tensors: Parts = {}
    for name, shape in shapes_of(model, config).items():
        if name.endswith("_proj.weight") and model != "gpt-oss":
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": tensor for part, tensor in matrix(*shape).items()}
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # GPT-OSS's own MXFP4
            *stack, k = shape
            tensors[f"{name}_blocks"] = _bytes(*stack, k // gpt_oss.GROUP, gpt_oss.GROUP // 2)
            tensors[f"{name}_scales"] = torch.full((*stack, k // gpt_oss.GROUP), 118, dtype=torch.uint8)
        elif "norm" in name:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = _plain(*shape)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
