"""Verification: which drafts were right."""

from __future__ import annotations

import torch

from weft.runner.batch import Verify
from weft.runner.sampler import SampleOutput

Tensor = torch.Tensor


def accept(verify: Verify, output: SampleOutput) -> Tensor:
    """int64 [decode rows]: leading drafts that equal the sample at their position.

    A sample without a value (an error) equals nothing.
    """
    samples = output.tokens.masked_fill(output.error, -2)[verify.entries]
    return (samples == verify.drafts).long().cumprod(dim=1).sum(dim=1)
