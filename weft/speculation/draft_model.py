"""Drafts from a draft model with the same tokens.

The draft model has read every token that the model has read (``models/drafted.py``). Only the newest token is
new to the draft model:

    position        end - 1      end          end + 1      end + 2
    token           t            newest       draft 1      draft 2
    draft model     has read     └─ draft 1   └─ draft 2   ...

The entries from ``end`` on are guesses. The step that verifies the drafts writes the entries again. Blocks
for the entries are reserved, because a wanted draft reserves its position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache
from weft.models.drafted import DraftedModel
from weft.ops.upload import upload
from weft.parallel.comm import drive
from weft.speculation.base import Drafter, Sampled
from weft.speculation.chain import CapturedChains, CaptureOptions, Chain, DraftSteps, likeliest, rows_of

Tensor = torch.Tensor


class ModelChain(Chain):
    """Makes drafts one after another by a draft model, which reads no hidden states."""

    def __init__(
        self,
        model: DraftedModel,
        cache: Sequence[LayerCache],
        backends: Backends,
        steps: DraftSteps,
        history: Tensor,
        vocab_size: int,
    ) -> None:
        """history: int32 [slots + 1, longest]."""
        vocab = min(vocab_size, model.draft.spec.vocab_size)
        super().__init__(model, cache, backends, steps, history, vocab)
        self._drafted = model

    def capturable(self, *tokens: int) -> bool:
        return self._model.device.type != "cpu" or self._drafted.draft.capturable(*tokens)

    @property
    def sizes(self) -> tuple[int, torch.dtype, torch.device]:
        return 0, self._model.dtype, self._model.device

    def propose_after(
        self, hidden: Tensor, slots: Tensor, ends: Tensor, bounds: np.ndarray, count: int
    ) -> Tensor:
        """Return the drafts, as ``Chain.propose_after`` does. ``hidden`` is not read."""
        most = self.history.shape[1] - 2
        drafts: list[Tensor] = []
        for place in range(count):
            # Beyond the end of the history the draft is not wanted, and the result is dropped.
            starts = (ends + place).clamp_(max=most)
            one = self.steps.decode(slots, rows_of(np.minimum(bounds + place, most), 1), starts, 0)
            own = drive(self._drafted.propose(one, self._cache, self._backends))
            drafts.append(likeliest(drive(self._drafted.draft.logits(own)), self._vocab))
            # The next pass reads the draft from the history, like any other token.
            self.history[slots, starts + 1] = drafts[-1].to(self.history.dtype)
        return torch.stack(drafts, dim=1)


class ModelDrafter(Drafter):
    """Drafts greedily at any temperature; ties go to the lowest id."""

    skips_idle_steps = True

    def __init__(self, chain: ModelChain, capturing: CaptureOptions | None = None) -> None:
        self._chain = chain
        self.captured = None if capturing is None else CapturedChains(chain, capturing)
        """Replayed drafting; None without captures."""

    def reset(self) -> None:
        if self.captured is not None:
            self.captured.reset()

    def propose(self, step: Sampled) -> Tensor | None:
        self.uncaptured = False
        rows = step.wanted()
        if not len(rows):
            return None
        slots, ends, bounds = step.slots, step.ends, step.bounds()[rows]
        if len(rows) < len(step.next_k):
            at = upload(rows, slots.device)
            slots, ends = slots[at], ends[at]
        inputs = slots.new_empty(len(rows), 0), slots, ends, bounds, int(step.next_k.max())
        drafts = None
        if self.captured is not None:
            drafts = self.captured.propose_after(*inputs)
            self.uncaptured = self.captured.uncaptured
        return self._chain.propose_after(*inputs) if drafts is None else drafts
