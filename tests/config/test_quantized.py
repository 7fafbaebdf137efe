"""``quantization_config`` in the form of each tool, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.families.load import refuse_unserved
from weft.config.spec import QuantizedSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}


def _load(folder: Path, **more: Any) -> QuantizedSpec | None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **more}))
    return load_spec(str(folder)).quantized


def _compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


ACCEPTED: dict[str, tuple[dict[str, Any], QuantizedSpec]] = {
    "fp8 blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        QuantizedSpec(method="fp8", block=(128, 128), bits=8.25),
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        QuantizedSpec(method="fp8", bits=8.25),
    ),
    "fp8 exponents": (
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "weight_block_size": [128, 128]},
        QuantizedSpec(method="fp8", block=(128, 128), bits=8.25, expert_bits=4.25),
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        QuantizedSpec(method="mxfp4", bits=4.25),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"},
        QuantizedSpec(method="awq", bits=4 + 40 / 128),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": True},
        QuantizedSpec(method="gptq", zero_offset=1, bits=4),
    ),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        QuantizedSpec(method="gptq", zero_offset=0, bits=8 + 40 / 32),
    ),
    "compressed fp8": (
        _compressed(
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "symmetric": True,
                "block_structure": [64, 64],
            },
            format="float-quantized",
            ignore=["lm_head"],
            quantization_status="compressed",
        ),
        QuantizedSpec(method="compressed-tensors", block=(64, 64), bits=8.25),
    ),
    "compressed int4": (
        _compressed(
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            format="pack-quantized",
        ),
        QuantizedSpec(method="compressed-tensors", bits=4 + 40 / 32),
    ),
    "compressed int8 by rows": (
        _compressed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
        QuantizedSpec(method="compressed-tensors", bits=8),
    ),
    "compressed floats of 4 bits": (
        _compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
        QuantizedSpec(method="compressed-tensors", bits=4.5),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        QuantizedSpec(method="modelopt", bits=4.5),
    ),
    "modelopt mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}},
        },
        QuantizedSpec(method="modelopt", bits=8.25),
    ),
}


ACCEPTED |= {
    "modelopt without a method": (
        {
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt"},
            "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
        },
        QuantizedSpec(method="modelopt", bits=8.25),
    ),
    "modelopt of four bits, scales for 32": (
        {"quant_algo": "MXFP4"},
        QuantizedSpec(method="modelopt", bits=4.25),
    ),
    "modelopt below another field": (
        {"quantization": {"quant_algo": "nvfp4", "kv_cache_quant_algo": "FP8", "exclude_modules": []}},
        QuantizedSpec(method="modelopt", bits=4.5),
    ),
    "modelopt mixed, experts apart": (
        {
            "quant_algo": "MIXED_PRECISION",
            "quant_method": "modelopt_mixed",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.experts.3.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.0.mlp.shared_experts.up_proj": {"quant_algo": "W4A16_NVFP4"},
            },
        },
        QuantizedSpec(method="modelopt", bits=8.25, expert_bits=4.5),
    ),
    "fp8 whose experts modelopt made anew": (
        {"quant_method": "fp8", "moe_quant_algo": "NVFP4", "weight_block_size": [128, 128]},
        QuantizedSpec(method="fp8", block=(128, 128), bits=8.25, expert_bits=4.5),
    ),
    "autoround as gptq": (
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "autoround_version": "0.8.0",
            "block_name_to_quantize": "model.layers",
            "iters": 200,
            "extra_config": {
                "lm_head": {"bits": 16, "data_type": "float"},
                "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 64},
            },
        },
        QuantizedSpec(method="gptq", zero_offset=1, bits=4 + 40 / 128),
    ),
    "autoround as awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "sym": False},
        QuantizedSpec(method="awq", bits=4 + 40 / 128),
    ),
    "autoround by its other name": (
        {"quant_method": "intel/auto-round", "bits": 2},
        QuantizedSpec(method="gptq", zero_offset=1, bits=4 + 40 / 128),
    ),
}


def test_what_stands_beside_the_quantization(tmp_path: Path) -> None:
    """DeepSeek V4 names the type of its experts at the top level of config.json."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = _load(tmp_path, quantization_config=fp8, expert_dtype="fp4")
    assert found == QuantizedSpec(method="fp8", block=(128, 128), bits=8.25, expert_bits=4.25)
    found = _load(tmp_path, quantization_config={**fp8, "moe_quant_algo": "NVFP4"}, expert_dtype="fp4")
    assert found is not None
    assert found.expert_bits == 4.5
    found = _load(tmp_path, quantization_config=fp8, expert_dtype="fp8")
    assert found == QuantizedSpec(method="fp8", block=(128, 128), bits=8.25)
    with pytest.raises(ConfigError, match=r"config\.json: expert_dtype = 'fp6' is not supported"):
        _load(tmp_path, quantization_config=fp8, expert_dtype="fp6")


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_what_tools_write(name: str, tmp_path: Path) -> None:
    config, expected = ACCEPTED[name]
    assert _load(tmp_path, quantization_config=config) == expected


