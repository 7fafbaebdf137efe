"""Quantization of a checkpoint's weights: ``quantization_config`` of config.json, typed.

The loader reads quantized tensors, group sizes and bits off the tensors. The configuration adds only the
layout. Activation schemes (static, dynamic) and lists of excluded modules have no effect here: Weft
dequantizes the published weights and computes with the result. Settings that would change results and are not
implemented are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.families.facts import Facts, read_json
from weft.config.families.quantized_fields import QuantizationFields
from weft.config.spec import QuantizedSpec

log = get_logger(__name__)

MODELOPT_FILE = "hf_quant_config.json"
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json of older AutoGPTQ and AutoAWQ -> method."""
_ELSE = (
    "Serve a version of the model in one of these formats or in GGUF, or the version in 16 bits with "
    "--quantization int8 or int4"
)
"""Advice for a format that is not supported."""
_MERGED = ". If the weights are plain, as in merged models, download the model and serve the folder"
"""More advice for bitsandbytes if the names of the tensors are not known, as before a download."""
_MODELOPT_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "MIXED_PRECISION",
)
_COMPRESSED_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)


_FP8_BITS = 8.25
"""Bits per FP8 element with a float32 scale per row and 128 inputs: see docs/quantization.md."""
_GROUP = 128
"""Inputs per group of integers if the configuration has no group size."""
_ALGORITHM_BITS = {"MXFP4": 4.25, "NVFP4": 4.5}
"""Bits per element by part of ModelOpt's name, with one-byte scales per 32 (MXFP4) or 16 (NVFP4) elements."""
_EXPERTS = re.compile(r"(^|\.)experts(\.|$|\*)")
"""Names of modules of routed experts."""


def quantized_spec(facts: Facts, folder: Path) -> QuantizedSpec | None:
    """Return the layout of quantized weights, or None for plain weights.

    The source is ``config.json``, or ``hf_quant_config.json`` in the same folder. Older ModelOpt writes its
    fields into ``quantization_config`` without ``quant_method``. Raise ConfigError with the field and its
    value for an unknown or unsupported setting.
    """
    for field in ("quantization_config", "compression_config"):
        found = facts.get(field)
        if found is None or found == {}:
            continue
        if not isinstance(found, dict):
            raise facts.fail(field, f"must be an object, not {found!r}")
        fields = QuantizationFields(found, f"config.json: {field}")
        default = "compressed-tensors" if field == "compression_config" else None
        if "quant_algo" in found or isinstance(found.get("quantization"), dict):
            default = "modelopt"
        if _is_left_over(fields, facts.weights):
            log.warning(
                "%s names bitsandbytes, but the weights are plain: they are served as they are", field
            )
            return None
        found_none = facts.weights is None and _is_bitsandbytes(fields)
        return _by_method(fields, default, facts.get("expert_dtype"), _ELSE + _MERGED * found_none)
    beside = read_json(folder, MODELOPT_FILE)
    if beside is None:
        return _older(facts, folder)
    if not isinstance(beside.get("quantization"), dict) and "quant_algo" not in beside:
        raise ConfigError(f"{MODELOPT_FILE} has no field quantization", param="--model")
    return _modelopt(QuantizationFields(beside, MODELOPT_FILE), "modelopt")


def _is_left_over(fields: QuantizationFields, names: Sequence[str] | None) -> bool:
    """Return True for the configuration of bitsandbytes beside plain weights.

    Tools that merge adapters into a model keep the configuration of the training. ``names``: of the tensors,
    None if unknown.
    """
    if not names or not _is_bitsandbytes(fields):
        return False
    return not any(name.endswith((".absmax", ".SCB")) or ".quant_state." in name for name in names)


def _is_bitsandbytes(fields: QuantizationFields) -> bool:
    return fields.get("quant_method") == "bitsandbytes" or fields.get("load_in_4bit") is not None


def _by_method(
    fields: QuantizationFields, default: str | None, expert_dtype: Any, advice: str = _ELSE
) -> QuantizedSpec | None:
    """Return the layout by ``quant_method``, or by the method ``default``. Raise ConfigError.

    expert_dtype: field of this name outside of quantization_config. advice: for a method without support.
    """
    method = default if fields.get("quant_method") is None else fields.get("quant_method")
    if method is None:
        unnamed = next((name for field, name in _UNNAMED.items() if fields.get(field) is not None), None)
        of = f" (the fields are those of {unnamed}, which is not supported)" if unnamed else ""
        raise fields.fail("quant_method", f"is missing{of}; there are: {', '.join(_METHODS)}. {advice}")
    if not isinstance(method, str) or method not in _METHODS:
        raise fields.fail(
            "quant_method", f"= {method!r} is not supported; there are: {', '.join(_METHODS)}. {advice}"
        )
    fields.refuse_changes()
    # Only this method has a field outside of quantization_config.
    if method == "fp8":
        return _with_experts(_fp8(fields, method), fields, expert_dtype)
    return _METHODS[method](fields, method)


