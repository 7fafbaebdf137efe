"""DeepSeek V4: sparse attention and routed experts, with several residual streams."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.attention.sparse.compress import ByToken, Completed, completed_groups, groups_by_token
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.hyper import HyperConnection, HyperHead
from weft.layers.rope import Rope
from weft.models.decoder import Block, Decoder
from weft.models.deepseek_v4.v4_attention import SparseAttention, SparseInput, TypeInput, overlap_of
from weft.moe.block import RoutedMLP
from weft.ops.moe import Contribution
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class StreamsBlock(Block):
    """A block with attention and feed-forward that read from and add to several streams."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        assert spec.moe is not None
        assert spec.hyper is not None
        hashed = spec.vocab_size if layer in spec.moe.hash_layers else 0
        super().__init__(
            spec,
            build,
            attention=SparseAttention(spec, layer, build),
            feed_forward=RoutedMLP(spec.hidden, spec.moe, spec.activation, build, hashed=hashed),
        )
        self.attention_streams = HyperConnection(spec.hidden, spec.hyper, spec.norm_eps, build)
        self.feed_forward_streams = HyperConnection(spec.hidden, spec.hyper, spec.norm_eps, build)

    def steps(
        self,
        x: Tensor,
        delta: Contribution | None,
        shared: SparseInput,  # type: ignore[override]
        caches: LayerCache,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Contribution | None]]:
        """Run the block on the streams x [T, N, hidden].

        ``delta`` is None, because outputs are added at once. Returns the streams of rows ``logits_indices``
        (None: all), and None. Writes the caches of the layer. Yields at each pending communication.
        """
        # [T, hidden], [T, N], [T, N, N]: input of the layer, weights of its output, mix of streams
        one, out, mix = self.attention_streams(x)
        partial = self.attention(self.attention_norm(one), shared, caches, logits_indices)
        if logits_indices is not None:
            x = x[logits_indices]
            out = out[logits_indices]
            mix = mix[logits_indices]
        made = yield from reduced(self._comm, partial)
        x = self.attention_streams.add(x, made, out, mix)
        one, out, mix = self.feed_forward_streams(x)
        ids = None
        if self.feed_forward.reads_ids:
            ids = shared.step.ids if logits_indices is None else shared.step.ids[logits_indices]
        normed = self.feed_forward_norm(one)
        adapters = shared.step.adapters_at(logits_indices)
        step = shared.step
        made = yield from self.feed_forward.steps(
            self._comm, normed, ids, step.exchange, adapters, step.routes
        )
        return self.feed_forward_streams.add(x, made, out, mix), None


class StreamsDecoder(Decoder):
    """Decoder with streams: embedding copied to every stream, blocks, streams merged, norm, head."""

    def __init__(
        self, spec: ModelSpec, build: Build, make_block: Callable[[ModelSpec, int, Build], Block]
    ) -> None:
        super().__init__(spec, build, make_block)
        assert spec.hyper is not None
        assert spec.sparse is not None
        self.streams_head = HyperHead(spec.hidden, spec.hyper, spec.norm_eps, build)
        self._group_rope = Rope(spec.sparse.group_rope, build)
        self._first_layers = {
            kind: spec.sparse.types.index(kind) for kind in dict.fromkeys(spec.sparse.types)
        }
        self._reads = {kind: _reads(self.spec, kind, layer) for kind, layer in self._first_layers.items()}

    def share(self, step: StepInput, kv: Sequence[LayerCache], backends: Backends) -> SparseInput:
        """Return the shared input of the layers: for each type of layer the angles, the plans and the
        completed groups.
        """
        backend = backends["sparse"]
        assert isinstance(backend, SparseBackend)
        group_angles = self._group_rope.angles(step.positions)
        types: dict[str, TypeInput] = {}
        for kind, reads in self._reads.items():
            caches = kv[self._first_layers[kind]]
            prefill, decode = step.segments
            types[kind] = TypeInput(
                reads=reads,
                angles=self._rope.angles(step.positions) if reads.groups is None else group_angles,
                plans=(backend.plan(prefill, reads, caches), backend.plan(decode, reads, caches)),
                completed=self._completed(step, kind, reads, caches, backend.by_token),
            )
        return SparseInput(step=step, backends=backends, types=types)

    def _completed(
        self, step: StepInput, kind: str, reads: Reads, caches: LayerCache, by_token: bool
    ) -> Completed | ByToken | None:
        """Return the groups completed by the step in layers of type ``kind``.

        With ``by_token``, return the data for an operation that finds the groups. None for layers without
        groups.
        """
        if reads.groups is None:
            return None
        sources, rope = reads.groups - 1, self._group_rope
        if by_token:
            return groups_by_token(step, sources, reads.groups, reads.ratio, rope)
        block = caches[sources][0].shape[1]
        return completed_groups(step, sources, reads.groups, reads.ratio, overlap_of(kind), block, rope)

    def enter(self, embedded: Tensor) -> Tensor:
        assert self.spec.hyper is not None
        return embedded.unsqueeze(1).repeat(1, self.spec.hyper.streams, 1)

    def leave(self, x: Tensor, delta: Contribution | None) -> Tensor:
        result: Tensor = self.norm(self.streams_head(x))
        return result


def _reads(spec: ModelSpec, kind: str, layer: int) -> Reads:
    """Return the reads of layers of the type of ``layer``: window entries, and groups (the last KV cache
    group)."""
    sparse = spec.sparse
    kinds = spec.caches_of(layer)
    assert sparse is not None
    groups = None if kind == "window" else kinds[2]
    return Reads(
        entries=kinds[0],
        window=sparse.window,
        groups=groups,
        ratio=1 if groups is None else spec.caches[groups].ratio,
        top=sparse.index_top if kind == "chosen" else 0,
        heads=spec.heads,
        dim=spec.head_dim,
        index_heads=sparse.index_heads,
    )


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    return StreamsBlock(spec, layer, build)
