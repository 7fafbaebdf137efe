"""Whole engines on a simulated GPU: drafts, caches, FlashInfer, ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.e0 import rig as e0
from tests.rehearsal import rig, vendors
from tests.rehearsal.rig import rehearse
from tests.support.slow import mostly_slow
from weft.attention.gqa import triton_backend
from weft.engine.core import EngineCore
from weft.ops import registry
from weft.runner.runner import Runner
from weft.types.plan import StepPlan
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.slow

CUT = {"tp-overlap", "tp-latent-overlap", "replicas-overlap"}
"""Layouts with prompts that are split into micro-batches."""
PLAIN = [
    TokenParams(temperature=0.0, max_tokens=8),
    TokenParams(temperature=0.9, top_k=9, top_p=0.8, max_tokens=7),
]
SPECULATION = {"speculative_adaptive": False, "num_speculative_tokens": 2}


@mostly_slow(
    ("name", "settings"),
    [
        ("llama", {"speculative_method": "ngram"}),
        ("mtp", {"speculative_method": "mtp"}),
        ("qwen3_next", {"speculative_method": "ngram"}),
        ("deepseek_v4", {"speculative_method": "ngram"}),
    ],
    2,
    ids=["llama", "mtp", "qwen3_next", "deepseek_v4"],
)
def test_rows_with_drafts(
    name: str, settings: dict[str, Any], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows verify any number of correct drafts."""
    _, _, core = rehearse(
        monkeypatch, folder_of(name), rig.short(), **SPECULATION, **settings, max_model_len=128
    )
    assert sum(core.scheduler.stats().drafts) > 0


