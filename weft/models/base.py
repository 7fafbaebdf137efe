"""Interface between the runner and a model."""

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
    """A model on one rank. The loader fills the weights. A model keeps no state between steps."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec = build.local(spec)
        """Model spec of this rank's part (``weft.config.sharding``)."""
        self.mesh = build.mesh
        """Mesh of the ranks that compute each step together."""
        self.dtype = build.dtype
        self.device = build.device
        self.notes = build.notes
        """Notes about the parameters, for the loader."""
        self._ops = build.ops
        self.experts: ExpertLayers | None = None
        """Expert layers divided over ranks. Set by ``pack``; None without such layers."""
        self.vision: Tower | None = None
        """Tower that makes the rows of ``StepInput.media``; None for text-only models."""

    def pack(self) -> None:
        """Pass every loaded weight to the op that reads the weight. Call once, before the first ``steps``."""
        pack_all(self)
        divided = [m.divided for m in self.modules() if isinstance(m, RoutedMLP) and m.divided is not None]
        self.experts = ExpertLayers(divided) if divided else None

    @property
    def varying(self) -> tuple[str, ...]:
        """Ops with batch-dependent rows, each with its implementation. Includes the collectives of the
        mesh."""
        found = {f"{op} ({made.name})" for (op, _), made in self._ops.items() if not made.invariant}
        if any(isinstance(m, RoutedMLP) and m.varying for m in self.modules()):
            found.add("moe_copies (of experts that move)")
        return tuple(sorted(found.union(self.mesh.varying)))

    @property
    def asking(self) -> tuple[str, ...]:
        """Ops that make the host read a device value in the middle of a step, each with its
        implementation."""
        return tuple(sorted({f"{op} ({made.name})" for (op, _), made in self._ops.items() if made.asks}))

    def capturable(self, *tokens: int) -> bool:
        """Return True if passes over these numbers of tokens may be captured on a CPU in the present epoch.

        Requires collectives that are operators, and no device values read by the host. All ranks of a group
        return the same answer.
        """
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
        """Run one forward pass up to the head. Return [L, hidden] for the merged rows ``logits_indices``
        (int64 [L]).

        logits_indices: None: all rows. kv: caches of each layer, written in place. Yields once per
        collective, in an order fixed by the configuration; a single rank never yields. ``done(layer)`` is
        called after each layer, when all cache writes of the layer are launched.
        """

    def lookahead(
        self,
        step: StepInput,
        hidden: Tensor,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Run the MTP module, which predicts one more token. Return [L, hidden] for rows ``logits_indices``
        (None: all).

        ``step.ids`` are the ids one position later; hidden [T, hidden] is the result of ``hidden`` for the
        positions of the step. The returned states belong to the next positions: their ``logits`` predict the
        token after ``step.ids``. So ``step.media`` lists rows with an image as the *next* token (levels are
        ignored), and ``step.rope_positions`` are the positions of ``hidden``. Only for models with
        ``spec.mtp_layers``.
        """
        raise NotImplementedError

    @abstractmethod
    def logits(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        """Return logits [L, vocab], in the model's dtype, for a result of ``hidden``."""

    def steps(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Run one forward pass. Return logits [L, vocab], in the model's dtype, for ``step.logits_index``."""
        hidden = yield from self.hidden(step, kv, backends, step.logits_index, done)
        return (yield from self.logits(hidden))
