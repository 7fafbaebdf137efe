"""Blocks and frame of declared architectures, by the traits of ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.attention.gqa.declared import TraitAttention, TraitInput
from weft.attention.gqa.gqa import Attention, AttentionInput
from weft.attention.mla.mla import LatentAttention
from weft.config.parts.traits import AttentionSpec, LayerSpec, NormSpec, TemperatureSpec
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import GatedMLP, RMSNorm
from weft.layers.norms import LayerNorm, stream_norm
from weft.layers.plain_mlp import PlainMLP
from weft.layers.rope import Rope
from weft.models.declared.beside import BesideExperts, InputWeightedMLP
from weft.models.declared.layer_inputs import InputTable, LayerInputs
from weft.models.decoder import Block, Decoder
from weft.moe.block import RoutedMLP
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import Contribution, added
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights. Layers from ``spec.layers`` on belong to MTP modules.

    A model without further traits has the plain block.
    """
    plain = spec.norms == NormSpec() and spec.attention == AttentionSpec() and spec.layer == LayerSpec()
    if plain and spec.scales.residual == 1:
        attention = Attention(spec, layer, build) if spec.mla is None else LatentAttention(spec, layer, build)
        return Block(spec, build, attention=attention, feed_forward=make_feed_forward(spec, layer, build))
    return TraitBlock(spec, layer, build)


def make_feed_forward(spec: ModelSpec, layer: int, build: Build) -> FeedForward:
    """Build the feed-forward of ``layer``: routed experts or a dense block."""
    if spec.moe is not None and not spec.moe.beside and layer in spec.moe.layers:
        if spec.moe.on_input:
            return InputWeightedMLP(spec, build)
        return RoutedMLP(spec.hidden, spec.moe, spec.activation, build)
    dense = GatedMLP if spec.gated else PlainMLP
    inner = spec.intermediate * (1 + (layer in spec.layer.double))
    return dense(spec.hidden, inner, spec.activation, build, bias=spec.mlp_bias)


