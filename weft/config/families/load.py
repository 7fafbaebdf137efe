"""From a checkpoint's folder to a ``ModelSpec``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.registry import Registry
from weft.config.families.declared.rows import MODEL_TYPES as DECLARED_TYPES
from weft.config.families.declared.rows import ROWS, WRAPPERS
from weft.config.families.facts import Facts, read_json
from weft.config.families.generation import generation_ends
from weft.config.families.generic import probing as generic
from weft.config.families.quantized import quantized_spec
from weft.config.families.tasks.pooling import (
    CLASSIFIES,
    TASK_FIELDS,
    check_classes,
    classify_spec,
    pooled_spec,
    with_overrides,
)
from weft.config.families.vision import read_tower
from weft.config.families.weight_files import refuse_adapter, saved_dtype, tensor_names
from weft.config.spec import ModelSpec, QuantizedSpec, keep_mtp

#: Architecture name in ``config.json`` -> function that reads the spec.
FAMILIES: Registry[Callable[[Facts, int | None], ModelSpec]] = Registry("architecture")
FAMILIES.add("DeepseekV2ForCausalLM", "weft.config.families.deepseek:build_v2")
FAMILIES.add("DeepseekV3ForCausalLM", "weft.config.families.deepseek:build_v3")
FAMILIES.add("DeepseekV32ForCausalLM", "weft.config.families.deepseek_v32:build_spec")
FAMILIES.add("GlmMoeDsaForCausalLM", "weft.config.families.deepseek_v32:build_glm_spec")
FAMILIES.add("DeepseekV4ForCausalLM", "weft.config.families.deepseek_v4:build_spec")
FAMILIES.add("Qwen3NextForCausalLM", "weft.config.families.qwen3_next:build_spec")
FAMILIES.add("Qwen3_5ForCausalLM", "weft.config.families.qwen3_5:build_spec")
FAMILIES.add("Qwen3_5MoeForCausalLM", "weft.config.families.qwen3_5:build_spec")
FAMILIES.add("Qwen3_5ForConditionalGeneration", "weft.config.families.qwen3_5:build_text_spec")
FAMILIES.add("Qwen3_5MoeForConditionalGeneration", "weft.config.families.qwen3_5:build_text_spec")
FAMILIES.add("Qwen3VLForConditionalGeneration", "weft.config.families.qwen3_vl:build_spec")
FAMILIES.add("Qwen3VLMoeForConditionalGeneration", "weft.config.families.qwen3_vl:build_spec")
FAMILIES.add("Kimi_K25ForConditionalGeneration", "weft.config.families.kimi_k25:build_spec")
FAMILIES.add("KimiK25ForConditionalGeneration", "weft.config.families.kimi_k25:build_spec")
FAMILIES.add("KimiLinearForCausalLM", "weft.config.families.kimi_linear:build_spec")
FAMILIES.add("GptOssForCausalLM", "weft.config.families.gpt_oss:build_spec")
for _architecture_name in ROWS:
    FAMILIES.add(_architecture_name, "weft.config.families.declared.build:build_spec")
FAMILIES.add("Lfm2ForCausalLM", "weft.config.families.mixers.lfm2:build_spec")
FAMILIES.add("Lfm2MoeForCausalLM", "weft.config.families.mixers.lfm2:build_moe_spec")
FAMILIES.add("NemotronHForCausalLM", "weft.config.families.mixers.nemotron_h:build_spec")
for _architecture_name in WRAPPERS:
    FAMILIES.add(_architecture_name, "weft.config.families.declared.build:build_text_spec")
FAMILIES.add("GraniteMoeHybridForCausalLM", "weft.config.families.mixers.granite_hybrid:build_spec")
FAMILIES.add("FalconH1ForCausalLM", "weft.config.families.mixers.falcon_h1:build_spec")
FAMILIES.add("Mamba2ForCausalLM", "weft.config.families.mixers.mamba2:build_spec")
FAMILIES.add("MambaForCausalLM", "weft.config.families.mixers.mamba1:build_spec")
FAMILIES.add("FalconMambaForCausalLM", "weft.config.families.mixers.mamba1:build_falcon_spec")
FAMILIES.add("JambaForCausalLM", "weft.config.families.mixers.jamba:build_spec")
FAMILIES.add("BailingHybridForCausalLM", "weft.config.families.mixers.bailing_hybrid:build_spec")
FAMILIES.add("BambaForCausalLM", "weft.config.families.mixers.bamba:build_spec")

MODEL_TYPES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    **DECLARED_TYPES,
    "internvl": "InternVLForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}
"""Architecture for each ``model_type``, for a ``config.json`` without ``architectures``."""

_SPELLINGS = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LLaMaForCausalLM": "LlamaForCausalLM",
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
}
"""Spelling of an architecture in published files -> spelling of transformers."""

_UNCONVERTED = {
    "InternVLChatModel": (
        "Use the same model in the form of transformers (InternVLForConditionalGeneration), whose name ends "
        "in -hf, for example OpenGVLab/InternVL3-8B-hf or OpenGVLab/InternVL3_5-8B-HF"
    )
}
"""Architecture with code -> the served form of the same models."""

_HEAD = re.compile(r"(^|\.)lm_head\.|^(model\.)?head\.")
"""Names of the tensors of an output head, with any prefix. DeepSeek V4 uses ``head``."""


def load_spec(
    folder: str,
    num_hidden_layers_override: int | None = None,
    *,
    trust_remote_code: bool = False,
    mtp: int = 0,
    language_model_only: bool = False,
    overrides: Mapping[str, Any] | None = None,
    model_impl: str = "auto",
) -> ModelSpec:
    """Return the spec of the checkpoint in ``folder``.

    End-of-text ids are the union of ``config.json`` and ``generation_config.json``. Tensor names decide if
    there is an output head (``ModelSpec.head``). A checkpoint with code (``auto_map``) is refused unless
    ``trust_remote_code``. The code never runs: Weft or transformers must have the architecture.
    At most ``mtp`` modules that predict further tokens are kept. ``language_model_only`` drops the vision
    tower. ``overrides``: fields of --hf-overrides. ``model_impl``: weft, transformers, or auto (Weft's own if
    there is one). Raise ConfigError for a checkpoint that cannot be served.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"model folder {path.name!r} does not exist", param="--model")
    refuse_adapter(path)
    config = with_overrides(_read_config(path, trust_remote_code), overrides or {})
    # From here on the architecture decides: every field that no reader has read must be without effect.
    names = tensor_names(path)
    classifies, tasks = _classifies(config), Facts(config)
    classify, pooled = classify_spec(tasks, path, classifies=classifies), pooled_spec(tasks, path)
    layers = {name: value for name, value in config.items() if name not in TASK_FIELDS}
    facts = Facts({**layers, "architectures": [_architecture(Facts(config))]}, names)
    if generic.serves(architecture := facts.get("architectures")[0], model_impl, FAMILIES):
        head = None if classifies else names is None or any(map(_HEAD.search, names))
        spec = generic.load_spec(path, facts, architecture, num_hidden_layers_override, mtp, pooled, head)
        return check_classes(msgspec.structs.replace(spec, classify=classify))
    spec = FAMILIES.get(architecture)(facts, num_hidden_layers_override)
    facts.refuse_unknown_computation()
    if mtp > spec.mtp_layers or (mtp and not _has_modules(facts)):
        raise ConfigError(
            f"--speculative-method mtp: this checkpoint of {spec.architecture} has no multi-token prediction "
            "module; use --speculative-method ngram or none",
            param="--speculative-method",
        )
    spec = msgspec.structs.replace(
        keep_mtp(spec, mtp),
        # A classifier's own matrix stands in place of the output head.
        head=not classifies and (spec.tied or names is None or any(map(_HEAD.search, names))),
        tied=spec.tied and not classifies,
        classify=classify,
        pooled=pooled,
        eos_ids=_eos_ids(spec, path),
        dtype=spec.dtype or saved_dtype(path) or "float32",
        quantized=_quantized(facts, path),
        vision=None if language_model_only else read_tower(facts, path, spec),
    )
    return check_classes(spec)


