"""Attention of classes that compute attention in code of their own, not through the attention interface.

    class                                      replaced
    CodeGen, GPT-J, GPT-Neo, GPT-NeoX Japanese method ``_attn`` of the attention module: scores to values
    Bloom, Falcon, MPT                         ``forward`` of the attention module

The replacement uses the matrices of the module and calls Weft's attention. A pass with the attention of
transformers runs the code of the class, so the self check compares both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.models.generic.interface import Distances, attends, attention

Tensor = torch.Tensor
Forward = Callable[..., Any]


def replace_attention(model: Any) -> None:
    """Let the attention modules of ``model`` call Weft's attention, where the table has the class."""
    for module in list(model.modules()):
        replace = _REPLACED.get(type(module).__name__)
        if replace is not None:
            replace(module)


def rounded_bias(model: Any) -> list[str]:
    """Return the reason against Falcon with ALiBi, if ``model`` is one.

    The class rounds slope x position to 16 bits at every position. No factor of a position gives this bias.
    """
    found = any(type(module).__name__ == "FalconModel" and module.use_alibi for module in model.modules())
    return ["a bias by distance (ALiBi) that the class rounds to 16 bits"] if found else []


def _in_passes(module: Any, name: str, made: Forward) -> None:
    """Replace method ``name`` of ``module`` by ``made`` in passes with Weft's attention."""
    plain = getattr(module, name)

    @functools.wraps(plain)
    def chosen(*given: Any, **named: Any) -> Any:
        return (made if attends() else plain)(*given, **named)

    setattr(module, name, chosen)


def _attn(module: Any) -> None:
    """Replace ``_attn(q, k, v, mask)``. q, k, v and the first result: [1, heads, T, dim]."""
    if not hasattr(module, "layer_idx"):
        module.layer_idx = module.layer_id
    # GPT-Neo does not scale scores. Its local layers have a table of the window in place of a mask.
    scale = 1.0 / float(getattr(module, "scale_attn", getattr(module, "norm_factor", 1.0)))
    window = module.config.window_size if getattr(module, "attention_type", "") == "local" else None

    def computed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        q, k = q.to(v.dtype), k.to(v.dtype)
        mask = None if window else mask  # a mask of full attention would hide the window
        out = attention(module, q, k, v, mask, scaling=scale, sliding_window=window)[0]
        return out.transpose(1, 2), None

    _in_passes(module, "_attn", computed)


def _bloom(module: Any) -> None:
    """Replace ``forward``. The bias by distance is not rounded to the dtype of the model."""
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    distances = Distances(_get_alibi_slopes(module.num_heads, torch.device("cpu")))

    def computed(
        hidden_states: Tensor, residual: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        scale = module.inv_norm_factor
        out = attention(module, q, k, v, attention_mask, scaling=scale, distances=distances)[0]
        return module.dense(out.flatten(2)) + residual, None

    _in_passes(module, "forward", computed)


def _mpt(module: Any) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bias = build_mpt_alibi_tensor(module.n_heads, 2, device=torch.device("cpu"))  # of distances 1 and 0
    distances = Distances(-bias[:, 0, 0])

    def computed(
        hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        scale = module.softmax_scale
        out = attention(module, q, k, v, attention_mask, scaling=scale, distances=distances)[0]
        return module.out_proj(out.flatten(2)), None

    _in_passes(module, "forward", computed)


def _falcon(module: Any) -> None:
    """Replace ``forward``. KV heads stay one per group; the class copies them for every head."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def computed(
        hidden_states: Tensor,
        alibi: None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        made = module.query_key_value(hidden_states)
        if module.new_decoder_architecture:
            parts = made.unflatten(2, (module.num_kv_heads, -1, module.head_dim))
            q, k, v = parts[:, :, :, :-2].flatten(2, 3), parts[:, :, :, -2], parts[:, :, :, -1]
        else:
            q, k, v = module._split_heads(made)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *(position_embeddings or ()))
        out = attention(module, q, k, v, attention_mask, scaling=module.inv_norm_factor)[0]
        return module.dense(out.flatten(2)), None

    _in_passes(module, "forward", computed)


def _without_bias(name: str) -> Callable[[Any], None]:
    """Return a replacement of method ``name`` of a base model: attention makes the bias by distance."""

    def replace(base: Any) -> None:
        _in_passes(base, name, lambda *_, **__: None)

    return replace


#: Class name -> replacement of a module.
_REPLACED: dict[str, Callable[[Any], None]] = {
    "BloomAttention": _bloom,
    "BloomModel": _without_bias("build_alibi_tensor"),
    "CodeGenAttention": _attn,
    "FalconAttention": _falcon,
    "GPTJAttention": _attn,
    "GPTNeoXJapaneseAttention": _attn,
    "GPTNeoSelfAttention": _attn,
    "MptAttention": _mpt,
    "MptModel": _without_bias("build_mpt_alibi_tensor"),
}
