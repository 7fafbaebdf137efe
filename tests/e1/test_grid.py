"""Bitwise invariance: the logits of every sampled position have equal bits, whatever else runs.

The reference of every sequence is a run alone: the whole prompt in one step, one step in flight, no cache,
one thread. The default run has every value of each feature, ``-m slow`` every pair, ``-m grid`` every
combination.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import run, submit
from tests.e1.rig import VOCAB, force_preemptions, make_checkpoint, make_engine
from tests.support.pairwise import covering, each_value, everything, name
from tests.support.slow import mostly_slow
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

OUTPUT = 12
CHECKED = 6
"""Number of compared sequences of a batch; the others only run beside."""
SAMPLING = {
    "greedy": TokenParams(temperature=0.0, max_tokens=OUTPUT),
    "seeded": TokenParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=OUTPUT),
}
FEATURES: dict[str, list[Any]] = {
    "model": ["llama", "qwen3", "qwen2_mixed", "qwen3_moe"],
    "form": ["cpp", "fallback"],
    "dtype": ["bfloat16", "float32"],
    "chunk": [16, 256, 0],
    "batch": [1, 16, 64],
    "prefix": ["hit", "miss"],
    "preempt": [False, True],
    "depth": [1, 2],
    "threads": [1, 2],
    "sampling": ["greedy", "seeded"],
}
COVER = covering(FEATURES, seed=18, cheap={"batch": 1, "form": "cpp", "model": "llama"})  # a light one


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    lengths = [290, 33, 129, 64, 1, 200, *(rng.randrange(2, 90) for _ in range(58))]
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = prompts()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Reference:
    """Logits by position of (model, form, dtype, sampling, prompt) alone, computed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._known: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            self._folders[model] = make_checkpoint(self._root, model)
        return self._folders[model]

    def logits(self, case: dict[str, Any], prompt: int) -> dict[int, torch.Tensor]:
        cache = case.get("cache", "auto")
        key = (case["model"], case["form"], case["dtype"], case["sampling"], cache, prompt)
        if key not in self._known:
            with threads(1):
                engine, runner = make_engine(
                    self.folder(case["model"]), case["dtype"], case["form"], kv_cache_dtype=cache
                )
                try:
                    run(engine, [[submit(1, PROMPTS[prompt], SAMPLING[case["sampling"]], request=prompt)]])
                finally:
                    engine.close()
            self._known[key] = {position: rows[0] for (_, position), rows in runner.bits.items()}
            assert len(self._known[key]) == OUTPUT
        return self._known[key]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("e1"))


def plan_submits(case: dict[str, Any]) -> list[list[Submit]]:
    """Return the sequences to submit before each step: arrivals are spread out, in a random order."""
    rng = random.Random(name(case))
    order = rng.sample(range(case["batch"]), case["batch"])
    arrivals: list[list[Submit]] = [[]]
    for prompt in order:
        one = submit(prompt + 1, PROMPTS[prompt], SAMPLING[case["sampling"]], request=prompt)
        if rng.random() < 0.6:
            arrivals.append([])
        arrivals[-1].append(one)
    return arrivals


def check(case: dict[str, Any], reference: Reference) -> None:
    hit = case["prefix"] == "hit"
    with threads(case["threads"]):
        engine, runner = make_engine(
            reference.folder(case["model"]),
            case["dtype"],
            case["form"],
            chunk=case["chunk"],
            depth=case["depth"],
            caching=hit,
            replay=case["form"] == "cpp",
            kv_cache_dtype=case.get("cache", "auto"),
        )
        try:
            if hit:
                once = TokenParams(max_tokens=1)
                known = PROMPTS[: case["batch"]]
                run(engine, [[submit(5000 + i, ids, once, request=5000 + i) for i, ids in enumerate(known)]])
            warmed = engine.stats()
            runner.watch()
            force = partial(force_preemptions, engine) if case["preempt"] else None
            run(engine, plan_submits(case), force)
            stats = engine.stats()
        finally:
            engine.close()
    compared = compare(case, reference, runner.bits)
    assert compared >= min(CHECKED, case["batch"]) * OUTPUT
    # The features were active.
    assert (stats.preemptions > 0) == case["preempt"]
    assert runner.deepest == case["depth"]
    if case["form"] == "cpp":
        assert runner.graphs is not None
        assert runner.graphs.works, "a decode step could not be captured"
    if not case["preempt"]:
        assert (stats.prefix_hits > warmed.prefix_hits) == hit
    if case["chunk"]:
        assert max(runner.prefill_counts) <= case["chunk"]
    elif not hit:
        assert max(runner.prefill_counts) >= 290
    if case["batch"] > 1:
        assert stats.mixed_steps > warmed.mixed_steps


def compare(case: dict[str, Any], reference: Reference, bits: dict[Any, list[torch.Tensor]]) -> int:
    """Return the number of compared rows of logits. Fail if a row differs."""
    compared = 0
    for prompt in range(min(CHECKED, case["batch"])):
        for position, expected in reference.logits(case, prompt).items():
            assert torch.isfinite(expected).all()
            for row in bits[1000 + prompt, position]:
                assert torch.equal(row, expected), f"prompt {prompt}, position {position}"
                compared += 1
    return compared


