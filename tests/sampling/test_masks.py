"""Masks of grammars in the sampler: rule 1, in every form of the rule, for entries with a mask only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sampling.test_sampler import MANY, entry
from weft.common.errors import EngineDead
from weft.ops import cpu
from weft.ops import sampling as ops
from weft.ops.cpu import sampling as direct
from weft.runner.sampling import sampler as module
from weft.types.plan import Segment, StepPlan, TokenMasks, column
from weft.types.sampling import TokenParams

VOCAB = 1043
WORDS = -(-VOCAB // 32)
INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def random_masks(rng: np.random.Generator, entries: list[int], share: float = 0.3) -> TokenMasks:
    bits = rng.random((len(entries), 32 * WORDS)) < share
    bits[:, 3] = True
    words = np.packbits(bits.astype(np.uint8), axis=1, bitorder="little").view("<i4")
    return TokenMasks(entries=column(entries), words=np.ascontiguousarray(words.ravel(), np.int32))


def allowed(masks: TokenMasks, which: int) -> tuple[int, ...]:
    words = masks.words.reshape(len(masks.entries), -1)[which]
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:VOCAB]
    return tuple(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("native", [True, False])
def test_a_mask_is_a_list_of_allowed_tokens(
    make: SimpleNamespace, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch, extension: None
) -> None:
    if not native:
        monkeypatch.setattr(direct, "serves", lambda logits: False)
    params = [one for one in MANY if one.allowed is None] * 2
    of = make.scene(len(params), VOCAB, seed=9)
    of.logits = of.logits.to(dtype)
    index = list(range(len(params)))
    rows = make.rows(index, index, of.positions)
    some = index[::2]
    masks = random_masks(np.random.default_rng(2), some)
    choices = [i % 5 for i in index]
    plain = make.sampler(params, vocab=VOCAB, seeds=of.seeds, choices=choices)
    made = plain.sample(of.logits, rows, of.history, of.num_prompt, masks)
    lists = [
        replace(one, allowed=allowed(masks, some.index(i))) if i in some else one
        for i, one in enumerate(params)
    ]
    listed = make.sampler(lists, vocab=VOCAB, seeds=of.seeds, choices=choices)
    expected = listed.sample(of.logits, rows, of.history, of.num_prompt)
    assert [entry(made, i) for i in index] == [entry(expected, i) for i in index]
    free = plain.sample(of.logits, rows, of.history, of.num_prompt)
    assert any(entry(made, i)[0] != entry(free, i)[0] for i in some), "no mask changed anything"
    monkeypatch.setitem(module.CHUNK, "cpu", 2 * VOCAB)
    cut = plain.sample(of.logits, rows, of.history, of.num_prompt, masks)
    assert [entry(cut, i) for i in index] == [entry(made, i) for i in index]


def test_masks_and_lists_together(make: SimpleNamespace) -> None:
    """A token must pass both."""
    params = [TokenParams(allowed=(4, 8, 9)), TokenParams(bad=((8,),), temperature=0.0)]
    of = make.scene(2, VOCAB)
    of.logits[:, 8] = 99.0
    sampler = make.sampler(params, vocab=VOCAB, seeds=of.seeds)
    words = np.zeros((2, WORDS), np.int32)
    words[:, 0] = 1 << 8 | 1 << 9
    masks = TokenMasks(entries=column([0, 1]), words=words.ravel())
    made = sampler.sample(of.logits, make.rows([0, 1], [0, 1], [10, 10]), of.history, of.num_prompt, masks)
    assert made.tokens.tolist() == [8, 9]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("params", MANY[:2] + MANY[5:6], ids=str)
def test_a_mask_that_leaves_nothing_is_an_error_of_its_row(
    make: SimpleNamespace, params: TokenParams, native: bool, monkeypatch: pytest.MonkeyPatch, extension: None
) -> None:
    if not native:
        monkeypatch.setattr(direct, "serves", lambda logits: False)
    of = make.scene(4, VOCAB)
    of.logits[2, 700] = float("nan")  # at a place that the mask excludes, too
    sampler = make.sampler([params] * 4, vocab=VOCAB, seeds=of.seeds)
    words = np.zeros((3, WORDS), np.int32)
    words[1:, 0] = 6
    masks = TokenMasks(entries=column([0, 1, 2]), words=words.ravel())
    made = sampler.sample(
        of.logits, make.rows(range(4), range(4), [10] * 4), of.history, of.num_prompt, masks
    )
    assert made.error.tolist() == [True, False, True, False]
    assert made.tokens[0] == made.tokens[2] == 0
    assert made.tokens[1] in (1, 2)


def test_logprobs_are_those_of_untouched_logits(make: SimpleNamespace) -> None:
    of = make.scene(1, VOCAB)
    sampler = make.sampler([TokenParams(logprobs=3)], vocab=VOCAB, seeds=of.seeds)
    words = np.zeros((1, WORDS), np.int32)
    words[0, 1] = 1
    rows = make.rows([0], [0], [10])
    masks = TokenMasks(entries=column([0]), words=words.ravel())
    made = sampler.sample(of.logits, rows, of.history, of.num_prompt, masks)
    assert made.tokens.tolist() == [32]
    assert made.logprobs is not None
    expected = of.logits.log_softmax(dim=1)
    assert made.logprobs.ids[0].tolist() == [32, *ops.top_ids(of.logits, 3)[0].tolist()]
    assert torch.allclose(made.logprobs.values[0], expected[0, made.logprobs.ids[0]])


def test_words_of_a_frame_are_read_only_and_fine(make: SimpleNamespace) -> None:
    of = make.scene(1, VOCAB)
    sampler = make.sampler([TokenParams()], vocab=VOCAB, seeds=of.seeds)
    words = np.full(WORDS, 1, np.int32)
    words.setflags(write=False)
    masks = TokenMasks(entries=column([0]), words=words)
    made = sampler.sample(of.logits, make.rows([0], [0], [10]), of.history, of.num_prompt, masks)
    assert made.tokens[0] % 32 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 31, 32, 33, 1000, 40001])
def test_both_forms_of_masks_agree(dtype: torch.dtype, vocab: int, extension: None) -> None:
    assert cpu.load()
    torch.manual_seed(vocab)
    logits = (torch.randn(9, vocab + 3) * 3).to(dtype)
    logits[2, vocab - 1] = float("nan")
    logits[3, 0] = INF
    logits[4] = -INF
    logits[5, : vocab // 2] = -INF
    logits[:, vocab:] = float("nan")  # padded columns
    rows = torch.randperm(9)[:7]
    words = torch.randint(-(2**31), 2**31 - 1, (4, -(-vocab // 32)), dtype=torch.int32)
    places = torch.randint(0, 4, (7,))
    masks = (words, places)
    made, error = direct.allow_bits(logits, rows, vocab, masks)
    wanted = logits[rows, :vocab].float()
    assert error.tolist() == ops.broken(wanted).tolist()
    ops.allow_bits_(wanted, words[places])
    assert torch.equal(made.nan_to_num(7.0), wanted.nan_to_num(7.0))
    with pytest.raises(RuntimeError, match=r"mask \d of 4"):
        direct.allow_bits(logits, rows, vocab, (words, places + 4))


@pytest.mark.requirement("G9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 31, 32, 33, 1000, 40001])
@pytest.mark.parametrize("least", [0.0, 0.3])
def test_drawing_under_a_mask_is_drawing_from_what_it_leaves(
    dtype: torch.dtype, vocab: int, least: float, extension: None
) -> None:
    """Without a copy of the logits, and the same tokens and errors: from many masks, a few of single tokens
    and one of none.
    """
    assert cpu.load()
    torch.manual_seed(vocab)
    logits = (torch.randn(60, vocab + 3) * 3).to(dtype)
    logits[2, vocab - 1] = float("nan")
    logits[3, 0] = INF
    logits[4] = -INF
    logits[5, : vocab // 2] = -INF
    logits[:, vocab:] = float("nan")  # padded columns
    rows, count = torch.randperm(60), 60
    words = torch.randint(-(2**31), 2**31 - 1, (8, -(-vocab // 32)), dtype=torch.int32)
    words[5:] = 0
    words[5, 0] = 1
    words[6, -1] = 1
    masks = (words, torch.randint(0, 8, (count,)))
    kept, broken = direct.allow_bits(logits, rows, vocab, masks)
    whole = torch.arange(count)
    columns = (
        torch.full((count,), 0.8, dtype=torch.float64),
        torch.full((count,), least, dtype=torch.float64),
        torch.randint(0, 2**62, (count,)),
        whole % 3,
        whole,
    )
    for (made, wrong), (wanted, none) in (
        (direct.greedy(logits, rows, vocab, masks), direct.greedy(kept, whole, vocab)),
        (
            direct.sample(logits, rows, vocab, *columns, masks),
            direct.sample(kept, whole, vocab, *columns),
        ),
    ):
        assert wrong.tolist() == (broken | none).tolist()
        assert made[~wrong].tolist() == wanted[~wrong].tolist()
    with pytest.raises(RuntimeError, match="mask 8 of 8"):
        direct.greedy(logits, rows, vocab, (words, masks[1].clamp(min=8)))


def test_masks_that_cannot_be_right_are_refused() -> None:
    decode = Segment(slot=column([1]), gen=column([1]), sample=column([1]))
    plan: Any = StepPlan(step=3, decode=decode, constrained=True)
    good = TokenMasks(entries=column([0]), words=np.zeros(WORDS, np.int32))
    good.check(plan, VOCAB)
    for bad in (
        replace(good, entries=column([1])),
        replace(good, entries=column([0, 0]), words=np.zeros(2 * WORDS, np.int32)),
        replace(good, words=np.zeros(WORDS + 1, np.int32)),
    ):
        with pytest.raises(EngineDead):
            bad.check(plan, VOCAB)
    with pytest.raises(EngineDead, match="not constrained"):
        good.check(replace(plan, constrained=False), VOCAB)


class _NoReadBack(TorchDispatchMode):
    """Fails on operators that make the host of a GPU wait for one value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read back"
        return func(*args, **(kwargs or {}))


