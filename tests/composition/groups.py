"""A prefill group and a decode group, optionally with encode groups, with any set of features: see
``rig``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.composition.rig import (
    BLOCK,
    LONGEST,
    MAX_LEN,
    SEQUENCES,
    answer_of,
    asked_of,
    implementation,
    params,
    room_for_images,
    tight,
)
from tests.e1.rig import force_preemptions
from tests.support.fleet_engine import FleetEngine, start_llm
from weft import SamplingParams
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.types.grammar import Grammar
from weft.types.messages import EngineStats
from weft.types.plan import MoveMedia

OTHER = {"same": BLOCK, "larger": 2 * BLOCK, "smaller": BLOCK // 2}
"""Block size of the decode group."""
MOST_IMAGES = 4
"""Maximum images of a prompt. A receiver of embeddings has space for all images of a prompt."""


@dataclass
class Seen:
    """Observations of the two groups."""

    prefill: EngineStats
    decode: EngineStats
    unfinished: int = 0
    """Prompt rows that did not reach the end of their prompt, in the prefill group."""
    deepest: int = 0
    """Steps in flight in the decode group."""
    halved: int = 0
    """Steps in two micro-batches, in the prefill group."""
    lifted: int = 0
    """Embeddings that came back from host memory, in the prefill group."""
    encoded: list[int] = field(default_factory=list)
    """Images of each encode group."""


def group(folder: Path, case: dict[str, Any], role: str) -> EngineConfig:
    """Return the configuration of the group of ``role`` with the features of ``case``."""
    decodes = role == "decode"
    if role == "encode":
        return _encoder(folder, case)
    settings: dict[str, Any] = {
        "model": str(folder),
        "model_impl": implementation(folder),
        "role": role,
        "dtype": "float64",
        "device": "cpu",
        "max_model_len": MAX_LEN,
        "block_size": OTHER[case["blocks"]] if decodes else BLOCK,
        "kv_cache_memory": "64M",
        "max_num_seqs": SEQUENCES,
        "enable_prefix_caching": case["prefix"],
        "steps_in_flight": case["depth"],
        "long_prefill_token_threshold": case["chunk"],
        "tensor_parallel_size": case["ranks"][decodes],
        "threads": 1,
    }
    if case["kv"] != "auto":
        settings["kv_cache_dtype"] = case["kv"]
    if case["draft"] != "none":
        settings |= {"speculative_method": case["draft"], "num_speculative_tokens": 2}
        settings["speculative_adaptive"] = False
    if case["preempt"]:
        settings["max_model_len"] = LONGEST
        if decodes:
            settings["kv_cache_memory"] = str(tight(folder, case, OTHER[case["blocks"]]))
    if not decodes:
        settings["overlap"] = "all" if case.get("overlap") else "off"
    if case.get("encoders"):
        settings |= {"language_model_only": True, "take_embeddings": not decodes}
    if not decodes:
        settings |= room_for_images(folder, case.get("room"), MOST_IMAGES if case.get("encoders") else 1)
    return resolve(from_keywords(settings))


def _encoder(folder: Path, case: dict[str, Any]) -> EngineConfig:
    settings = {"model": str(folder), "role": "encode", "dtype": "float64", "device": "cpu", "threads": 1}
    settings |= {"max_model_len": MAX_LEN, "steps_in_flight": case["depth"]}
    return resolve(from_keywords({**settings, **room_for_images(folder, case.get("room"), 1)}))


def run(
    folder: Path, case: dict[str, Any], stop: list[str] | None = None, grammar: Grammar | None = None
) -> tuple[dict[Any, Any], Seen]:
    """Return (answers by (prompt, choice), observations). Check that all caches were transferred and freed.

    ``grammar`` constrains every answer.
    """
    roles = ["prefill", "decode", *["encode"] * case.get("encoders", 0)]
    groups = [group(folder, case, role) for role in roles]
    length = groups[0].kv.max_model_len
    llm = start_llm(pytest.MonkeyPatch(), groups, str(folder), max_model_len=length, kv_cache_memory="64M")
    engine: Any = llm._core
    assert isinstance(engine, FleetEngine)
    seen = Seen(EngineStats(), EngineStats())
    _watch(engine, seen)
    if case["preempt"]:
        _evict_often(engine)
    try:
        asked: list[Any] = asked_of(folder)
        if case["prefix"]:
            llm.generate(asked[-3:], SamplingParams(max_tokens=2), use_tqdm=False)
        outputs = llm.generate(asked, params(case, len(asked), stop), use_tqdm=False, grammar=grammar)
        engine.settle()
        seen.prefill, seen.decode = (engine.cores(role)[0].stats() for role in ("prefill", "decode"))
        assert not engine.fleet.local_prefills
        seen.encoded = [core.stats().images_encoded for core in engine.cores("encode")]
    finally:
        llm.shutdown()
    return {(i, c.index): answer_of(c) for i, o in enumerate(outputs) for c in o.outputs}, seen


def _evict_often(engine: FleetEngine) -> None:
    """Evict running sequences of the decode group before some steps, beside evictions for lack of blocks."""
    (decode,) = engine.cores("decode")
    step, number = decode.step, 0

    def stepped() -> Any:
        nonlocal number
        number += 1
        if number < 60:
            force_preemptions(decode, number)
        return step()

    decode.step = stepped  # type: ignore[method-assign]


def _watch(engine: FleetEngine, seen: Seen) -> None:
    (prefill,), (decode,) = engine.cores("prefill"), engine.cores("decode")
    forward, launch, read = prefill.runner.forward, decode.runner.forward, decode.runner.read
    in_flight = 0

    def computed(plan: Any) -> Any:
        seen.unfinished += int((plan.prefill.sample == 0).sum())
        seen.halved += plan.micro_batches > 1
        seen.lifted += sum(isinstance(op, MoveMedia) and op.up for op in plan.ops)
        return forward(plan)

    def launched(plan: Any) -> Any:
        nonlocal in_flight
        in_flight += 1
        seen.deepest = max(seen.deepest, in_flight)
        return launch(plan)

    def was_read(handle: Any) -> Any:
        nonlocal in_flight
        in_flight -= 1
        return read(handle)

    prefill.runner.forward = computed  # type: ignore[method-assign]
    decode.runner.forward, decode.runner.read = launched, was_read  # type: ignore[method-assign]
