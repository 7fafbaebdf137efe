"""Prompts of 128k positions: the memory of a step stays within the plan; the roofline counts the right
work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import long, long_work
from tests.support.slow import mostly_slow
from weft.bench.process_memory import own_peak
from weft.cli.verify.tiny import write_family
from weft.config.families import load_spec
from weft.config.sizing.memory import activation_bytes

DEPTH = 131_072
_FEW = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": long.LONGEST}
_LATENT = {"qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
#: Models for the C++ attention with few heads: a row of scores over the context is 256 MiB per head.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _FEW,
    "deepseek_v3": {**_FEW, **_LATENT},
    "qwen3_next": _FEW,
    "deepseek_v32": {**_FEW, **_LATENT, "index_n_heads": 2},
    "deepseek_v4": {**_FEW, "num_key_value_heads": 1, "o_groups": 2, "index_n_heads": 2},
    "gpt_oss": _FEW,
}
SLACK = 48 << 20
"""Bytes of the process besides a step: prompt ids, block tables, allocator overhead."""


def tiny(folder: Path, family: str, **more: Any) -> Path:
    path = write_family(folder, family)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **more}))
    return path


@mostly_slow("family", FAMILIES, 1)
def test_a_step_at_128k_takes_what_planning_set_aside(family: str, tmp_path: Path, extension: None) -> None:
    folder = tiny(tmp_path, family, **FAMILIES[family])
    made = long.Engine(folder, 1, DEPTH + long.CHUNK + 8, attention_backend="cpu")
    try:
        made.run(DEPTH, 1, 4)
        grown = own_peak() - made.filled
        config = made.core.config
        assert grown <= activation_bytes(config.spec, "bfloat16", config.scheduler) + SLACK
    finally:
        made.core.close()


def test_a_depth_is_skipped_and_the_rest_computed(tmp_path: Path, extension: None) -> None:
    """After two skipped chunks two of four chunks are computed, with attention to all four."""
    folder = tiny(tmp_path, "qwen3", max_position_embeddings=4096)
    made = long.Engine(folder, 1, 2500)
    try:
        made.run(1024, 2, 4)
        assert len(made.prefill) == 2
        assert len(made.decode) >= 1
        made.run(0, 4, 1)
        assert len(made.prefill) == 4
    finally:
        made.core.close()


def test_what_the_roofline_counts(tmp_path: Path) -> None:
    qwen = load_spec(str(tiny(tmp_path, "qwen3")))  # 2 layers, 8 heads over 4 of 16
    assert long_work.cache_bytes(qwen, 1000, 2) == 2 * 1000 * 2 * 4 * 16 * 2
    assert long_work.attention_flops(qwen, 999, 1) == 2 * 1000 * 4 * 8 * 16
    assert long_work.attention_flops(qwen, 0, 3) == 2 * (1 + 2 + 3) * 4 * 8 * 16
    chooses = load_spec(str(tiny(tmp_path, "deepseek_v32")))  # 2 layers, 32 + 8, 24 chosen by keys of 16
    assert long_work.cache_bytes(chooses, 20, 2) == 2 * 20 * 40 * 2
    assert long_work.cache_bytes(chooses, 1000, 2) == 2 * (24 * 40 + 1000 * 16) * 2
    groups = load_spec(str(tiny(tmp_path, "deepseek_v4")))  # window 24; groups of 4 (24 chosen) and of 16
    window, chosen, everything = 24 * 16, 24 * 16 + 24 * 16 + 250 * 16, 24 * 16 + 62 * 16
    assert long_work.cache_bytes(groups, 1000, 2) == 2 * (window + chosen + everything)
    hybrid = load_spec(str(tiny(tmp_path, "qwen3_next")))  # one layer of four attends
    assert long_work.cache_bytes(hybrid, 1000, 2) == 1000 * 2 * 4 * 16 * 2


def test_floors_are_the_longer_of_reading_and_computing() -> None:
    rows = [
        {"decode_ms": 1.0, "prefill_ms": 1.0, "bytes": 0, "decode_flops": 0.0, "prefill_flops": 0.0},
        {"decode_ms": 4.0, "prefill_ms": 2.0, "bytes": 10**9, "decode_flops": 1e9, "prefill_flops": 1e9},
    ]
    long.against_floor(rows, {"read GB/s": 500.0, "bf16 GFLOP/s": 1000.0})
    assert rows[1]["decode_added_ms"] == 3.0
    assert rows[1]["decode_floor_ms"] == pytest.approx(2.0)  # a GB at 500 GB/s
    assert rows[1]["prefill_floor_ms"] == pytest.approx(1.0)  # 1e9 operations at 1e12 a second
    assert long.share({**rows[1], "decode_added_ms": 4.0}, "decode") == "50%"
