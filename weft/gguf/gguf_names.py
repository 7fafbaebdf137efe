"""Published weights of the tensors in a GGUF file.

llama.cpp stores matrices in the layout of its computation. Experts are stacked. In the architecture ``llama``
the rows of queries and keys are pairs of neighbours; published weights have halves. The two parts of a latent
up-projection are separate, and one part is transposed. Gate and up of GPT-OSS are separate; the published
rows alternate. ``TensorForm`` says how stored tensors make a published tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import msgspec

from weft.common.errors import ConfigError
from weft.gguf.container import StoredTensor

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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_OTHERWISE = {
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "gpt-oss": {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
}
"""Exceptions from ``_LAYER``, by family."""
_BARE = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Weights published without the ending ``.weight`` or ``.bias``."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
WITHOUT_EFFECT = frozenset({"rope_freqs.weight"})
"""Tensors for facts of config.json (``weft.gguf.config``), not weights."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<what>[a-z_]+)\.(?P<end>weight|bias)")
MXFP4_NUMBERS, MXFP4_BYTES = 32, 16


class TensorForm(Enum):
    """Construction of a published tensor. E experts, h inputs, n outputs, r numbers of a latent."""

    STORED = "as it is stored"
    EXPERT = "a matrix of a stored stack"
    HALVES = "rows of each head in halves, not in pairs of neighbours"
    LATENT = "keys [heads, r, d] transposed and values [heads, v, r] to [heads (d + v), r]"
    IN_TURN = "[E, n, h] twice to [E, h, 2 n], and [E, n] twice to [E, 2 n]: one of each in turn"
    TRANSPOSED = "[E, n, h] to [E, h, n]"
    BLOCKS = "the 4-bit numbers of MXFP4, [E, rows, h / 32, 16 bytes], of one stored stack or two in turn"
    SCALES = "their scales, [E, rows, h / 32]"


class GgufNames(msgspec.Struct, frozen=True):
    """Positions of the weights in a model's files."""

    family: str
    """Key in ``FAMILIES`` of ``weft.gguf.config``."""
    layers: int
    heads: int
    kv_heads: int
    tensors: tuple[StoredTensor, ...]
    """Tensors of all files. Stored, because a search takes seconds in a file with a large vocabulary."""


