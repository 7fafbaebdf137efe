"""Models over an 8-bit cache: rows are independent, and logits are near the logits of the plain cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compared import random_ids, run_mixed
from tests.support.slow import mostly_slow
from weft.config.families import load_spec
from weft.config.resolve import with_cache_dtype
from weft.config.sections.all import CacheSection
from weft.models.loader import load_model

CPU = torch.device("cpu")
NAMES = [
    "qwen3",
    "qwen2-mixed-window",
    "llama-biases-head-dim",
    "deepseek-v3",
    "deepseek-v3-dense-halves",
    "deepseek-v2-groups-yarn",
    "deepseek-v32",
    "glm-dsa",
    "deepseek-v4",
    "deepseek-v4-odd",
]


def _model(checkpoint: Any, dtype: torch.dtype, kv_cache_dtype: str = "fp8") -> Any:
    section = CacheSection(kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    spec = with_cache_dtype(load_spec(checkpoint.folder, None), section)
    return load_model(checkpoint.folder, spec, dtype, CPU, progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_each_other(name: str, checkpoints: Any, paged: Any) -> None:
    """A row in any mixed batch equals the row alone and in one piece; all unused memory is NaN."""
    model = _model(checkpoints(name), torch.float64)
    harness = paged(model, seed=1)
    lengths, prompts = [41, 17, 26], [25, 3, 26]
    sequences = [
        harness.sequence(random_ids(n, model.spec.vocab_size, 20 + i)) for i, n in enumerate(lengths)
    ]
    run_mixed(harness, sequences, prompts, seed=4)
    for sequence in sequences:
        alone = paged(model, block_size=5, seed=2)
        again = alone.sequence(sequence.ids)
        alone.step([(again, len(again.ids))])
        mine, theirs = torch.stack(sequence.logits), torch.stack(again.logits)
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)


@mostly_slow("dtype", [torch.float64, torch.float32, torch.bfloat16], [torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_those_of_the_plain_cache(
    name: str, dtype: torch.dtype, checkpoints: Any, paged: Any
) -> None:
    """But not the same: entries of the cache are rounded."""
    logits, dtypes = [], []
    for kv_cache_dtype in ("auto", "fp8"):
        harness = paged(_model(checkpoints(name), dtype, kv_cache_dtype))
        dtypes.append({tensor.dtype for layer in harness.kv for ts in layer.values() for tensor in ts})
        sequence = harness.sequence(random_ids(40, 97, 7))
        harness.step([(sequence, 30)])
        while sequence.computed < 40:
            harness.step([], [(sequence, 1)])
        logits.append(torch.stack(sequence.logits).double())
    assert dtypes[0] == {dtype}
    assert torch.float8_e4m3fn in dtypes[1]
    assert torch.isfinite(logits[1]).all()
    error = (logits[1] - logits[0]).abs().mean() / logits[0].abs().mean()
    assert 1e-4 < error < 0.25, float(error)


@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_float64(name: str, checkpoints: Any, paged: Any) -> None:
    """The entries are equal, except values that rounding moves over a tie."""
    logits = []
    for dtype in (torch.float64, torch.float32):
        harness = paged(_model(checkpoints(name), dtype))
        sequence = harness.sequence(random_ids(40, 97, 8))
        harness.step([(sequence, 30)])
        harness.step([], [(sequence, 10)])
        logits.append(torch.stack(sequence.logits).double())
    assert (logits[1] - logits[0]).abs().mean() / logits[0].abs().mean() < 2e-3
