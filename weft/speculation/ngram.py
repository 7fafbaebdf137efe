"""Drafts from the sequence itself: what followed the last time that the same tokens came.

Source: prompt look-up decoding, Saxena 2023; Yang et al. 2023, arXiv 2304.04487.
"""

from __future__ import annotations

import torch

from weft.ops.upload import upload
from weft.speculation.base import Drafter, Sampled

Tensor = torch.Tensor


class NgramDrafter(Drafter):
    """Looks for the longest end of a sequence, of ``least`` to ``most`` tokens, that occurs in it before.

    Of the longest ones the latest counts, and drafts are the tokens behind it; where they run into the end of
    the sequence they go on with themselves. A sequence without such an end repeats its last token.
    """

    rests = True

    def __init__(self, history: Tensor, least: int, most: int) -> None:
        """history: int32 [slots + 1, longest]."""
        self._history = history
        self._least = least
        self._most = most

    def propose(self, step: Sampled) -> Tensor | None:
        rows = step.wanted()
        if not len(rows):
            return None
        longest = int(step.bounds()[rows].max()) + 1
        slots = step.slots
        ends = step.ends
        if len(rows) < len(step.next_k):
            at = upload(rows, slots.device)
            slots = slots[at]
            ends = ends[at]
        ids = self._history[slots, :longest]
        return follow(ids, ends, int(step.next_k.max()), self._least, self._most)


def follow(ids: Tensor, ends: Tensor, count: int, least: int, most: int) -> Tensor:
    """int64 [rows, count]: what should follow each row of ids [rows, n].

    The last token of a row is at ``ends`` (int64 [rows]); what lies behind it is arbitrary.
    """
    places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    matched = torch.zeros(ids.shape, dtype=torch.int32, device=ids.device)
    going = places < ends.unsqueeze(1)
    for back in range(most):
        wanted = ids.gather(1, (ends - back).clamp(min=0).unsqueeze(1))
        same = ids == wanted
        if back:  # the token ``back`` places before each place; there is none before the first
            same = torch.nn.functional.pad(same, (back, 0))[:, : ids.shape[1]]
        going = going & same & (ends >= back).unsqueeze(1)
        matched += going
    # The longest match, and of those the last place; shorter than ``least`` is none.
    score = torch.where(matched >= least, matched * ids.shape[1] + places, -1)
    best, place = score.max(dim=1)
    place = torch.where(best < 0, ends - 1, place)
    period = ends - place
    ahead = torch.arange(count, device=ids.device) % period.unsqueeze(1)
    source = (place.unsqueeze(1) + 1 + ahead).clamp(min=0)
    return ids.gather(1, source).long()
