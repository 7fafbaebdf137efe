"""Embeddings of each token for each layer: a table beside the embedding, and a small block in each layer.

Source: Gemma 3n and Gemma 4 (2025, 2026). Every rank has a part of the dims of each layer.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.dense import Linear, RMSNorm, RowLinear, TokenEmbedding
from weft.layers.plain_mlp import plain_activation
from weft.parallel.comm import Comm, Pending, reduced

Tensor = torch.Tensor


class InputTable(nn.Module):
    """Inputs of all layers: rows of a table, plus a projection of the token's embedding."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self._layers, self._dims = spec.layers, spec.layer.inputs
        width = spec.layers * spec.layer.inputs
        self.table = TokenEmbedding(spec.layer.inputs_vocab, width, build)
        self.project = Linear(spec.hidden, width, build)
        self.norm = RMSNorm(spec.layer.inputs, spec.norm_eps, build)
        self._scales = (spec.layer.inputs**0.5, spec.hidden**-0.5, 2**-0.5)
        begin, end = build.part(spec.layer.inputs).spans[0]
        self._part = slice(begin, end)

    def steps(self, comm: Comm, ids: Tensor, embedded: Tensor) -> Generator[Pending, None, Tensor]:
        """Return [layers, T, dims of this rank] for int64 [T] ids and their embeddings [T, hidden]."""
        rows = yield from reduced(comm, self.table(ids))
        of_table, of_projection, of_sum = self._scales
        shape = (self._layers, self._dims)
        projected = self.norm((self.project(embedded) * of_projection).unflatten(1, shape))
        made = (projected + rows.unflatten(1, shape) * of_table) * of_sum
        return made[..., self._part].transpose(0, 1).contiguous()


class LayerInputs(nn.Module):
    """``norm(out(activation(gate(x)) * input))`` for the inputs of one layer."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        self._layer = layer
        dims = build.part(spec.layer.inputs)
        self.gate = Linear(spec.hidden, dims, build)
        self.out = RowLinear(dims, spec.hidden, build)
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self._activation = plain_activation(spec.activation, build)

    def steps(
        self, comm: Comm, x: Tensor, inputs: Tensor, rows: Tensor | None
    ) -> Generator[Pending, None, Tensor]:
        """Return the contribution to the stream x [T or L, hidden].

        inputs: [layers, T, dims of this rank]. rows: int64 [L], merged rows of x; None: all.
        """
        own = inputs[self._layer] if rows is None else inputs[self._layer].index_select(0, rows)
        made = yield from reduced(comm, self.out(self._activation(self.gate(x)) * own))
        return self.norm(made)
