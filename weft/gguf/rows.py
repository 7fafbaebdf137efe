"""Table of the architectures whose files need no code of their own: names, forms and facts by architecture.

A row says how llama.cpp stores the family. The published names are in the spelling of Llama, which
``weft.models.declared.names`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from weft.gguf import row_facts
from weft.gguf.container import StoredTensor
from weft.gguf.model_facts import ModelFacts
from weft.gguf.row_facts import Fields, Tensors

_OUTPUT_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Norm before the feed-forward under the name of a norm behind attention."""
_POST_NORMS = {**_OUTPUT_NORM, "post_ffw_norm": "post_feedforward_layernorm"}
_BOTH_NORMS = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


class GgufRow(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. The defaults describe a file with the published weights as they are."""

    read: Callable[[ModelFacts, Tensors], Fields]
    """Reader of the facts beyond sizes."""
    names: dict[str, str] = {}
    """Tensor of a layer -> published name within the layer, where the name differs from Llama's."""
    halves: bool = False
    """True if the file has the rows of queries and keys in pairs of neighbours, as for Llama."""
    centred: bool = False
    """True if the file adds 1 to the weights of norms."""
    partial: bool = False
    """True if heads may be rotated in part."""
    layer_norm: bool = False
    """True for norms that subtract the mean. The file has their epsilon under another key."""
    facts: tuple[str, ...] = ()
    """Tensors for facts of config.json, not weights."""


_GRANITE = GgufRow(read=row_facts.granite, halves=True)
_OLMO = GgufRow(read=row_facts.olmo2, names=_POST_NORMS)
_ERNIE = GgufRow(read=row_facts.ernie)
_MISTRAL = GgufRow(read=row_facts.mistral3, halves=True)
_HUNYUAN = GgufRow(read=row_facts.hunyuan)

ROWS: dict[str, GgufRow] = {
    "gemma3": GgufRow(read=row_facts.gemma3, names=_BOTH_NORMS, centred=True),
    "glm4moe": GgufRow(read=row_facts.glm4moe, names=_OUTPUT_NORM, partial=True),
    "phi3": GgufRow(
        read=row_facts.phi3,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial=True,
        facts=("rope_factors_long", "rope_factors_short"),
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoe-shared": _GRANITE,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "smollm3": GgufRow(read=row_facts.smollm3, halves=True),
    "exaone4": GgufRow(read=row_facts.exaone4, names=_POST_NORMS),
    "ernie4_5": _ERNIE,
    "ernie4_5-moe": _ERNIE,
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": _HUNYUAN,
    "minimax-m2": GgufRow(read=row_facts.minimax_m2, partial=True),
    "seed_oss": GgufRow(read=row_facts.seed_oss, names=_OUTPUT_NORM),
    "mistral3": _MISTRAL,
    "ministral3": _MISTRAL,
    "cohere2": GgufRow(read=row_facts.cohere2, layer_norm=True),
}
"""Key in ``FAMILIES`` -> row."""


def row_fields(row: GgufRow, facts: ModelFacts, tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    """Return the fields of config.json by the row. Raises ConfigError for an unsupported model."""
    return row_facts.head_size(facts, partial=row.partial) | row.read(facts, tensors)
