"""Bitwise invariance with speculation: logits of verified positions equal those of single tokens.

The C++ operations run by default for a dense model, under --deterministic for latent attention; the torch
fallback runs too. Verify steps and drafting are captured and replayed, or launched eagerly.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import run, submit
from tests.e1.rig import VOCAB, force_preemptions, make_checkpoint, make_engine
from tests.e1.test_grid import PROMPTS
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.oracle import Oracle
from weft.config.sections.all import SpeculationSection
from weft.runner import drafting
from weft.runner.graphs import graphs
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

OUTPUT = 24
BATCH = 6
SAMPLING = {
    "greedy": TokenParams(temperature=0.0, max_tokens=OUTPUT),
    "seeded": TokenParams(temperature=0.8, top_k=40, top_p=0.95, max_tokens=OUTPUT),
}
#: What the C++ operations serve.
_LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}

Known = dict[int, tuple[list[int], dict[int, torch.Tensor]]]
"""Prompt -> (tokens, logits of each sampled position)."""


class Reference:
    """Every sequence alone, without speculation."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._known: dict[tuple[Any, ...], Known] = {}

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            if model == "deepseek_mtp":
                sizes = {**_LATENT, "vocab_size": VOCAB, "max_position_embeddings": 384, "hidden_size": 64}
                folder = make_mtp_checkpoint(self._root / model, skilled=True, **sizes)
            else:
                folder = make_checkpoint(self._root, model)
            self._folders[model] = folder
        return self._folders[model]

    def known(self, model: str, form: str, dtype: str, sampling: str) -> Known:
        key = (model, form, dtype, sampling)
        if key not in self._known:
            made: Known = {}
            for prompt in range(BATCH):
                engine, runner = make_engine(self.folder(model), dtype, form)
                one = submit(1, PROMPTS[prompt], SAMPLING[sampling], request=prompt)
                answer = run(engine, [[one]])[1]
                engine.close()
                bits = {position: rows[0] for (_, position), rows in runner.bits.items()}
                assert len(bits) == OUTPUT
                made[prompt] = (answer.tokens, bits)
            self._known[key] = made
        return self._known[key]


@pytest.fixture(autouse=True)
def _capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 1)
    monkeypatch.setattr(drafting, "WORTH_CAPTURING", 1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("e1"))


CASES = [
    ("llama", "cpp", "bfloat16", "oracle", 3, 2, "greedy", True),
    ("llama", "cpp", "float32", "oracle", 8, 1, "seeded", True),
    ("llama", "cpp", "bfloat16", "ngram", 2, 1, "greedy", False),
    ("qwen2_mixed", "cpp", "float32", "oracle", 4, 2, "seeded", True),
    ("qwen2_mixed", "cpp", "bfloat16", "ngram", 1, 1, "greedy", True),
    ("qwen3_moe", "cpp", "bfloat16", "oracle", 3, 1, "greedy", True),
    ("qwen3_moe", "cpp", "float32", "oracle", 2, 2, "seeded", False),
    ("qwen3_next", "cpp", "bfloat16", "oracle", 3, 1, "greedy", True),
    ("qwen3_next", "cpp", "float32", "oracle", 2, 2, "seeded", True),
    ("deepseek_v3", "cpp", "bfloat16", "oracle", 4, 1, "seeded", True),
    ("gpt_oss", "cpp", "float32", "oracle", 3, 1, "greedy", True),
    ("qwen3", "fallback", "float32", "oracle", 3, 1, "greedy", False),
    ("qwen3", "fallback", "bfloat16", "oracle", 2, 2, "seeded", False),
    ("deepseek_mtp", "cpp", "bfloat16", "mtp", 3, 1, "greedy", True),
    ("deepseek_mtp", "cpp", "float32", "mtp", 2, 2, "seeded", True),
    ("deepseek_mtp", "cpp", "float32", "mtp", 1, 1, "greedy", False),
]

PREEMPTED = {0, 2, 3, 6, 7, 9, 12, 13, 15}
"""Cases that run with preemption by default; the others run without. Both have each form, dtype, drafter,
depth and sampling.
"""
FEW = {0, 4, 7, 9, 11, 13}
"""Cases that run by default. These cases have each form, dtype, drafter, depth and sampling, too. The other
cases are slow."""


def _marks(number: int, preempt: bool) -> list[pytest.MarkDecorator]:
    if preempt != (number in PREEMPTED):
        return [pytest.mark.grid]
    return [] if number in FEW else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("model", "form", "dtype", "drafter", "drafts", "depth", "sampling", "replay", "preempt"),
    [
        pytest.param(
            *case,
            preempt,
            marks=_marks(number, preempt),
            id="-".join(map(str, (*case, preempt))),
        )
        for number, case in enumerate(CASES)
        for preempt in (False, True)
    ],
)
def test_bits_do_not_depend_on_drafts(
    model: str,
    form: str,
    dtype: str,
    drafter: str,
    drafts: int,
    depth: int,
    sampling: str,
    replay: bool,
    preempt: bool,
    reference: Reference,
) -> None:
    known = reference.known(model, form, dtype, sampling)

    def answer(op: AllocSlot) -> list[int]:
        prompt = op.seed - 1000
        return PROMPTS[prompt] + known[prompt][0]

    speculation = SpeculationSection(
        speculative_method="mtp" if drafter == "mtp" else "ngram",
        num_speculative_tokens=drafts,
        speculative_adaptive=False,
        ngram_min_length=1,
    )
    engine, runner = make_engine(
        reference.folder(model),
        dtype,
        form,
        chunk=64,
        depth=depth,
        replay=replay,
        speculation=speculation,
        drafter=Oracle(answer, 0.7, VOCAB) if drafter == "oracle" else None,
    )
    submits = [[submit(i + 1, PROMPTS[i], SAMPLING[sampling], request=i)] for i in range(BATCH)]
    try:
        answers = run(engine, submits, partial(force_preemptions, engine) if preempt else None)
    finally:
        engine.close()
    compared = 0
    for prompt, (tokens, bits) in known.items():
        assert answers[prompt + 1].tokens == tokens
        for position, expected in bits.items():
            for row in runner.bits[1000 + prompt, position]:
                assert torch.equal(row, expected), f"prompt {prompt}, position {position}"
                compared += 1
    assert compared >= BATCH * OUTPUT
    stats = engine.stats()
    assert sum(stats.drafts) > sum(stats.drafts_accepted) > 0
    assert (stats.preemptions > 0) == preempt
    assert runner.deepest == depth
    if replay and runner.graphs is not None:
        assert any(key[1] > 1 for key in runner.graphs._replays)
        assert runner.graphs.replayed > 0
    assert not replay or runner.graphs is not None, "nothing was replayed"
