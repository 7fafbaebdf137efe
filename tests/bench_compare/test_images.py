"""``bench.image_waits`` and ``bench.image_bursts``: evaluation of spans, and a bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.image_bursts import longer
from bench.image_waits import rates, shares, turns
from weft.config.families import load_spec
from weft.tracing.merge import ReadSpan

SECOND = 10**9


def span(process: str, name: str, begin: float, end: float) -> ReadSpan:
    start, stop = int(begin * SECOND), int(end * SECOND)
    return ReadSpan(process, 1, name, "t", "s", "p", start, stop, {}, (), None)


def test_time_is_lost_where_a_prompt_is_ready_and_none_is_computed() -> None:
    spans = [
        span("prefill0", "await images", 0, 2),
        span("prefill0", "queue", 2, 3),
        span("prefill0", "prefill", 3, 5),
        span("prefill0", "queue", 1, 1.5),  # of text, with nothing before
        span("prefill0", "prefill", 1.5, 2.5),
        span("prefill0", "queue", 3, 4),  # after a computed prompt
        span("prefill0", "prefill", 4.5, 6),
        span("prefill0", "await images", 5, 7),
        span("prefill0", "await images", 9, 10),
        span("encode0", "queue", 0, 10),
        span("decode0", "queue", 8, 9),
    ]
    assert shares(spans) == pytest.approx(
        {"computing": 0.4, "lost": 0.1, "only images": 0.3, "nothing": 0.2}, abs=1e-9
    )
    with pytest.raises(ValueError, match="no head"):
        shares(spans[-2:])


def test_rounds_are_compared_by_prompts_between_the_first_end_and_the_last() -> None:
    assert rates([(1.0, 5.0), (2.0, 5.5), (3.0, 6.5)]) == (1.0, 750.0)
    with pytest.raises(ValueError, match="longer"):
        rates([(1.0, 5.0)])
    rounds = [{"waiting": n % 2 * 8, "rate": rate, "cpu_ms": 3.0} for n, rate in enumerate((2.0, 1.9, 2.0))]
    alone, beside = turns(rounds)
    assert (alone["prompts that wait"], alone["lost %"]) == (0, 0.0)
    assert (beside["prompts that wait"], beside["lost %"]) == (8, 5.0)


def test_a_bundled_model_with_more_positions(tmp_path: Path) -> None:
    folder = longer("spool-vision", 4096, tmp_path)
    assert load_spec(folder).max_position == 4096
    assert (tmp_path / "model.safetensors").is_file()
