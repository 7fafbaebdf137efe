"""From a checkpoint's folder to its ``ModelSpec``."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.registry import Registry
from weft.config.families.facts import Facts, read_json
from weft.config.families.quantized import quantized_spec
from weft.config.families.vision import read_tower
from weft.config.spec import ModelSpec, keep_mtp

#: Architecture, as ``config.json`` names it, to the function that reads its facts.
FAMILIES: Registry[Callable[[Facts, int | None], ModelSpec]] = Registry("architecture")
FAMILIES.add("LlamaForCausalLM", "weft.config.families.llama:build_spec")
FAMILIES.add("MistralForCausalLM", "weft.config.families.mistral:build_spec")
FAMILIES.add("Qwen2ForCausalLM", "weft.config.families.qwen2:build_spec")
FAMILIES.add("Qwen3ForCausalLM", "weft.config.families.qwen3:build_spec")
FAMILIES.add("Qwen3MoeForCausalLM", "weft.config.families.qwen3_moe:build_spec")
FAMILIES.add("MixtralForCausalLM", "weft.config.families.mixtral:build_spec")
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
FAMILIES.add("GptOssForCausalLM", "weft.config.families.gpt_oss:build_spec")

_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_HEADER = 100 << 20


def load_spec(
    folder: str,
    num_hidden_layers_override: int | None = None,
    *,
    trust_remote_code: bool = False,
    mtp: int = 0,
    language_model_only: bool = False,
) -> ModelSpec:
    """The facts of the checkpoint in ``folder``.

    End-of-text ids are those of ``config.json`` and ``generation_config.json`` together. A checkpoint that
    brings code (``auto_map``) is refused unless ``trust_remote_code``; with it, the code is still not run:
    the architecture must be one of Weft's own. Modules that predict further tokens are left out, but for the
    first ``mtp``; so is a vision tower with ``language_model_only``. Raises ConfigError for anything that
    cannot be served.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"model folder {path.name!r} does not exist", param="--model")
    config = read_json(path, "config.json")
    if config is None:
        raise ConfigError(f"model folder {path.name!r} has no config.json", param="--model")
    if config.get("auto_map") and not trust_remote_code:
        raise ConfigError(
            "config.json asks for code that comes with the checkpoint (auto_map). Weft does not run it; pass "
            "--trust-remote-code to accept the checkpoint and serve it with Weft's own implementation",
            param="--trust-remote-code",
        )
    facts = Facts(config, _weight_names(path))
    build = FAMILIES.get(_architecture(facts))
    spec = build(facts, num_hidden_layers_override)
    facts.refuse_unknown_computation()
    if mtp > spec.mtp_layers or (mtp and not _has_modules(facts, path)):
        raise ConfigError(
            f"--speculative-method mtp: this checkpoint of {spec.architecture} has no module that predicts "
            "further tokens; use --speculative-method ngram or none",
            param="--speculative-method",
        )
    return msgspec.structs.replace(
        keep_mtp(spec, mtp),
        eos_ids=_eos_ids(spec, path),
        dtype=spec.dtype or _saved_dtype(path) or "float32",
        quantized=quantized_spec(facts, path) or quantized_spec(_text_facts(facts), path),
        vision=None if language_model_only else read_tower(facts, path, spec),
    )


def _text_facts(facts: Facts) -> Facts:
    """Of the text model, where it has a configuration of its own."""
    text = facts.get("text_config")
    return Facts(text if isinstance(text, dict) else {})


def _architecture(facts: Facts) -> str:
    names = facts.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise facts.fail("architectures", f"must name one architecture; there are: {', '.join(FAMILIES)}")
    return names[0]


def _eos_ids(spec: ModelSpec, folder: Path) -> tuple[int, ...]:
    generation = read_json(folder, "generation_config.json")
    more = Facts(generation).integers("eos_token_id") if generation is not None else ()
    return tuple(sorted({i for i in spec.eos_ids + more if 0 <= i < spec.vocab_size}))


def _has_modules(facts: Facts, folder: Path) -> bool:
    """Whether the weights of a module that predicts further tokens were saved; true where none are at all.

    They are named ``mtp.``, or as the layers behind the last.
    """
    behind = re.compile(rf"(^|\.)(mtp\.|layers\.{facts.get('num_hidden_layers')}\.)")
    names = _weight_names(folder)
    return names is None or any(behind.search(name) for name in names)


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: an entry a tensor. Empty where it cannot be read."""
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= _MAX_HEADER:
            return {}
        try:
            found = json.loads(file.read(size))
        except ValueError:
            return {}
    return found if isinstance(found, dict) else {}


def _saved_dtype(folder: Path) -> str | None:
    """The type of the first floating tensor, no scale, of a safetensors file, from its header alone."""
    for path in sorted(folder.glob("*.safetensors")):
        header = _header(path)
        if not header:
            return None
        for name, entry in header.items():
            if "scale" not in name and isinstance(entry, dict) and entry.get("dtype") in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[entry["dtype"]]
    return None


def _weight_names(folder: Path) -> list[str] | None:
    """The names of a safetensors checkpoint's tensors; None where there are none, or they can't be read."""
    index = read_json(folder, "model.safetensors.index.json")
    if index is not None and isinstance(index.get("weight_map"), dict):
        return list(index["weight_map"])
    headers = [_header(path) for path in sorted(folder.glob("*.safetensors"))]
    if not headers or not all(headers):
        return None
    return [name for header in headers for name in header]
