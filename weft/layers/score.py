"""The matrix of a classifier, in place of an output head."""

from __future__ import annotations

import torch

from weft.layers.build import Build, Layer

Tensor = torch.Tensor


class ScoreHead(Layer):
    """Numbers of the labels of hidden states [n, hidden], float64 [n, labels]. Whole on every rank.

    Sums are float64: the numbers of a prompt do not depend on the other prompts of a step.
    """

    def __init__(self, hidden: int, labels: int, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(labels, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.double() @ self.weight.double().T
