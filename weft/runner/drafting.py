"""Selection of the drafter of a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.attention.base import Backends, LayerCache
from weft.config.resolved import KVConfig
from weft.config.sections.all import SpeculationSection
from weft.models.decoder import Model
from weft.models.drafted import DraftedModel
from weft.runner.batch.batch import BatchBuilder
from weft.runner.graphs.graphs import (
    MOST_DRAFTED,
    MOST_EXACT,
    MOST_KEPT,
    WORTH_CAPTURING,
    GraphOptions,
    context_buckets,
    row_buckets,
)
from weft.runner.slot_state import SlotState
from weft.speculation.base import Drafter
from weft.speculation.chain import CaptureOptions
from weft.speculation.draft_model import ModelChain, ModelDrafter
from weft.speculation.mtp import MtpDrafter
from weft.speculation.ngram import NgramDrafter

MOST_DRAFTS = 64
"""Captures of drafts per runner on a GPU, for buckets of rows, tokens, drafts and context. Each capture is
made during a step and takes memory that the pools do not have."""


class DraftedParts(NamedTuple):
    """Parts of a runner used by its drafter."""

    model: Model
    cache: Sequence[LayerCache]
    backends: Backends
    builder: BatchBuilder
    state: SlotState
    vocab_size: int
    kv: KVConfig


def make_drafter(
    parts: DraftedParts, speculation: SpeculationSection | None, graphs: GraphOptions | None
) -> Drafter | None:
    """Return the drafter for ``speculation``; None without speculation. ``graphs``: capture options of decode
    steps, if captured."""
    if speculation is None or speculation.speculative_method == "none":
        return None
    history = parts.state.history
    if speculation.speculative_method == "ngram":
        return NgramDrafter(history, speculation.ngram_min_length, speculation.ngram_max_length)
    if isinstance(parts.model, DraftedModel):
        chain = ModelChain(parts.model, parts.cache, parts.backends, parts.builder, history, parts.vocab_size)
        return ModelDrafter(chain, _capturing(parts, graphs))
    kv = parts.kv
    windows = any(pool.cache.window for pool in kv.pools)
    return MtpDrafter(
        parts.model,
        parts.cache,
        parts.backends,
        parts.builder,
        history,
        parts.vocab_size,
        kv.block_size,
        _capturing(parts, graphs),
        defers=parts.model.mesh.layout.expert_ranks == 1 and not windows,
    )


def _capturing(parts: DraftedParts, graphs: GraphOptions | None) -> CaptureOptions | None:
    """Return capture options for the passes of a drafter, derived from ``graphs``, the options of decode
    steps. Return None on a GPU whose steps have collectives: the captures of steps are then lazy."""
    cpu = parts.model.device.type == "cpu"
    if graphs is None or graphs.lazy != cpu:
        return None
    exact = range(1, min(graphs.max_rows, MOST_EXACT) + 1)
    # On a CPU a capture takes memory per call, and a draft model makes the calls of a whole model per draft.
    kept = MOST_KEPT // graphs.most_each if isinstance(parts.model, DraftedModel) else MOST_KEPT
    return CaptureOptions(
        capture=graphs.capture,
        contexts=context_buckets(parts.kv.max_model_len + parts.kv.copies),
        rows=exact if cpu else row_buckets(min(graphs.max_rows, MOST_DRAFTED)),
        most_each=graphs.most_each,
        after=WORTH_CAPTURING,
        most_kept=kept if cpu else MOST_DRAFTS,
        spare=parts.state.spare,
    )
