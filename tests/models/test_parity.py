"""Every family against its transformers implementation, and every row against the row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compared import distance, random_ids, run_mixed

TOLERANCE = 1e-4


def test_whole_prompt_float32(compared: Any, paged: Any) -> None:
    model = compared.load()
    ids = random_ids(61, model.spec.vocab_size, 1)
    harness = paged(model)
    sequence = harness.sequence(ids)
    harness.step([(sequence, len(ids))])
    assert distance(sequence.logits, compared.expected(ids)) <= TOLERANCE


@pytest.mark.requirement("B11")
def test_chunks_and_decode_float32(compared: Any, paged: Any) -> None:
    _check_chunks(compared, paged)


def test_chunks_of_kimi_linear(checkpoints: Any, paged: Any) -> None:
    _check_chunks(checkpoints("kimi-linear"), paged)


def _check_chunks(compared: Any, paged: Any) -> None:
    """Compare chunks and decode steps in mixed batches with the reference."""
    model = compared.load()
    harness = paged(model)
    lengths, prompts = [47, 20, 33, 9], [30, 5, 32, 1]
    sequences = [
        harness.sequence(random_ids(n, model.spec.vocab_size, 10 + i)) for i, n in enumerate(lengths)
    ]
    run_mixed(harness, sequences, prompts, seed=3)
    for sequence in sequences:
        assert distance(sequence.logits, compared.expected(sequence.ids)) <= TOLERANCE


@torch.no_grad()
def test_greedy_tokens_float64(compared: Any, paged: Any) -> None:
    reference = compared.reference_in_float64()
    harness = paged(compared.load(torch.float64))
    prompt = random_ids(23, harness.model.spec.vocab_size, 5)
    sequence = harness.sequence(prompt)
    harness.step([(sequence, 9)])
    harness.step([(sequence, 14)])
    expected = list(prompt)
    for _ in range(16):
        top = sequence.logits[-1].topk(2).values
        assert top[0] - top[1] > 1e-4, "a tie: choose another seed"
        sequence.ids.append(int(sequence.logits[-1].argmax()))
        logits = reference(torch.tensor([expected]), use_cache=False).logits[0, -1]
        expected.append(int(logits.argmax()))
        harness.step([], [(sequence, 1)])
    assert sequence.ids == expected
    assert len(set(sequence.ids[len(prompt) :])) > 1, "degenerate logits prove nothing"


@pytest.mark.requirement("B11")
def test_rows_do_not_depend_on_each_other(compared: Any, paged: Any) -> None:
    """A row in any mixed batch equals the row alone and in one piece; all unused memory is NaN."""
    model = compared.load(torch.float64)
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
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        assert torch.equal(mine.argmax(-1), theirs.argmax(-1))


def test_host_upper_bounds_do_not_show(compared: Any, paged: Any) -> None:
    """A context that is shorter on the device than the host planned gives equal logits."""
    model = compared.load(torch.float64)
    ids = random_ids(31, model.spec.vocab_size, 6)
    results = []
    for bound in (0, 6):
        harness = paged(model)
        sequence = harness.sequence(ids)
        harness.step([(sequence, 20)], bound=bound)
        while sequence.computed < len(ids):
            harness.step([], [(sequence, 1)], bound=bound)
        results.append(torch.stack(sequence.logits))
    assert torch.allclose(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3-moe", "mistral-window", "llama-llama3"])
def test_half_precision_is_close_to_float32(
    name: str, dtype: torch.dtype, checkpoints: Any, paged: Any
) -> None:
    """Rounding of weights and activations only; a router near a tie may flip, so the mean is compared."""
    checkpoint = checkpoints(name)
    ids = random_ids(40, 97, 7)
    harness = paged(checkpoint.load(dtype))
    sequence = harness.sequence(ids)
    harness.step([(sequence, 30)])
    harness.step([], [(sequence, 10)])
    ours = torch.stack(sequence.logits).float()
    theirs = checkpoint.expected(ids)
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < 0.1


@torch.no_grad()
def test_dynamic_rope_equals_transformers_when_generating(checkpoints: Any, paged: Any) -> None:
    """The prompt fits max_position; the tokens decoded one at a time go far beyond."""
    checkpoint = checkpoints("llama-dynamic")
    reference = checkpoint.reference
    limit = reference.config.max_position_embeddings
    ids = random_ids(limit + 24, 131, 8)
    prompt = limit - 8
    cache, theirs = None, []
    for begin, end in [(0, prompt)] + [(p, p + 1) for p in range(prompt, len(ids))]:
        out = reference(torch.tensor([ids[begin:end]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        theirs.append(out.logits[0])
    harness = paged(checkpoint.load(), block_size=16)
    assert harness.model.spec.max_position == 4 * limit
    sequence = harness.sequence(ids)
    harness.step([(sequence, 200)])
    harness.step([(sequence, prompt - 200)])
    while sequence.computed < len(ids):
        harness.step([], [(sequence, 1)])
    assert distance(sequence.logits, torch.cat(theirs)) <= TOLERANCE
    # The same positions in one piece, for which transformers would give other logits.
    whole = paged(harness.model, block_size=16)
    again = whole.sequence(ids)
    whole.step([(again, len(ids))])
    assert distance(again.logits, torch.stack(sequence.logits)) <= TOLERANCE


def test_single_rank_yields_nothing_and_empty_segments_are_fine(checkpoints: Any, paged: Any) -> None:
    """Pure prefill, pure decode and logits of no row run the same code."""
    model = checkpoints("qwen3-moe").load()
    harness = paged(model)
    a, b = harness.sequence([1, 2, 3, 4]), harness.sequence([5, 6, 7])
    harness.step([(a, 3), (b, 2)])
    harness.step([], [(a, 1), (b, 1)])
    assert len(a.logits) == 4
    assert len(b.logits) == 3


def test_a_step_without_tokens(checkpoints: Any, paged: Any) -> None:
    """An idle replica runs a step without tokens."""
    for name in ("qwen3-moe", "mistral-window"):
        paged(checkpoints(name).load()).step([])
