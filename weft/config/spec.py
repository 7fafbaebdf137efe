"""Model specs: the properties of a checkpoint that layers, caches and the scheduler need, as data."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from weft.config.media import MediaFacts
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec, ParallelSpec
from weft.config.parts.tower_kinds import PUBLISHED, TowerKind
from weft.config.parts.traits import AttentionSpec, LayerSpec, NormSpec, ScaleSpec
from weft.types.pooled import ClassifySpec, PooledSpec
from weft.types.routes import RouteShape

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, with every scaling method of the families' configs (names as in config.json)."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "proportional", "longrope"] = "default"
    theta: float = 10000.0
    dim: int
    """Rotated dims per head; the remaining dims are not rotated."""
    factor: float = 1.0
    original_max_position: int = 0
    """Context length of the training with unscaled frequencies (dynamic, llama3, yarn)."""
    max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    pairs: int = 0
    """proportional: number of rotated pairs. Further pairs, up to ``dim``, do not rotate."""
    divisors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies, one per pair, for contexts beyond ``original_max_position``."""
    short_divisors: tuple[float, ...] = ()
    """longrope: divisors for contexts of at most ``original_max_position``."""
    sections: tuple[int, int, int] | None = None
    """Models with images: number of dim pairs per axis, rotated by the frame, row and column of a token; see
    ``weft.layers.rope.axes``. None: all pairs rotate by the position.
    """
    interleaved: bool = True
    """True if the pairs of the sections alternate (Qwen3-VL).

    False if the sections are contiguous (Qwen2-VL).
    """

    @property
    def temperature(self) -> float:
        """Factor for cos and sin in yarn, computed from ``factor``, ``mscale`` and ``mscale_all_dim``.

        1 for other kinds, and for a ``factor`` of at most 1. ``attention_factor`` does not count here.

        Source: YaRN, arXiv 2309.00071, section 3.4.
        """
        if self.kind != "yarn" or self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._scaled(self.mscale) / self._scaled(self.mscale_all_dim)
        return self._scaled(1.0)

    def _scaled(self, mscale: float) -> float:
        """Return the yarn factor for ``mscale``."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


class MoESpec(msgspec.Struct, frozen=True, kw_only=True):
    """A routed feed-forward block."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    """True if the weights of the chosen experts are scaled to sum to 1."""
    layers: tuple[int, ...]
    """Layers with routed experts; the other layers are dense."""
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function from router logits to scores."""
    correction: bool = False
    """True if a trained bias is added to the scores for the choice of experts.

    Weights never include the bias.
    """
    groups: int = 1
    top_groups: int = 1
    """Number of groups, out of ``groups`` equal groups, from which experts are chosen."""
    group_rule: Literal["max", "top2"] = "max"
    """Score of a group: the best expert's score (max), or the sum of the best two (top2)."""
    scale: float = 1.0
    """Final factor of the expert weights."""
    shared: int = 0
    """Total width of the shared experts, applied to every token; 0 for none."""
    shared_gate: bool = False
    """True if a sigmoid gate scales the output of the shared experts."""
    limit: float = 0.0
    """Clamp of the gate (from above) and of the other half (both sides); 0 for none."""
    alpha: float = 0.0
    """If greater than 0, experts compute ``gate * sigmoid(alpha * gate) * (up + 1)``."""
    bias: bool = False
    """True if router and experts have biases."""
    on_input: bool = False
    """True if the weight of the one chosen expert multiplies the input, not the output."""
    inputs_first: bool = False
    """True if stacks of experts are published with inputs before outputs."""
    beside: bool = False
    """True if the routing layers also have the dense feed-forward, and the outputs are added."""
    hash_layers: tuple[int, ...] = ()
    """Routing layers that choose experts by a table of token ids."""
    gated: bool = True
    """False for experts, and shared experts, of two matrices: ``down(activation(up(x)))``."""
    latent: int = 0
    """Width of the rows that experts read and write, behind a projection from the hidden size; 0: the hidden
    size. Router and shared experts read the hidden size."""


