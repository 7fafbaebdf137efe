"""Which tensor of a GGUF file is which published weight.

llama.cpp keeps the experts of a layer stacked, and in the architecture ``llama`` the rows of queries and keys
in the order of its own rotary embedding: pairs of neighbours where the published weights have halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from weft.common.errors import ConfigError
from weft.gguf.container import StoredTensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
WITHOUT_EFFECT = frozenset({"rope_freqs.weight"})
"""Said by the metadata, too: see ``weft.gguf.config``."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<what>[a-z_]+)\.(?P<end>weight|bias)")


class Layout(msgspec.Struct, frozen=True):
    """What decides where weights are in a file."""

    architecture: str
    heads: int
    kv_heads: int
    mixtral: bool


class Published(NamedTuple):
    """A weight by its published name, as a part of a stored tensor."""

    name: str
    stored: StoredTensor
    expert: int | None = None
    """Which matrix of the stored stack it is."""
    heads: int = 0
    """Heads whose rows are to be put in the published order; 0: they are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the published tensor."""
        return self.stored.shape if self.expert is None else self.stored.shape[1:]


def published(tensors: Iterable[StoredTensor], layout: Layout) -> list[Published]:
    """The weights that ``tensors`` are, experts one by one.

    Raises ConfigError for a tensor that no served model has.
    """
    mixtral = layout.mixtral
    permuted = {"attn_q": layout.heads, "attn_k": layout.kv_heads} if layout.architecture == "llama" else {}
    found: list[Published] = []
    for stored in tensors:
        if stored.name in WITHOUT_EFFECT:
            continue
        parts = _NAME.fullmatch(stored.name)
        if parts is None:
            raise _unknown(stored)
        what, end = parts["what"], parts["end"]
        if parts["layer"] is None:
            if what not in _TOP:
                raise _unknown(stored)
            found.append(Published(f"{_TOP[what]}.{end}", stored))
            continue
        layer = f"model.layers.{parts['layer']}"
        if what in _EXPERTS and len(stored.shape) == 3:
            matrix = _EXPERTS[what]
            block = f"{layer}.block_sparse_moe.experts" if mixtral else f"{layer}.mlp.experts"
            own = _MIXTRAL[matrix] if mixtral else matrix
            found += [Published(f"{block}.{e}.{own}.{end}", stored, e) for e in range(stored.shape[0])]
        elif what in _LAYER:
            theirs = "block_sparse_moe.gate" if mixtral and what == "ffn_gate_inp" else _LAYER[what]
            found.append(Published(f"{layer}.{theirs}.{end}", stored, heads=permuted.get(what, 0)))
        else:
            raise _unknown(stored)
    return found


def _unknown(stored: StoredTensor) -> ConfigError:
    return ConfigError(
        f"the GGUF file has a tensor {stored.name!r}, which no served model of its architecture has",
        param="--model",
    )