@pytest.mark.parametrize(
    ("form", "method", "offset"),
    [
        ({"packing_format": "auto_round"}, "gptq", 0),
        ({"packing_format": "auto_round:gptqmodel"}, "gptq", 0),
        ({"packing_format": "auto_round:gptq", "backend": "auto_round:exllamav2"}, "gptq", 1),
        ({"backend": "auto_round:exllamav2"}, "gptq", 0),
        ({"backend": "auto_round:gptq:exllamav2"}, "gptq", 1),
        ({"backend": "auto_round:awq:gemm"}, "awq", 0),
        ({"backend": "auto"}, "gptq", 1),
        ({}, "gptq", 1),
    ],
)
def test_zero_points_of_autoround(form: dict[str, Any], method: str, offset: int, tmp_path: Path) -> None:
    """AutoRound's own packing has zero points as they are. Older releases name it in ``backend``."""
    found = _load(tmp_path, quantization_config={"quant_method": "auto-round", "bits": 4, **form})
    assert found is not None
    assert (found.method, found.zero_offset) == (method, offset)


def test_blocks_as_text(tmp_path: Path) -> None:
    """Older compressed-tensors writes the block as a text."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    found = _load(tmp_path, quantization_config=_compressed(weights))
    assert found == QuantizedSpec(method="compressed-tensors", block=(128, 128), bits=8.25)


def test_formats_are_refused_before_a_download(tmp_path: Path) -> None:
    """The folder has no weights yet."""
    mlx = {"quantization": {"bits": 4, "group_size": 64}}
    for more in (mlx, {"quantization_config": {"quant_method": "hqq"}}):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **more}))
        with pytest.raises(ConfigError, match=r"is not supported"):
            refuse_unserved(tmp_path)


def test_plain_checkpoints(tmp_path: Path) -> None:
    assert _load(tmp_path) is None
    assert _load(tmp_path, quantization_config=None) is None
    assert _load(tmp_path, quantization_config={}) is None


def test_compression_config_is_the_old_name(tmp_path: Path) -> None:
    found = _load(tmp_path, compression_config={"format": "float-quantized", "config_groups": {}})
    assert found == QuantizedSpec(method="compressed-tensors")


def test_the_file_that_modelopt_writes_beside(tmp_path: Path) -> None:
    beside = tmp_path / "hf_quant_config.json"
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["x"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    assert _load(tmp_path) == QuantizedSpec(method="modelopt", bits=4.5)
    beside.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert _load(tmp_path) is None
    beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config.json.quantization.quant_algo = 'W4A8_AWQ'"):
        _load(tmp_path)
    beside.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported; there are: fp8"),
        ({"load_in_8bit": False, "load_in_4bit": True}, "as in merged models, download the model and serve"),
        ({"bits": 4, "group_size": 64}, "quant_method is missing (the fields are those of MLX, if"),
        ({"load_in_4bit": True}, "quant_method is missing (the fields are those of bitsandbytes, which"),
        ({"quant_method": "hqq"}, "or the version in 16 bits with --quantization int8 or int4"),
        ({"quant_method": ["awq"]}, "quant_method = ['awq'] is not supported"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation = 'hadamard'"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 16}}, "adapter = {'rank': 16}"),
        ({"quant_method": "auto-round", "bits": 4, "hadamard_config": {"a": 1}}, "hadamard_config = {'a'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "format = 'gemv_fast'"),
        ({"quant_method": "awq", "w_bit": 3}, "w_bit = 3"),
        ("fp8", "quantization_config must be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be two"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt = 'e3m4'"),
        ({"quant_method": "fp8", "scale_fmt": "e5m0"}, "scale_fmt = 'e5m0'"),
        ({"quant_method": "fp8", "modules_to_not_convert": "all"}, "modules_to_not_convert must be a list"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point = False"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "bits": True}, "bits = True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format = True"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "desc_act = 'yes'"),
        (_compressed({"num_bits": 3, "type": "int"}), "config_groups.group_0.weights.num_bits = 3"),
        (_compressed({"num_bits": 8, "type": "float", "symmetric": False}), "weights.symmetric = False"),
        (_compressed({}, format="marlin-24"), "format = 'marlin-24'"),
        (_compressed({}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (_compressed({}, transform_config={"config_groups": {}}), "transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ'"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ' is not supported"),
        ({"quant_method": "fp8", "moe_quant_algo": "INT3"}, "moe_quant_algo = 'INT3'"),
        ({"quant_method": "auto-round", "bits": 3}, "bits = 3"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:gguf"},
            "packing_format = 'auto_round:g",
        ),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        (
            {"quant_method": "auto-round", "bits": 4, "backend": "auto_round:hpu"},
            "backend = 'auto_round:hpu'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"model.layers.7.mlp": {"bits": 3}}},
            "extra_config.model.layers.7.mlp.bits = 3",
        ),
        (
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_awq",
                "extra_config": {"model.layers.7.mlp": {"bits": 8}},
            },
            "extra_config.model.layers.7.mlp.bits = 8",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "INT3"}},
            },
            "quantized_layers.a.quant_algo = 'INT3'",
        ),
    ],
)
def test_refusals_name_the_field(config: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, quantization_config=config)
    assert named in raised.value.message