def _read_config(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return ``config.json`` in ``path``. Raise ConfigError if the file is missing, or for code."""
    config = read_json(path, "config.json")
    if config is None:
        form = ", but the params.json of Mistral's own form: use the files of transformers' form"
        why = form if (path / "params.json").is_file() else ""
        raise ConfigError(f"model folder {path.name!r} has no config.json{why}", param="--model")
    _refuse_unconverted(config)
    if config.get("auto_map") and not trust_remote_code:
        raise ConfigError(
            "config.json names code in the checkpoint (auto_map). Weft does not run the code; pass "
            "--trust-remote-code to accept the checkpoint and serve it with the code of Weft or transformers",
            param="--trust-remote-code",
        )
    return config


def _refuse_unconverted(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a checkpoint in a form that is not served, with the name of the served form."""
    for name, served in _UNCONVERTED.items():
        if config.get("architectures") == [name]:
            raise ConfigError(
                f"architecture {name!r} runs with code in the checkpoint, and is not served. {served}",
                param="--model",
            )
    apple = config.get("quantization")
    if isinstance(apple, dict) and "bits" in apple:
        raise ConfigError(
            "config.json: quantization is the format of Apple's MLX, which is not supported: serve the model "
            "that was converted, or a GGUF file of the model",
            param="--model",
        )


def refuse_unserved(folder: Path, model_impl: str = "auto") -> None:
    """Raise ConfigError if ``config.json`` in ``folder`` names an unsupported architecture.

    ``model_impl``: weft, transformers, or auto.
    For folders without weights so far: ``load_spec`` runs the other checks.
    """
    config = read_json(folder, "config.json")
    if config is not None and config.get("architectures"):
        _refuse_unconverted(config)
        facts = Facts(config, tensor_names(folder))
        architecture = _architecture(facts)
        _quantized(facts, folder)
        if generic.serves(architecture, model_impl, FAMILIES):
            generic.probed_spec(folder, architecture, None)
        else:
            FAMILIES.get(architecture)


def _classifies(config: Mapping[str, Any]) -> bool:
    """Return True if the architecture has the matrix ``score.weight`` in place of an output head."""
    names = config.get("architectures")
    return (
        bool(names)
        and isinstance(names, list)
        and all(isinstance(n, str) and n.endswith(CLASSIFIES) for n in names)
    )


def _quantized(facts: Facts, path: Path) -> QuantizedSpec | None:
    """Return the layout of quantized weights by ``config.json`` or its ``text_config``. Raise ConfigError."""
    text = facts.get("text_config")
    inner = Facts(text if isinstance(text, dict) else {}, facts.weights)
    return quantized_spec(facts, path) or quantized_spec(inner, path)


def _architecture(facts: Facts) -> str:
    """Return the architecture named in the file, or the architecture of ``model_type``.

    Raise ConfigError without either, or with several.

    Embedding models are published under the name of the model without head (``Qwen3Model``), and classifiers
    as ``Qwen3ForSequenceClassification``, with the same layers: such a name is returned with ``ForCausalLM``.
    """
    names = facts.get("architectures")
    if names in (None, []):
        kind = facts.get("model_type")
        if isinstance(kind, str) and kind in MODEL_TYPES:
            return MODEL_TYPES[kind]
        said = f" and its model_type {kind!r} is none of: {', '.join(MODEL_TYPES)}" if kind else ""
        raise facts.fail(
            "architectures", f"must name one architecture{said}; there are: {', '.join(FAMILIES)}"
        )
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise facts.fail("architectures", f"must name one architecture; there are: {', '.join(FAMILIES)}")
    # Tensor names decide later if there is a head.
    for ending in ("Model", CLASSIFIES):
        for causal in generic.CAUSAL:
            below = f"{names[0].removesuffix(ending)}{causal}"
            if names[0].endswith(ending) and (below in FAMILIES or generic.is_known(below)):
                return below
    return _SPELLINGS.get(names[0], names[0])


def _eos_ids(spec: ModelSpec, folder: Path) -> tuple[int, ...]:
    """Return the end-of-text ids of both files, without ids outside of the vocabulary."""
    return tuple(sorted({i for i in spec.eos_ids + generation_ends(folder) if 0 <= i < spec.vocab_size}))


def _has_modules(facts: Facts) -> bool:
    """Return True if weights of a module that predicts further tokens were saved, or if no names are known.

    The names contain ``mtp.``, or the number of the layer after the last layer.
    """
    behind = re.compile(rf"(^|\.)(mtp\.|layers\.{facts.get('num_hidden_layers')}\.)")
    return facts.weights is None or any(behind.search(name) for name in facts.weights)
