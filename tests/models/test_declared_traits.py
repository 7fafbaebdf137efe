"""Traits of declared architectures: bits that do not depend on the batch, and the further reference ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.models import conftest
from tests.support.compared import random_ids, run_mixed
from tests.support.declared_models import CASES
from weft.ops import plain_ops

#: Sizes of heads that the attention of the CPU extension takes.
_SIZES = {"hidden_size": 64, "head_dim": 16, "global_head_dim": 32}
_NAMES = ("gemma4-inputs", "olmo3", "cohere2", "hunyuan", "ministral3", "apertus", "gemma4-moe", "llama4")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if at == 0 else [pytest.mark.slow]) for at, name in enumerate(_NAMES)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_the_batch(
    name: str, dtype: torch.dtype, tmp_path: Path, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = CASES[name]
    sizes = {field: size for field, size in _SIZES.items() if field in changes or field == "hidden_size"}
    monkeypatch.setitem(conftest.CASES, name, (family, {**changes, **sizes}))
    model = conftest.make_checkpoint(name, tmp_path).load(dtype, invariant=True)
    assert model.varying == ()
    harness = paged(model, seed=1)
    sequences = [harness.sequence(random_ids(n, 90, 20 + i)) for i, n in enumerate([41, 17, 26])]
    run_mixed(harness, sequences, [25, 3, 26], seed=4)
    for sequence in sequences:
        alone = paged(model, block_size=5, seed=2)
        again = alone.sequence(sequence.ids)
        alone.step([(again, len(again.ids))])
        assert torch.equal(torch.stack(sequence.logits), torch.stack(again.logits))


def test_the_factor_of_gemmas_embeddings_has_the_dtype_of_the_model(tmp_path: Path) -> None:
    model: Any = conftest.make_checkpoint("gemma3", tmp_path).load(torch.bfloat16)
    factor = model.spec.scales.embedding
    rounded = torch.tensor(factor, dtype=torch.bfloat16).item()
    x = torch.linspace(0.5, 3, 4000).bfloat16()
    assert not torch.equal(x * factor, x * rounded)
    assert torch.equal(model.enter(x), x * rounded)


def test_further_ops_are_those_of_torch() -> None:
    x = torch.randn(5, 33, dtype=torch.float64) * 4
    weight, bias = torch.randn(2, 33, dtype=torch.float64)
    made = {
        "layer norm": (
            plain_ops.layer_norm(x, weight, bias, 1e-3),
            F.layer_norm(x, (33,), weight, bias, 1e-3),
        ),
        "squares": (plain_ops.squares(x), (x * x).sum(1, keepdim=True)),
        "soft cap": (plain_ops.softcap(x, 3.0), 3 * (x / 3).tanh()),
        "silu": (plain_ops.activation(x, "silu"), F.silu(x)),
        "gelu": (plain_ops.activation(x, "gelu_pytorch_tanh"), F.gelu(x, approximate="tanh")),
        "relu2": (plain_ops.activation(x, "relu2"), F.relu(x) ** 2),
    }
    for name, (ours, theirs) in made.items():
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14), name
    far = torch.tensor([[-4000.0, 4000.0]])
    assert torch.equal(plain_ops.softcap(far, 30.0), torch.tensor([[-30.0, 30.0]]))
    assert torch.equal(plain_ops.activation(far, "silu"), torch.tensor([[0.0, 4000.0]]))
    with pytest.raises(ValueError, match="no activation 'sine'"):
        plain_ops.activation(x, "sine")