def test_captured_steps_draw_the_tokens_of_the_cpu(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels run in the interpreter. One request has logprobs, so that some replays draw nothing."""
    logprobs = TokenParams(temperature=0.7, logprobs=1, max_tokens=2)
    turns = [[e0.submit(i, [5 + i, 6, 7], one, request=i)] for i, one in enumerate([*PLAIN, logprobs])]
    drawn: list[bool] = []
    sample = Runner._sample

    def noted(self: Runner, handle: Any, masks: Any) -> Any:
        if not handle.plan.prefill.rows:
            drawn.append(handle.drawn is not None)
        return sample(self, handle, masks)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Runner, "_sample", noted)

    _, made, _ = rehearse(
        monkeypatch, folder_of("llama"), turns, values=True, plant=plant, dtype="float32", max_num_seqs=3
    )
    assert set(drawn) == {True, False}
    monkeypatch.undo()
    core = EngineCore(
        rig.config_of(folder_of("llama"), dtype="float32", device="cpu", max_num_seqs=3), progress=False
    )
    expected = e0.run(core, turns)
    core.close()
    assert {n: answer.tokens for n, answer in made.items()} == {n: a.tokens for n, a in expected.items()}


@mostly_slow("name", ["llama", "qwen3_next", "deepseek_v3", "deepseek_v4"], ["llama"])
def test_prompts_are_computed_before_any_request(
    name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up uses a slot without a later sequence; requests are then answered, by captured steps where
    the model allows."""
    computed: list[int] = []
    compute = Runner._compute

    def noted(self: Runner, plan: StepPlan, *given: Any) -> Any:
        computed.append(plan.tokens)
        return compute(self, plan, *given)

    def watch(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Runner, "_compute", noted)

    _, answers, _ = rehearse(monkeypatch, folder_of(name), rig.few(50), plant=watch, warm_up=True)
    assert computed[:14] == [size for size in (64, 32, 16, 8, 4, 2, 1) for _ in range(2)]
    assert len(answers) == 3


NARROW = {
    "aten._to_copy.default",
    "aten.view.dtype",
    "aten.view.default",
    "aten.select.int",
    "aten.slice.Tensor",
}
"""Allowed operators on 8-bit floats: conversions and views. GPU index kernels do not support 8-bit floats."""


CACHES_BY = {
    "llama": {"_attend", "_qkv_rope_cache"},
    "deepseek_v3": {"_attend_latent", "_latent_rope_cache"},
}
"""Kernels that read and write the entries of a family."""


@mostly_slow("name", [*CACHES_BY], ["llama"])
def test_caches_in_8_bits(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write and read the entries, and steps are captured."""
    made, _, core = rehearse(monkeypatch, folder_of(name), kv_cache_dtype="fp8")
    assert made.narrow <= NARROW
    assert CACHES_BY[name] <= made.operators
    assert core.runner.graphs is not None
    assert core.runner.graphs.replayed > 0


def test_tokens_over_caches_in_8_bits(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose kernels run in the interpreter gives the tokens of torch's attention. Decode steps have
    keys in splits, which the last program merges."""
    attention = pytest.importorskip("weft.ops.triton.attention")
    params = TokenParams(temperature=0.9, top_k=9, max_tokens=4)
    turns = [[e0.submit(0, [5, 6, 7] * 11, params, request=0)]]

    def tokens(backend: str) -> list[int]:
        config = rig.config_of(
            folder_of("llama"), device="cpu", dtype="float32", kv_cache_dtype="fp8",
            attention_backend=backend, decode_graphs=False,
        )  # fmt: skip
        core = EngineCore(config, progress=False)
        made = e0.run(core, turns)
        core.close()
        return made[0].tokens

    monkeypatch.setattr(Runner, "warm_up", lambda *_: None)
    expected = tokens("torch")
    launches: list[tuple[bool, bool]] = []
    attend = attention.attend

    def noted(*args: Any, **more: Any) -> None:
        launches.append((more["scales"] is not None, more["counters"] is not None))
        attend(*args, **more)

    kernels = [one for one in registry._OPS["qkv_rope_cache_fp8"] if one.name == "triton"]
    monkeypatch.setitem(registry._OPS, "qkv_rope_cache_fp8", [replace(kernels[0], devices=("cpu",))])
    monkeypatch.setattr(attention, "attend", noted)
    monkeypatch.setattr(triton_backend, "SHORT_SPLIT", 32)
    assert tokens("triton") == expected
    assert set(launches) == {(True, False), (True, True)}, "prompts and decode steps read codes"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_deterministic_kernels(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, core = rehearse(monkeypatch, folder_of(name), deterministic=True)
    assert core.deterministic
    assert "_linear" in made.variants


def test_flashinfer(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is selected by name, and is not captured."""
    vendors.install(monkeypatch)
    made, _, core = rehearse(monkeypatch, folder_of("heads of 64"), attention_backend="flashinfer")
    assert core.runner.graphs is None
    assert "_attend" not in made.operators
    assert "flashinfer run" in made.labels


@mostly_slow("name", ["qwen3-next", "deepseek-v3"], ["deepseek-v3"])
def test_cached_prefixes_and_snapshots(name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = rig.few(131)
    turns.extend([[]] * 8)
    turns.append([e0.submit(9, [*rig.prompt_of(turns[0][1])[:64], 3], rig.GREEDY, request=9)])
    _, _, core = rehearse(monkeypatch, folder_of(name), turns)
    assert core.scheduler.stats().prefix_hits > 0


TP: dict[str, Any] = {"tensor_parallel_size": 2}
EP: dict[str, Any] = {**TP, "enable_expert_parallel": True}
EXPERT_GROUP: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("llama", TP),
    "tp-ordered": ("qwen3_moe", {**TP, "deterministic": True, "collectives": "nccl"}),
    "tp-read": ("qwen3_moe", {**TP, "deterministic": True}),
    "tp-overlap": ("llama", {**TP, "overlap": "all"}),
    "tp-latent-overlap": ("deepseek_v3", {**TP, "overlap": "all"}),
    "tp-gloo": ("llama", {**TP, "collectives": "gloo", "overlap": "all"}),
    "tp-delta": ("qwen3_next", {**TP, "overlap": "all"}),
    "ep-reduce": ("qwen3_moe", {**EP, "moe_dispatch": "reduce"}),
    "ep-gather": ("qwen3_moe", {**EP, "moe_dispatch": "gather", "overlap": "all"}),
    "ep-low-latency": ("qwen3_moe", {**EP, "moe_dispatch": "low-latency", "overlap": "all"}),
    "ep-throughput": (
        "qwen3_moe",
        {**EP, "moe_dispatch": "throughput", "dtype": "float64", "overlap": "all"},
    ),
    "tp-mtp": ("mtp", {**TP, **SPECULATION, "speculative_method": "mtp", "overlap": "all"}),
    "replicas-mtp": (
        "mtp",
        {
            **EXPERT_GROUP,
            **SPECULATION,
            "speculative_method": "mtp",
            "moe_dispatch": "gather",
            "dtype": "float64",
        },
    ),
    "moving-experts": (
        "qwen3_moe",
        {
            **EXPERT_GROUP,
            "eplb_interval": 2,
            "redundant_experts": 2,
            "moe_dispatch": "gather",
            "dtype": "float64",
        },
    ),
    "replicas": ("qwen3_moe", {**EXPERT_GROUP, "moe_dispatch": "low-latency"}),
    "replicas-overlap": ("deepseek_v3", {**EXPERT_GROUP, "moe_dispatch": "gather", "overlap": "all"}),
}


@mostly_slow(
    "layout",
    LAYOUTS,
    ["tp", "tp-ordered", "tp-overlap", "tp-gloo", "ep-low-latency", "replicas", "moving-experts"],
)
def test_ranks(layout: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives on streams, through host memory, in micro-batches and in graphs."""
    name, settings = LAYOUTS[layout]
    values = settings.get("dtype") == "float64"
    turns = None if layout in CUT else rig.short()
    made, _, core = rehearse(monkeypatch, folder_of(name), turns, ranked=True, values=values, **settings)
    assert made.operators & {"all_gather", "all_to_all", "all_reduce", "_meet"}
    assert ("_meet" in made.operators) == (settings.get("collectives", "auto") == "auto")
    if settings.get("overlap") == "all":
        assert core.overlap.steps > 0
    if layout in ("tp", "tp-overlap", "tp-read", "ep-reduce", "ep-gather", "ep-low-latency", "replicas"):
        assert core.runner.graphs is not None
        assert core.runner.graphs.replayed > 0


def test_a_runner_that_was_reset_serves_again(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.rehearsed(monkeypatch) as made:
        config = rig.config_of(folder_of("llama"))
        rig.Answers(made, monkeypatch, config.spec.vocab_size)
        core = EngineCore(config, progress=False)
        rig.serve(core, made, rig.short())
        core.runner._runner.reset()
        core.scheduler.requeue_all()  # also forgets the occupants of slots
        rig.serve(core, made, rig.short())
        core.close()
