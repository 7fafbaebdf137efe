"""The sampler against a plain-Python reading of the sampling rule."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.slow import mostly_slow
from weft.types.sampling import TokenParams

VOCAB = 24
TOKEN = st.integers(0, VOCAB - 1)
NAN, INF = float("nan"), float("inf")

GRID = st.sampled_from([-4.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 4.0])
SMOOTH = st.floats(-30, 30, width=32)
LOGIT = st.one_of(GRID, GRID, SMOOTH, st.sampled_from([-INF, -1e4, 1e4]))


@st.composite
def token_params(draw: st.DrawFn) -> TokenParams:
    def some(strategy: st.SearchStrategy, otherwise: object) -> object:
        return draw(strategy) if draw(st.booleans()) else otherwise

    ids = st.lists(TOKEN, max_size=6, unique=True)
    word = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    bias = st.tuples(TOKEN, st.sampled_from([-100.0, -2.5, 0.1, 3.0, 100.0]))
    return TokenParams(
        temperature=draw(st.sampled_from([0.0, 9e-6, 1e-5, 0.3, 0.7, 1.0, 1.0, 1.6, 100.0])),
        top_k=some(st.sampled_from([-1, 1, 2, 3, 7, VOCAB, VOCAB + 5]), 0),
        top_p=some(st.sampled_from([1e-9, 0.1, 0.35, 0.5, 0.77, 0.95, 0.9999]), 1.0),
        min_p=some(st.sampled_from([1e-12, 0.01, 0.2, 0.9, 1.0]), 0.0),
        frequency_penalty=some(st.sampled_from([-2.0, 0.3, 2.0]), 0.0),
        presence_penalty=some(st.sampled_from([-2.0, 0.7, 2.0]), 0.0),
        repetition_penalty=some(st.sampled_from([0.5, 1.1, 7.0]), 1.0),
        logit_bias=some(st.lists(bias, max_size=5, unique_by=lambda pair: pair[0]).map(tuple), ()),
        allowed=some(st.lists(TOKEN, min_size=1, max_size=12).map(tuple), None),
        bad=some(st.lists(word, max_size=5).map(tuple), ()),
        min_tokens=some(st.integers(0, 6), 0),
        stop_ids=tuple(sorted(draw(ids))),
        max_tokens=100,
    )


@st.composite
def row(draw: st.DrawFn) -> SimpleNamespace:
    history = draw(st.lists(st.one_of(st.integers(0, 3), TOKEN), min_size=1, max_size=12))
    return SimpleNamespace(
        params=draw(token_params()),
        logits=draw(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB)),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        choice=draw(st.integers(0, 127)),
        history=history,
        num_prompt=draw(st.integers(1, len(history))),
        junk=draw(st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([-5, 10**6]))),
        bad_value=draw(st.sampled_from([None, None, None, None, None, NAN, INF])),
    )


def history_table(rows: list[SimpleNamespace], length: int = 16) -> torch.Tensor:
    table = torch.empty(len(rows), length, dtype=torch.int32)
    for index, of in enumerate(rows):
        table[index] = of.junk
        table[index, : len(of.history)] = torch.tensor(of.history, dtype=torch.int32)
    return table


def run(make: SimpleNamespace, rows: list[SimpleNamespace], logits: torch.Tensor, vocab: int = VOCAB):
    sampler = make.sampler(
        [of.params for of in rows],
        vocab=vocab,
        seeds=[of.seed for of in rows],
        choices=[of.choice for of in rows],
        num_prompt=[of.num_prompt for of in rows],
    )
    index = list(range(len(rows)))
    where = make.rows(index, index, [len(of.history) for of in rows])
    num_prompt = torch.tensor([of.num_prompt for of in rows])
    length = max(16, 1 + max(len(of.history) for of in rows))
    return sampler.sample(logits, where, history_table(rows, length), num_prompt)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(row(), min_size=1, max_size=4), wide=st.booleans(), pad=st.integers(0, 3))
def test_matches_plain_reading(
    plain: SimpleNamespace, make: SimpleNamespace, rows: list[SimpleNamespace], wide: bool, pad: int
) -> None:
    table = np.full((len(rows), VOCAB + pad), 50.0, np.float64 if wide else np.float32)
    for index, of in enumerate(rows):
        table[index, :VOCAB] = of.logits
        if of.bad_value is not None:
            table[index, of.seed % VOCAB] = of.bad_value
    before = table.copy()
    made = run(make, rows, torch.from_numpy(table))
    assert np.array_equal(table, before, equal_nan=True), "the logits were written"
    for index, of in enumerate(rows):
        token, margin = plain.sample(
            table[index],
            of.params,
            seed=of.seed,
            choice=of.choice,
            history=of.history,
            num_prompt=of.num_prompt,
            vocab=VOCAB,
        )
        if token is None:
            assert bool(made.error[index])
            assert int(made.tokens[index]) == 0
            continue
        assume(margin > 1e-9)
        assert not bool(made.error[index])
        assert int(made.tokens[index]) == token


def plain_row(params: TokenParams, seed: int, history: list[int], num_prompt: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        params=params, seed=seed, choice=seed % 3, history=history, num_prompt=num_prompt, junk=10**6
    )


LARGE = 3000
LARGE_PARAMS = [
    TokenParams(temperature=0),
    TokenParams(),
    TokenParams(temperature=0.4),
    TokenParams(temperature=5.0),
    TokenParams(top_p=0.6),
    TokenParams(top_p=0.9),
    TokenParams(top_p=0.9999, temperature=2.0),
    TokenParams(min_p=0.02),
    TokenParams(min_p=1e-9, temperature=3.0),
    *(TokenParams(top_k=k, temperature=3.0) for k in (1, 5, 127, 128, 129, 2048, 2049, 2999, 3000)),
    TokenParams(top_k=129, top_p=0.97, temperature=4.0),
    TokenParams(top_k=2500, top_p=0.999, min_p=1e-3, temperature=4.0),
    TokenParams(top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.5),
    TokenParams(temperature=0, repetition_penalty=2.0, presence_penalty=2.0),
    TokenParams(logit_bias=((7, 50.0), (2999, 50.5)), bad=((7,),)),
    TokenParams(allowed=tuple(range(0, 3000, 3)), top_p=0.8),
]


@mostly_slow("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], [torch.float32])
def test_large_vocabulary(plain: SimpleNamespace, make: SimpleNamespace, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    for spread in (1.0, 4.0):
        shape = (len(LARGE_PARAMS), LARGE + 8)
        logits = (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)
        rows = [
            plain_row(params, 1000 * index + int(spread), [3, 1, 2000, 1, *range(index)])
            for index, params in enumerate(LARGE_PARAMS)
        ]
        made = run(make, rows, logits, LARGE)
        assert not made.error.any()
        wide = logits.numpy() if dtype == torch.float64 else logits.float().numpy()
        for index, of in enumerate(rows):
            token, margin = plain.sample(
                wide[index],
                of.params,
                seed=of.seed,
                choice=of.choice,
                history=of.history,
                num_prompt=1,
                vocab=LARGE,
            )
            assert margin > 1e-12
            assert int(made.tokens[index]) == token, of.params


@mostly_slow(
    ("top_p", "kept"),
    [(0.2, 1), (0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)],
    [(0.25, 1), (0.2500001, 2)],
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(make: SimpleNamespace, top_p, kept) -> None:
    logits = torch.tensor([[-50.0, 1.0, 1.0, -50.0, 1.0, 1.0]], dtype=torch.float64)
    seen = {
        int(run(make, [plain_row(TokenParams(top_p=top_p), seed, [0])], logits, 6).tokens)
        for seed in range(120)
    }
    assert seen == set([1, 2, 4, 5][:kept])


def test_top_k_ties_go_to_the_lowest_id(make: SimpleNamespace) -> None:
    logits = torch.zeros(1, 600)
    logits[0, 100] = 0.5
    params = TokenParams(top_k=5, temperature=100.0)
    seen = {int(run(make, [plain_row(params, seed, [0])], logits, 600).tokens) for seed in range(150)}
    assert seen == {100, 0, 1, 2, 3}


def test_greedy_ties_go_to_the_lowest_id(make: SimpleNamespace) -> None:
    logits = torch.full((3, 700), -1.0)
    for index, ids in enumerate([(699, 650), (5, 133, 699), (128, 255)]):
        logits[index, list(ids)] = 2.0
    rows = [plain_row(TokenParams(temperature=0), 0, [0]) for _ in range(3)]
    assert run(make, rows, logits, 700).tokens.tolist() == [650, 5, 128]
    assert run(make, rows, logits.bfloat16(), 700).tokens.tolist() == [650, 5, 128]


def test_top_p_counts_what_top_k_left(make: SimpleNamespace) -> None:
    # Of ten equal tokens top_k leaves four, so the first three reach 0.75 of what is left.
    logits = torch.zeros(1, 10, dtype=torch.float64)
    params = TokenParams(top_k=4, top_p=0.75)
    seen = {int(run(make, [plain_row(params, seed, [0])], logits, 10).tokens) for seed in range(80)}
    assert seen == {0, 1, 2}


def test_bad_words_look_at_prompt_and_output_and_nothing_beyond(make: SimpleNamespace) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])

    def greedy(history: list[int], bad: tuple[tuple[int, ...], ...], junk: int = 3) -> int:
        of = plain_row(TokenParams(temperature=0, bad=bad), 0, history)
        of.junk = junk
        return int(run(make, [of], logits, 5).tokens)

    assert greedy([1, 2, 3], ((3, 4),)) == 3
    assert greedy([1, 2, 3], ((2, 3, 4),)) == 3
    assert greedy([1, 2, 3], ((1, 3, 4),)) == 4
    assert greedy([2, 3], ((2, 3, 4), (2, 3, 3))) == 2
    assert greedy([3], ((2, 3, 4), (3, 3, 4))) == 4
    assert greedy([1, 2], ((3, 4), (2, 2, 4))) == 4
    assert greedy([1, 3], ((3, 4), (2, 4), (3,))) == 2
    assert greedy([1, 3], ((9, 9, 9, 9, 4), (3, 900))) == 4


def test_penalties_see_neither_the_position_nor_what_follows(make: SimpleNamespace) -> None:
    logits = torch.tensor([[2.0, 1.9], [2.0, 1.9], [2.0, 1.9]])
    params = TokenParams(temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    rows = [plain_row(params, 0, history) for history in ([1], [1, 1, 1, 1], [0])]
    for of in rows:
        of.junk = 0
    assert run(make, rows, logits, 2).tokens.tolist() == [0, 0, 1]


def test_penalties_of_output_do_not_see_the_prompt(make: SimpleNamespace) -> None:
    logits = torch.tensor([[2.0, 1.9], [2.0, 1.9]])
    params = TokenParams(temperature=0, frequency_penalty=1.0, presence_penalty=1.0)
    rows = [plain_row(params, 0, [0, 0], num_prompt=2), plain_row(params, 0, [0, 0], num_prompt=1)]
    assert run(make, rows, logits, 2).tokens.tolist() == [0, 1]


def test_min_tokens_counts_output_only(make: SimpleNamespace) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    params = TokenParams(temperature=0, min_tokens=2, stop_ids=(1,))
    for history, expected in (([0, 0], 2), ([0, 0, 2], 2), ([0, 0, 2, 2], 1), ([0, 0, 2, 2, 0], 1)):
        assert int(run(make, [plain_row(params, 0, history, 2)], logits, 3).tokens) == expected


def test_a_row_whose_every_token_is_masked_is_an_error(make: SimpleNamespace) -> None:
    params = TokenParams(allowed=(1,), bad=((1,),))
    made = run(make, [plain_row(params, 0, [0]), plain_row(TokenParams(), 0, [0])], torch.zeros(2, 3), 3)
    assert made.error.tolist() == [True, False]


def test_overflow_under_a_penalty_is_the_rows_error(make: SimpleNamespace) -> None:
    logits = torch.tensor([[3e38, 1.0, 0.0]])
    params = TokenParams(repetition_penalty=0.1)
    assert run(make, [plain_row(params, 0, [0])], logits, 3).error.tolist() == [True]
