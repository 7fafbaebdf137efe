"""Verification of drafts."""

from __future__ import annotations

import torch

from weft.runner.batch.batch import Verify
from weft.runner.sampling.sampler import SampleOutput

Tensor = torch.Tensor


def accept(verify: Verify, output: SampleOutput) -> Tensor:
    """Return int64 [decode rows]: number of leading drafts that equal the sample at the same position.

    A sample with an error equals no draft.
    """
    # [decode rows, most drafts]; -2 never equals a draft id or the padding -1
    samples = output.tokens.masked_fill(output.error, -2)[verify.entries]
    return (samples == verify.drafts).long().cumprod(dim=1).sum(dim=1)
