"""Steps with prompts on a simulated GPU: one copy and one replay, with the tokens of a CPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import rig
from tests.rehearsal.test_launches import UPLOAD, Step, watched
from weft.engine.core import EngineCore
from weft.ops.triton import interpreting
from weft.runner.graphs import mixed
from weft.runner.graphs.mixed import MixedGraphs
from weft.types.messages import Submit
from weft.types.plan import AllocSlot, AppendBlocks, AppendEach
from weft.types.sampling import TokenParams

SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "kv_cache_memory": "1M"}
PENALTY = {"presence_penalty": 0.5}
EXTRAS: list[dict[str, Any]] = [PENALTY, {"prompt_logprobs": 1}, {"logprobs": 1}, {"allowed": (3, 4)}]
ALLOC_LAUNCHES, APPEND_LAUNCHES, COPY_LAUNCHES = 6, 2, 1
"""Launches for a new sequence, for the blocks of one KV cache group of a row, and for the columns of a
step."""


def params(**given: Any) -> TokenParams:
    return TokenParams(**{"temperature": 0.0, "max_tokens": 4, **given})


def turns(**given: Any) -> list[list[Submit]]:
    """Return two short prompts in one step, a prompt of three chunks beside their decode rows, and a prompt
    with a cached prefix."""
    long = [1 + n % 60 for n in range(52)]
    sampled = params(**{"temperature": 0.8, "top_p": 0.9, **given})
    return [
        [e0.submit(0, [5, 6, 7], params(**given), request=0), e0.submit(1, [8, 9] * 7, sampled, request=1)],
        [e0.submit(2, long, params(**given), request=2)],
        [],
        [e0.submit(3, [*long[:36], 3, 4], params(**given), request=3)],
    ]


def with_prompts(seen: list[Step]) -> list[Step]:
    return [step for step in seen if step.plan.prefill.rows]


def mixed_of(core: Any) -> MixedGraphs:
    made: MixedGraphs | None = core.runner.runner.mixed
    assert made is not None
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"deterministic": True}),
        ("llama", {"speculative_method": "ngram", "num_speculative_tokens": 2}),
        ("qwen2_windowed", {}),
        ("qwen3_moe", {}),
        ("gpt-oss", {}),
    ],
)
def test_steps_with_prompts_draw_the_tokens_of_the_cpu(
    name: str, settings: dict[str, Any], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run in Triton's interpreter. Padding, empty rows and unfinished prompts change no token."""
    if not interpreting():
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    seen: list[Step] = []
    settings = {**SETTINGS, "dtype": "float32", **settings}
    for name_, value in (("TOKENS", (24,)), ("DECODES", (2,)), ("PROMPTS", 3)):  # the interpreter is slow
        monkeypatch.setattr(mixed, name_, value)
    with monkeypatch.context() as patch:
        _, there, core = rig.rehearse(
            patch, folder_of(name), turns(), values=True, plant=watched(seen), **settings
        )
    steps = with_prompts(seen)
    assert mixed_of(core).replayed == sum(step.replays for step in steps)
    assert mixed_of(core).replayed == len(steps) or "speculative_method" in settings
    assert any(step.plan.prefill.rows == 2 for step in steps if step.replays)
    assert any(step.plan.decode.rows for step in steps if step.replays)
    assert any((step.plan.prefill.sample == 0).any() for step in steps if step.replays)
    here = EngineCore(rig.config_of(folder_of(name), **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, turns())
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_with_prompts_is_one_copy_and_one_replay(
    temperature: float, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the replay the host launches the copy of the columns, and what new sequences and blocks need."""
    seen: list[Step] = []
    rig.rehearse(
        monkeypatch, folder_of("llama"), turns(temperature=temperature), plant=watched(seen), **SETTINGS
    )
    steps = with_prompts(seen)
    assert len(steps) >= 4
    for step in steps:
        new = sum(isinstance(op, AllocSlot) for op in step.plan.ops)
        blocks = sum(isinstance(op, AppendBlocks | AppendEach) for op in step.plan.ops)
        assert step.replays == 1
        assert step.labels[UPLOAD] <= COPY_LAUNCHES + 2 * new + blocks
        assert step.launches <= COPY_LAUNCHES + ALLOC_LAUNCHES * new + APPEND_LAUNCHES * blocks


@pytest.mark.slow
@pytest.mark.parametrize("given", EXTRAS)
def test_rows_that_kernels_cannot_draw_alone_are_launched(
    given: dict[str, Any], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Step] = []
    plain = e0.submit(1, [4] * 9, params(), request=1)
    rig.rehearse(
        monkeypatch, folder_of("llama"), [[plain], turns(**given)[0][:1]], plant=watched(seen), **SETTINGS
    )
    first, second = with_prompts(seen)
    assert (first.replays, second.replays) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "llama"])
def test_other_attention_and_drafters_that_never_rest_capture_no_prompts(
    name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent and recurrent attention need the lengths of prompts on the host; float64 has no kernels."""
    settings = {"dtype": "float64"} if name == "llama" else {}
    _, _, core = rig.rehearse(monkeypatch, folder_of(name), rig.few(60), **settings)
    assert core.runner.runner.mixed is None


@pytest.mark.slow
def test_captures_with_prompts_are_few_and_reported(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Buckets do not grow with the number of rows or tokens of a step, and the largest graph comes first."""
    settings = {"max_num_seqs": 20, "max_num_batched_tokens": 100, "max_model_len": 200}
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    with caplog.at_level(logging.INFO):
        _, _, core = rig.rehearse(monkeypatch, folder_of("llama"), [[rig.one(3)]], **settings)
    keys = list(mixed_of(core)._replays)
    assert {key.tokens for key in keys} == {32, 64, 100}
    assert {key.decodes for key in keys} == {0, 4, 16, 20}
    sizes = [key.tokens + key.decodes for key in keys]
    assert sizes == sorted(sizes, reverse=True)
    assert f"{len(keys)} CUDA graphs for steps with prompts, up to 100 prompt tokens" in caplog.text
