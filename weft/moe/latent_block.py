"""A routed block with experts of another width than the hidden size.

Source: NVIDIA Nemotron 3, 2025, LatentMoE: the router and the shared expert read the hidden size, the experts
a projection.
"""

from __future__ import annotations

from dataclasses import fields

from weft.common.errors import ConfigError
from weft.config.spec import MoESpec
from weft.layers.build import Build
from weft.layers.dense import Linear
from weft.moe.block import RoutedMLP
from weft.ops.moe import Routed
from weft.ops.moe_plain import LatentRouted


class LatentRoutedMLP(RoutedMLP):
    """``RoutedMLP`` with projections before and behind the experts, whole on every rank.

    The projection behind the experts is linear, so a rank projects its partial sum.
    """

    adapted = ("enter", "leave")

    def __init__(self, hidden: int, spec: MoESpec, activation: str, build: Build) -> None:
        """Raises ConfigError for experts with a gate, and for whole experts divided over ranks."""
        if spec.gated:
            raise ConfigError("moe_latent_size is not supported for experts with a gate", param="--model")
        if build.divides_experts:
            raise ConfigError(
                "--enable-expert-parallel does not support this model's latent experts; use "
                "--tensor-parallel-size alone",
                param="--enable-expert-parallel",
            )
        super().__init__(hidden, spec, activation, build)
        self.enter = Linear(hidden, spec.latent, build)
        self.leave = Linear(spec.latent, hidden, build)
        if self.low is not None:
            self.low.around = tuple(one.low for one in (self.enter, self.leave) if one.low is not None)

    def _completed(self, weights: Routed) -> Routed:
        common = {field.name: getattr(weights, field.name) for field in fields(weights)}
        return LatentRouted(**common, enter=self.enter, leave=self.leave)