class Published(NamedTuple):
    """A weight with the published name."""

    name: str
    form: TensorForm
    parts: tuple[StoredTensor, ...]
    number: int = 0
    """Index of the matrix in the stack (``EXPERT``), or number of heads with rows in halves (``HALVES``)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the published tensor."""
        shape = self.parts[0].shape
        match self.form:
            case TensorForm.EXPERT:
                return shape[1:]
            case TensorForm.LATENT:
                heads, width, size = shape
                return heads * (size + self.parts[1].shape[1]), width
            case TensorForm.IN_TURN:
                return (shape[0], shape[2], 2 * shape[1]) if len(shape) == 3 else (shape[0], 2 * shape[1])
            case TensorForm.TRANSPOSED:
                return shape[0], shape[2], shape[1]
            case TensorForm.BLOCKS | TensorForm.SCALES:
                scales = (shape[0], len(self.parts) * shape[1], shape[2] // MXFP4_NUMBERS)
                return (*scales, MXFP4_BYTES) if self.form is TensorForm.BLOCKS else scales
        return shape


def published(layout: GgufNames) -> list[Published]:
    """Return the weights made by the tensors, with experts one by one if published one by one.

    Raises ConfigError for a tensor of no supported model, and for a tensor without its counterpart.
    """
    found: list[Published] = []
    stacks: dict[str, dict[str, StoredTensor]] = {}
    for stored in layout.tensors:
        if stored.name in WITHOUT_EFFECT:
            continue
        parts = _NAME.fullmatch(stored.name)
        if parts is None:
            raise _unknown(stored)
        # Some weights need several tensors of a layer. Their parts are collected in ``stacks`` first.
        what, end, layer = parts["what"], parts["end"], parts["layer"]
        if layer is None:
            if what not in _TOP:
                raise _unknown(stored)
            found.append(Published(f"{_TOP[what]}.{end}", TensorForm.STORED, (stored,)))
        elif int(layer) < layout.layers:  # layers after the last predict further tokens
            if what in ("attn_k_b", "attn_v_b") or (what in _EXPERTS and layout.family == "gpt-oss"):
                stacks.setdefault(layer, {})[f"{what}.{end}"] = stored
            else:
                found += _of_layer(stored, f"model.layers.{layer}", what, end, layout)
    for layer, stack in stacks.items():
        made = _experts_in_turn if layout.family == "gpt-oss" else _latent
        try:
            found += made(f"model.layers.{layer}", stack)
        except KeyError as missing:
            raise ConfigError(f"the GGUF file lacks blk.{layer}.{missing.args[0]}", param="--model") from None
    return found


def _of_layer(
    stored: StoredTensor, layer: str, what: str, end: str, layout: GgufNames
) -> Iterator[Published]:
    """Yield the published weights of one tensor of a layer: one per expert for a stack, else one.

    Raises ConfigError for an unknown tensor.

    ``layer``: published prefix. ``what``, ``end``: the parts of the tensor's name.
    """
    permuted = layout.family in ("llama", "mixtral")
    theirs = _OTHERWISE.get(layout.family, {}).get(what) or _LAYER.get(what)
    # The order of the cases matters: expert stacks and bare names are not in ``_LAYER``.
    if what in _EXPERTS and len(stored.shape) == 3:
        matrix = _EXPERTS[what]
        block, own = f"{layer}.mlp.experts", matrix
        if layout.family == "mixtral":
            block, own = f"{layer}.block_sparse_moe.experts", _MIXTRAL[matrix]
        for expert in range(stored.shape[0]):
            yield Published(f"{block}.{expert}.{own}.{end}", TensorForm.EXPERT, (stored,), expert)
    elif (bare := _BARE.get(f"{what}.{end}")) is not None:
        yield Published(f"{layer}.{bare}", TensorForm.STORED, (stored,))
    elif theirs is None:
        raise _unknown(stored)
    elif permuted and what in ("attn_q", "attn_k"):
        heads = layout.heads if what == "attn_q" else layout.kv_heads
        yield Published(f"{layer}.{theirs}.{end}", TensorForm.HALVES, (stored,), heads)
    else:
        yield Published(f"{layer}.{theirs}.{end}", TensorForm.STORED, (stored,))


def _latent(layer: str, stack: dict[str, StoredTensor]) -> Iterator[Published]:
    parts = (stack["attn_k_b.weight"], stack["attn_v_b.weight"])
    yield Published(f"{layer}.self_attn.kv_b_proj.weight", TensorForm.LATENT, parts)


def _experts_in_turn(layer: str, stack: dict[str, StoredTensor]) -> Iterator[Published]:
    """Yield the expert weights of a gpt-oss layer.

    ``stack``: tensors by name within the layer. Raises KeyError with the name of a missing tensor.
    """
    matrices = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
    for matrix, stored in matrices.items():
        parts = tuple(stack[f"{one}.weight"] for one in stored)
        biases = tuple(stack[f"{one}.bias"] for one in stored)
        name = f"{layer}.mlp.experts.{matrix}"
        if all(part.kind == "MXFP4" for part in parts):
            yield Published(f"{name}_blocks", TensorForm.BLOCKS, parts)
            yield Published(f"{name}_scales", TensorForm.SCALES, parts)
        else:
            yield Published(name, TensorForm.IN_TURN if len(parts) == 2 else TensorForm.TRANSPOSED, parts)
        yield Published(f"{name}_bias", TensorForm.IN_TURN if len(parts) == 2 else TensorForm.STORED, biases)


def _unknown(stored: StoredTensor) -> ConfigError:
    return ConfigError(
        f"the GGUF file has a tensor {stored.name!r}, which is unknown for the architecture",
        param="--model",
    )
