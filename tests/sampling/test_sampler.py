"""The sampler as the runner uses it: batches, slots, logprobs, devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.common.errors import EngineDead
from weft.runner.sampling import sampler as module
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

NAN, INF = float("nan"), float("inf")
VOCAB = 2600
MANY = [
    TokenParams(temperature=0),
    TokenParams(),
    TokenParams(top_p=0.9, temperature=3.0),
    TokenParams(temperature=0, logprobs=3),
    TokenParams(top_k=7, logprobs=0),
    TokenParams(top_k=300, top_p=0.99, temperature=3.0),
    TokenParams(top_k=2500, temperature=9.0, logprobs=5),
    TokenParams(min_p=0.05, logprobs=20),
    TokenParams(frequency_penalty=1.0, repetition_penalty=1.2, logprobs=1),
    TokenParams(bad=((3,), (1, 4), (0, 1, 5)), logit_bias=((3, 9.0), (4, 8.0)), stop_ids=(5,), min_tokens=9),
    TokenParams(allowed=(9, 8, 7), temperature=100.0, presence_penalty=-2.0),
    TokenParams(top_p=0.99999, temperature=100.0),
]


def build(make: SimpleNamespace, of: SimpleNamespace, params: list[TokenParams], vocab: int, device="cpu"):
    return make.sampler(
        params, vocab=vocab, seeds=of.seeds, choices=[i % 5 for i in range(len(params))], device=device
    )


def entry(made: module.SampleOutput, index: int) -> tuple:
    """Return all results of entry ``index``, without the padding for other entries."""
    result = (int(made.tokens[index]), bool(made.error[index]))
    if made.logprobs is None or index not in made.logprobs.entries:
        return result
    at = int(np.flatnonzero(made.logprobs.entries == index)[0])
    ids, values = made.logprobs.ids[at], made.logprobs.values[at]
    return (*result, ids[ids >= 0].tolist(), values[ids >= 0].tolist(), int(made.logprobs.rank[at]))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_entry_does_not_depend_on_the_others(make: SimpleNamespace, threads: int, ties: bool) -> None:
    count = len(MANY)
    of = make.scene(count, VOCAB, seed=3, ties=ties)
    sampler = build(make, of, MANY, VOCAB)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        index = list(range(count))
        whole = sampler.sample(of.logits, make.rows(index, index, of.positions), of.history, of.num_prompt)
        for slot in index:
            rows = make.rows([slot], [slot], [of.positions[slot]])
            alone = sampler.sample(of.logits, rows, of.history, of.num_prompt)
            assert entry(alone, 0) == entry(whole, slot), MANY[slot]
        order = np.random.default_rng(0).permutation(count).tolist()
        shuffled = sampler.sample(
            of.logits[order],
            make.rows(order, index, [of.positions[i] for i in order]),
            of.history,
            of.num_prompt,
        )
        for place, slot in enumerate(order):
            assert entry(shuffled, place) == entry(whole, slot), MANY[slot]
    finally:
        torch.set_num_threads(before)


def test_chunks_change_nothing(make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    params = MANY * 3
    of = make.scene(len(params), VOCAB, seed=5)
    sampler = build(make, of, params, VOCAB)
    index = list(range(len(params)))
    prompt = [(i, i, of.positions[i]) for i in index]
    of.history = torch.cat([of.history, of.history], dim=1)
    rows = make.rows(index, index, of.positions, prompt)
    whole = sampler.sample(of.logits, rows, of.history, of.num_prompt)
    monkeypatch.setitem(module.CHUNK, "cpu", 2 * VOCAB)
    cut = sampler.sample(of.logits, rows, of.history, of.num_prompt)
    assert [entry(cut, i) for i in index] == [entry(whole, i) for i in index]
    assert whole.prompt_logprobs is not None
    assert cut.prompt_logprobs is not None
    assert cut.prompt_logprobs.values.equal(whole.prompt_logprobs.values)
    assert cut.prompt_logprobs.ids.equal(whole.prompt_logprobs.ids)


def test_several_entries_of_one_slot(make: SimpleNamespace) -> None:
    of = make.scene(3, 50)
    sampler = build(make, of, MANY[:3], 50)
    rows = make.rows([1, 1, 1], [0, 1, 2], [10, 11, 12])
    together = sampler.sample(of.logits, rows, of.history, of.num_prompt).tokens.tolist()
    apart = []
    for index in range(3):
        rows = make.rows([1], [index], [10 + index])
        apart += sampler.sample(of.logits, rows, of.history, of.num_prompt).tokens.tolist()
    assert together == apart


@pytest.mark.parametrize("params", [TokenParams(temperature=0, logprobs=2), *MANY], ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_broken_row_breaks_nothing_else(make: SimpleNamespace, params: TokenParams, poison: float) -> None:
    of = make.scene(3, VOCAB)
    sampler = build(make, of, [params] * 3, VOCAB)
    rows = make.rows([0, 1, 2], [0, 1, 2], of.positions)
    clean = sampler.sample(of.logits, rows, of.history, of.num_prompt)
    assert not clean.error.any()
    if poison == -INF:
        of.logits[1] = poison
    else:
        of.logits[1, 1234] = poison
    made = sampler.sample(of.logits, rows, of.history, of.num_prompt)
    assert made.error.tolist() == [False, True, False]
    assert int(made.tokens[1]) == 0
    assert entry(made, 0) == entry(clean, 0)
    assert entry(made, 2) == entry(clean, 2)
    if made.logprobs is not None:
        assert made.logprobs.error.tolist() == [False, True, False]


def test_history_beyond_the_position_is_never_read(make: SimpleNamespace) -> None:
    of = make.scene(len(MANY), VOCAB, seed=9)
    sampler = build(make, of, MANY, VOCAB)
    index = list(range(len(MANY)))
    rows = make.rows(index, index, of.positions)
    first = sampler.sample(of.logits, rows, of.history, of.num_prompt).tokens
    for junk in (0, 4, -1, 2**31 - 1):
        for slot, position in enumerate(of.positions):
            of.history[slot, position:] = junk
        assert sampler.sample(of.logits, rows, of.history, of.num_prompt).tokens.equal(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs(plain: SimpleNamespace, make: SimpleNamespace, dtype: torch.dtype, ties: bool) -> None:
    vocab, tops = 300, [0, 1, 5, 20, -1]
    params = [TokenParams(logprobs=top, temperature=2.0, logit_bias=((3, 5.0),)) for top in tops]
    of = make.scene(5, vocab, ties=ties)
    padded = torch.nn.functional.pad(of.logits, (0, 4), value=99.0).to(dtype)
    sampler = build(make, of, params, vocab)
    made = sampler.sample(padded, make.rows(range(5), range(5), of.positions), of.history, of.num_prompt)
    logprobs = made.logprobs
    assert logprobs is not None
    assert logprobs.entries.tolist() == [0, 1, 2, 3]
    assert logprobs.ids.shape == logprobs.values.shape == (4, 21)
    assert logprobs.values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(4):
        wide = padded[row, :vocab].double().numpy()
        ids, values, rank = plain.logprobs(wide, int(made.tokens[row]), tops[row])
        assert logprobs.ids[row].tolist() == ids + [-1] * (20 - tops[row])
        assert logprobs.values[row, : 1 + tops[row]].tolist() == pytest.approx(values, abs=1e-5)
        assert int(logprobs.rank[row]) == rank


def test_more_top_logprobs_than_tokens(make: SimpleNamespace) -> None:
    params = [TokenParams(temperature=0, logprobs=20)]
    made = make.sampler(params, vocab=3).sample(
        torch.tensor([[1.0, 2.0, 1.0]]),
        make.rows([0], [0], [1]),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.ones(1, dtype=torch.int64),
    )
    assert made.logprobs is not None
    assert made.logprobs.ids[0].tolist() == [1, 1, 0, 2] + [-1] * 17


def test_prompt_logprobs_read_the_history(plain: SimpleNamespace, make: SimpleNamespace) -> None:
    vocab = 40
    params = [TokenParams(prompt_logprobs=2), TokenParams(prompt_logprobs=0, logprobs=1)]
    of = make.scene(2, vocab)
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    prompt = [(0, 0, 1), (0, 1, 2), (1, 3, 4), (1, 4, 5)]
    sampler = build(make, of, params, vocab)
    made = sampler.sample(logits, make.rows([0, 1], [2, 5], [3, 6], prompt), of.history, of.num_prompt)
    found = made.prompt_logprobs
    assert found is not None
    assert found.entries.tolist() == [0, 1, 2, 3]
    for index, (slot, row, position) in enumerate(prompt):
        top = params[slot].prompt_logprobs
        ids, values, rank = plain.logprobs(logits[row].double().numpy(), int(of.history[slot, position]), top)
        assert found.ids[index].tolist() == ids + [-1] * (2 - top)
        assert found.values[index, : 1 + top].tolist() == pytest.approx(values, abs=1e-5)
        assert int(found.rank[index]) == rank
    assert made.logprobs is not None
    assert made.logprobs.entries.tolist() == [1]
    assert made.logprobs.ids[0, 0] == made.tokens[1]


def test_a_step_may_sample_nothing(make: SimpleNamespace) -> None:
    of = make.scene(1, 40)
    sampler = build(make, of, [TokenParams(prompt_logprobs=0)], 40)
    made = sampler.sample(of.logits, make.rows([], [], [], [(0, 0, 3)]), of.history, of.num_prompt)
    assert made.tokens.shape == made.error.shape == (0,)
    assert made.logprobs is None
    assert made.prompt_logprobs is not None
    made = sampler.sample(of.logits[:0], make.rows([], [], []), of.history, of.num_prompt)
    assert made.prompt_logprobs is None


def test_slots_forget_their_last_sequence(make: SimpleNamespace) -> None:
    def admitted(params: TokenParams) -> AllocSlot:
        return AllocSlot(
            slot=0,
            gen=2,
            choice=0,
            seed=0,
            params=params,
            num_prompt=1,
            num_cached=0,
            token_ids=np.zeros(1, np.int32),
        )

    sampler = make.sampler(
        [TokenParams(temperature=0, bad=((2,),), logit_bias=((1, 9.0),), logprobs=1)], vocab=3
    )
    with pytest.raises(EngineDead):
        sampler.slots.alloc(admitted(TokenParams()))
    sampler.slots.free(0)
    with pytest.raises(EngineDead):
        sampler.slots.free(0)
    sampler.slots.alloc(admitted(TokenParams(temperature=0)))
    made = sampler.sample(
        torch.tensor([[0.0, 1.0, 2.0]]),
        make.rows([0], [0], [1]),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.ones(1, dtype=torch.int64),
    )
    assert made.tokens.tolist() == [2]
    assert made.logprobs is None


class _NoReadBack(TorchDispatchMode):
    """Fails on operators that make the host of a GPU wait for one value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read back"
        return func(*args, **(kwargs or {}))


