"""Bitwise invariance over groups: in float32, logprobs of two groups have the bits of one engine.

One group prefills and another decodes. Transfers move bytes, so the bits are equal where an engine has
bitwise invariance: see docs/determinism.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e1.rig import MAX_LEN, VOCAB, make_checkpoint
from tests.support.fleet_engine import FleetEngine
from tests.support.slow import mostly_slow
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.ops.cpu import linear
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

#: Shape of ``tests.e1.rig`` -> settings with which it is deterministic.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "kimi_linear": {"deterministic": True},
    "lfm2": {},
    "nemotron_h": {"deterministic": True},
    "bamba": {},
    "mamba2": {},
    "falcon_mamba": {},
    "jamba": {},
    "olmo_hybrid": {},
    "bailing_hybrid": {"deterministic": True},
    "gpt_oss": {},
    "deepseek_v3": {"deterministic": True},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "glm_dsa": {},
}
SUBMITS = [
    submit(
        i,
        [(5 * i + 3 * j) % VOCAB for j in range(6 + 21 * i)],
        TokenParams(temperature=0.8 * (i % 2), max_tokens=5 + 3 * i, logprobs=5),
        request=i,
    )
    for i in range(7)
]
Bits = dict[int, list[tuple[int, bytes]]]
"""Sequence -> its tokens, and the logprobs of the most likely tokens."""


def settings(folder: Path, shape: str) -> dict[str, Any]:
    return {
        "model": str(folder),
        "tokenizer": "spool-text",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_model_len": MAX_LEN,
        "kv_cache_memory": "32M",
        "max_num_seqs": 8,
        **SHAPES[shape],
    }


def bits(engine: EngineCore | FleetEngine, asked: list[Submit]) -> Bits:
    """Run all of ``asked`` together and return the tokens and logprobs."""
    made: Bits = {one.sequence: [] for one in asked}
    for one in asked:
        assert not engine.submit(one)
    while engine.has_work():
        for event in engine.step():
            assert event.error is None
            if event.token_ids:
                assert event.logprobs is not None
                ids, values, _ = event.logprobs.arrays()
                rows = [one.tobytes() + other.tobytes() for one, other in zip(ids, values, strict=True)]
                made[event.sequence] += zip(event.token_ids, rows, strict=True)
    return made


CASES = [(shape, "auto") for shape in SHAPES]
CASES += [(shape, "fp8") for shape in ("deepseek_v32", "deepseek_v4", "glm_dsa")]


@mostly_slow(("shape", "cache"), CASES, [(shape, "auto") for shape in ("llama", "qwen3_next", "deepseek_v3")])
@pytest.mark.usefixtures("extension")
def test_logprobs_have_the_bits_of_one_engine(tmp_path: Path, shape: str, cache: str) -> None:
    """The reference runs alone in one engine. The groups run batches in chunks, with other block sizes."""
    if not linear.available():
        pytest.skip("the C++ products are for CPUs with AVX2 or AVX-512")
    folder = make_checkpoint(tmp_path, shape)
    common = {**settings(folder, shape), "kv_cache_dtype": cache}
    alone = EngineCore(
        resolve(from_keywords({**common, "block_size": 16, "enable_prefix_caching": False})), progress=False
    )
    expected: Bits = {}
    try:
        assert alone.deterministic
        for one in SUBMITS:
            expected |= bits(alone, [one])
    finally:
        alone.close()
    for blocks in ((16, 16), (16, 32)):
        more = {**common, "long_prefill_token_threshold": 48}
        groups = [
            resolve(from_keywords({**more, "role": role, "block_size": block}))
            for role, block in zip(("prefill", "decode"), blocks, strict=True)
        ]
        engine = FleetEngine(groups)
        try:
            assert engine.deterministic
            assert bits(engine, SUBMITS) == expected
            engine.settle()
            moved = engine.cores("decode")[0].stats().transfers
            assert moved is not None
            assert moved.done == len(SUBMITS)
            assert moved.received_bytes > 0
        finally:
            engine.close()
