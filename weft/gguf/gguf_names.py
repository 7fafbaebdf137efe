"""Published weights of the tensors in a GGUF file.

llama.cpp stores matrices in the layout of its computation:

* The matrices of all experts are one stack.
* ``llama``: the two dims of one rotation are neighbours in queries and keys. Published weights have all first
  dims, then all second dims.
* Latent attention: the two parts of the up-projection are separate, and one part is transposed.
* GPT-OSS: gate and up are separate. The published rows alternate.
* Gated delta nets: see ``weft.gguf.delta_heads``.

``TensorForm`` lists the conversions from stored tensors to a published tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import msgspec

from weft.common.errors import ConfigError
from weft.gguf.container import StoredTensor
from weft.gguf.delta_heads import DeltaHeads, Order
from weft.gguf.rows import ROWS

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_EXCEPTIONS = {
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "gpt-oss": {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
}
"""Exceptions from ``_LAYER``, by family."""
_BARE = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Weights published without the ending ``.weight`` or ``.bias``."""
_DELTA_NET = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
"""Names in the layers of hybrid models (``GgufNames.delta``)."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_GATE_UP = "ffn_gate_up_exps"
"""Gate and up matrices of all experts in one stack, gate first."""
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
WITHOUT_EFFECT = frozenset({"rope_freqs.weight"})
"""Tensors for facts of config.json (``weft.gguf.config``), not weights."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<what>[a-z0-9_.]+?)(?:\.(?P<end>weight|bias))?")
MXFP4_NUMBERS, MXFP4_BYTES = 32, 16


class TensorForm(Enum):
    """Construction of a published tensor. E experts, h inputs, n outputs, r numbers of a latent."""

    STORED = "unchanged"
    EXPERT = "a matrix of a stored stack"
    GATE = "the first half of the rows of a matrix of a stored stack"
    UP = "the second half of the rows of a matrix of a stored stack"
    HALVES = "rows of each head: first dims of all rotations, then second dims; stored as neighbours"
    LATENT = "keys [heads, r, d] transposed and values [heads, v, r] to [heads (d + v), r]"
    INTERLEAVED = "two [E, n, h] to [E, h, 2 n], or two [E, n] to [E, 2 n], interleaved"
    TRANSPOSED = "[E, n, h] to [E, h, n]"
    BLOCKS = "4-bit numbers of MXFP4, [E, rows, h / 32, 16 bytes], of one stack or two interleaved stacks"
    SCALES = "scales of MXFP4, [E, rows, h / 32]"
    CENTRED = "weight of a norm minus 1: the file adds 1"
    GROUPED = "rows with the value heads grouped by key head"
    GROUPED_COLUMNS = "columns with the value heads grouped by key head"
    BY_KEY_HEAD = "queries, keys, values and gates [n, h] of each key head, from two tensors"
    RATES = "log(-x), with the value heads grouped by key head"
    LOGARITHMS = "log(-x)"
    TAPS = "[C, K], [C, 1, K] or [1, C, 1, K] to [C, 1, K], with the value heads grouped by key head"
    ROW = "[h] to [1, h]"
    FLAT = "all numbers in one dimension"


_DELTA_FORMS = {
    "attn_qkv": TensorForm.GROUPED,
    "attn_gate": TensorForm.GROUPED,
    "ssm_beta": TensorForm.GROUPED,
    "ssm_alpha": TensorForm.GROUPED,
    "ssm_dt": TensorForm.GROUPED,
    "ssm_out": TensorForm.GROUPED_COLUMNS,
    "ssm_a": TensorForm.RATES,
    "ssm_conv1d": TensorForm.TAPS,
    "post_attention_norm": TensorForm.CENTRED,
    "ffn_gate_inp_shexp": TensorForm.ROW,
}
"""Forms of the tensors in ``_DELTA_NET`` that are not stored as published."""
_COLLECTED = {"gpt-oss": tuple(_EXPERTS), "qwen3next": ("attn_qkv", "attn_gate")}
"""Tensors that are merged with other tensors into a published tensor, by family."""


class GgufNames(msgspec.Struct, frozen=True):
    """Positions of the weights in a model's files."""

    family: str
    """Key in ``FAMILIES`` of ``weft.gguf.model_facts``."""
    layers: int
    heads: int
    kv_heads: int
    tensors: tuple[StoredTensor, ...]
    """Tensors of all files. Stored, because a search takes seconds in a file with a large vocabulary."""
    delta: DeltaHeads | None = None
    """Heads of gated delta nets; None for models without delta nets."""

    @property
    def centred(self) -> bool:
        """True if the files add 1 to the weights of norms."""
        row = ROWS.get(self.family)
        return self.delta is not None or (row is not None and row.centred)


