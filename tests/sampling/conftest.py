"""An independent form of the sampling rule: plain Python over one row, following its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weft.runner.sampling.sampler import Sampler, SampleRows
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

MASK = 0xFFFFFFFF
INF = float("inf")


def plain_philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox-4x32-10 on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def plain_word(seed: int, choice: int, position: int, token: int) -> int:
    key = (seed & MASK, seed >> 32)
    return plain_philox((token >> 2, position, choice, 0), key)[token & 3]


def plain_gumbel(word: int) -> float:
    return -math.log(-math.log((word + 0.5) * 2.0**-32))


def processed(
    logits: np.ndarray, params: TokenParams, history: Sequence[int], num_prompt: int, vocab: int
) -> list[Any]:
    """Steps 1 to 3 on one row, in the dtype of ``logits``. ``history`` ends before the token to be drawn."""
    number = logits.dtype.type
    x = [number(v) for v in logits[:vocab]]
    history = list(history)
    output = history[num_prompt:]
    for token in range(vocab):
        if params.allowed is not None and token not in params.allowed:
            x[token] = number(-INF)
        if len(output) < params.min_tokens and token in params.stop_ids:
            x[token] = number(-INF)
    for bad in params.bad:
        before = list(bad[:-1])
        if (
            len(before) <= len(history)
            and history[len(history) - len(before) :] == before
            and bad[-1] < vocab
        ):
            x[bad[-1]] = number(-INF)
    for token, bias in params.logit_bias:
        x[token] = x[token] + number(bias)
    r = number(params.repetition_penalty)
    for token in range(vocab):
        if token in history:
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        count = output.count(token)
        if count:
            penalty = number(params.frequency_penalty) * number(count) + number(params.presence_penalty)
            x[token] = x[token] - penalty
    return x


def kept_tokens(x: list[Any], params: TokenParams) -> tuple[list[int], float]:
    """Step 6. Return (kept ids in order, distance of the nearest undecided comparison from its threshold)."""
    margin = INF
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    top = float(x[order[0]])
    weight = [math.exp(float(x[token]) - top) for token in order]
    total = math.fsum(weight)
    probability = [w / total for w in weight]
    kept = len(order)
    if params.top_p < 1:
        cumulative = 0.0
        for place, p in enumerate(probability):
            cumulative += p
            margin = min(margin, abs(cumulative - params.top_p))
            if cumulative >= params.top_p:
                kept = place + 1
                break
    keep = []
    for token, p in list(zip(order, probability, strict=True))[:kept]:
        if float(x[token]) != top and params.min_p:
            margin = min(margin, abs(p / probability[0] - params.min_p))
        if p >= params.min_p * probability[0]:
            keep.append(token)
    return keep, margin


def plain_sample(
    logits: np.ndarray,
    params: TokenParams,
    *,
    seed: int = 0,
    choice: int = 0,
    history: Sequence[int],
    num_prompt: int,
    vocab: int,
) -> tuple[int | None, float]:
    """Return (token, or None for a row error; smallest margin of a comparison that rounding could change)."""
    with np.errstate(all="ignore"):
        raw = [float(v) for v in logits[:vocab]]
        x = processed(logits, params, history, num_prompt, vocab)
        greedy = params.temperature < 1e-5
        if not greedy:
            x = [v / logits.dtype.type(params.temperature) for v in x]
    for row in (raw, [float(v) for v in x]):
        if any(math.isnan(v) or v == INF for v in row) or all(v == -INF for v in row):
            return None, INF
    if greedy:
        return x.index(max(x)), INF
    keep, margin = kept_tokens(x, params)
    best, winner, second = -INF, -1, -INF
    for token in sorted(keep):
        score = float(x[token]) + plain_gumbel(plain_word(seed, choice, len(history), token))
        if score > best:
            best, winner, second = score, token, best
        else:
            second = max(second, score)
    return winner, min(margin, best - second)


def plain_logprobs(logits: np.ndarray, token: int, top: int) -> tuple[list[int], list[float], int]:
    """Return (token and top ids, log probabilities, rank of the token) of raw logits, in float64."""
    x = [float(v) for v in logits]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    lse = max(x) + math.log(math.fsum(math.exp(v - max(x)) for v in x))
    ids = [token, *order[:top]]
    return ids, [x[i] - lse for i in ids], order.index(token) + 1


def build(
    params: Sequence[TokenParams],
    *,
    vocab: int,
    seeds: Sequence[int] | None = None,
    choices: Sequence[int] | None = None,
    num_prompt: Sequence[int] | None = None,
    device: str = "cpu",
) -> Sampler:
    """Return a sampler whose slot i has ``params[i]``."""
    sampler = Sampler(len(params), vocab, torch.device(device))
    for slot, of in enumerate(params):
        prompt = num_prompt[slot] if num_prompt else 1
        sampler.slots.alloc(
            AllocSlot(
                slot=slot,
                gen=1,
                choice=choices[slot] if choices else 0,
                seed=seeds[slot] if seeds else 0,
                params=of,
                num_prompt=prompt,
                num_cached=0,
                token_ids=np.zeros(prompt, np.int32),
            )
        )
    return sampler


def make_rows(
    slots: Sequence[int],
    logits_rows: Sequence[int],
    positions: Sequence[int],
    prompt: Sequence[tuple[int, int, int]] = (),
    device: str = "cpu",
) -> SampleRows:
    """``prompt``: (slot, logits row, position) of each prompt-logprob entry."""

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    return SampleRows(
        slot_host=np.array(slots, np.int64),
        slot=tensor(slots),
        logits_row=tensor(logits_rows),
        position=tensor(positions),
        prompt_slot_host=np.array([e[0] for e in prompt], np.int64),
        prompt_slot=tensor([e[0] for e in prompt]),
        prompt_logits_row=tensor([e[1] for e in prompt]),
        prompt_position=tensor([e[2] for e in prompt]),
    )


def scene(count: int, vocab: int, seed: int = 0, ties: bool = False) -> SimpleNamespace:
    """Random logits, history and positions of ``count`` slots; ``ties``: few distinct logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 3
    if ties:
        logits = (logits * 2).round() / 2
    return SimpleNamespace(
        logits=logits,
        history=torch.randint(0, vocab, (count, 40), generator=generator, dtype=torch.int32),
        num_prompt=torch.randint(1, 10, (count,), generator=generator),
        positions=(torch.randint(10, 40, (count,), generator=generator)).tolist(),
        seeds=[(1 << 63) + 977 * i for i in range(count)],
    )


@pytest.fixture(scope="session")
def plain() -> SimpleNamespace:
    """The independent forms."""
    return SimpleNamespace(
        philox=plain_philox,
        word=plain_word,
        gumbel=plain_gumbel,
        sample=plain_sample,
        kept=kept_tokens,
        logprobs=plain_logprobs,
    )


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Return builders of real samplers and their arguments."""
    return SimpleNamespace(sampler=build, rows=make_rows, scene=scene)