def test_masks_are_applied_without_reading_a_value_back() -> None:
    x, words = torch.randn(3, VOCAB), torch.full((3, WORDS), 8, dtype=torch.int32)
    with _NoReadBack():
        ops.allow_bits_(x, words)
    assert (x > -INF).nonzero()[:, 1].tolist() == list(range(3, VOCAB, 32)) * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_masks_as_the_cpu_does(make: SimpleNamespace, dtype: torch.dtype) -> None:
    of = make.scene(len(MANY), VOCAB, seed=4)
    index = list(range(len(MANY)))
    masks = random_masks(np.random.default_rng(2), index[1::2])
    made = []
    for device in ("cpu", "cuda"):
        sampler = make.sampler(MANY, vocab=VOCAB, seeds=of.seeds, device=device)
        rows = make.rows(index, index, of.positions, device=device)
        moved = [t.to(device) for t in (of.logits.to(dtype), of.history, of.num_prompt)]
        torch.cuda.synchronize()
        if device == "cuda":
            sampler.sample(moved[0], rows, moved[1], moved[2], masks)
            torch.cuda.set_sync_debug_mode("error")
        try:
            made.append(sampler.sample(moved[0], rows, moved[1], moved[2], masks))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert made[1].tokens.cpu().equal(made[0].tokens)
    assert made[1].error.cpu().equal(made[0].error)
