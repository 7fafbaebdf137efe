"""DeepSeek V3.2 and GLM-5: DeepSeek V3 with attention to positions chosen by an indexer."""

from __future__ import annotations

from collections.abc import Sequence

from weft.attention.base import Backends, LayerCache, StepInput
from weft.attention.sparse.indexed import IndexedAttention, IndexedInput, reads_of
from weft.attention.sparse.sparse import SparseBackend
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Block, Decoder
from weft.models.deepseek.model import make_feed_forward


class IndexedDecoder(Decoder):
    """Decoder with layers that share the choice of the last indexer."""

    def share(self, step: StepInput, kv: Sequence[LayerCache], backends: Backends) -> IndexedInput:
        """Return the shared input of the layers, with a plan per segment and KV cache group and no choice
        yet.
        """
        backend = backends["sparse"]
        assert isinstance(backend, SparseBackend)
        prefill, decode = step.segments
        plans = {}
        for kind, cache in enumerate(self.spec.caches):
            reads = reads_of(self.spec, kind)
            caches = kv[cache.layers[0]]
            plans[kind] = backend.plan(prefill, reads, caches), backend.plan(decode, reads, caches)
        return IndexedInput(
            step=step,
            angles=self._rope.angles(step.positions),
            backends=backends,
            plans=plans,
            chosen=[None, None],
        )


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    attention = IndexedAttention(spec, layer, build)
    return Block(spec, build, attention=attention, feed_forward=make_feed_forward(spec, layer, build))
