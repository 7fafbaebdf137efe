"""A model with a draft model beside it. The draft model reads the tokens of every step with the model.

So the cache of the draft model is complete wherever the cache of the model is: behind prefix hits, preemption
and transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import nn

from weft.attention.base import Backends, LayerCache, StepInput
from weft.models.decoder import Model
from weft.ops.low_rank import AdapterRows
from weft.parallel.comm import Pending

Tensor = torch.Tensor


class DraftedModel(Model):
    """Both models, loaded and packed. Everything except drafts is the model's own."""

    def __init__(self, target: Model, draft: Model) -> None:
        nn.Module.__init__(self)
        self.target = target
        self.draft = draft
        self.spec, self.mesh = target.spec, target.mesh
        self.dtype, self.device, self.notes = target.dtype, target.device, target.notes
        # Drafts change no output, so only the model's own ops decide about invariance.
        self._ops = target._ops
        self.experts, self.vision, self.score = target.experts, target.vision, target.score
        self.adapters, self.routed_layers = target.adapters, target.routed_layers
        self._first = self.spec.layers + self.spec.mtp_layers

    @property
    def asking(self) -> tuple[str, ...]:
        return tuple(sorted({*self.target.asking, *self.draft.asking}))

    @property
    def varying(self) -> tuple[str, ...]:
        return self.target.varying

    def hidden(
        self,
        step: StepInput,
        kv: Sequence[LayerCache],
        backends: Backends,
        logits_indices: Tensor | None = None,
        done: Callable[[int], None] | None = None,
    ) -> Generator[Pending, None, Tensor]:
        """Return the model's hidden states. The draft model only writes its cache."""
        hidden = yield from self.target.hidden(step, kv[: self._first], backends, logits_indices, done)
        yield from self.propose(step, kv, backends, step.positions[:0])
        return hidden

    def propose(
        self, step: StepInput, kv: Sequence[LayerCache], backends: Backends, wanted: Tensor | None = None
    ) -> Generator[Pending, None, Tensor]:
        """Run the draft model on ``step``. Return its hidden states of the rows ``wanted`` (int64 [L]; None:
        all)."""
        # The draft model has no adapters, and sees the placeholders of images instead of images. Its table
        # may have fewer padded rows.
        ids = step.ids.clamp(max=self.draft.spec.vocab_size - 1)
        own = replace(step, ids=ids, media=None, rope_positions=None, adapters=None, routes=None)
        return (yield from self.draft.hidden(own, kv[self._first :], backends, wanted))

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        return (yield from self.target.logits(hidden, adapters))

    def classify(self, hidden: Tensor) -> Generator[Pending, None, Tensor]:
        return (yield from self.target.classify(hidden))
