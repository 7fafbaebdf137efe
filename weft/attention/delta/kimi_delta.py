"""Kimi Delta Attention: a gated delta net with a decay for every key channel.

Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

import torch

from weft.attention.delta.delta import DeltaNet
from weft.attention.delta.delta_backend import DeltaInputs
from weft.config.spec import DeltaSpec
from weft.layers.build import Build
from weft.layers.dense import Linear
from weft.layers.paired import PairedLinear
from weft.layers.shard import Shard, joined, whole
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor


class KimiDelta(DeltaNet):
    """Layer of Kimi Delta Attention: ``DeltaNet`` with other input projections and a sigmoid output gate.

    qkv         [q heads | k heads | v heads, hidden]
    gates       [rank of decays | rank of z | b, hidden]; every rank has both low ranks
    decay       [v_heads * k_dim, rank]: a, one per key channel of each value head
    gate        [v_heads * v_dim, rank]: z
    step_bias   [v_heads * k_dim]
    """

    adapted = ("qkv", "gates", "decay", "gate", "out")

    def _add_inputs(
        self, hidden: int, delta: DeltaSpec, key: Shard, heads: Shard, decays: Shard, build: Build
    ) -> None:
        rank = delta.gate_rank
        value = heads.times(delta.v_dim)
        self.qkv = PairedLinear(hidden, joined(key, key, value), build)
        self.gates = PairedLinear(hidden, joined(whole(rank), whole(rank), heads), build)
        self.decay = Linear(rank, decays, build)
        self.gate = Linear(rank, value, build)
        self._parts = (rank, rank, heads.count)

    def _pack_inputs(self) -> None:
        self.qkv.pack_with(self.gates)

    def _inputs(self, x: Tensor, adapters: AdapterRows | None) -> DeltaInputs:
        qkv, gates = self.qkv.both(self.gates, x, adapters)
        decay, gate, b = gates.split(self._parts, dim=1)
        return DeltaInputs(qkv, self.gate(gate, adapters), b, self.decay(decay, adapters))
