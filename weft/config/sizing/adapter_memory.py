"""Estimated memory of LoRA adapters on a rank: the places of the pools, and copies of adapters."""

from __future__ import annotations

from weft.config.sections.lora_section import LoraSection
from weft.config.sharding import local_spec
from weft.config.sizing.layer_elements import recurrent_layers
from weft.config.spec import DTYPE_BYTES, ModelSpec, MoESpec
from weft.types.layout import Layout


def adapter_bytes(spec: ModelSpec, dtype: str, lora: LoraSection, layout: Layout, redundant: int = 0) -> int:
    """Return the bytes of the places for adapters on one rank, and of the copies of --lora-modules.

    ``spec``: the whole model. ``redundant``: extra copies of experts over all ranks. On a CPU places and
    copies are in the same memory. The copies are counted with the size of a place; adapters that are loaded
    later are not counted.
    """
    if not lora.max_loras:
        return 0
    spec = local_spec(spec, layout)
    numbers = spec.layers * _feeding(spec) + (spec.layers - recurrent_layers(spec)) * _attention(spec)
    numbers += _mixers(spec)
    if spec.moe is not None:
        numbers += len(spec.moe.layers) * _routed(spec, spec.moe, lora.lora_experts, layout, redundant)
    vocab = -(-spec.vocab_size // layout.tensor)
    numbers += (1 + spec.head) * (vocab + spec.hidden) + lora.max_lora_rank  # A of the embedding: an identity
    place = numbers * lora.max_lora_rank
    if lora.lora_saved_modules:
        place += (1 + spec.head) * vocab * spec.hidden
    return place * DTYPE_BYTES[dtype] * (lora.max_loras + len(lora.lora_modules))


def _feeding(spec: ModelSpec) -> int:
    """Return inputs and outputs of one dense feed-forward block, averaged over the layers."""
    dense = spec.layers - len(spec.bare_layers)
    if spec.moe is not None and not spec.moe.beside:
        dense -= len(spec.moe.layers)
    return _blocks(spec.hidden, spec.intermediate, spec.gated) * dense // spec.layers


def _blocks(hidden: int, inner: int, gated: bool) -> int:
    """Return inputs and outputs of the matrices of a feed-forward block; gate and up have an A each."""
    return (2 if gated else 1) * (hidden + inner) + inner + hidden


def _attention(spec: ModelSpec) -> int:
    """Return inputs and outputs of the matrices of one attention layer."""
    mla = spec.mla
    if spec.sparse is not None:
        return 0  # takes no adapters
    if mla is None:
        queries = spec.heads * (2 if spec.output_gate else 1) * spec.head_dim
        outputs = queries + 2 * spec.kv_heads * spec.head_dim
        return 3 * spec.hidden + outputs + spec.heads * spec.head_dim + spec.hidden
    queries = spec.heads * (mla.nope + mla.rope)
    first = mla.q_lora or queries
    down = 2 * spec.hidden + first + mla.kv_lora + mla.rope
    q_up = mla.q_lora + queries if mla.q_lora else 0
    up = mla.kv_lora + spec.heads * (mla.nope + mla.v)
    of_heads = spec.heads * (mla.nope + 2 * mla.kv_lora + mla.v)  # copies by head (``UpAdapters``)
    gate = spec.hidden + spec.heads if mla.head_gate else 0
    return down + q_up + up + of_heads + gate + spec.heads * mla.v + spec.hidden


def _mixers(spec: ModelSpec) -> int:
    """Return inputs and outputs of the matrices of all recurrent mixers."""
    total = 0
    if (delta := spec.delta) is not None:
        key, value = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
        outputs = 2 * key + value + delta.v_heads
        if rank := delta.gate_rank:
            outputs += 2 * rank + (rank + delta.decays) + (rank + value)
        else:
            outputs += value + delta.decays
        total += len(delta.layers) * (delta.matrices * spec.hidden + outputs + value + spec.hidden)
    if (conv := spec.conv) is not None:
        total += len(conv.layers) * (2 * spec.hidden + 4 * conv.heads * conv.dim)
    if (mamba := spec.mamba) is not None:
        inner, shared = mamba.heads * mamba.dim, 2 * mamba.groups * mamba.state
        total += len(mamba.layers) * (2 * spec.hidden + 3 * inner + shared + mamba.heads)
    if (first := spec.mamba1) is not None:
        total += len(first.layers) * (2 * spec.hidden + 4 * first.inner + first.selected)
    return total


def _routed(spec: ModelSpec, moe: MoESpec, experts: bool, layout: Layout, redundant: int) -> int:
    """Return inputs and outputs of the experts of one routed block on this rank."""
    made = _blocks(spec.hidden, moe.shared, moe.gated) if moe.shared else 0
    if moe.latent:
        made += 2 * (spec.hidden + moe.latent)
    if experts:
        # Whole experts have places for the adapters of every replica.
        here = -(-(moe.experts + redundant) // layout.ranks) * layout.data if layout.expert else moe.experts
        made += here * _blocks(moe.latent or spec.hidden, moe.intermediate, moe.gated)
    return made