class MLASpec(msgspec.Struct, frozen=True, kw_only=True):
    """Latent attention. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    q_lora: int | None
    """Rank of the query projection; None for one full matrix."""
    kv_lora: int
    """Elements of the latent from which keys and values are computed."""
    nope: int
    """Dims per head of query and key without position."""
    rope: int
    """Rotated dims; all heads share one rotated key."""
    v: int
    """Dims per head of the value."""
    scale: float
    """Factor of the attention scores."""
    interleaved: bool = True
    """True if rotated pairs are neighbours (2 i, 2 i + 1), False if pairs are (i, i + rope / 2)."""
    bias: bool = False
    """True if the projections from the hidden size (query rank, latent and key) have a bias."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of the query rank and the latent."""
    head_gate: bool = False
    """True if a sigmoid gate scales the output of each head."""


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An indexer: chooses the positions that latent attention reads.

    In layers with an indexer, the index keys are the last ``dim`` elements of the cache entries. Source:
    DeepSeek-V3.2 (2025), section 2.
    """

    layers: tuple[int, ...]
    """Layers with an indexer. Other layers reuse the choice of the nearest indexer layer before."""
    heads: int
    dim: int
    top: int
    """Number of positions chosen per token."""
    interleaved: bool
    """Pair order as in ``MLASpec``, for the indexer's queries and keys. The first dims are rotated."""


class DeltaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated delta net, or Kimi Delta Attention. Source: arXiv 2412.06464; arXiv 2510.26692."""

    layers: tuple[int, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    """Taps of the causal convolution."""
    reach: float = 1.0
    """Upper bound of beta. 2: the state may turn a direction around (negative eigenvalues)."""
    norm_eps: float | None = None
    """Epsilon of the norm of the output; None: the epsilon of the model."""
    gate_rank: int = 0
    """Kimi Delta Attention: rank of the projections of decays and output gate; 0: whole matrices."""
    channel_decays: bool = False
    """Kimi Delta Attention with whole matrices."""
    floor: float = 0.0
    """If below 0, lower bound of the log of a decay."""
    matrices: int = 2
    """Published matrices that read the input of a layer, for the memory of adapters."""

    @property
    def by_channel(self) -> bool:
        """True for Kimi Delta Attention: every key channel has a decay, and the output gate is a sigmoid.
        False: every value head has a decay, and the gate is a silu."""
        return self.channel_decays or self.gate_rank > 0

    @property
    def decays(self) -> int:
        """Number of decays per token."""
        return self.v_heads * (self.k_dim if self.by_channel else 1)


class SparseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention to a window of single entries and, further back, to one entry per group of positions.

    Keys and values are one entry, shared by all heads. Source: DeepSeek-V4, sections 2.2 and 2.3.
    """

    types: tuple[Literal["window", "chosen", "all"], ...]
    """Visible groups per layer: none (window), the indexer's choice (chosen), or all."""
    window: int
    chosen_ratio: int
    """Positions per group in layers of type chosen. Groups overlap: an entry combines two groups."""
    all_ratio: int
    """Positions per group in layers of type all."""
    q_lora: int
    o_groups: int
    """Groups of heads, each with a separate low-rank output projection."""
    o_lora: int
    index_heads: int
    index_dim: int
    index_top: int
    """Number of groups chosen per token."""
    group_rope: RopeSpec
    """Rotary embedding of layers with groups. Other layers use the model's rotary embedding."""


class HyperSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams with learned mixing. Source: Xie et al. 2025, arXiv 2512.24880."""

    streams: int
    iterations: int
    """Iterations of the normalization of rows and columns (Sinkhorn and Knopp)."""
    eps: float


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a recurrent layer's state of a sequence. The size does not depend on the length."""

    name: str
    shape: tuple[int, ...]
    wide: bool
    """True for float32 (float64 in a float64 model), False for the model's dtype."""


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group of a model: layers with one block table and one pool. A layer may be in several
    groups.

        full, window, chunk   entries of one key and one value per KV head: ``kv_heads``, ``head_dim``
        latent                entries of ``width`` elements
        compressed            entries of ``width`` elements, one per ``ratio`` positions
        state                 no entries: ``parts`` per sequence; blocks hold copies (snapshots) for hits
    """

    kind: Literal["full", "window", "chunk", "latent", "compressed", "state"]
    layers: tuple[int, ...]
    window: int = 0
    """First position read at p: p - window + 1 (or 0); in a chunk p - p % window. 0: no window."""
    kv_heads: int = 0
    head_dim: int = 0
    width: int = 0
    ratio: int = 1
    parts: tuple[StatePart, ...] = ()
    form: str = "gqa"
    """Form of core attention that reads the group; "" if no attention backend prepares for the group."""
    fp8: bool = False
    """All kinds except state: True for 8-bit values (E4M3).

    A float32 scale belongs to each entry of a KV head, or to each entry of ``width`` elements.
    """
    exact: int = 0
    """Number of elements in the model's dtype, at the end of an 8-bit entry of ``width`` elements."""


class QuantizedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of a checkpoint's quantized weights. The loader reads bits and group sizes off the tensors."""

    method: str
    """Method as named in config.json: fp8, mxfp4, awq, gptq, compressed-tensors, modelopt."""
    block: tuple[int, int] | None = None
    """Rows and columns that share one scale, if stated."""
    zero_offset: int = 0
    """Number to add to a stored zero point."""
    bits: float | None = None
    """Approximate bits per element of a packed matrix, with scales, for the memory plan. None if the
    configuration does not state the bits.
    """
    expert_bits: float | None = None
    """Approximate bits per element of routed experts, if stated separately; None: see ``bits``."""


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower: from the patches of an image to rows of the text model's hidden size."""

    kind: TowerKind
    hidden: int
    layers: int
    heads: int
    intermediate: int
    activation: str
    gated: bool = False
    """True if the feed-forward has a gate."""
    output: int
    """Hidden size of the text model."""
    side: int
    """Rows, and columns, of the table of learned positions. The table is interpolated. 0: no table."""
    settings: str = ""
    """JSON text of ``vision_config``, for a tower with the modules of transformers."""
    frames: int = 1
    """Maximum number of frames (moonvit)."""
    levels: tuple[int, ...] = ()
    """Layers with additional output embeddings (deepstack, arXiv 2406.04334). The text model adds the
    embeddings to the residual stream after layers 0, 1, ..
    """
    theta: float = 10000.0
    norm_eps: float = 1e-6
    """Epsilon of the norm before the last two matrices. The epsilon of the layers follows from the kind."""
    parameters: int = 0
    """Number of parameters without norms; 0: the sizes say the number."""
    ahead: Literal["none", "windows", "all"] = "none"
    """Layers of the text model in which tokens of an image attend to later tokens of the image."""
    media: MediaFacts

    @property
    def published(self) -> tuple[str, ...]:
        """Name prefixes of the tower's tensors in a checkpoint. No other tensor has these prefixes."""
        return PUBLISHED[self.kind]


class EagleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An EAGLE-3 draft head. Source: Li et al. 2025, arXiv 2503.01840."""

    layers: tuple[int, ...]
    """Layers of the model with an input that the head reads."""
    vocab_size: int
    """Tokens that the head can draft."""
    norm_before_residual: bool = False
    """True if the normalized stream enters the residual stream of the head."""


class CountedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts of a model of transformers, counted in the model."""

    experts: int
    """Experts of each layer with experts."""
    elements: int
    """Parameters of all experts of all layers."""
    whole: int = 0
    """Part of ``elements`` that every tensor parallel rank has without expert parallelism."""
    undivided: str = ""
    """Reason why ranks cannot have whole experts; empty if ranks can."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model. Layers are numbered from 0."""

    family: str
    """Name of the package below ``models/`` that builds the model."""
    architecture: str
    """Architecture as named in config.json, e.g. ``Qwen3MoeForCausalLM``."""
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
    """True if the output head shares the embedding table."""
    head: bool = True
    """False for a checkpoint without an output head: an embedding model, which generates no tokens."""
    head_bias: bool = False
    """True if the output head has a bias."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True for RMSNorm over head_dim of queries and keys before rope."""
    centred_norms: bool = False
    """True if RMSNorm weights are published as the difference from 1. The weights stay in a wide type:
    rounding to bf16 near 1 would lose trained precision.
    """
    wide_stream: bool = False
    """True if the stream between the blocks stays in float32 (float64) in a narrower model."""
    gated: bool = True
    """False for dense feed-forward blocks without a gate: ``down(activation(up(x)))``."""
    bare_layers: tuple[int, ...] = ()
    """Layers without a feed-forward block."""
    output_gate: bool = False
    """True if attention output is multiplied by the sigmoid of a projection of the attention input."""
    sinks: bool = False
    """True if each head has an attention sink: a score without value in every softmax."""
    scales: ScaleSpec = ScaleSpec()
    norms: NormSpec = NormSpec()
    attention: AttentionSpec = AttentionSpec()
    layer: LayerSpec = LayerSpec()
    ropes: tuple[RopeSpec, ...] = ()
    """Further rotary embeddings, numbered from 1 in ``attention.rope_of``."""
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    index: IndexSpec | None = None
    delta: DeltaSpec | None = None
    conv: ConvSpec | None = None
    mamba: MambaSpec | None = None
    mamba1: Mamba1Spec | None = None
    parallel: ParallelSpec | None = None
    """Factors of layers with attention and Mamba2 side by side; None for other layers."""
    sparse: SparseSpec | None = None
    hyper: HyperSpec | None = None
    mtp_layers: int = 0
    """Modules that predict the token after the next token: layers ``layers`` and up in the caches."""
    caches: tuple[CacheSpec, ...]
    """KV cache groups. Every layer is in a group, except layers that read the cache of another layer."""
    max_position: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "bfloat16"
    """Type of the checkpoint's weights."""
    quantized: QuantizedSpec | None = None
    """Layout of the quantized weights; None for plain weights."""
    vision: VisionSpec | None = None
    """Vision tower; None for a text-only model."""
    classify: ClassifySpec | None = None
    """Numbers for a whole prompt; None for a model that does not classify."""
    pooled: PooledSpec = PooledSpec()
    eagle: EagleSpec | None = None
    """Set only in ``draft`` of a model with an EAGLE-3 head."""
    draft: ModelSpec | None = None
    """Draft model; None for speculation without a draft model. In the caches its layers follow the model's
    layers and MTP modules."""
    counted: int = 0
    """Parameters without the tables of tokens, counted in the model; 0: the other fields say the number."""
    counted_whole: int = 0
    """Part of ``counted`` that every tensor parallel rank has."""
    counted_experts: CountedExperts | None = None
    """Part of ``counted``; never divided by ``local_spec``. None without experts, or if ``moe`` has them."""

    def cache_of(self, layer: int) -> int:
        """Return the number of the first KV cache group of ``layer``. Raise KeyError if there is none."""
        return self.caches_of(layer)[0]

    def caches_of(self, layer: int) -> tuple[int, ...]:
        """Return the numbers of the KV cache groups of ``layer``. Raise KeyError if there is none."""
        result = tuple(number for number, cache in enumerate(self.caches) if layer in cache.layers)
        if not result:
            raise KeyError(layer)
        return result

    @property
    def implementation(self) -> Literal["weft", "transformers"]:
        """Source of the modeling code: Weft's own families, or transformers."""
        return "transformers" if self.family == "transformers" else "weft"

    @property
    def routes(self) -> RouteShape | None:
        """Size of the routes in answers; None without routed experts of Weft's own. Modules that predict
        further tokens do not count."""
        if self.moe is None or self.implementation != "weft":
            return None
        layers = sum(layer < self.layers for layer in self.moe.layers)
        return RouteShape(layers=layers, top_k=self.moe.top_k, experts=self.moe.experts) if layers else None

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of core attention that the model needs, in the order of the KV cache groups."""
        return tuple(dict.fromkeys(cache.form for cache in self.caches if cache.form))


def keep_mtp(spec: ModelSpec, modules: int) -> ModelSpec:
    """Return ``spec`` with at most ``modules`` modules that predict further tokens, and matching caches."""
    if spec.mtp_layers <= modules:
        return spec
    end = spec.layers + modules
    # Modules are numbered after the layers, so cutting all lists at ``end`` removes the rest.
    kept = [
        msgspec.structs.replace(cache, layers=tuple(n for n in cache.layers if n < end))
        for cache in spec.caches
    ]
    caches = tuple(cache for cache in kept if cache.layers)
    moe = spec.moe
    if moe is not None:
        moe = msgspec.structs.replace(moe, layers=tuple(n for n in moe.layers if n < end))
    return msgspec.structs.replace(spec, mtp_layers=modules, caches=caches, moe=moe)
