"""A model of transformers as a Weft model: attention on paged caches, everything else as published."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from weft.attention.base import AttentionBackend, Backends, CoreInput, LayerCache, StepInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Model
from weft.models.generic.attention import FusedAttention
from weft.models.generic.experts import RoutedExperts
from weft.models.generic.interface import (
    AttentionCall,
    Receiver,
    answered_by,
    call_weft,
    current,
    published_experts,
)
from weft.models.generic.last_rows import LastRows, See, layers_of, seen_layers
from weft.models.generic.modules import Sums
from weft.models.generic.skeleton import base_of
from weft.models.generic.swap import Substitution
from weft.moe.balance import ExpertLayers
from weft.ops import torch_ops
from weft.ops.low_rank import AdapterRows
from weft.parallel.comm import Pending

Tensor = torch.Tensor


class _Given(BaseModelOutputWithPast):
    """Output of a base model with given hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key == 0 else super().__getitem__(key)


class _Stub(nn.Module):
    """Stands where the base model was, and returns its input. So the head's own forward computes logits."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.__dict__["base"] = base  # hidden from nn.Module: the parameters belong to the base

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["base"], name)
        # The head of OPT calls the decoder inside of the base model.
        return _Stub(found) if isinstance(found, PreTrainedModel) else found

    def forward(self, *_: Any, inputs_embeds: Any = None, **__: Any) -> _Given:
        return _Given(inputs_embeds)


class _Pass:
    """Receiver of the calls of one step."""

    attends = True

    def __init__(
        self,
        model: TransformersModel,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        done: Callable[[int], None] | None,
    ) -> None:
        self._model = model
        self._step = step
        self._kv = kv
        backend = backends["gqa"]
        assert isinstance(backend, AttentionBackend)
        self._backend = backend
        self._done = done
        self._angles: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Write keys and values to the caches of the layer, and return the attention of all segments.

        In the second pass of the last layer: return what the first pass has kept.
        """
        model = self._model
        layer: int = call.module.layer_idx
        if model.sums.filler:
            self._written(layer)
            return call.q.new_zeros(1, 1, call.q.shape[1], call.v.shape[3])
        kept = self._kept(layer)
        if kept is None:
            kind = model.kinds[layer]
            step = self._step
            call = call.with_distances(step.positions)
            if layer in model.cuts:
                call = model.cuts[layer].of(call)
            q = model.write(call, self._kv[layer][kind], step.writes[kind], model.spec.caches[kind].fp8)
            kept = self._attended(layer, q, call.scale, call.sinks, call.softcap or 0.0)
        width = call.v.shape[3]
        kept = kept if width == kept.shape[2] else kept[..., :width].contiguous()
        return kept.unsqueeze(0)

    def fused(self, attention: FusedAttention, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output of an attention module [1, T, hidden] for x [1, T, hidden].

        angles: cos and sin [1, T, rotated], both halves alike.
        """
        model, layer, rotation = self._model, attention.layer, attention.rotation
        kept = self._kept(layer)
        if kept is None:
            kind = model.kinds[layer]
            q = model.cache_op(model.spec.caches[kind].fp8)(
                attention.group.whole(x),
                attention.heads,
                attention.kv_heads,
                *attention.norms,
                rotation.eps,
                *self._halves(*angles),
                *self._kv[layer][kind],
                self._step.writes[kind],
            )
            kept = self._attended(layer, q, rotation.scale, None)
        return attention.out(kept.view(1, len(kept), -1))

    def _kept(self, layer: int) -> Tensor | None:
        last = self._model.last_rows
        return last.kept if last is not None and layer == self._model.spec.layers - 1 else None

    def _written(self, layer: int) -> None:
        if self._done is not None:
            self._done(layer)  # later modules of the layer write no cache

    def _halves(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, rotated / 2] in the dtype of the op. Computed once for all layers."""
        found = self._angles.get(id(cos))
        if found is None:
            wide, half = torch_ops.wide(self._model.dtype), cos.shape[2] // 2
            first, second = (part[0, :, :half].to(wide).contiguous() for part in (cos, sin))
            found = self._angles[id(cos)] = (first, second, cos)  # ``cos`` stays alive, so the id is unique
        return found[0], found[1]

    def _attended(
        self, layer: int, q: Tensor, scale: float, sinks: Tensor | None, softcap: float = 0.0
    ) -> Tensor:
        """Return the attention [T, heads, dim] of rotated queries q. The caches have the entries of the step.

        Ends the first pass of the last layer.
        """
        step, model = self._step, self._model
        kind = model.kinds[layer]
        self._written(layer)
        out = torch.empty_like(q)
        for segment, prepared in zip(step.segments, step.prepared, strict=True):
            if not segment.tokens:
                continue
            alone = segment.tokens == len(q)
            rows = slice(segment.begin, segment.begin + segment.tokens)
            core = CoreInput(segment, self._kv[layer], scale, prepared[kind], sinks, softcap)
            parts = (q, out) if alone else (q[rows], out[rows])
            self._backend.attend(*parts, core, kind, model.spec.caches[kind])
        if layer in model.cuts:
            out = model.cuts[layer].whole(out, model.sums)
        last = model.last_rows
        return out if last is None or layer != model.spec.layers - 1 else last.attended(out)

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return published_experts(module, x, ids, weights)


class _Loops:
    """Receiver of a pass with the attention of transformers: only experts call Weft."""

    attends = False

    def attend(self, call: AttentionCall) -> Tensor:
        raise AssertionError("this pass uses the attention of transformers")

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return published_experts(module, x, ids, weights)


class TransformersModel(Model):
    """A causal model of transformers with Weft's attention.

    Rows of a step are one sequence [1, T] with positions; only attention knows which rows belong together.
    Collectives finish inside the forward pass (``Sums``), so the generators never yield.
    """

    def __init__(
        self, spec: ModelSpec, build: Build, published: Any, sums: Sums, swapped: Substitution
    ) -> None:
        super().__init__(spec, build)
        self.published = published
        self.sums = sums
        self.loops = tuple(sorted(set(swapped.loops)))
        """Classes of experts that run in a loop of transformers."""
        name, base = base_of(published)
        # Hidden from nn.Module: both show parameters that ``published`` shows already.
        head = copy.copy(published)
        head._modules = {**published._modules, name: _Stub(base)}
        self._base = (base,)
        self._head = (head,)
        self.kinds = {layer: self.spec.cache_of(layer) for layer in range(self.spec.layers)}
        fp8 = any(cache.fp8 for cache in self.spec.caches)
        self.cuts = swapped.cuts
        self._cache_op = build.op("qkv_rope_cache").run
        self._cache_op_fp8 = build.op("qkv_rope_cache_fp8").run if fp8 else None
        for module, rotation in swapped.rotations:
            FusedAttention(module, rotation, self._fused)
        layers = layers_of(base, swapped.last_attention, spec.layers)
        self._layers = (layers,)
        self.last_rows = None if layers is None else LastRows(layers[-1], sums)
        """The last layer for some rows; None if the last layer is unknown."""
        self._no_angles = torch.zeros(1, 0, dtype=build.wide, device=build.device)
        # Of four dims, so transformers takes the mask as finished and makes none.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=build.dtype, device=build.device)

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(sorted({*super().varying, "modules of transformers"}))

    @property
    def asking(self) -> tuple[str, ...]:
        return tuple(sorted({*super().asking, *(f"{name} (of transformers)" for name in self.loops)}))

    def pack(self) -> None:
        super().pack()
        routed = [module for module in self.modules() if isinstance(module, RoutedExperts)]
        divided = [module.divided for module in routed if module.divided is not None]
        self.experts = ExpertLayers(divided) if divided else None

    def cache_op(self, fp8: bool) -> Any:
        """Return the op for rotation and cache."""
        op = self._cache_op_fp8 if fp8 else self._cache_op
        assert op is not None
        return op

    def _fused(self, attention: FusedAttention, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor | None:
        """Return the output of ``attention`` in a pass of Weft; None in any other pass."""
        receiver = current()
        if not isinstance(receiver, _Pass) or self.sums.filler:
            return None
        return receiver.fused(attention, x, angles)

    def write(self, call: AttentionCall, cache: tuple[Tensor, ...], writes: Tensor, fp8: bool) -> Tensor:
        """Write the keys and values of ``call`` to ``cache``. Return the queries [T, heads, dim].

        Values with fewer dims than the cache are padded with zeros (expanded latent attention).
        """
        q, k, v = (part[0].transpose(0, 1) for part in (call.q, call.k, call.v))  # [T, heads, dim]
        dim = cache[0].shape[4]
        if v.shape[2] < dim:
            v = torch.nn.functional.pad(v, (0, dim - v.shape[2]))
        heads, kv_heads = q.shape[1], k.shape[1]
        qkv = torch.cat((q, k, v), dim=1).view(len(q), -1).to(self.dtype)
        angles = self._no_angles.expand(len(q), 0)
        result: Tensor = self.cache_op(fp8)(
            qkv, heads, kv_heads, None, None, 0.0, angles, angles, *cache, writes
        )
        return result

    def hidden_apart(self, ids: Tensor, positions: Tensor, receiver: Receiver) -> Tensor:
        """Return the hidden states [T, hidden] of a pass in which ``receiver`` answers attention.

        For the self check. ids, positions: int64 [T].
        """
        with answered_by(receiver):
            out = self._base[0](
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=self._mask,
                use_cache=False,
            )
        result: Tensor = out.last_hidden_state[0]
        return result

    def published_hidden(self, ids: Tensor) -> Tensor:
        """Return the hidden states [T, hidden] of one sequence with the attention and masks of transformers.

        For the self check, on one rank. ids: int64 [T].
        """
        positions = torch.arange(len(ids), device=ids.device)
        call_weft(self.published.config, "eager")
        try:
            with answered_by(_Loops()):
                out = self._base[0](input_ids=ids[None], position_ids=positions[None], use_cache=False)
        finally:
            call_weft(self.published.config)
        result: Tensor = out.last_hidden_state[0]
        return result

    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
        see: See | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Run one forward pass (``Model.hidden``). ``see(layer, stream, None)`` runs before each layer."""
        yield from ()
        sums = self.sums
        sums.exchange, sums.adapters, sums.filler = step.exchange, step.adapters, not len(step.ids)
        ids, positions = step.ids, step.positions
        if sums.filler:  # code of transformers cannot reshape zero rows; other ranks wait for this rank
            ids = positions = torch.zeros(1, dtype=torch.int64, device=self.device)
        last, wanted = self.last_rows, logits_indices
        if last is not None:
            few = wanted is not None and last.on and 2 * len(wanted) <= len(ids) and not sums.filler
            # The layer computes one row at least, for the same reason.
            rows = wanted if wanted is None or len(wanted) else positions.new_zeros(1)
            last.begin(len(ids), rows if few else None)
        try:
            seen = seen_layers(self._layers[0], see, len(step.ids))
            with seen, answered_by(_Pass(self, step, kv, backends, done)):
                out = self._base[0](
                    input_ids=ids[None],
                    position_ids=positions[None],
                    attention_mask=self._mask,
                    use_cache=False,
                )
        finally:
            if last is not None:
                last.end()
        x: Tensor = out.last_hidden_state[0]
        if sums.filler:
            return x[:0]
        if wanted is None:
            return x
        return x[: len(wanted)] if last is not None and few else x[wanted]

    def embed(self, step: StepInput) -> Generator[Pending, None, Tensor]:
        """Return the embeddings of ``step.ids``, [T, hidden]."""
        yield from ()
        made: Tensor = self._base[0].get_input_embeddings()(step.ids)
        return made

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        yield from ()
        if not self.spec.head or (not len(hidden) and self.sums.comm.size == 1):
            return hidden.new_zeros(len(hidden), self.spec.vocab_size)
        self.sums.adapters = adapters  # a head beside an unknown embedding is a linear layer with adapters
        made: Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return made.to(self.dtype)
