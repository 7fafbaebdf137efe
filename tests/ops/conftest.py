"""What tests of operations share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weft.ops import cpu


@pytest.fixture(params=["tiles", "brgemm"])
def kernel(request: pytest.FixtureRequest, extension: None) -> Iterator[str]:
    """Both ways to bf16 sums, whichever this machine would choose."""
    if request.param == "brgemm" and "brgemm" not in cpu.capabilities():
        pytest.skip("ATen's brgemm does not take bf16 on this CPU")
    before = torch.ops.weft_cpu.set_brgemm.default(request.param == "brgemm")
    yield request.param
    torch.ops.weft_cpu.set_brgemm.default(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
