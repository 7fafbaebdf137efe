"""The kernels of a draw against the sampling rule as tensor functions, which run on the CPU.

Without a GPU the kernels run in Triton's interpreter, with small blocks. With a GPU all cases have the mark
``gpu``, with a vocabulary of a large model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.sampling import every_way_of_sampling
from tests.support.slow import mostly_slow
from weft.ops import draw as draws
from weft.ops import sampling as rule
from weft.ops.draw import DRAWS, Advance
from weft.runner.sampling.sampler import Sampler, SampleRows
from weft.types.plan import AllocSlot, TokenMasks, column
from weft.types.sampling import signed_seed

pytest.importorskip("triton")

from weft.ops.triton import draw as kernels

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")
COLUMNS = rule.Columns(0, 1, 2, 3, 4, 5)
THERE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if THERE else "cpu")
LARGE = 128256 if THERE else 101
"""Tokens of a vocabulary of many blocks."""
pytestmark = [pytest.mark.gpu] if THERE else []


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks in the interpreter, so that few tokens fill several blocks."""
    if not THERE:
        monkeypatch.setattr(kernels, "BLOCK", 64)


@dataclass
class Slots:
    """Parameters of slots, with the same seeds for every instance."""

    temperature: list[float]
    top_p: list[float]
    min_p: list[float]
    top_k: list[int]

    def __post_init__(self) -> None:
        count = len(self.temperature)
        made = torch.Generator().manual_seed(5)
        self.seed = torch.randint(-(2**63), 2**63 - 1, (count,), generator=made)
        self.choice = torch.arange(count)
        self.table = torch.zeros(count, len(COLUMNS), dtype=torch.int64)
        floats = torch.tensor([self.temperature, self.top_p, self.min_p], dtype=torch.float64)
        self.table.view(torch.float64)[:, :3] = floats.T
        self.table[:, 3] = torch.tensor(self.top_k)
        self.table[:, 4], self.table[:, 5] = self.seed, self.choice

    def expected(self, logits: Tensor, vocab: int, slots: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of the rule; -1 for a row with an error."""
        floats = self.table.view(torch.float64)[slots]
        x = rule.to_x(logits, vocab)[rows]
        is_greedy = floats[:, 0] < 1e-5
        likeliest, error = rule.greedy(x)
        scaled = x / floats[:, :1].float()
        error = torch.where(is_greedy, error, rule.broken(scaled))
        filters = rule.Filters(
            top_k=self.table[slots, 3], top_p=floats[:, 1], min_p=floats[:, 2], all_top_k=False
        )
        noise = rule.Noise(seed=self.seed[slots], choice=self.choice[slots], position=positions)
        scaled = scaled.masked_fill((error | is_greedy).unsqueeze(1), 0.0)
        sampled = rule.sample_all(rule.only_kept(scaled, filters), noise)
        return torch.where(error, -1, torch.where(is_greedy, likeliest, sampled))


def cycle(values: list[float], count: int, step: int = 1) -> list[float]:
    return [values[place * step % len(values)] for place in range(count)]


def check(logits: Tensor, vocab: int, slots: Slots) -> Tensor:
    """Draw every row of ``logits`` with another slot, compare with the rule, and return the tokens."""
    count = len(logits)
    order, rows = torch.randperm(count), torch.randperm(count)
    positions = torch.randint(0, 1 << 17, (count,))
    made = kernels.draw(
        logits.to(DEVICE),
        vocab,
        order.to(DEVICE),
        slots.table.to(DEVICE),
        COLUMNS,
        rows.to(DEVICE),
        positions.to(DEVICE),
        None,
    ).cpu()
    expected = slots.expected(logits, vocab, order, rows, positions)
    assert made.tolist() == expected.tolist(), (slots, order[made != expected])
    return made


VOCABS = (5, LARGE) if THERE else (1, 5, 67, LARGE, 300)
DTYPES = (torch.bfloat16, torch.float32) if THERE else (torch.bfloat16, torch.float32, torch.float16)
CASES = [
    (vocab, dtype, spread) for vocab in VOCABS for dtype in DTYPES for spread in (0.0, 0.1, 1.0, 3.0, 20.0)
]
COUNT = 12 if THERE else 3


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "dtype", "spread"), CASES)
def test_tokens_are_those_of_the_rule(vocab: int, dtype: torch.dtype, spread: float) -> None:
    """Temperatures and min_p of all sizes, padded columns, rows with few finite logits."""
    count = COUNT
    logits = (torch.randn(count, vocab + 3) * spread).to(dtype)
    logits[:, vocab:] = 1e4
    logits[::3, : vocab // 2] = -INF
    slots = Slots(
        temperature=cycle([0.0, 1.0, 0.3, 1.1e-5, 7.0, 100.0], count),
        top_p=[1.0] * count,
        min_p=cycle([0.0, 0.0, 0.02, 1e-12, 1.0], count),
        top_k=[vocab] * count,
    )
    assert (check(logits, vocab, slots) >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "dtype", "spread"), [c for c in CASES if c[2]])
def test_filters_cut_where_the_rule_cuts(vocab: int, dtype: torch.dtype, spread: float) -> None:
    """top_k, top_p and min_p together, with many equal logits at the cuts."""
    count = COUNT
    logits = (torch.randn(count, vocab) * spread).to(dtype)
    logits[1::2] = (logits[1::2] * 2).round() / 2
    slots = Slots(
        temperature=cycle([1.0, 0.7, 2.5], count),
        top_p=cycle([0.9, 0.5, 1.0, 0.05, 0.999, 0.0, 0.7], count),
        min_p=cycle([0.0, 0.0, 0.1], count),
        top_k=[min(vocab, int(k)) for k in cycle([vocab, 3, 41, 1, 207], count)],
    )
    check(logits, vocab, slots)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float32, 0.1), (torch.float32, 0.0), (torch.bfloat16, 0.1), (torch.bfloat16, 0.0)],
)
def test_broken_rows_are_errors(dtype: torch.dtype, temperature: float) -> None:
    """NaN, +inf, nothing finite, and a division that overflows, for greedy rows and others."""
    logits = torch.zeros(6, 60, dtype=dtype)
    logits[0, 59], logits[1, 3], logits[2] = NAN, INF, -INF
    logits[3, 2] = -INF
    logits[4] = 3e38
    slots = Slots([temperature] * 6, [1.0] * 6, [0.0] * 6, [60] * 6)
    assert (check(logits, 60, slots) < 0).sum() == (4 if temperature else 3)


@pytest.mark.slow
def test_equal_scores_go_to_the_lowest_id() -> None:
    """Logits so large that noise is lost in rounding: every token of a row has the same score."""
    logits = torch.full((2, LARGE), 1e30)
    logits[:, :70] = -INF
    slots = Slots([1.0, 0.5], [1.0] * 2, [0.0] * 2, [LARGE] * 2)
    assert check(logits, LARGE, slots).tolist() == [70, 70]


@mostly_slow(
    ("seed", "choice", "position", "token", "g"),
    [
        (0x0123456789ABCDEF, 1, 5, 7, 4.9150352663),
        (0, 0, 0, 0, 0.0848202511),
        (0x0123456789ABCDEF, 0, 5, 7, -0.5010688644),
        (2**64 - 1, 2, 131071, 151935, -0.6468533736),
    ],
    1,
)
def test_vectors_of_the_rule(
    seed: int, choice: int, position: int, token: int, g: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``token`` beats another token exactly when its logit exceeds the difference of the noise."""
    if not THERE:
        monkeypatch.setattr(kernels, "BLOCK", 1 << 14)  # few programs
    other, vocab = 3, 151936 if THERE else max(8, token + 1)
    slots = Slots([1.0], [1.0], [0.0], [vocab])
    slots.table[0, 4], slots.table[0, 5] = signed_seed(seed), choice
    where = torch.tensor([position])
    noise = rule.Noise(seed=slots.table[:, 4], choice=slots.table[:, 5], position=where)
    needed = float(noise.of(torch.tensor([other]))) - g
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for shift, winner in ((1e-5, token), (-1e-5, other)):
        logits = torch.full((1, vocab), -INF)
        logits[0, other], logits[0, token] = 0.0, needed + shift
        table = slots.table.to(DEVICE)
        made = kernels.draw(logits.to(DEVICE), vocab, first, table, COLUMNS, first, where.to(DEVICE), None)
        assert int(made) == winner


@pytest.mark.parametrize("draw", [True, False])
def test_a_captured_step_writes_its_slots(draw: bool) -> None:
    """The token is written behind the slot's ids and the slot advances; other slots and padding rows stay."""
    vocab, spare = 60, 4
    table = Slots([0.0, 1.0, 0.8, 0.6], [1.0, 1.0, 0.9, 1.0], [0.0] * 4, [vocab, vocab, vocab, 5])
    history = torch.randint(vocab, (spare + 1, 40), dtype=torch.int32)
    computed, live = torch.tensor([5, 0, 38, 11, 0]), torch.ones(spare + 1, dtype=torch.int64)
    names = torch.tensor([3, 0, 2, spare, DRAWS if draw else spare])
    logits = torch.randn(4, vocab)
    logits[1, 7] = NAN
    there = [tensor.clone().to(DEVICE) for tensor in (history, computed, live, names)]
    advance = Advance(there[3][4:], spare, *there[:3])
    made = kernels.draw(
        logits.to(DEVICE), vocab, there[3][:4], table.table.to(DEVICE), COLUMNS, None, None, advance
    ).cpu()
    if draw:
        slots, rows = names[:3], torch.arange(3)
        expected = table.expected(logits, vocab, slots, rows, computed[slots] + 1)
        assert made[:3].tolist() == expected.tolist()
        assert expected.tolist()[1] == -1
        computed[slots] += 1
        history[slots, computed[slots]] = expected.clamp(min=0).int()
        live[slots] = 0
    for tensor, wanted in zip(there, (history, computed, live), strict=False):
        assert torch.equal(tensor.cpu(), wanted)


@pytest.mark.slow
@pytest.mark.skipif(THERE, reason="tests/runner/test_gpu.py has this case for a GPU")
def test_the_sampler_draws_by_kernels_what_it_draws_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every class in one step: masks, lists, penalties, filters and logprobs."""
    params, vocab, length = every_way_of_sampling(9), 61, 20
    count = len(params)
    sampler = Sampler(count, vocab, DEVICE)
    for slot, one in enumerate(params):
        ids = column(list(range(length)))
        sampler.slots.alloc(
            AllocSlot(
                slot=slot, gen=1, choice=0, seed=slot, params=one, num_prompt=8, num_cached=0, token_ids=ids
            )
        )
    order = torch.arange(count).flip(0)
    none = order[:0]
    rows = SampleRows(
        slot_host=order.numpy(),
        slot=order,
        logits_row=order,
        position=torch.full((count,), length),
        prompt_slot_host=none.numpy(),
        prompt_slot=none,
        prompt_logits_row=none,
        prompt_position=none,
    )
    logits, history = torch.randn(count, vocab), torch.randint(0, vocab, (count, 32), dtype=torch.int32)
    logits[3, 5] = NAN
    words = np.array([[-1, 3]] * 2, np.int32)
    masks = TokenMasks(entries=np.array([1, 4]), words=words.ravel())
    expected = sampler.sample(logits, rows, history, torch.full((count,), 8), masks)
    monkeypatch.setattr(draws, "serves", lambda logits: True)
    made = sampler.sample(logits, rows, history, torch.full((count,), 8), masks)
    assert made.tokens.tolist() == expected.tokens.tolist()
    assert made.error.tolist() == expected.error.tolist()
    assert made.error.sum() == 1
