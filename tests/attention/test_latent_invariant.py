"""The invariant form of latent attention on torch: correct, with equal bits in any batch."""

from __future__ import annotations

import pytest
import torch

from tests.support.latent import Scene, Shape, bits
from tests.support.slow import mostly_slow
from weft.attention.mla.latent_invariant import InvariantLatent

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 8e-3}
ROWS = [(5, 9), (0, 70), (130, 1), (8, 4), (63, 2)]


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("block", [1, 4, 48, 64])
def test_equals_attention_written_out(block: int, window: int) -> None:
    scene = Scene(ROWS, Shape(block=block), window)
    for form in ("absorbed", "expanded"):
        made = scene.run(InvariantLatent(), form)
        assert torch.allclose(made, scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@mostly_slow("window", [0, 40], [40])
@pytest.mark.parametrize("shape", [Shape(), Shape(heads=9, nope=16, rope=16, v=16, lora=48, block=16)])
def test_bits_do_not_depend_on_company_or_chunks(shape: Shape, window: int, dtype: torch.dtype) -> None:
    scene = Scene(ROWS, shape, window, dtype)
    whole = scene.run(InvariantLatent(), "absorbed")
    assert (whole.double() - scene.expected()).abs().max() < TOLERANCE[dtype]
    for size in (1, 7, 16):
        pieces = [
            (r, first, min(size, count - first))
            for r, (_, count) in enumerate(scene.rows)
            for first in range(0, count, size)
        ]
        assert torch.equal(bits(scene.run(InvariantLatent(), "absorbed", pieces)), bits(whole)), size
        alone = torch.cat([scene.run(InvariantLatent(), "absorbed", [piece]) for piece in pieces[:20]])
        assert torch.equal(bits(alone), bits(whole[: len(alone)])), size
    shorter = Scene(ROWS, shape, window, dtype, bound=9)
    assert torch.equal(bits(shorter.run(InvariantLatent(), "absorbed")), bits(whole))
