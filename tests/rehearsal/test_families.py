"""Every family on a simulated GPU, with plans of the scheduler; for some families also the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import rig
from tests.rehearsal.rig import rehearse
from tests.support import checkpoints
from tests.support.slow import mostly_slow
from weft.engine.core import EngineCore
from weft.ops.triton import interpreting
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.slow

#: A configuration for every family, with each form of cache and layers.
FAMILIES = [
    "llama-biases-head-dim",
    "llama-yarn",
    "mistral-window",
    "mixtral",
    "qwen2-mixed-window",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
    "qwen3-5-moe",
    "gpt-oss",
    "deepseek-v2-groups-yarn",
    "deepseek-v3",
    "deepseek-v32",
    "glm-dsa",
    "deepseek-v4",
    "kimi-linear",
    "lfm2-moe",
    "nemotron-h-moe",
    "granite-hybrid",
    "falcon-h1",
    "falcon-mamba",
    "jamba",
]


BRIEF = {
    "llama-biases-head-dim",
    "qwen3-next",
    "qwen3-5-moe",
    "kimi-linear",
    "lfm2-moe",
    "granite-hybrid",
    "falcon-h1",
    "falcon-mamba",
    "jamba",
}
"""Families whose longer prompts are covered by other families or tests."""
ONE = {"deepseek-v4"}
"""Families with so many operators that one prompt is enough."""
FORMS = 8
"""Maximum number of forms of one kernel in one engine. Each form compiles at first use, while clients
wait."""

KERNELS = {
    "llama": {"_attend"},
    "nemotron-h-dense": {"_mamba_states", "_mamba_outputs"},
    "nemotron-h-moe": {"_mamba_states", "_mamba_outputs", "_grouped"},
    "falcon_h1": {"_mamba_states", "_mamba_outputs"},
    "falcon_mamba": {"_mamba1_states", "_short_conv"},
    "lfm2": {"_short_conv"},
    "lfm2-moe": {"_short_conv"},
    "deepseek-v4": {"_attend_lines", "_write_lines"},
}
"""Kernels that a family must launch; other families of the test have sparse attention."""


@mostly_slow(
    "name",
    FAMILIES,
    ["llama-biases-head-dim", "qwen3-moe", "qwen3-next", "gpt-oss"],
)
def test_every_family_runs(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 with the kernels: chunks, mixed steps, decode.

    gpt-oss has windows. ``test_engines.py`` has a latent family (deepseek-v3) by default.
    """
    turns = rig.short() if name in BRIEF else [[rig.one(40)]] if name in ONE else None
    made, _, core = rehearse(monkeypatch, folder_of(name), turns)
    assert not made.waited
    if core.runner.graphs is not None:
        assert core.runner.graphs.replayed > 0
    assert all(len(forms) <= FORMS for forms in made.variants.values()), made.variants


@mostly_slow("name", ["llama", "qwen2_windowed", "qwen3_next", "mtp"], ["qwen3_next", "mtp"])
def test_values_are_those_of_a_cpu(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 every token equals the CPU's token; one family covers all ways of sampling."""
    folder, vocab = folder_of(name), checkpoints.VOCAB
    settings: dict[str, Any] = {"dtype": "float64", "max_model_len": 128, "max_num_seqs": 8}
    turns = {"llama": rig.arrivals(vocab), "qwen3_next": rig.short()}.get(name, rig.few(vocab))
    with monkeypatch.context() as patch:
        _, there, _ = rehearse(patch, folder, turns, values=True, **settings)
    here = EngineCore(rig.config_of(folder, **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, turns)
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}


@pytest.mark.parametrize(
    ("name", "drafts", "cache"),
    [
        ("llama", 0, "auto"),
        ("llama", 3, "auto"),
        ("deepseek-v32", 0, "auto"),
        ("deepseek-v32", 3, "auto"),
        ("glm-dsa", 0, "auto"),
        ("glm-dsa", 0, "fp8"),
        ("deepseek-v4", 0, "auto"),
        ("deepseek-v4", 0, "fp8"),
        ("nemotron-h-dense", 0, "auto"),
        ("nemotron-h-dense", 3, "auto"),
        ("nemotron-h-moe", 0, "auto"),
        ("falcon_h1", 0, "auto"),
        ("falcon_mamba", 0, "auto"),
        ("lfm2", 0, "auto"),
        ("lfm2-moe", 3, "auto"),
    ],
)
def test_graphs_of_kernels_give_the_tokens_of_a_cpu(
    name: str, drafts: int, cache: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 with Triton's interpreter: a replay runs the captured calls again in the same memory."""
    if not interpreting():
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "1M", "kv_cache_dtype": cache}
    turns = rig.short()
    if drafts:
        settings |= {"speculative_method": "ngram", "num_speculative_tokens": drafts, "max_model_len": 48}
        settings |= {"speculative_adaptive": False}
        # Random tokens of few ids, so that many drafts are right and many are wrong.
        few = TokenParams(temperature=1.0, max_tokens=24, allowed=(5, 7))
        turns = [[e0.submit(0, [5, 6, 7] * 3, few, request=0)]]
    with monkeypatch.context() as patch:
        made, there, core = rehearse(patch, folder_of(name), turns, values=True, **settings)
    assert core.runner.graphs is not None
    assert core.runner.graphs.replayed > 0
    stats = core.scheduler.stats()
    assert not drafts or 0 < sum(stats.drafts_accepted) < sum(stats.drafts)
    assert KERNELS.get(name, {"_attend_lines"}) <= made.operators
    here = EngineCore(rig.config_of(folder_of(name), **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, turns)
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("llama", {"quantization": "w8a8-fp8"}, {"_round_rows"}),
        ("deepseek-v32", {"deterministic": True}, {"_attend_lines", "_head_product", "_linear"}),
        ("deepseek-v4", {"deterministic": True}, {"_attend_lines", "_linear"}),
    ],
)
def test_forms_by_name(
    name: str, settings: dict[str, Any], expected: set[str], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 products, and invariant forms of sparse attention, in captured steps."""
    made, _, core = rehearse(monkeypatch, folder_of(name), rig.short(), **settings)
    assert expected <= made.operators
    assert core.runner.graphs is not None
    assert core.runner.graphs.replayed > 0