@pytest.mark.parametrize("case", each_value(COVER), ids=name)
def test_pairwise_cover(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


@pytest.mark.grid
@pytest.mark.parametrize("case", everything(FEATURES), ids=name)
def test_whole_grid(case: dict[str, Any], reference: Reference) -> None:
    check(case, reference)


OTHERS = [
    {"model": "mistral", "form": form, "dtype": dtype, "batch": batch, "chunk": chunk}
    for form, dtype, batch, chunk in (
        ("cpp", "bfloat16", 16, 16),
        ("cpp", "float32", 1, 256),
        ("fallback", "bfloat16", 16, 0),
        ("fallback", "float64", 16, 16),
    )
]
OTHERS += [
    {"model": "gpt_oss", "form": form, "dtype": dtype, "batch": 16, "chunk": chunk}
    for form, dtype, chunk in (("cpp", "bfloat16", 16), ("cpp", "float32", 0), ("fallback", "float64", 256))
]
OTHERS += [
    {"model": "deepseek_v3", "form": form, "dtype": dtype, "batch": 16, "chunk": chunk}
    for form, dtype, chunk in (("cpp", "bfloat16", 16), ("cpp", "float32", 0), ("fallback", "float64", 256))
]
OTHERS += [
    {"model": "qwen3_next", "form": form, "dtype": dtype, "batch": 16, "chunk": chunk, **more}
    for form, dtype, chunk, more in (
        ("cpp", "bfloat16", 16, {"prefix": "hit", "preempt": True}),
        ("cpp", "bfloat16", 0, {"prefix": "hit", "threads": 2}),
        ("cpp", "float32", 256, {"preempt": True, "sampling": "seeded"}),
        ("fallback", "float32", 16, {"prefix": "hit"}),
        ("fallback", "bfloat16", 0, {"preempt": True}),
    )
]
OTHERS += [
    {"model": model, "form": "cpp", "dtype": dtype, "batch": 16, "chunk": chunk, **more}
    for model in ("deepseek_v32", "deepseek_v4", "glm_dsa")
    for dtype, chunk, more in (
        ("bfloat16", 16, {"prefix": "hit", "preempt": True}),
        ("bfloat16", 0, {"prefix": "hit", "threads": 2, "sampling": "seeded"}),
        ("float32", 256, {"preempt": True, "depth": 1}),
        ("bfloat16", 16, {"prefix": "hit", "preempt": True, "cache": "fp8"}),
    )
]
FIRST = {case["model"]: case for case in reversed(OTHERS)}
"""Model -> the first of its cases."""
OTHERS += [
    {"model": "kimi_linear", "form": form, "dtype": dtype, "batch": 16, "chunk": chunk, **more}
    for form, dtype, chunk, more in (
        ("cpp", "bfloat16", 16, {"prefix": "hit", "preempt": True}),
        ("cpp", "float32", 256, {"preempt": True, "sampling": "seeded"}),
        ("fallback", "float32", 16, {"prefix": "hit"}),
    )
]
OTHERS += [
    {"model": "lfm2", "form": form, "dtype": dtype, "batch": 16, "chunk": chunk, **more}
    for form, dtype, chunk, more in (
        ("cpp", "bfloat16", 16, {"prefix": "hit", "preempt": True}),
        ("fallback", "float32", 0, {"prefix": "hit", "sampling": "seeded"}),
    )
]
OTHERS += [
    {"model": "nemotron_h", "form": "fallback", "dtype": dtype, "batch": 16, "chunk": chunk, **more}
    for dtype, chunk, more in (
        ("float32", 16, {"prefix": "hit", "preempt": True}),
        ("bfloat16", 0, {"sampling": "seeded"}),
    )
]
OTHERS += [
    {"model": "bamba", "form": "cpp", "dtype": dtype, "batch": 16, "chunk": chunk, **more}
    for dtype, chunk, more in (
        ("bfloat16", 16, {"prefix": "hit", "preempt": True}),
        ("float32", 0, {"sampling": "seeded", "threads": 2}),
    )
]
OTHERS.append({"model": "qwen3_moe", "form": "fallback", "dtype": "float64", "batch": 16, "chunk": 16})


@mostly_slow("case", OTHERS, [FIRST["deepseek_v4"], FIRST["qwen3_next"]], ids=name)
def test_windows_everywhere_and_float64(case: dict[str, Any], reference: Reference) -> None:
    rest = {"prefix": "miss", "preempt": False, "depth": 2, "threads": 1, "sampling": "greedy"}
    check({**rest, **case}, reference)


def test_the_cover_covers_every_pair() -> None:
    for a in FEATURES:
        for b in FEATURES:
            if a < b:
                seen = {(row[a], row[b]) for row in COVER}
                assert seen == {(x, y) for x in FEATURES[a] for y in FEATURES[b]}
