"""The same paths on a CUDA device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.models.test_quantized_loading import FORMATS, _folders
from tests.support.vision_models import CASES as VISION_CASES
from tests.support.vision_models import make_prompt
from weft.config.families import load_spec
from weft.models.loader import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def _run(harness: Any, lengths: list[int]) -> list[Any]:
    rng = random.Random(0)
    sequences = [harness.sequence([rng.randrange(97) for _ in range(n)]) for n in lengths]
    first, second, third = sequences
    harness.step([(first, 9), (second, 20)])
    harness.step([(third, 5), (first, lengths[0] - 12)], [(second, 1)])
    while any(s.computed < len(s.ids) for s in sequences):
        harness.step([], [(s, 1) for s in sequences if s.computed < len(s.ids)])
    return sequences


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cuda_equals_cpu(checkpoint: Any, paged: Any, dtype: torch.dtype) -> None:
    """Logits within rounding of the CPU's, over a poisoned cache and mixed steps; greedy tokens equal."""
    torch.backends.cuda.matmul.allow_tf32 = False
    lengths = [40, 24, 11]
    here = _run(paged(checkpoint.load(dtype)), lengths)
    there = _run(paged(checkpoint.load(dtype, torch.device("cuda"))), lengths)
    for a, b in zip(here, there, strict=True):
        x, y = torch.stack(a.logits), torch.stack(b.logits)
        assert (x - y).abs().max() / x.abs().max() < (1e-11 if dtype == torch.float64 else 1e-4)
        assert torch.equal(x.argmax(-1), y.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(VISION_CASES))
def test_images_on_cuda_equal_those_on_a_cpu(name: str, dtype: torch.dtype, seeing: Any, paged: Any) -> None:
    """The tower's rows, and logits of a prompt with images in chunks."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # Towers of transformers compute their rotations in float32, also in a float64 model.
    exact = 1e-6 if name.startswith("qwen2-") else 1e-11
    close = exact if dtype == torch.float64 else 1e-4
    made = []
    for device in ("cpu", "cuda"):
        model = seeing(name).load(dtype, torch.device(device))
        prompt = make_prompt((4, (3, 5), (1, 2), 3), model.spec, 1)
        harness = paged(model)
        sequence = harness.reading(prompt)
        harness.step([(sequence, 9)])
        harness.step([(sequence, len(prompt.ids) - 9)])
        made.append((prompt.embedded(model.vision)[0].main.cpu(), torch.stack(sequence.logits)))
    for here, there in zip(*made, strict=True):
        assert (here - there).abs().max() <= close * here.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_cuda(checkpoints: Any, paged: Any, dtype: torch.dtype) -> None:
    """Finite, and close to float32 on the mean."""
    checkpoint = checkpoints("qwen3-moe")
    half = _run(paged(checkpoint.load(dtype, torch.device("cuda"))), [40, 24, 11])
    full = _run(paged(checkpoint.load()), [40, 24, 11])
    for a, b in zip(half, full, strict=True):
        x, y = torch.stack(a.logits).float(), torch.stack(b.logits)
        assert torch.isfinite(x).all()
        assert (x - y).abs().mean() / y.abs().mean() < 0.1


def test_dense_steps_do_not_wait_for_the_gpu(checkpoints: Any, paged: Any) -> None:
    """A step of a dense model with windows, prefill and decode, launches without one synchronisation."""
    harness = paged(checkpoints("qwen2-mixed-window").load(device=torch.device("cuda")))
    one, two = harness.sequence(list(range(30))), harness.sequence(list(range(20)))
    harness.step([(one, 20), (two, 10)])
    steps = harness.model.steps

    def watched(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return (yield from steps(*arguments))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    harness.model.steps = watched
    harness.step([(one, 7)], [(two, 1)])
    assert len(one.logits) == 27


@pytest.mark.parametrize("name", ["fp8 blocks", "nvfp4", "int8"])
def test_packed_weights_are_as_close_as_dequantized_ones(name: str, tmp_path: Path, paged: Any) -> None:
    """Compares logits of the quantized bundled model with float32, for a prompt and decode steps."""
    folder, _ = _folders(Path(weft.__file__).parent / "checkpoints" / "spool-text", tmp_path, *FORMATS[name])
    spec = load_spec(str(folder))
    found = []
    for dtype, packed in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        before = torch.cuda.memory_allocated()
        model = load_model(str(folder), spec, dtype, torch.device("cuda"), progress=False, packed=packed)
        size = torch.cuda.memory_allocated() - before
        harness = paged(model)
        sequence = harness.sequence([(37 * i + 11) % 900 for i in range(120)])
        harness.step([(sequence, 100)])
        for _ in range(20):
            harness.step([], [(sequence, 1)])
        found.append((torch.stack(sequence.logits).float(), size))
        del model, harness, sequence
    (ours, small), (plain, large), (exact, _) = found
    assert small < large
    misses = [(made - exact).abs().mean() / exact.abs().mean() for made in (ours, plain)]
    assert misses[0] < 1.1 * misses[1] < 0.1