def _older(facts: Facts, folder: Path) -> QuantizedSpec | None:
    """Return the layout by the file that older tools write beside config.json. None without the file, or if
    no tensor is quantized. Raise ConfigError."""
    if facts.weights is None or not any(name.endswith(".qweight") for name in facts.weights):
        return None
    for name, method in _OLDER_FILES.items():
        found = read_json(folder, name)
        if found is not None:
            return _by_method(QuantizationFields(found, name), method, None)
    return None


def _fp8(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of FP8 weights. Raise ConfigError."""
    fields.choice("activation_scheme", ("dynamic", "static"))
    fields.choice("fmt", ("e4m3", "float8_e4m3fn", "e5m2"))
    fields.choice("scale_fmt", ("float", "ue8m0"))
    fields.names("modules_to_not_convert", "ignored_layers", "modules_to_convert")
    return QuantizedSpec(method=method, block=fields.pair("weight_block_size"), bits=_FP8_BITS)


def _with_experts(spec: QuantizedSpec, fields: QuantizationFields, beside: Any) -> QuantizedSpec:
    """Return ``spec`` with the bits of routed experts, if their format differs from FP8. Raise ConfigError.

    DeepSeek V4 has ``expert_dtype`` at the top level of config.json (``beside``), others in
    ``quantization_config``. ModelOpt's ``moe_quant_algo`` overrides both: such a checkpoint keeps the fields
    of the checkpoint before the conversion.
    """
    inside = fields.choice("expert_dtype", ("fp8", "fp4"))
    if beside not in (None, "fp8", "fp4"):
        raise ConfigError(
            f"config.json: expert_dtype = {beside!r} is not supported; there are: fp8, fp4", param="--model"
        )
    bits = _ALGORITHM_BITS["MXFP4"] if (inside or beside) == "fp4" else None
    algorithm = fields.choice("moe_quant_algo", _MODELOPT_ALGORITHMS)
    if algorithm is not None:
        bits = _algorithm_bits(algorithm)
    return msgspec.structs.replace(spec, expert_bits=bits)


def _gguf(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of a folder converted from a GGUF file.

    Each tensor states its own format. Raise ConfigError.
    """
    bits = fields.get("bits")
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 32:
        raise fields.fail("bits", f"must be a number of bits, not {bits!r}")
    return QuantizedSpec(method=method, bits=float(bits))


def _mxfp4(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of MXFP4 weights. Raise ConfigError."""
    fields.names("modules_to_not_convert")
    return QuantizedSpec(method=method, bits=_ALGORITHM_BITS["MXFP4"])


def _awq(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of AWQ weights. Raise ConfigError."""
    for name in ("bits", "w_bit"):  # the second names are those of older files
        fields.choice(name, (4,))
    for name in ("version", "format", "checkpoint_format"):
        version = fields.get(name)
        if version is not None and str(version).lower() != "gemm":
            raise fields.fail(name, f"= {version!r} is not supported; there are: gemm")
    fields.choice("zero_point", (True,))
    fields.choice("backend", ("autoawq",))
    group = fields.group_size("group_size" if fields.get("q_group_size") is None else "q_group_size")
    fields.names("modules_to_not_convert")
    return QuantizedSpec(method=method, bits=_integer_bits(4, group))


def _gptq(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of GPTQ weights. Raise ConfigError."""
    bits = fields.choice("bits", (2, 4, 8))
    group = fields.group_size("group_size")
    for flag in ("desc_act", "sym", "static_groups", "lm_head"):
        fields.choice(flag, (True, False))
    fields.refuse("is_marlin_format", False)
    fields.choice("pack_dtype", ("int32",))
    form = fields.choice("checkpoint_format", ("gptq", "gptq_v2", ""))
    form = form or fields.choice("format", ("gptq", "gptq_v2", ""))
    # The first version of the format stores zero points minus 1.
    offset = 0 if form == "gptq_v2" else 1
    return QuantizedSpec(method=method, zero_offset=offset, bits=_integer_bits(bits, group))


def _compressed(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of compressed-tensors weights. Raise ConfigError."""
    fields.choice("format", _COMPRESSED_FORMATS)
    fields.names("ignore")
    fields.refuse("transform_config", {})
    sparsity = fields.inner("sparsity_config")
    if sparsity is not None:
        sparsity.choice("format", ("dense",))
    block = None
    widest = 0.0
    for group in fields.each("config_groups"):
        group.choice("format", _COMPRESSED_FORMATS)
        weights = group.inner("weights")
        if weights is None:
            continue
        width = weights.choice("num_bits", (4, 8))
        kind = weights.choice("type", ("float", "int"))
        size = weights.group_size("group_size")
        if kind == "float":
            bits = _FP8_BITS if width == 8 else 4 + 8 / (size or 32)  # one byte per scale
        else:
            bits = _integer_bits(width, size or -1) or 16.0
        # The memory plan uses the widest format of all groups.
        widest = max(widest, bits)
        weights.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group"))
        if kind == "float":
            weights.choice("symmetric", (True,))
        weights.choice("dynamic", (False,))
        block = weights.pair("block_structure") or block
    return QuantizedSpec(method=method, block=block, bits=widest or None)


def _auto_round(fields: QuantizationFields, method: str) -> QuantizedSpec:
    """Return the layout of AutoRound weights: GPTQ or AWQ, by the packing format. Raise ConfigError.

    The loader reads the bits of single layers off the tensors.
    """
    like, offset = _packing(fields)
    fields.choice("data_type", ("int",))
    group = fields.group_size("group_size")
    fields.choice("sym", (True, False))
    allowed = (4,) if like == "awq" else (2, 4, 8)
    bits = fields.choice("bits", allowed)
    for layer in fields.each("extra_config"):
        # Layers of 16 or 32 bits are plain weights. None means the bits of the whole model.
        if layer.choice("bits", (*allowed, 16, 32)) not in (16, 32):
            layer.choice("data_type", ("int",))
    return QuantizedSpec(method=like, zero_offset=offset, bits=_integer_bits(bits, group))


def _packing(fields: QuantizationFields) -> tuple[str, int]:
    """Return (method with the same tensor layout, offset of stored zero points). Raise ConfigError.

    Older files name the packing in ``backend``, together with a kernel: ``auto_round:gptq:exllamav2``. In
    newer files ``backend`` names a kernel only.
    """
    name = "packing_format" if fields.get("packing_format") is not None else "backend"
    form = fields.get(name)
    if name == "backend" and not (isinstance(form, str) and form.startswith("auto_round")):
        return _PACKINGS["auto_gptq"]
    stem = form
    if isinstance(form, str):
        # The kernels of AutoRound's own form.
        stem = form.removesuffix(":exllamav2").removesuffix(":tritonv2").removesuffix(":gemm")
    if not isinstance(stem, str) or stem.removeprefix("auto_round:") not in _PACKINGS:
        shown = ", ".join(_PACKINGS)
        raise fields.fail(name, f"= {form!r} is not supported; there are: {shown} (also behind auto_round:)")
    return _PACKINGS[stem.removeprefix("auto_round:")]


def _modelopt(fields: QuantizationFields, method: str) -> QuantizedSpec | None:
    """Return the layout of ModelOpt weights; None if only the KV cache is quantized. Raise ConfigError."""
    fields = fields.inner("quantization") or fields
    # hf_quant_config.json nests the fields one level deeper than config.json.
    algorithm = fields.get("quant_algo")
    if algorithm in (None, ""):  # only the KV cache is quantized
        return None
    upper = algorithm.upper() if isinstance(algorithm, str) else algorithm
    if upper not in _MODELOPT_ALGORITHMS:
        shown = ", ".join(_MODELOPT_ALGORITHMS)
        raise fields.fail("quant_algo", f"= {algorithm!r} is not supported; there are: {shown}")
    fields.group_size("group_size")
    fields.names("ignore", "exclude_modules")
    fields.refuse("weight_scale_encoding")
    fields.choice("has_zero_point", (False,))
    fields.refuse("pre_quant_scale", False)
    if upper != "MIXED_PRECISION":
        return QuantizedSpec(method="modelopt", bits=_algorithm_bits(upper))
    return _mixed(fields)


def _mixed(fields: QuantizationFields) -> QuantizedSpec:
    """Return the layout of a checkpoint with one format per layer. Raise ConfigError.

    The memory plan uses the widest format of routed experts, and the widest of all other matrices.
    """
    widest: dict[bool, float] = {}
    for name, layer in fields.named("quantized_layers"):
        algorithm = layer.choice("quant_algo", _MODELOPT_ALGORITHMS)
        layer.refuse("weight_scale_encoding")
        expert = _EXPERTS.search(name) is not None
        bits = 16.0 if algorithm is None else _algorithm_bits(algorithm)
        widest[expert] = max(widest.get(expert, 0.0), bits)
    return QuantizedSpec(method="modelopt", bits=widest.get(False), expert_bits=widest.get(True))


def _algorithm_bits(algorithm: str) -> float:
    """Return the bits per element, with scales, of one of ModelOpt's formats."""
    for name, bits in _ALGORITHM_BITS.items():
        if name in algorithm:
            return bits
    return _FP8_BITS


def _integer_bits(bits: int | None, group: int | None) -> float | None:
    """Return the bits per element, with a float32 scale and a one-byte zero point per ``group`` inputs.

    Elements of 2 bits take 4 bits in memory. ``group``: -1 for whole rows, None if not stated. Return None if
    ``bits`` is None.
    """
    if bits is None:
        return None
    size = _GROUP if group is None else group
    return max(bits, 4) + (40 / size if size > 0 else 0.0)


_PACKINGS = {
    "auto_round": ("gptq", 0),
    "gptqmodel": ("gptq", 0),
    "auto_gptq": ("gptq", 1),
    "gptq": ("gptq", 1),
    "auto_awq": ("awq", 0),
    "awq": ("awq", 0),
}
"""AutoRound's packing -> (method with the same tensor layout, offset of stored zero points)."""

_UNNAMED = {
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "bits": "MLX, if the file is for Apple's MLX",
    "w_bit": "AWQ",
}
"""Field of a configuration without ``quant_method`` -> tool."""

_METHODS: dict[str, Callable[[QuantizationFields, str], QuantizedSpec | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "gguf": _gguf,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
}
