"""What ranks hold of a model against all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.layers.held import cut, held_by

Parameters = Mapping[str, torch.nn.Parameter]


def assert_parts(whole: Parameters, ranks: Sequence[Parameters]) -> None:
    """Ranks have their cut of the ``whole`` parameters, padding is zero, and nothing is nobody's."""
    divided = 0
    for name, values in whole.items():
        held = [held_by(parts[name]) for parts in ranks]
        covered = torch.zeros(values.shape, dtype=torch.int)
        for parts, mine in zip(ranks, held, strict=True):
            own = parts[name]
            if mine is None:
                assert torch.equal(own, values), name
                continue
            assert torch.equal(own.narrow(mine.dim, 0, mine.count), cut(values, mine)), name
            assert not own.narrow(mine.dim, mine.count, own.shape[mine.dim] - mine.count).any()
            for begin, end in mine.spans:
                covered.narrow(mine.dim, begin, end - begin).add_(1)
        if held[0] is not None:
            assert covered.min() >= 1, name
            divided += values.numel()
    assert divided > 0.5 * sum(values.numel() for values in whole.values())
    assert all(parts.keys() == whole.keys() for parts in ranks)
