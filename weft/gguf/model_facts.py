"""Typed access to the facts of a model in the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.common.errors import ConfigError
from weft.gguf.delta_heads import DeltaHeads

FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "deepseek3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "glm-dsa": ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    # Families with a row in ``weft.gguf.rows``.
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h"),
    "nemotron_h_moe": ("NemotronHForCausalLM", "nemotron_h"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "granitemoe-shared": ("GraniteMoeSharedForCausalLM", "granitemoeshared"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "olmo3": ("Olmo3ForCausalLM", "olmo3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "ministral3": ("Ministral3ForCausalLM", "ministral3"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "dots1": ("Dots1ForCausalLM", "dots1"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "kimi-linear": ("KimiLinearForCausalLM", "kimi_linear"),
    "mamba2": ("Mamba2ForCausalLM", "mamba2"),
    "mamba": ("MambaForCausalLM", "mamba"),
    "jamba": ("JambaForCausalLM", "jamba"),
}
"""GGUF architecture -> (architecture in config.json, model type). The keys in ``_VARIANTS`` are families of
another architecture. Vision models count as text models, because their file has no vision tower.
"""
_VARIANTS = ("mixtral", "deepseek3", "granitemoe-shared", "olmo3", "ministral3")
"""Families with an architecture of another name: ``llama`` with experts, ``deepseek2`` with sigmoid scores,
``granitemoe`` with shared experts, ``olmo2`` with windows, ``mistral3`` with a temperature."""
ARCHITECTURES = tuple(name for name in FAMILIES if name not in _VARIANTS)
HYBRID = ("qwen3next", "qwen35", "qwen35moe")
"""Architectures with gated delta nets."""
_VARYING = (
    *("gemma4", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "granitehybrid", "kimi-linear"),
    "jamba",
)
"""Architectures whose layers differ in size."""
_EFFECTS: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "router_logit_softcapping": (0.0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""Keys that change results -> values without effect. Only some architectures read these keys."""
_SIGMOID = 2
"""Value of ``expert_gating_func`` for sigmoid scores."""


class ModelFacts:
    """Typed access to the architecture's metadata. Raises ConfigError that names the wrong key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """``metadata``: of the file. Raises ConfigError for an unsupported architecture."""
        self.metadata = metadata
        self._read = set[str]()
        """Keys that were read, without the prefix of the architecture."""
        self.architecture = str(metadata.get("general.architecture", ""))
        if self.architecture == "clip":
            raise ConfigError(
                "the file is the vision tower of a model: name the model's file", param="--model"
            )
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"GGUF architecture {self.architecture!r} is not supported; there are: "
                + ", ".join(ARCHITECTURES),
                param="--model",
            )

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number, at least 0. Equal numbers per layer count as one. Raises ConfigError."""
        value = self._value(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one number per layer, all equal
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._fail(key, f"must be a whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0, rounded to the 7 digits of a stored 32-bit number.

        Raises ConfigError.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._fail(key, f"must be a number above 0, not {value!r}")
        return float(f"{value:.7g}")

    def refuse_unread(self) -> None:
        """Raise ConfigError for a key in ``_EFFECTS`` that was not read. Call after all readers."""
        for key, harmless in _EFFECTS.items():
            value = self.metadata.get(f"{self.architecture}.{key}")
            if value is None or key in self._read or value in harmless:
                continue
            # The default scale of attention scores is also without effect.
            usual = self.head_size**-0.5
            is_usual = isinstance(value, int | float) and math.isclose(value, usual, rel_tol=1e-3)
            if key != "attention.scale" or not is_usual:
                raise self._fail(key, f"= {value!r} is not supported for this architecture")

    def has(self, key: str) -> bool:
        """Return True if the file has the key. The key counts as read."""
        self._read.add(key)
        return f"{self.architecture}.{key}" in self.metadata

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.integer("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        if self.architecture in _VARYING:
            return max(self.per_layer("attention.head_count_kv"))
        return self.integer("attention.head_count_kv", self.heads)

    def per_layer(self, key: str) -> list[int]:
        """Return a whole number for each layer. Raises ConfigError."""
        value = self._value(key, None)
        found = self.numbers(key) if isinstance(value, list) else [self.integer(key)] * self.layers
        if len(found) < self.layers or min(found, default=-1) < 0:
            raise self._fail(key, f"must have a number for each of {self.layers} layers")
        return found[: self.layers]

    @property
    def inner_size(self) -> int:
        """Size of the dense feed-forward, the largest of all layers; 0 for none."""
        if self.architecture in _VARYING:
            return max(self.per_layer("feed_forward_length"))
        return self.integer("feed_forward_length", 0)

    @property
    def head_size(self) -> int:
        """Number of dims of a head."""
        return self.integer("attention.key_length", self.integer("embedding_length") // max(self.heads, 1))

    @property
    def experts(self) -> int:
        """Number of routed experts per layer; 0 for none."""
        return self.integer("expert_count", 0)

    @property
    def delta(self) -> DeltaHeads | None:
        """Heads of the delta nets; None for models without delta nets. Raises ConfigError."""
        if self.architecture not in HYBRID:
            return None
        k_heads, v_heads = self.integer("ssm.group_count"), self.integer("ssm.time_step_rank")
        values = self.integer("ssm.inner_size")
        if not k_heads or v_heads % k_heads or not v_heads or values % v_heads:
            raise self._fail(
                "ssm.time_step_rank", f"{v_heads} does not fit {k_heads} key heads, {values} dims"
            )
        return DeltaHeads(k_heads, v_heads, values, tiled=self.architecture != "qwen3next")

    @property
    def yarn(self) -> bool:
        """True for the rope scaling yarn."""
        return self.metadata.get(f"{self.architecture}.rope.scaling.type") == "yarn"

    @property
    def layers(self) -> int:
        """Number of layers, without layers for multi-token prediction."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    def pattern(self, key: str, default: int) -> int | list[bool]:
        """Return a period of layers, or a list with an entry per layer. Raises ConfigError."""
        value = self._value(key, default)
        if isinstance(value, list) and all(isinstance(each, int) for each in value):
            return [bool(each) for each in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._fail(key, f"must be a period or a list per layer, not {value!r}")
        return value

    def numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers; [] for a missing key. Raises ConfigError."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self._fail(key, f"must be a list of whole numbers, not {value!r}")
        return [int(each) for each in value]

    @property
    def family(self) -> str:
        """Key of the model in ``FAMILIES``."""
        if self.architecture == "llama" and self.experts:
            return "mixtral"
        if self.architecture == "deepseek2" and self.integer("expert_gating_func", 1) == _SIGMOID:
            return "deepseek3"
        if self.architecture == "granitemoe" and self.integer("expert_shared_feed_forward_length", 0):
            return "granitemoe-shared"
        if self.architecture == "olmo2" and self.integer("attention.sliding_window", 0):
            return "olmo3"
        if self.architecture == "mistral3" and self.has("attention.temperature_scale"):
            return "ministral3"
        return self.architecture

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of ``key`` as True or False; ``default`` for a missing key."""
        return bool(self._value(key, default))

    def _value(self, key: str, default: Any) -> Any:
        """Return a value of the architecture. Raises ConfigError for a missing value without default."""
        self._read.add(key)
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self._fail(key, "is missing")
        return value

    def _fail(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"the GGUF file's {self.architecture}.{key} {why}", param="--model")
