"""Mamba2 in bfloat16 with the stream in float32 (``residual_in_fp32``), beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weft.config.families import load_spec
from weft.models.loader import load_model


def _reference(folder: Path, dtype: torch.dtype, ids: list[int]) -> torch.Tensor:
    """Return the logits [T, vocab] of transformers, float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("wide", [True, False])
def test_the_stream_has_the_dtype_of_transformers(wide: bool, tmp_path: Path, paged: Any) -> None:
    """Embeddings are large beside what 8 layers add, so a narrow stream loses much of the layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=8,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=16,
        residual_in_fp32=wide,
    )
    model = transformers.Mamba2ForCausalLM(config)
    model.backbone.embeddings.weight.data *= 100
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    ids = torch.randint(0, 128, (40,)).tolist()
    exact = _reference(tmp_path, torch.float32, ids)

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).abs().mean() / exact.abs().mean())

    spec = load_spec(str(tmp_path), None)
    assert spec.wide_stream == wide
    served = load_model(str(tmp_path), spec, torch.bfloat16, torch.device("cpu"), progress=False)
    harness = paged(served)
    sequence = harness.sequence(ids)
    harness.step([(sequence, len(ids))])
    assert sequence.logits[0].dtype == torch.bfloat16
    ours = error(torch.stack(sequence.logits).double())
    assert ours == pytest.approx(error(_reference(tmp_path, torch.bfloat16, ids)), rel=0.2)
    assert (ours < 0.0035) == wide
