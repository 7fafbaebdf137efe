"""A model of transformers as a Weft model: attention on paged caches, everything else as published."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weft.attention.base import AttentionBackend, Backends, CoreInput, LayerCache, StepInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.decoder import Model
from weft.models.generic.interface import AttentionCall, answered_by, call_weft, published_experts
from weft.models.generic.modules import Sums
from weft.models.generic.skeleton import base_of
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
        return getattr(self.__dict__["base"], name)

    def forward(self, *_: Any, inputs_embeds: Any = None, **__: Any) -> _Given:
        return _Given(inputs_embeds)


class _Pass:
    """Receiver of the calls of one step."""

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

    def attend(self, call: AttentionCall) -> Tensor:
        """Write keys and values to the caches of the layer, and return the attention of all segments."""
        step, model = self._step, self._model
        layer: int = call.module.layer_idx
        kind = model.kinds[layer]
        caches = self._kv[layer]
        spec = model.spec.caches[kind]
        width = call.v.shape[3]
        q = model.write(call, caches[kind], step.writes[kind], spec.fp8)
        if self._done is not None:
            self._done(layer)  # later modules of the layer write no cache
        out = torch.empty_like(q)
        for segment, prepared in zip(step.segments, step.prepared, strict=True):
            if not segment.tokens:
                continue
            alone = segment.tokens == len(q)
            rows = slice(segment.begin, segment.begin + segment.tokens)
            core = CoreInput(segment, caches, call.scale, prepared[kind], call.sinks)
            parts = (q, out) if alone else (q[rows], out[rows])
            self._backend.attend(*parts, core, kind, spec)
        out = out if width == out.shape[2] else out[..., :width].contiguous()
        return out.unsqueeze(0)

    def route(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return published_experts(module, x, ids, weights)


class _Loops:
    """Receiver of a pass with the attention of transformers: only experts call Weft."""

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
        self, spec: ModelSpec, build: Build, published: Any, sums: Sums, loops: Sequence[str]
    ) -> None:
        """``loops``: classes of experts modules that read values on the host."""
        super().__init__(spec, build)
        self.published = published
        self.sums = sums
        self._loops = tuple(sorted(set(loops)))
        name, base = base_of(published)
        # Hidden from nn.Module: both show parameters that ``published`` shows already.
        head = copy.copy(published)
        head._modules = {**published._modules, name: _Stub(base)}
        self._base = (base,)
        self._head = (head,)
        self.kinds = {layer: self.spec.cache_of(layer) for layer in range(self.spec.layers)}
        fp8 = any(cache.fp8 for cache in self.spec.caches)
        self._cache_op = build.op("qkv_rope_cache").run
        self._cache_op_fp8 = build.op("qkv_rope_cache_fp8").run if fp8 else None
        self._no_angles = torch.zeros(1, 0, dtype=build.wide, device=build.device)
        # Of four dims, so transformers takes the mask as finished and makes none.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=build.dtype, device=build.device)

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(sorted({*super().varying, "modules of transformers"}))

    @property
    def asking(self) -> tuple[str, ...]:
        return tuple(sorted({*super().asking, *(f"{name} (of transformers)" for name in self._loops)}))

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
        op = self._cache_op_fp8 if fp8 else self._cache_op
        assert op is not None
        result: Tensor = op(qkv, heads, kv_heads, None, None, 0.0, angles, angles, *cache, writes)
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
    ) -> Generator[Pending, None, Tensor]:
        yield from ()
        with answered_by(_Pass(self, step, kv, backends, done)):
            out = self._base[0](
                input_ids=step.ids[None],
                position_ids=step.positions[None],
                attention_mask=self._mask,
                use_cache=False,
            )
        x: Tensor = out.last_hidden_state[0]
        return x if logits_indices is None else x[logits_indices]

    def logits(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        yield from ()
        made: Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return made.to(self.dtype)
