"""Experts of the rows of one step: recorded for requests that ask for routes, and forced where a request says
so.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class RowRoutes:
    """Routes of the T rows of a step or micro-batch. Routed layers call ``settle`` in order."""

    def __init__(self, layers: int, forced: Tensor | None = None) -> None:
        """``layers``: number of routed layers. ``forced``: int64 [T, layers, k], -1 where the router
        chooses; None: the router chooses everywhere."""
        self._forced = forced
        self._made: list[Tensor | None] = [None] * layers

    def settle(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the experts that routed layer number ``layer`` uses, int64 [T, k], and record them.

        ``chosen``: the router's own choice, int64 [T, k].
        """
        if self._forced is not None:
            forced = self._forced[:, layer]
            chosen = torch.where(forced < 0, chosen, forced)
        self._made[layer] = chosen
        return chosen

    def made(self) -> Tensor:
        """Return the recorded experts, int64 [T, layers, k]."""
        return torch.stack([layer for layer in self._made if layer is not None], dim=1)
