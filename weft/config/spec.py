"""What a model is, as data: the facts that layers, caches and the scheduler need of a checkpoint's config."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from weft.config.media import MediaFacts

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
    sections: tuple[int, int, int] | None = None
    """Of models that see images: how many pairs of dims turn by a token's frame, row and column; see
    ``weft.layers.rope.axes``. None: all turn by its position."""
    interleaved: bool = True
    """Whether the sections' pairs take turns (Qwen3-VL), or lie one section after another (Qwen2-VL)."""

    @property
    def temperature(self) -> float:
        """The factor of cos and sin that yarn computes from ``factor``; 1 for other kinds.

        Source: YaRN, arXiv 2309.00071, section 3.4.
        """
        if self.kind != "yarn" or self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._scaled(self.mscale) / self._scaled(self.mscale_all_dim)
        return self._scaled(1.0)

    def _scaled(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


class MoESpec(msgspec.Struct, frozen=True, kw_only=True):
    """A routed feed-forward block."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""
    layers: tuple[int, ...]
    """Layers that route; the others are dense."""
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """From router logits to scores."""
    correction: bool = False
    """Whether experts are chosen by score + a trained bias, and weighted by the score alone."""
    groups: int = 1
    top_groups: int = 1
    """Experts are chosen from the best ``top_groups`` of ``groups`` equal groups."""
    group_rule: Literal["max", "top2"] = "max"
    """A group's score: its best expert's, or the sum of its best two."""
    scale: float = 1.0
    """Of the weights, at the end."""
    shared: int = 0
    """Width of the shared experts together, which see every token; 0 for none."""
    shared_gate: bool = False
    """Whether a sigmoid gate weighs the shared experts' output."""
    limit: float = 0.0
    """Clamp of the gate (from above) and of the other half (both sides); 0 for none."""
    alpha: float = 0.0
    """Above 0, experts compute ``gate * sigmoid(alpha * gate) * (up + 1)``."""
    bias: bool = False
    """Whether router and experts have biases."""
    hash_layers: tuple[int, ...] = ()
    """Routing layers whose experts follow from the token id, by a table."""


class MLASpec(msgspec.Struct, frozen=True, kw_only=True):
    """Latent attention. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    q_lora: int | None
    """Rank of the queries' projection; None: one full matrix."""
    kv_lora: int
    """Elements of the latent that keys and values are made from."""
    nope: int
    """Dims of a head's query and key without position."""
    rope: int
    """Rotated dims, of a key that all heads share."""
    v: int
    """Dims of a head's value."""
    scale: float
    """Of the scores."""
    interleaved: bool = True
    """Whether rotated pairs are neighbours (2 i, 2 i + 1), not halves (i, i + rope / 2)."""
    bias: bool = False
    """Of the projections from the hidden size: to the queries' rank, and to latent and key."""
    norm_eps: float = 1e-6
    """Of the norms of queries' rank and latent."""


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An indexer that chooses the positions that latent attention reads.

    Its keys are the last ``dim`` elements of the entries of layers that have one. Source: DeepSeek-V3.2
    (2025), section 2.
    """

    layers: tuple[int, ...]
    """Layers that have their own; the others take what the last one before them chose."""
    heads: int
    dim: int
    top: int
    """Positions that a token chooses."""
    interleaved: bool
    """As in ``MLASpec``, of the indexer's queries and keys, whose first dims are rotated."""


class DeltaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated delta net. Source: Yang et al. 2024, arXiv 2412.06464."""

    layers: tuple[int, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    """Taps of the causal convolution."""


class SparseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention to a window of entries and, further back, to one entry for each group of positions.

    Keys and values are one entry, shared by all heads. Source: DeepSeek-V4, sections 2.2 and 2.3.
    """

    types: tuple[Literal["window", "chosen", "all"], ...]
    """What each layer sees of groups: nothing, those that its indexer chooses, or all."""
    window: int
    chosen_ratio: int
    """Positions of a group, in layers that choose; their groups overlap: an entry is made of two."""
    all_ratio: int
    """Likewise in layers that see all."""
    q_lora: int
    o_groups: int
    """Groups of heads, each with a low-rank output projection of its own."""
    o_lora: int
    index_heads: int
    index_dim: int
    index_top: int
    """Groups that a token chooses."""
    group_rope: RopeSpec
    """Of layers with groups; those without have the model's."""


class HyperSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams with learned mixing. Source: Xie et al. 2025, arXiv 2512.24880."""

    streams: int
    iterations: int
    """Of the normalization of rows and columns (Sinkhorn and Knopp)."""
    eps: float


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of what a recurrent layer keeps of a sequence, whatever its length."""

    name: str
    shape: tuple[int, ...]
    wide: bool
    """In float32 (float64 in a float64 model); else in the model's dtype."""


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cache kind of a model: layers that share one block table and one pool. A layer may be in several.

    full, window    entries of one key and one value for each KV head: ``kv_heads``, ``head_dim``
    latent          entries of ``width`` elements
    compressed      entries of ``width`` elements, one for every ``ratio`` positions
    state           no entries: ``parts`` for each sequence; blocks hold copies of them, for prefix hits
    """

    kind: Literal["full", "window", "latent", "compressed", "state"]
    layers: tuple[int, ...]
    window: int = 0
    """A token at position p reads positions p - window + 1 .. p; 0 for all before it."""
    kv_heads: int = 0
    head_dim: int = 0
    width: int = 0
    ratio: int = 1
    parts: tuple[StatePart, ...] = ()
    form: str = "gqa"
    """The form of core attention that reads it; "" where none prepares for it."""
    fp8: bool = False
    """full, window, latent: values in 8 bits (E4M3), and a float32 scale for each entry of a KV head (or for
    each latent entry)."""
    exact: int = 0
    """Elements at the end of a latent entry that keep the model's dtype all the same."""


class QuantizedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """In whose layout a checkpoint's weights are quantized. Bits and groups are read off the tensors."""

    method: str
    """As config.json names it: fp8, mxfp4, awq, gptq, compressed-tensors, modelopt."""
    block: tuple[int, int] | None = None
    """Rows and columns that share one scale, where it says so."""
    zero_offset: int = 0
    """What is added to a stored zero point."""
    bits: float | None = None
    """Of an element of a matrix that stays packed, scales included: about, for the plan of memory. None where
    the configuration does not say."""
    expert_bits: float | None = None
    """The same for matrices of routed experts, where the configuration says others; None: as ``bits``."""


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower: from the patches of an image to rows of the text model's hidden size.

    qwen3_vl   Qwen3-VL, arXiv 2511.21631, and Qwen3.5; frames of one item do not see each other
    moonvit    Kimi K2.5, arXiv 2602.02276; frames see each other, and become one by their mean
    """

    kind: Literal["qwen3_vl", "moonvit"]
    hidden: int
    layers: int
    heads: int
    intermediate: int
    activation: str
    output: int
    """Hidden size of the text model."""
    side: int
    """Rows, and columns, of the table of learned positions, which is interpolated."""
    frames: int = 1
    """Frames at most (moonvit)."""
    levels: tuple[int, ...] = ()
    """Layers behind which further embeddings are taken; the text model adds them to its stream behind its
    layers 0, 1, .. (deepstack, arXiv 2406.04334)."""
    theta: float = 10000.0
    norm_eps: float = 1e-6
    """Of the norm before the last two matrices; those of layers are the kind's."""
    media: MediaFacts

    @property
    def published(self) -> tuple[str, ...]:
        """What the names of the tower's tensors in a checkpoint begin with, and no others."""
        return {"qwen3_vl": ("model.visual.",), "moonvit": ("vision_tower.", "mm_projector.")}[self.kind]


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
    head: bool = True
    """False for a checkpoint without an output head: an embedding model, which generates no tokens."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of queries and keys before rope."""
    centred_norms: bool = False
    """RMSNorm weights are published as their difference from 1, and kept wide: rounded to bf16 near 1 they
    would lose what they were trained to."""
    output_gate: bool = False
    """Whether attention's output is multiplied by the sigmoid of a projection of its input."""
    sinks: bool = False
    """Whether each head has a score that takes part in every softmax and has no value."""
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    index: IndexSpec | None = None
    delta: DeltaSpec | None = None
    sparse: SparseSpec | None = None
    hyper: HyperSpec | None = None
    mtp_layers: int = 0
    """Modules that predict the token after the next; they are layers ``layers`` .. of the caches."""
    caches: tuple[CacheSpec, ...]
    """Every layer belongs to at least one."""
    max_position: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "bfloat16"
    """What the checkpoint was saved in."""
    quantized: QuantizedSpec | None = None
    """How its weights are quantized; None: not at all."""
    vision: VisionSpec | None = None
    """The tower beside it; None: it reads text alone."""

    def cache_of(self, layer: int) -> int:
        """Number of the first cache kind that ``layer`` belongs to."""
        return self.caches_of(layer)[0]

    def caches_of(self, layer: int) -> tuple[int, ...]:
        """Numbers of the cache kinds that ``layer`` belongs to. Raises KeyError when there are none."""
        result = tuple(number for number, cache in enumerate(self.caches) if layer in cache.layers)
        if not result:
            raise KeyError(layer)
        return result

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of core attention that the model needs, in the order of its cache kinds."""
        return tuple(dict.fromkeys(cache.form for cache in self.caches if cache.form))


def keep_mtp(spec: ModelSpec, modules: int) -> ModelSpec:
    """``spec`` with no more than ``modules`` of its modules that predict further tokens, and their caches."""
    if spec.mtp_layers <= modules:
        return spec
    end = spec.layers + modules
    kept = [
        msgspec.structs.replace(cache, layers=tuple(n for n in cache.layers if n < end))
        for cache in spec.caches
    ]
    caches = tuple(cache for cache in kept if cache.layers)
    moe = spec.moe
    if moe is not None:
        moe = msgspec.structs.replace(moe, layers=tuple(n for n in moe.layers if n < end))
    return msgspec.structs.replace(spec, mtp_layers=modules, caches=caches, moe=moe)
