"""The distance of a fixture from a tie: at the final scores, at every cut, and at every router.

Exact tokens are promised where no decision depends on the last bits. A fixture must therefore have no such
decision. This module has a second implementation of the sampling rule, on whole rows of float64 logits, with
separate noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tests.e0.rig import Answer, make_engine, model_of, run, submit
from weft.ops import moe
from weft.ops.philox import gumbel, token_words
from weft.ops.routing import Rule
from weft.types.messages import Submit, ids_from_bytes, ids_to_bytes
from weft.types.sampling import TokenParams

MARGIN = 1e-6


def guesses(
    folder: Path, prompts: list[list[int]], params: TokenParams, choices: int
) -> dict[tuple[int, int], Answer]:
    """Return (prompt, choice) -> answer, from one batch with all prompts. ``smallest_margin`` checks the
    answer."""
    keys = [(prompt, choice) for prompt in range(len(prompts)) for choice in range(choices)]
    engine, _ = make_engine(folder, caching=False, max_num_seqs=len(keys), blocks=16 * len(keys))
    submits = [
        submit(number, prompts[prompt], params, request=prompt, choice=choice)
        for number, (prompt, choice) in enumerate(keys)
    ]
    try:
        answers = run(engine, [submits])
    finally:
        engine.close()
    return {key: answers[number] for number, key in enumerate(keys)}


def smallest_margin(folder: Path, one: Submit, tokens: list[int]) -> float:
    """Return the smallest distance to another outcome over all positions of ``tokens``, from one pass.

    Fail if a token is not the result of the rule for the tokens before it.
    """
    prompt = ids_from_bytes(one.prompt_ids).tolist()
    logits, routers = _all_logits(folder, prompt + tokens)
    least = min((_cut(np.sort(row)[::-1], top) for rows, top in routers for row in rows), default=math.inf)
    for at, token in enumerate(tokens):
        position = len(prompt) + at
        output = tokens[:at]
        row = _penalised(logits[position - 1], prompt, output, one.params)
        margin, chosen = _decide(row, one, position)
        assert chosen == token, "the rule written out here gives another token"
        least = min(least, margin)
    return least


def _all_logits(folder: Path, ids: list[int]) -> tuple[np.ndarray, list[tuple[np.ndarray, int]]]:
    """Return logits [len(ids), vocab], and for each choice of a router (scores [len(ids), .], number taken).

    All values come from one pass.
    """
    routers: list[tuple[np.ndarray, int]] = []
    seen, route = 0, moe.route

    def watched(
        logits: torch.Tensor,
        rule: Rule,
        correction: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal seen
        if chosen is None:
            seen += 1
            routers.extend(_choices(logits, rule, correction))
        return route(logits, rule, correction, chosen)

    moe.route = watched
    engine, runner = make_engine(folder, caching=False, max_num_seqs=1)
    try:
        whole = Submit(
            sequence=1,
            request=1,
            seed=0,
            prompt_ids=ids_to_bytes(ids),
            params=TokenParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        )
        engine.submit(whole)
        plan = engine.scheduler.plan(0.0)
        assert plan is not None
        _, logits = runner.forward(plan).forwarded.result()
    finally:
        moe.route = route
        engine.close()
    assert logits.dtype == torch.float64
    assert len(logits) == len(ids)
    spec = model_of(folder).spec
    choosing = 0 if spec.moe is None else len(set(spec.moe.layers) - set(spec.moe.hash_layers))
    assert seen == choosing
    return logits.numpy(), routers


def _choices(
    logits: torch.Tensor, rule: Rule, correction: torch.Tensor | None
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the choices of one router, of groups if any and of experts: scores, and the number taken."""
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": F.softplus(logits).sqrt(),
    }[rule.scoring]
    scores = (scores if correction is None else scores + correction).numpy()
    if rule.groups > 1:
        grouped = np.sort(scores.reshape(len(scores), rule.groups, -1))[:, :, ::-1]
        best = grouped[:, :, : 2 if rule.group_rule == "top2" else 1].sum(-1)
        yield best, rule.top_groups
        taken = np.argsort(-best, axis=1, kind="stable")[:, : rule.top_groups]
        allowed = np.zeros_like(best, bool)
        np.put_along_axis(allowed, taken, True, axis=1)
        scores = np.where(np.repeat(allowed, scores.shape[1] // rule.groups, axis=1), scores, -np.inf)
    yield scores, rule.top_k


def _cut(descending: np.ndarray, kept: int) -> float:
    """Return the distance between the last kept value and the first dropped value."""
    return float(descending[kept - 1] - descending[kept]) if kept < len(descending) else math.inf


def _penalised(row: np.ndarray, prompt: list[int], output: list[int], p: TokenParams) -> np.ndarray:
    x = row.copy()
    seen = np.array(sorted(set(prompt) | set(output)))
    x[seen] = np.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
    counts = np.bincount(output, minlength=len(x)) if output else np.zeros(len(x))
    return x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def _decide(x: np.ndarray, one: Submit, position: int) -> tuple[float, int]:
    """Return (distance to another outcome, token)."""
    p = one.params
    if p.temperature < 1e-5:
        return _cut(np.sort(x)[::-1], 1), int(x.argmax())
    x = x / p.temperature
    order = np.lexsort((np.arange(len(x)), -x))
    margin = _cut(x[order], p.top_k) if p.top_k else math.inf
    kept = order[: p.top_k] if p.top_k else order
    weight = np.exp(x[kept] - x[kept[0]])
    reached = np.cumsum(weight / weight.sum())
    margin = min(margin, float(np.abs(reached - p.top_p).min()))
    kept = kept[: int((reached < p.top_p).sum()) + 1]
    ratio = np.exp(x[kept] - x[kept[0]])
    margin = min(margin, float(np.abs(ratio - p.min_p).min()))
    kept = kept[ratio >= p.min_p]
    ids = torch.from_numpy(kept.copy())
    columns = [torch.tensor([value]) for value in (one.seed, one.choice, position)]
    score = x[kept] + gumbel(token_words(*columns, ids)).numpy()  # type: ignore[call-arg]
    return min(margin, _cut(np.sort(score)[::-1], 1)), int(kept[score.argmax()])
