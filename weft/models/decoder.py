"""The interface of a model on one rank, and the frame of decoder-only models: embedding, blocks, norm, head.
Families supply the blocks.

Only generators yield (``Block.steps``, ``hidden``, ``logits`` and their callees), once per collective. On a
single rank the generators yield nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn

from weft.attention.base import Backends, LayerCache, MediaRows, StepInput
from weft.attention.gqa.gqa import AttentionInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward, Layer, pack_all
from weft.layers.dense import Linear, LMHead, NoHead, RMSNorm, TokenEmbedding
from weft.layers.rope import Rope
from weft.layers.score import ScoreHead
from weft.models.adapters import Adapters
from weft.models.vision import Tower, make_tower
from weft.moe.balance import ExpertLayers
from weft.moe.block import RoutedMLP
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import Contribution, summed
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class Model(nn.Module, ABC):
    """A model on one rank. The loader fills the weights. A model keeps no state between steps."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec = build.local(spec)
        """Model spec of this rank's part (``weft.config.sharding``)."""
        self.mesh = build.mesh
        """Mesh of the ranks that compute each step together."""
        self.dtype = build.dtype
        self.device = build.device
        self.notes = build.notes
        """Notes about the parameters, for the loader."""
        self._ops = build.ops
        self.routed_layers = 0
        """Number of layers with routes in answers; drafting modules do not count. Set by ``pack``."""
        self.experts: ExpertLayers | None = None
        """Expert layers divided over ranks. Set by ``pack``; None without such layers."""
        self.adapters: Adapters | None = None
        """LoRA adapters on this rank. Set by the loader; None without places for adapters."""
        self.vision: Tower | None = None
        """Tower that makes the rows of ``StepInput.media``; None for text-only models."""
        own = spec.classify is not None and not spec.classify.tokens
        self.score = ScoreHead(spec.hidden, spec.classify.labels, build) if spec.classify and own else None
        """Matrix of a classifier; None for other models."""

    def pack(self) -> None:
        """Pass every loaded weight to the op that reads the weight. Call once, before the first ``steps``."""
        pack_all(self)
        routed = [m for m in getattr(self, "blocks", nn.ModuleList()).modules() if isinstance(m, RoutedMLP)]
        for number, layer in enumerate(routed):
            layer.number = number
        self.routed_layers = len(routed)
        divided = [m.divided for m in self.modules() if isinstance(m, RoutedMLP) and m.divided is not None]
        self.experts = ExpertLayers(divided) if divided else None

    @property
    def varying(self) -> tuple[str, ...]:
        """Ops with batch-dependent rows, each with its implementation. Includes the collectives of the
        mesh."""
        found = {f"{op} ({made.name})" for (op, _), made in self._ops.items() if not made.invariant}
        if any(isinstance(m, RoutedMLP) and m.varying for m in self.modules()):
            found.add("moe_copies (of experts that move)")
        return tuple(sorted(found.union(self.mesh.varying)))

    @property
    def asking(self) -> tuple[str, ...]:
        """Ops that make the host read a device value in the middle of a step, each with its
        implementation."""
        return tuple(sorted({f"{op} ({made.name})" for (op, _), made in self._ops.items() if made.asks}))

    def capturable(self, *tokens: int) -> bool:
        """Return True if passes over these numbers of tokens may be captured in the present epoch.

        Requires collectives that can be captured (on a CPU operators, on a GPU NCCL), and no device values
        read by the host. All ranks of a group return the same answer.
        """
        experts = self.experts
        collectives = self.mesh.shares if self.device.type == "cpu" else self.mesh.obstacle is None
        return collectives and (experts is None or not any(experts.asks(count) for count in tokens))

    @abstractmethod
    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Run one forward pass up to the head. Return [L, hidden] for the merged rows ``logits_indices``
        (int64 [L]).

        logits_indices: None: all rows. kv: caches of each layer, written in place. Yields once per
        collective, in an order fixed by the configuration; a single rank never yields. ``done(layer)`` is
        called after each layer, when all cache writes of the layer are launched.
        """

    def lookahead(
        self,
        step: StepInput,
        hidden: Tensor,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Run the MTP module, which predicts one more token. Return [L, hidden] for rows ``logits_indices``
        (None: all).

        ``step.ids`` are the ids one position later; hidden [T, hidden] is the result of ``hidden`` for the
        positions of the step. The returned states belong to the next positions: their ``logits`` predict the
        token after ``step.ids``. So ``step.media`` lists rows with an image as the *next* token (levels are
        ignored), and ``step.rope_positions`` are the positions of ``hidden``. Only for models with
        ``spec.mtp_layers``.
        """
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Elements of a result of ``hidden``."""
        return self.spec.hidden

    @property
    def draft_ids(self) -> Tensor | None:
        """int64: token id of each column of ``draft_logits``; None for equal ids."""
        return None

    def draft_logits(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        """Return the logits of drafts for a result of ``lookahead`` [L, width]: by default ``logits``."""
        return (yield from self.logits(hidden))

    @abstractmethod
    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        """Return logits [L, vocab], in the model's dtype, for a result of ``hidden``. ``adapters``: places of
        the L rows."""

    def classify(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        """Return the numbers of ``spec.classify`` for final hidden states [n, hidden], float64 [n, labels].

        Yields like ``logits``.
        """
        wanted = self.spec.classify
        assert wanted is not None
        if self.score is not None:
            made: Tensor = self.score(hidden)
            return made
        logits = yield from self.logits(hidden)
        made = logits[:, list(wanted.tokens)].double()
        return made[:, 1:] - made[:, :1] if wanted.difference else made

    def steps(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Run one forward pass. Return logits [L, vocab], in the model's dtype, for ``step.logits_index``."""
        hidden = yield from self.hidden(step, kv, backends, step.logits_index, done)
        return (yield from self.logits(hidden, step.adapters_at(step.logits_index)))


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream (pre-norm).

    The output of a layer is added to the stream at the next norm: one pass over memory for add and norm.
    """

    def __init__(self, spec: ModelSpec, build: Build, attention: Layer, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
        self.feed_forward = feed_forward
        self._comm = build.comm

    def steps(
        self,
        x: Tensor,
        delta: Contribution | None,
        shared: AttentionInput,
        caches: LayerCache,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Contribution | None]]:
        """Run the block on the stream x [T, hidden] and ``delta`` [T, hidden], which is not yet added to the
        stream.

        May overwrite x. Writes the caches of the layer. Returns stream and delta of the rows
        ``logits_indices`` (int64 [L]; None: all). Yields at each pending reduction.
        """
        x, normed = self.attention_norm.add(x, delta)
        delta = None  # results of experts are large in prompts
        partial = self.attention(normed, shared, caches, logits_indices)
        if logits_indices is not None:
            x = x[logits_indices]
        delta = yield from reduced(self._comm, partial)
        x, normed = self.feed_forward_norm.add(x, delta)
        ids = None
        if self.feed_forward.reads_ids:
            ids = shared.step.ids if logits_indices is None else shared.step.ids[logits_indices]
        adapters = shared.step.adapters_at(logits_indices)
        step = shared.step
        made = yield from self.feed_forward.terms(
            self._comm, normed, ids, step.exchange, adapters, step.routes
        )
        return x, made


class MTPModule(nn.Module):
    """Multi-token prediction module: combines a hidden state with the embedding of the next token.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """

    def __init__(self, spec: ModelSpec, build: Build, block: Block) -> None:
        super().__init__()
        wide = spec.centred_norms
        self.embedding_norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=wide)
        self.hidden_norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=wide)
        self.project = Linear(2 * spec.hidden, spec.hidden, build)
        self.block = block
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=wide)

    def steps(
        self,
        embedded: Tensor,
        hidden: Tensor,
        shared: AttentionInput,
        caches: LayerCache,
        logits_indices: Tensor | None,
    ) -> Generator[Pending, None, Tensor]:
        """Return [L, hidden] after the last norm, for rows ``logits_indices`` of embedded and hidden [T,
        hidden]."""
        x = self.project(torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=1))
        x, delta = yield from self.block.steps(x, None, shared, caches, logits_indices)
        return self.norm.add(x, delta)[1]


class Decoder(Model):
    """Embedding, blocks, norm, head.

    A family with another form of the stream, or of the shared input of layers, overrides ``share``, ``enter``
    and ``leave``.
    """

    def __init__(
        self, spec: ModelSpec, build: Build, make_block: Callable[[ModelSpec, int, Build], Block]
    ) -> None:
        """``make_block`` makes the block of a layer; layers from ``spec.layers`` on are MTP modules."""
        super().__init__(spec, build)
        self.embedding = TokenEmbedding(spec.vocab_size, spec.hidden, build, tied=spec.tied, adapted=True)
        self.blocks = nn.ModuleList(make_block(spec, layer, build) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
        self.head = LMHead(self.embedding, build, tied=spec.tied) if spec.head else NoHead(spec.vocab_size)
        self._comm = build.comm
        self._rope = Rope(spec.rope, build)
        self.vision = None if spec.vision is None else make_tower(spec.vision, build)
        modules = range(spec.layers, spec.layers + spec.mtp_layers)
        self.mtp = nn.ModuleList(MTPModule(spec, build, make_block(spec, layer, build)) for layer in modules)

    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
        see: Callable[[int, Tensor, Tensor | None], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Return the final hidden states of rows ``logits_indices`` (int64 [L]; None: all).

        Writes the caches ``kv``. Yields at each pending communication. ``done(layer)`` is called after each
        layer, and ``see(layer, stream, delta)`` before each layer.
        """
        x, shared = yield from self.begin(step, kv, backends)
        delta: Contribution | None = None
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            caches = kv[self.spec.attention.source(layer)]
            assert isinstance(block, Block)
            # After the keys and values of the last layer only the rows with logits are needed.
            wanted = logits_indices if layer == last else None
            if see is not None:
                total = delta = summed(delta)  # the next norm reads the same sum
                see(layer, x, total)
            steps = block.steps(x, delta, shared, caches, wanted)
            del x, delta  # the block frees the results of experts at its first norm
            x, delta = yield from steps
            delta = _with_level(delta, step.media, layer, wanted)
            if done is not None:
                done(layer)
        return self.leave(x, delta)

    def begin(
        self, step: StepInput, kv: Sequence[LayerCache], backends: Backends
    ) -> Generator[Pending, None, tuple[Tensor, Any]]:
        """Return (stream before the first block, input ``shared`` of every block)."""
        shared = self.share(step, kv, backends)
        embedded = yield from self.embed(step)
        return self.enter(embedded), shared

    def share(self, step: StepInput, kv: Sequence[LayerCache], backends: Backends) -> Any:
        """Return the input ``shared`` of every block."""
        angles = self._rope.angles(step.positions, step.rope_positions)
        return AttentionInput(step=step, angles=angles, backends=backends)

    def enter(self, embedded: Tensor) -> Tensor:
        """Return the stream before the first block, from the embeddings of tokens [T, hidden]."""
        return embedded

    def leave(self, x: Tensor, delta: Contribution | None) -> Tensor:
        """Return the input of the head, [L, hidden], from stream and delta of the last block."""
        return self.norm.add(x, delta)[1]

    def lookahead(
        self,
        step: StepInput,
        hidden: Tensor,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Return the hidden states of the MTP module for ``hidden`` [T, hidden].

        Writes the cache of the module. Yields at each pending communication.
        """
        # The rotation uses the position of the hidden state. Only differences of positions count, so the
        # shift is harmless.
        embedded = yield from self.embed(step)
        angles = self._rope.angles(step.positions, step.rope_positions)
        shared = AttentionInput(step=step, angles=angles, backends=backends)
        module = self.mtp[0]
        assert isinstance(module, MTPModule)
        caches = kv[self.spec.layers]
        return (yield from module.steps(embedded, hidden, shared, caches, logits_indices))

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        return (yield from self.head.steps(hidden, adapters))

    def embed(self, step: StepInput) -> Generator[Pending, None, Tensor]:
        """Return the embeddings of ``step.ids``, with images in place of their tokens: [T, hidden]."""
        embedded = yield from reduced(self._comm, self.embedding(step.ids, step.adapters))
        # After the sum over ranks, because every rank has the complete image rows.
        return embedded if step.media is None else embedded.index_copy(0, step.media.rows, step.media.main)


def _with_level(
    delta: Contribution | None, media: MediaRows | None, layer: int, wanted: Tensor | None
) -> Contribution | None:
    """Return ``delta`` of layer ``layer`` plus the image level of the layer (deepstack); ``delta`` itself
    (perhaps None) without a level. delta: [T, hidden], or [L, hidden] for the merged rows ``wanted`` (int64
    [L]).
    """
    if delta is None or media is None or media.levels is None or layer >= len(media.levels):
        return delta
    delta, level = summed(delta), media.levels[layer]
    assert delta is not None
    if wanted is None:
        return delta.index_copy(0, media.rows, delta.index_select(0, media.rows) + level)
    # Find each wanted row among the sorted image rows; rows without an image add 0.
    found = torch.searchsorted(media.rows, wanted).clamp(max=len(media.rows) - 1)
    of_image = media.rows.index_select(0, found) == wanted
    return delta + level.index_select(0, found).masked_fill(~of_image.unsqueeze(1), 0)
