"""What the runner sees of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

import torch
from torch import nn

from weft.attention.base import Backends, LayerCache, StepInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build, pack_all
from weft.models.vision import Tower
from weft.moe.balance import ExpertLayers
from weft.moe.block import RoutedMLP
from weft.parallel.comm import Pending

Tensor = torch.Tensor


class Model(nn.Module, ABC):
    """A model on one rank. Its weights are memory that the loader fills; it holds no state between steps."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec = build.local(spec)
        """The model as this rank computes it (``weft.config.sharding``)."""
        self.mesh = build.mesh
        """Of the ranks that compute each step together."""
        self.dtype = build.dtype
        self.device = build.device
        self._ops = build.ops
        self.experts: ExpertLayers | None = None
        """Those that ranks divide; there when the weights are packed."""
        self.vision: Tower | None = None
        """What makes rows for ``StepInput.media``; None where the model reads text alone."""

    def pack(self) -> None:
        """Hands every loaded weight to the op that reads it. Once, before the first ``steps``."""
        pack_all(self)
        divided = [m.divided for m in self.modules() if isinstance(m, RoutedMLP) and m.divided is not None]
        self.experts = ExpertLayers(divided) if divided else None

    @property
    def varying(self) -> tuple[str, ...]:
        """The ops whose rows can depend on what is computed beside them, each with its implementation."""
        found = {f"{op} ({made.name})" for (op, _), made in self._ops.items() if not made.invariant}
        return tuple(sorted(found.union(self.mesh.varying)))

    @property
    def asking(self) -> tuple[str, ...]:
        """The ops that have the host read a value in the middle of a step, each with its implementation."""
        return tuple(sorted({f"{op} ({made.name})" for (op, _), made in self._ops.items() if made.asks}))

    def capturable(self, *tokens: int) -> bool:
        """Whether passes over so many tokens each may be captured on a CPU, in this epoch: their collectives
        are operators, and the host reads nothing. The same on all ranks of a group."""
        experts = self.experts
        return self.mesh.shares and (experts is None or not any(experts.asks(count) for count in tokens))

    @abstractmethod
    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """One forward pass up to the head: [L, hidden] for the merged rows ``logits_indices`` (int64 [L]), or
        for all.

        kv: for each layer its caches, written in place. Yields once for each collective, in an order that the
        configuration alone fixes; on one rank never. ``done(layer)`` is called behind each layer, when all
        that it writes to its caches is launched.
        """

    def ahead(
        self,
        step: StepInput,
        hidden: Tensor,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """The module that predicts one token further: [L, hidden] for the rows ``logits_indices``, or for
        all.

        ``step.ids`` are those one position on, hidden [T, hidden] what ``hidden`` returned for the step's
        positions. What it returns is like it, of the next positions: ``logits`` predict the token after
        ``step.ids``. So ``step.media`` are the rows whose *next* token stands for an image (its levels are
        not read), and ``step.rope_positions`` those of ``hidden``. Only of models with ``spec.mtp_layers``.
        """
        raise NotImplementedError

    @abstractmethod
    def logits(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        """[L, vocab] in the model's dtype, of what ``hidden`` returned."""

    def steps(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """One forward pass; returns logits [L, vocab] in the model's dtype, for ``step.logits_index``."""
        hidden = yield from self.hidden(step, kv, backends, step.logits_index, done)
        return (yield from self.logits(hidden))
