"""Compare the parameters of ranks with the whole model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest
import torch

from weft.layers.pending_codes import Weight
from weft.layers.shard import cut
from weft.models.decoder import Model
from weft.models.files import WeightFile

Weights = Mapping[str, Weight]


def weights_of(model: Model) -> dict[str, Weight]:
    return model.notes.weights(model.named_parameters())


def assert_parts(whole: Weights, ranks: Sequence[Weights]) -> None:
    """Assert that ranks have the right cuts of the ``whole`` parameters, zero padding, and full coverage
    together.
    """
    divided = 0
    for name, (values, _) in whole.items():
        shard = [parts[name].note.shard for parts in ranks]
        covered = torch.zeros(values.shape, dtype=torch.int)
        for parts, mine in zip(ranks, shard, strict=True):
            own = parts[name].parameter
            if mine is None:
                assert torch.equal(own, values), name
                continue
            assert torch.equal(own.narrow(mine.dim, 0, mine.count), cut(values, mine)), name
            assert not own.narrow(mine.dim, mine.count, own.shape[mine.dim] - mine.count).any()
            for begin, end in mine.spans:
                covered.narrow(mine.dim, begin, end - begin).add_(1)
        if shard[0] is not None:
            assert covered.min() >= 1, name
            divided += values.numel()
    assert divided > 0.5 * sum(values.numel() for values, _ in whole.values())
    assert all(parts.keys() == whole.keys() for parts in ranks)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, int]]:
    """Record the bytes read from checkpoints from now on, by thread (a rank) and tensor. Return the
    record.
    """
    read = dict[int, dict[str, int]]()
    tensor, part = WeightFile.tensor, WeightFile.part

    def note(name: str, found: torch.Tensor) -> torch.Tensor:
        of_rank = read.setdefault(threading.get_ident(), {})
        of_rank[name] = of_rank.get(name, 0) + found.nbytes
        return found

    def noted(self: WeightFile, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        return note(name, part(self, name, place)) if place else self.tensor(name)

    monkeypatch.setattr(WeightFile, "tensor", lambda self, name: note(name, tensor(self, name)))
    monkeypatch.setattr(WeightFile, "part", noted)
    return read
