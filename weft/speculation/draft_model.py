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
from weft.speculation.chain import DraftSteps, likeliest, rows_of

Tensor = torch.Tensor


class ModelDrafter(Drafter):
    """Drafts greedily, whatever the temperature; ties go to the lowest id."""

    rests = True

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
        self._model = model
        self._cache = cache
        self._backends = backends
        self._steps = steps
        self._history = history
        self._vocab = min(vocab_size, model.draft.spec.vocab_size)

    def propose(self, step: Sampled) -> Tensor | None:
        rows = step.wanted()
        if not len(rows):
            return None
        slots, ends, bounds = step.slots, step.ends, step.bounds()[rows]
        if len(rows) < len(step.next_k):
            at = upload(rows, slots.device)
            slots, ends = slots[at], ends[at]
        most = self._history.shape[1] - 2
        drafts: list[Tensor] = []
        for place in range(int(step.next_k.max())):
            # Rows at the end of the history want no such draft: the result is dropped.
            starts = (ends + place).clamp_(max=most)
            one = self._steps.decode(slots, rows_of(np.minimum(bounds + place, most), 1), starts, 0)
            hidden = drive(self._model.propose(one, self._cache, self._backends))
            drafts.append(likeliest(drive(self._model.draft.logits(hidden)), self._vocab))
            # The next pass reads the draft from the history, like any other token.
            self._history[slots, starts + 1] = drafts[-1].to(self._history.dtype)
        return torch.stack(drafts, dim=1)
