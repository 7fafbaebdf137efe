"""What a model is, as data: the facts that layers, caches and the scheduler need of a checkpoint's config."""

from __future__ import annotations

from typing import Literal

import msgspec

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, every scaling form that the families' configs allow (names as in config.json)."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    dim: int
    """Rotated dims of a head; the rest pass through."""
    factor: float = 1.0
    original_max_position: int = 0
    """Context the base frequencies were trained for (dynamic, llama3, yarn)."""
    max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class MoESpec(msgspec.Struct, frozen=True, kw_only=True):
    """A routed feed-forward block."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""
    layers: tuple[int, ...]
    """Layers that route; the others are dense."""
    hash_layers: tuple[int, ...] = ()
    """Those of ``layers`` whose experts come from a table by token id."""
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    correction: bool = False
    """Whether a learned number is added to each expert's score for the choice alone."""
    groups: int = 1
    """Groups of neighbouring experts; 1: none."""
    top_groups: int = 1
    """Groups that one token's experts may come from."""
    group_rule: Literal["max", "top2"] = "max"
    """A group is chosen by its best score, or by the sum of its best two."""
    scale: float = 1.0
    """What the chosen experts' weights are multiplied with."""
    shared: int = 0
    """Intermediate size of the shared experts together; 0: none."""
    shared_gate: bool = False
    """Whether the shared expert is weighted by a sigmoid of its own."""
    limit: float = 0.0
    """Gates are clamped to at most this and what they multiply to within +- this; 0: not at all."""
    alpha: float = 0.0
    """Above 0, experts compute ``gate * sigmoid(alpha * gate) * (up + 1)``."""
    bias: bool = False
    """Whether router and experts add biases."""


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cache kind of a model: the layers that share one block table and one pool."""

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    window: int = 0
    """A token at position p attends to positions p - window + 1 .. p. 0 for ``full``."""
    kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of one block over all the kind's layers: ``[2, kv_heads, block, head_dim]`` each."""
        return len(self.layers) * 2 * self.kv_heads * block_size * self.head_dim * DTYPE_BYTES[dtype]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model. Layers are numbered from 0."""

    family: str
    """Name of the package below ``models/`` that builds it."""
    architecture: str
    """As config.json names it, e.g. ``Qwen3MoeForCausalLM``."""
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    rope: RopeSpec
    tied: bool = False
    """Whether the output head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of queries and keys before rope."""
    moe: MoESpec | None = None
    caches: tuple[CacheSpec, ...]
    """Every layer belongs to exactly one."""
    max_position: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "bfloat16"
    """What the checkpoint was saved in."""

    def cache_of(self, layer: int) -> int:
        """Number of the cache kind that ``layer`` belongs to."""
        for number, cache in enumerate(self.caches):
            if layer in cache.layers:
                return number
        raise KeyError(layer)
