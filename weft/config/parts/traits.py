"""Traits of a model: small structs of ``ModelSpec``. The defaults describe Llama."""

from __future__ import annotations

from typing import Literal

import msgspec


class ScaleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Constant factors of the computation."""

    embedding: float = 1.0
    """Factor of the token embeddings."""
    embedding_rounded: bool = False
    """True if the factor of the token embeddings has the dtype of the model."""
    residual: float = 1.0
    """Factor of the output of attention and feed-forward, before the sum with the stream."""
    attention: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """If greater than 0, a score x becomes ``attention_softcap * tanh(x / attention_softcap)``."""
    logits: float = 1.0
    """Factor of the logits."""
    softcap: float = 0.0
    """If greater than 0, a logit x becomes ``softcap * tanh(x / softcap)``."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Norms of the stream.

    pre        before attention and before feed-forward: x + f(norm(x))
    post       behind both: x + norm(f(x))
    both       before and behind: x + norm(f(norm(x)))
    parallel   one norm before both, which run side by side: x + attention(norm(x)) + feed_forward(norm(x))
    """

    place: Literal["pre", "post", "both", "parallel"] = "pre"
    kind: Literal["rms", "layer"] = "rms"
    """layer: LayerNorm, which also subtracts the mean. Source: arXiv 1607.06450."""
    bias: bool = False
    """True if layer norms have a bias."""


class TemperatureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Queries grow with the position p: factor ``1 + beta * log(1 + floor((p + shift) / length))``."""

    beta: float
    length: int
    shift: int = 0
    unrotated: bool = False
    """True if only layers without rotation have the factor."""


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Traits of attention with grouped queries. ``ModelSpec.rope`` has number 0."""

    norm: Literal["head", "all", "behind", "unit"] = "head"
    """Norm of queries and keys, if ``ModelSpec.qk_norm``.

    head: of each head, before the rotation. all: one norm over all heads. behind: of each head, behind the
    rotation. unit: of each head, without weights, only in layers with a rotation.
    """
    interleaved: bool = False
    """True if rotated pairs are neighbours (2 i, 2 i + 1), False if pairs are (i, i + dim / 2)."""
    rope_of: tuple[int, ...] = ()
    """Number of each layer's rotary embedding, -1 for none. Empty: 0 for all layers."""
    temperature: TemperatureSpec | None = None
    value_norm: bool = False
    """True if each head of the values has an RMS norm without weights."""
    key_is_value: tuple[int, ...] = ()
    """Layers without a matrix for values: values are the keys before norm and rotation."""
    shared_kv: tuple[int, ...] = ()
    """For each layer, the layer with the keys and values that the layer reads. Empty: each its own."""

    def source(self, layer: int) -> int:
        """Return the layer with the keys and values that ``layer`` reads."""
        return self.shared_kv[layer] if layer < len(self.shared_kv) else layer

    def rope(self, layer: int) -> int:
        """Return the number of the rotary embedding of ``layer``, or -1."""
        return self.rope_of[layer] if layer < len(self.rope_of) else 0


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a layer besides attention and feed-forward."""

    scalar: bool = False
    """True if a trained number multiplies the stream behind each layer."""
    inputs: int = 0
    """Dims of the embedding of each token for each layer; 0 for none. Source: Gemma 3n (2025)."""
    inputs_vocab: int = 0
    """Rows of the table of these embeddings."""
    inputs_pad: int = 0
    """Token in place of the tokens of an image, for the table."""
    double: tuple[int, ...] = ()
    """Layers with a dense feed-forward of twice the intermediate size."""