def test_lists_are_applied_without_reading_a_value_back(make: SimpleNamespace) -> None:
    of = make.scene(1, 40)
    words = ((3,), (int(of.history[0, of.positions[0] - 1]), 4))
    sampler = build(make, of, [TokenParams(temperature=0, bad=words, stop_ids=(6,), min_tokens=99)], 40)
    rows = make.rows([0], [0], of.positions)
    floats, ints = torch.from_numpy(sampler.slots.floats), torch.from_numpy(sampler.slots.ints)
    none = sampler._no_masks
    step = module._Rows(rows.slot_host, rows.slot, rows.logits_row, rows.position, floats, ints, *none)
    with _NoReadBack():
        sampler._apply_lists(of.logits, step, of.history, of.num_prompt)
    assert (of.logits[0] == -INF).nonzero().flatten().tolist() == [3, 4, 6]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cuda_draws_what_the_cpu_draws(make: SimpleNamespace, dtype: torch.dtype, ties: bool) -> None:
    params = MANY * 4
    count = len(params)
    of = make.scene(count, VOCAB, seed=11, ties=ties)
    of.logits[5, 77] = NAN
    index = list(range(count))
    prompt = [(i, i, of.positions[i] - 1) for i in index]
    made = []
    for device in ("cpu", "cuda"):
        sampler = build(make, of, params, VOCAB, device)
        rows = make.rows(index, index, of.positions, prompt, device)
        moved = [t.to(device) for t in (of.logits.to(dtype), of.history, of.num_prompt)]
        torch.cuda.synchronize()
        if device == "cuda":
            sampler.sample(moved[0], rows, moved[1], moved[2])
            torch.cuda.set_sync_debug_mode("error")
        try:
            made.append(sampler.sample(moved[0], rows, moved[1], moved[2]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ours, theirs = made
    assert theirs.tokens.cpu().equal(ours.tokens)
    assert theirs.error.cpu().equal(ours.error)
    for mine, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
        assert mine is not None
        assert other is not None
        good = ~mine.error
        assert other.ids.cpu()[good].equal(mine.ids[good])
        assert other.rank.cpu()[good].equal(mine.rank[good])
        assert torch.allclose(other.values.cpu()[good], mine.values[good], atol=1e-5)


def test_long_histories_are_penalised_in_chunks(
    make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history longer than the vocabulary bounds the rows of a chunk."""
    count, vocab = 9, 8
    of = make.scene(count, vocab, seed=4)
    params = [TokenParams(repetition_penalty=1.0 + row / 4, frequency_penalty=0.5) for row in range(count)]
    rows = make.rows(range(count), range(count), of.positions)

    def drawn() -> list[int]:
        sampler = build(make, of, params, vocab)
        return sampler.sample(of.logits, rows, of.history, of.num_prompt).tokens.tolist()

    expected, penalise, sizes = drawn(), module.ops.penalise_, []

    def watched(x: Any, penalties: Any, history: torch.Tensor, *rest: Any) -> None:
        sizes.append(history.numel())
        penalise(x, penalties, history, *rest)

    monkeypatch.setitem(module.CHUNK, "cpu", 80)
    monkeypatch.setattr(module.ops, "penalise_", watched)
    assert drawn() == expected
    assert max(sizes) <= 80
