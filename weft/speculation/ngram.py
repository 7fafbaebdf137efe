"""Drafts from the sequence itself: the tokens after the last occurrence of the same n-gram.

Source: prompt look-up decoding, Saxena 2023; Yang et al. 2023, arXiv 2304.04487.
"""

from __future__ import annotations

import torch

from weft.ops.upload import upload
from weft.speculation.base import Drafter, Sampled

Tensor = torch.Tensor


class NgramDrafter(Drafter):
    """Finds the longest suffix of a sequence, of ``least`` to ``most`` tokens, with an earlier occurrence.

    Among the longest matches the latest counts. The drafts are the tokens after the match; past the end of
    the sequence the drafts repeat periodically. Without a match, the drafts repeat the last token.
    """

    skips_idle_steps = True

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
    """Return the likely next tokens of each row of ids [rows, n], int64 [rows, count].

    ``ends``: int64 [rows], position of each row's last token; later ids are arbitrary.
    """
    places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    # [rows, n], length of the match with its end at each position
    matched = torch.zeros(ids.shape, dtype=torch.int32, device=ids.device)
    going = places < ends.unsqueeze(1)
    for back in range(most):
        # [rows, 1], the token `back` positions before the end
        wanted = ids.gather(1, (ends - back).clamp(min=0).unsqueeze(1))
        same = ids == wanted
        if back:  # the token ``back`` positions before each position; none before the first
            same = torch.nn.functional.pad(same, (back, 0))[:, : ids.shape[1]]
        going = going & same & (ends >= back).unsqueeze(1)
        matched += going
    # Prefer the longest match, then the latest position; a match shorter than ``least`` does not count.
    score = torch.where(matched >= least, matched * ids.shape[1] + places, -1)
    best, place = score.max(dim=1)
    place = torch.where(best < 0, ends - 1, place)
    # Past the end of the sequence, repeat the tokens between the match and the end.
    period = ends - place
    ahead = torch.arange(count, device=ids.device) % period.unsqueeze(1)
    source = (place.unsqueeze(1) + 1 + ahead).clamp(min=0)
    return ids.gather(1, source).long()
