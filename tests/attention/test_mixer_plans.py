"""The memory plan covers the intermediate results of both forms of Mamba and of short convolutions, as torch
allocates.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.test_mixers import Scene, WholeMamba1
from tests.support.allocated import most_allocated
from tests.support.slow import mostly_slow
from weft.attention.conv.conv_torch import TorchConv
from weft.attention.mamba.mamba_torch import InvariantMamba, TorchMamba
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec
from weft.config.sizing.layer_elements import conv_elements, mamba1_elements, mamba_elements

Spec = ConvSpec | MambaSpec | Mamba1Spec


def mamba(heads: int, dim: int, groups: int, state: int, **more: Any) -> MambaSpec:
    return MambaSpec(layers=(0,), heads=heads, dim=dim, groups=groups, state=state, conv=4, **more)


SPECS: dict[str, Spec] = {
    "wide states": mamba(8, 64, 1, 128),
    "two groups": mamba(8, 64, 2, 128, norm="normed"),
    "narrow states": mamba(16, 32, 1, 16),
    "a group for each head": mamba(4, 64, 4, 64, norm="none"),
    "wide heads": mamba(4, 128, 1, 256),
    "conv": ConvSpec(layers=(0,), heads=8, dim=64, taps=3),
    "conv with bias": ConvSpec(layers=(0,), heads=8, dim=64, taps=4, bias=True),
    "mamba1": Mamba1Spec(layers=(0,), heads=8, dim=64, state=16, rank=32, conv=4),
    "mamba1 of narrow states": Mamba1Spec(layers=(0,), heads=16, dim=128, state=2, rank=32, conv=4),
}
LENGTHS = [[1024], [256] * 3, [64] * 16, [16] * 64, [255, *[129] * 7], [65] * 15, [17] * 60, [3] * 100]
LONG = [[1100] * 2, [2500]]


def used(backend: Any, spec: Spec, lengths: list[int], dtype: torch.dtype, each: bool = False) -> float:
    """Return the largest allocation of a run, as a share of the plan."""
    scene = Scene(spec, dtype, lengths=lengths)
    segment, x = scene.stage([(row, len(row.x)) for row in scene.rows])
    for part in scene.state:
        part.zero_()
    out = torch.empty(len(x), scene.columns, dtype=dtype)
    given = scene.given(backend, segment, each)
    found = most_allocated(lambda: backend.run(x, out, given))
    model: Any = SimpleNamespace(conv=spec, mamba=spec, mamba1=spec)
    if isinstance(spec, ConvSpec):
        planned = conv_elements(model, len(x))
    elif isinstance(spec, Mamba1Spec):
        planned = mamba1_elements(model, len(x), len(lengths))
    else:
        planned = mamba_elements(model, len(x), len(lengths))
    return found / (planned * max(4, dtype.itemsize))


CASES = [(name, dtype) for name in SPECS for dtype in (torch.float32, torch.bfloat16)]
DEFAULT = [("a group for each head", torch.bfloat16)]


@mostly_slow(("name", "dtype"), CASES, DEFAULT)
def test_the_plan_covers_a_run(name: str, dtype: torch.dtype) -> None:
    """The plan holds for every division of tokens into rows, and the worst division uses most of the plan."""
    spec = SPECS[name]
    backends: dict[type, Any] = {ConvSpec: TorchConv, MambaSpec: TorchMamba, Mamba1Spec: WholeMamba1}
    backend = backends[type(spec)]()
    shares = [used(backend, spec, lengths, dtype) for lengths in LENGTHS + LONG]
    assert max(shares) <= 1
    assert max(shares) >= 0.5, "the plan takes memory from the caches"


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TorchMamba(), InvariantMamba()])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if isinstance(spec, MambaSpec)])
def test_the_plan_covers_states(name: str, backend: Any) -> None:
    """Decode rows need copies of their states."""
    shares = [
        used(backend, SPECS[name], [1] * rows, torch.float32, each=True) for rows in (8, 32, 33, 256)
    ] + [used(backend, SPECS[name], lengths, torch.float32) for lengths in ([64] * 16, [256] * 3)]
    assert max(shares) <= 1
    assert max(shares) >= 0.4, "the plan takes memory from the caches"


@pytest.mark.parametrize(("count", "n"), [(31, 65), (40, 130)])
def test_parts_of_rows_give_the_same_results(count: int, n: int) -> None:
    """Rows of 65 tokens would otherwise need the memory of 128 tokens each."""
    spec = mamba(2, 4, 1, 4)
    whole, due = Scene(spec, lengths=[n] * count), Scene(spec, lengths=[n] * count)
    for one, other in zip(whole.whole(TorchMamba()), due.whole(InvariantMamba()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    for part, other in zip(whole.state, due.state, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-10, atol=1e-10, equal_nan=True)
