"""A routed feed-forward block: router, experts, combination.

Source: Shazeer et al. 2017, arXiv 1701.06538; softmax over all experts before the choice.
"""

from __future__ import annotations

import torch

from weft.config.spec import MoESpec
from weft.layers.build import Build, Layer
from weft.layers.linear import Linear

Tensor = torch.Tensor


class Experts(Layer):
    """The experts' weights, stacked, and their computation."""

    def __init__(self, count: int, hidden: int, intermediate: int, activation: str, build: Build) -> None:
        super().__init__()
        self.gate_up = build.weight(count, 2 * intermediate, hidden)
        self.down = build.weight(count, hidden, intermediate)
        self._activation = activation
        self._run = build.op("experts").run

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: [T, hidden], ids: int64 [T, k]; returns [T, k, hidden]."""
        made: Tensor = self._run(x, ids, self.gate_up, self.down, self._activation)
        return made


class RoutedMLP(Layer):
    """The ``top_k`` experts of each token, summed by their router weights in top-k order; returns a partial.

    The router computes in float32 (float64 in a float64 model); ties go to the lowest expert.
    """

    def __init__(self, hidden: int, spec: MoESpec, activation: str, build: Build) -> None:
        super().__init__()
        self.router = Linear(hidden, spec.experts, build, wide=True)
        self.experts = Experts(spec.experts, hidden, spec.intermediate, activation, build)
        self._wide = build.wide
        self._top_k = spec.top_k
        self._renormalize = spec.renormalize
        self._route = build.op("route").run
        self._combine = build.op("combine").run

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; ids: int64 [T], the tokens of its rows, where ``reads_ids``."""
        chosen, weights = self._route(self.router(x.to(self._wide)), self._top_k, self._renormalize)
        partial: Tensor = self._combine(self.experts(x, chosen), weights)
        return partial