class TraitBlock(Block):
    """Attention and feed-forward with norms at the places of ``NormSpec``."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        torch.nn.Module.__init__(self)
        place = spec.norms.place
        self._parallel = place == "parallel"
        self._scale = spec.scales.residual
        self._comm = build.comm
        self.attention_norm = stream_norm(spec, build) if place != "post" else None  # type: ignore[assignment]
        self.feed_forward_norm = stream_norm(spec, build) if place in ("pre", "both") else None  # type: ignore[assignment]
        self.attention_out_norm = stream_norm(spec, build) if place in ("post", "both") else None
        self.feed_forward_out_norm = stream_norm(spec, build) if place in ("post", "both") else None
        self.attention: TraitAttention = TraitAttention(spec, layer, build)
        self.feed_forward = make_feed_forward(spec, layer, build)
        beside = spec.moe is not None and spec.moe.beside and layer in spec.moe.layers
        self.beside = BesideExperts(spec, build) if beside else None
        self.inputs = LayerInputs(spec, layer, build) if spec.layer.inputs else None
        self.scalar = build.weight(1) if spec.layer.scalar else None

    def steps(
        self,
        x: Tensor,
        delta: Contribution | None,
        shared: Any,
        caches: LayerCache,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Contribution | None]]:
        """Run the block; see ``Block.steps``."""
        x, normed = _added(x, delta, self.attention_norm)
        partial = yield from self.attention.steps(normed, shared, caches, logits_indices)
        attended = yield from reduced(self._comm, partial)
        attended = self._out(attended, self.attention_out_norm)
        if logits_indices is not None:
            x = x[logits_indices]
        if self._parallel:
            rows = normed if logits_indices is None else normed[logits_indices]
        else:
            x, rows = _added(x, attended, self.feed_forward_norm)
        adapters = shared.step.adapters_at(logits_indices)
        exchange, routes = shared.step.exchange, shared.step.routes
        made = yield from self.feed_forward.steps(self._comm, rows, None, exchange, adapters, routes)
        if self.beside is not None:
            made = yield from self.beside.steps(self._comm, x, made, exchange, adapters, routes)
        made = self._out(made, self.feed_forward_out_norm)
        made = attended + made if self._parallel else made
        if self.inputs is None and self.scalar is None:
            return x, made
        x = x + made
        if self.inputs is not None:
            x = x + (yield from self.inputs.steps(self._comm, x, shared.inputs, logits_indices))
        return (x if self.scalar is None else x * self.scalar), None

    def _out(self, made: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """Return the contribution to the stream, from the output of attention or feed-forward [T, hidden]."""
        if norm is not None:
            made = norm(made)
        return made if self._scale == 1 else made * self._scale


def _added(x: Tensor, delta: Contribution | None, norm: RMSNorm | LayerNorm | None) -> tuple[Tensor, Tensor]:
    """Return (x + delta, norm of the sum), or the sum twice without a norm. May overwrite x with a norm."""
    if norm is not None:
        return norm.add(x, delta)
    x = added(x, delta)
    return x, x


class DeclaredDecoder(Decoder):
    """The frame with scales, several rotations, and the temperature of the queries."""

    def __init__(self, spec: ModelSpec, build: Build, make_block: Any) -> None:
        super().__init__(spec, build, make_block)
        if spec.norms.kind != "rms":
            self.norm = stream_norm(spec, build)  # type: ignore[assignment]
        self._plain = all(type(block) is Block for block in self.blocks)
        self._more = [Rope(rope, build) for rope in spec.ropes]
        self._wide = build.wide
        self._softcap = build.op("softcap").run if spec.scales.softcap else None
        self.inputs = InputTable(spec, build) if spec.layer.inputs else None
        self.head_bias = build.weight(spec.vocab_size) if spec.head_bias else None

    def begin(
        self, step: StepInput, kv: Sequence[LayerCache], backends: Backends
    ) -> Generator[Pending, None, tuple[Tensor, AttentionInput]]:
        shared = self.share(step, kv, backends)
        media, ids = step.media, step.ids
        x = self.enter((yield from self.embed(replace(step, media=None))))
        if media is not None:  # image rows have the scale of the stream already
            x = x.index_copy(0, media.rows, media.main)
        if self.inputs is not None:
            assert isinstance(shared, TraitInput)
            if media is not None:
                ids = ids.index_fill(0, media.rows, self.spec.layer.inputs_pad)
            inputs = yield from self.inputs.steps(self._comm, ids, x)
            shared = replace(shared, inputs=inputs)
        return x, shared

    def share(self, step: StepInput, kv: Sequence[LayerCache], backends: Backends) -> AttentionInput:
        if self._plain:
            shared: AttentionInput = super().share(step, kv, backends)
            return shared
        angles = self._rope.angles(step.positions, step.rope_positions)
        more = [rope.angles(step.positions) for rope in self._more]
        none = (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))
        warm = self.spec.attention.temperature
        return TraitInput(
            step=step,
            angles=angles,
            backends=backends,
            rotations=(angles, *more, none),
            kv=kv,
            temperature=None if warm is None else _temperature(warm, step.positions, self._wide),
        )

    def enter(self, embedded: Tensor) -> Tensor:
        scales = self.spec.scales
        scale = scales.embedding
        if scales.embedding_rounded:
            scale = torch.tensor(scale, dtype=embedded.dtype).item()
        return embedded if scale == 1 else embedded * scale

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        made = yield from super().logits(hidden, adapters)
        if self.head_bias is not None:
            made = made + self.head_bias
        scales = self.spec.scales
        if scales.logits != 1:
            made = made * scales.logits
        if self._softcap is not None:
            made = self._softcap(made, scales.softcap)
        return made


def _temperature(warm: TemperatureSpec, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of the queries at int64 [T] positions: [T, 1, 1]."""
    turns = (positions + warm.shift).div(warm.length, rounding_mode="floor").to(dtype)
    # log computes every element alike, log1p does not.
    return (1 + warm.beta * (1 + turns).log()).view(-1, 1, 1)
