"""A checkpoint's ``config.json`` from the metadata of a GGUF file.

Keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md): ``general.*``, and the model's facts
behind the architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weft.common.errors import ConfigError
from weft.gguf.container import StoredTensor

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""GGUF's name of an architecture -> what config.json calls it, and the model type."""
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Of every published model whose frequencies are scaled as Llama 3.1's."""
_LLAMA3_CONTEXT = 8192


class ModelFacts:
    """The metadata behind the architecture's name, with types. Raises ConfigError naming the key at fault."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"GGUF architecture {self.architecture!r} is not supported; there are: "
                + ", ".join(ARCHITECTURES),
                param="--model",
            )

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number that is at least 0."""
        value = self._value(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one for each layer, all alike
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._fail(key, f"must be a whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0: the decimal one that was stored in 32 bits."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._fail(key, f"must be a number above 0, not {value!r}")
        return float(f"{value:.7g}")

    def has(self, key: str) -> bool:
        """Whether the file says it."""
        return f"{self.architecture}.{key}" in self.metadata

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.integer("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.integer("attention.head_count_kv", self.heads)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for none."""
        return self.integer("expert_count", 0)

    @property
    def mixtral(self) -> bool:
        """Whether it is a Llama with experts."""
        return self.architecture == "llama" and self.experts > 0

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self._fail(key, "is missing")
        return value

    def _fail(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"the GGUF file's {self.architecture}.{key} {why}", param="--model")


def config_of(
    metadata: Mapping[str, Any], tensors: Sequence[StoredTensor], rope_factors: Sequence[float] | None
) -> dict[str, Any]:
    """``config.json`` of the model.

    ``rope_factors``: the file's ``rope_freqs.weight``, by which frequencies are divided. Raises ConfigError
    for a model that is not served.
    """
    facts = ModelFacts(metadata)
    name, model_type = _MIXTRAL if facts.mixtral else ARCHITECTURES[facts.architecture]
    stored = {tensor.name for tensor in tensors}
    heads = facts.heads
    made: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": facts.integer("embedding_length"),
        "num_hidden_layers": facts.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.kv_heads,
        "intermediate_size": facts.integer("feed_forward_length", 0) or _expert_size(facts),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.integer("context_length"),
        "vocab_size": _vocabulary(tensors),
        "hidden_act": "silu",
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in stored,
        "dtype": "float32" if all(tensor.kind == "F32" for tensor in tensors) else "bfloat16",
    }
    size = facts.integer("attention.key_length", made["hidden_size"] // max(heads, 1))
    if facts.integer("attention.value_length", size) != size:
        raise ConfigError("GGUF: keys and values of different sizes are not supported here", param="--model")
    if facts.integer("rope.dimension_count", size) != size:
        raise ConfigError("GGUF: heads that are rotated in part are not supported here", param="--model")
    made["head_dim"] = size
    made.update(_rope_scaling(facts, rope_factors, size, made["rope_theta"]))
    if facts.architecture == "llama" and not facts.mixtral:
        made["attention_bias"] = "blk.0.attn_q.bias" in stored
        made["mlp_bias"] = "blk.0.ffn_gate.bias" in stored
    if facts.experts:
        made["num_experts_per_tok"] = facts.integer("expert_used_count")
        made["num_local_experts" if facts.mixtral else "num_experts"] = facts.experts
    if facts.architecture == "qwen3moe":
        made |= {"moe_intermediate_size": _expert_size(facts), "norm_topk_prob": True}
        made |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return made | _ends(metadata)


def _expert_size(facts: ModelFacts) -> int:
    return facts.integer("expert_feed_forward_length", facts.integer("feed_forward_length", 0))


def _vocabulary(tensors: Sequence[StoredTensor]) -> int:
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[0]
    raise ConfigError("the GGUF file has no token_embd.weight: it holds no language model", param="--model")


def _ends(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Beginning and ends of a text: a turn's end is one, too."""
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    made: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(e for e in ends if isinstance(e, int)))}
    if isinstance(begin := metadata.get("tokenizer.ggml.bos_token_id"), int):
        made["bos_token_id"] = begin
    return made


def _rope_scaling(
    facts: ModelFacts, factors: Sequence[float] | None, size: int, theta: float
) -> dict[str, Any]:
    kind = facts.metadata.get(f"{facts.architecture}.rope.scaling.type", "none")
    if factors is not None:
        if kind not in ("none", "linear", "llama3") or not _is_llama3(factors, size, theta):
            raise ConfigError(
                "the GGUF file's rope_freqs.weight is not Llama 3.1's, and no other is supported",
                param="--model",
            )
        scaling = {"rope_type": "llama3", "factor": round(max(factors), 4), **_LLAMA3}
        return {"rope_scaling": scaling | {"original_max_position_embeddings": _LLAMA3_CONTEXT}}
    if kind in ("none", ""):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": facts.number("rope.scaling.factor")}
        if facts.has("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = facts.integer(
                "rope.scaling.original_context_length"
            )
        return {"rope_scaling": scaling}
    raise ConfigError(
        f"GGUF rope scaling {kind!r} is not supported; there are: linear, yarn", param="--model"
    )


def _is_llama3(factors: Sequence[float], size: int, theta: float) -> bool:
    """Whether ``factors`` are those of Llama 3.1's scaling, by the largest of them."""
    if len(factors) != size // 2:
        return False
    factor = max(factors)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for pair, found in enumerate(factors):
        length = 2 * math.pi * theta ** (2 * pair / size)
        smooth = (_LLAMA3_CONTEXT / length - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        if abs(1.0 / ((1 - smooth) / factor + smooth) - found) > 1e-3 * found:
            return False
    return True