class Published(NamedTuple):
    """A weight with the published name."""

    name: str
    form: TensorForm
    parts: tuple[StoredTensor, ...]
    number: int = 0
    """Index of the matrix in the stack (``EXPERT``), or number of heads with rows in halves (``HALVES``)."""
    heads: DeltaHeads | None = None
    """Heads of a delta net, for forms with an order of value heads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the published tensor."""
        shape = self.parts[0].shape
        match self.form:
            case TensorForm.EXPERT:
                return shape[1:]
            case TensorForm.GATE | TensorForm.UP:
                return shape[1] // 2, *shape[2:]
            case TensorForm.LATENT:
                heads, width, size = shape
                return heads * (size + self.parts[1].shape[1]), width
            case TensorForm.INTERLEAVED:
                return (shape[0], shape[2], 2 * shape[1]) if len(shape) == 3 else (shape[0], 2 * shape[1])
            case TensorForm.TRANSPOSED:
                return shape[0], shape[2], shape[1]
            case TensorForm.BLOCKS | TensorForm.SCALES:
                scales = (shape[0], len(self.parts) * shape[1], shape[2] // MXFP4_NUMBERS)
                return (*scales, MXFP4_BYTES) if self.form is TensorForm.BLOCKS else scales
            case TensorForm.BY_KEY_HEAD:
                return shape[0] + self.parts[1].shape[0], shape[1]
            case TensorForm.TAPS:
                return math.prod(shape[:-1]), 1, shape[-1]
            case TensorForm.FLAT | TensorForm.RATES:
                return (math.prod(shape),)
            case TensorForm.ROW:
                return 1, shape[-1]
        return shape

    @property
    def row_order(self) -> Order | None:
        """int64 [rows]: the stored row of each published row, over all parts; None for the stored order."""
        if self.heads is None:
            return None
        match self.form:
            case TensorForm.BY_KEY_HEAD:
                return self.heads.by_key_head(sum(part.shape[0] for part in self.parts))
            case TensorForm.GROUPED | TensorForm.RATES | TensorForm.TAPS:
                return self.heads.grouped(self.parts[0].shape[0])
        return None


def published(layout: GgufNames) -> list[Published]:
    """Return the published weights of all tensors. Most families publish one weight per expert.

    Raises ConfigError for an unknown tensor, and if a tensor of a merged weight is missing.
    """
    found: list[Published] = []
    stacks: dict[str, dict[str, StoredTensor]] = {}
    row = ROWS.get(layout.family)
    for stored in layout.tensors:
        if stored.name in WITHOUT_EFFECT:
            continue
        parts = _NAME.fullmatch(stored.name)
        if parts is None:
            raise _unknown(stored)
        # Some weights need several tensors of a layer. Their parts are collected in ``stacks`` first.
        what, end, layer = parts["what"], parts["end"], parts["layer"]
        if layer is None:
            if row is not None and what in row.facts:
                continue
            top = _TOP if row is None else {**_TOP, **row.top}
            if what not in top or end is None:
                raise _unknown(stored)
            centred = layout.centred and what == "output_norm"
            form = TensorForm.CENTRED if centred else TensorForm.STORED
            found.append(Published(f"{top[what]}.{end}", form, (stored,)))
        elif int(layer) < layout.layers:  # further layers are for multi-token prediction: not used
            if what in ("attn_k_b", "attn_v_b") or what in _COLLECTED.get(layout.family, ()):
                stacks.setdefault(layer, {})[f"{what}.{end}"] = stored
            else:
                prefix = "model.layers" if row is None else row.prefix
                found += _of_layer(stored, f"{prefix}.{layer}", what, end, layout)
    for layer, stack in stacks.items():
        made = {"gpt-oss": _interleaved_experts, "qwen3next": _by_key_head}.get(layout.family, _latent)
        try:
            found += made(f"model.layers.{layer}", stack, layout)
        except KeyError as missing:
            raise ConfigError(f"the GGUF file lacks blk.{layer}.{missing.args[0]}", param="--model") from None
    return found


def _of_layer(
    stored: StoredTensor, layer: str, what: str, end: str | None, layout: GgufNames
) -> Iterator[Published]:
    """Yield the published weights of one tensor of a layer: one per expert for a stack, else one.

    Raises ConfigError for an unknown tensor.

    ``layer``: published prefix. ``what``, ``end``: the parts of the tensor's name.
    """
    if layout.delta is not None and (name := _DELTA_NET.get(f"{what}.{end}" if end else what)):
        form = _DELTA_FORMS.get(what, TensorForm.STORED)
        yield Published(f"{layer}.{name}", form, (stored,), 0, layout.delta)
        return
    row = ROWS.get(layout.family)
    permuted = layout.family in ("llama", "mixtral") or (row is not None and row.halves)
    names = _EXCEPTIONS.get(layout.family, {}) if row is None else row.names
    published_as = names.get(what) or _LAYER.get(what)
    bares = _BARE if row is None else {**_BARE, **row.bare}
    if what == _GATE_UP and len(stored.shape) == 3 and f"{what}.{end}" not in bares:
        for half, form in (("ffn_gate_exps", TensorForm.GATE), ("ffn_up_exps", TensorForm.UP)):
            for expert, name in enumerate(_expert_names(stored, layer, half, end, layout.family)):
                yield Published(name, form, (stored,), expert)
        return
    whole = f"{what}.{end}" if end else what
    bare = bares.get(whole)
    own_form = TensorForm.STORED if row is None else TensorForm[row.forms.get(whole, "STORED")]
    # The order of the cases matters: expert stacks and bare names are not in ``_LAYER``.
    if bare is None and what in _EXPERTS and len(stored.shape) == 3:
        for expert, name in enumerate(_expert_names(stored, layer, what, end, layout.family)):
            yield Published(name, TensorForm.EXPERT, (stored,), expert)
    elif bare is not None:
        yield Published(f"{layer}.{bare}", own_form, (stored,))
    elif published_as is None or end is None:
        raise _unknown(stored)
    elif permuted and what in ("attn_q", "attn_k"):
        heads = layout.heads if what == "attn_q" else layout.kv_heads
        yield Published(f"{layer}.{published_as}.{end}", TensorForm.HALVES, (stored,), heads)
    else:
        centred = layout.centred and what.endswith("norm")
        form = TensorForm.CENTRED if centred else own_form
        yield Published(f"{layer}.{published_as}.{end}", form, (stored,))


def _expert_names(stored: StoredTensor, layer: str, what: str, end: str | None, family: str) -> Iterator[str]:
    """Yield the published name of each expert's matrix. ``what``: key in ``_EXPERTS``."""
    row = ROWS.get(family)
    matrix = _EXPERTS[what]
    block, own = f"{layer}.mlp.experts", matrix
    if family == "mixtral":
        block, own = f"{layer}.block_sparse_moe.experts", _MIXTRAL[matrix]
    if row is not None:
        block, own = f"{layer}.{row.experts[0]}", row.experts[1 + list(_EXPERTS).index(what)]
    for expert in range(stored.shape[0]):
        yield f"{block}.{expert}.{own}.{end}"


def _latent(layer: str, stack: dict[str, StoredTensor], _: GgufNames) -> Iterator[Published]:
    parts = (stack["attn_k_b.weight"], stack["attn_v_b.weight"])
    yield Published(f"{layer}.self_attn.kv_b_proj.weight", TensorForm.LATENT, parts)


def _by_key_head(layer: str, stack: dict[str, StoredTensor], layout: GgufNames) -> Iterator[Published]:
    parts = (stack["attn_qkv.weight"], stack["attn_gate.weight"])
    name = f"{layer}.linear_attn.in_proj_qkvz.weight"
    yield Published(name, TensorForm.BY_KEY_HEAD, parts, 0, layout.delta)


def _interleaved_experts(layer: str, stack: dict[str, StoredTensor], _: GgufNames) -> Iterator[Published]:
    """Yield the expert weights of a gpt-oss layer.

    ``stack``: tensors by name within the layer. Raises KeyError with the name of a missing tensor.
    """
    matrices = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
    for matrix, stored in matrices.items():
        parts = tuple(stack[f"{one}.weight"] for one in stored)
        biases = tuple(stack[f"{one}.bias"] for one in stored)
        name, paired = f"{layer}.mlp.experts.{matrix}", len(parts) == 2
        if all(part.kind == "MXFP4" for part in parts):
            yield Published(f"{name}_blocks", TensorForm.BLOCKS, parts)
            yield Published(f"{name}_scales", TensorForm.SCALES, parts)
        else:
            yield Published(name, TensorForm.INTERLEAVED if paired else TensorForm.TRANSPOSED, parts)
        yield Published(f"{name}_bias", TensorForm.INTERLEAVED if paired else TensorForm.STORED, biases)


def _unknown(stored: StoredTensor) -> ConfigError:
    return ConfigError(
        f"the GGUF file has a tensor {stored.name!r}, which is unknown for the architecture",
        param="--model",
    )
