"""The bench of latency beside batches runs lines at the priority of batches."""

from __future__ import annotations

from bench.batch_latency import run


def test_lines_run_beside_online_requests_and_delay_them() -> None:
    alone, beside = (run(seed=0, lines=lines, requests=30, rate=6.0) for lines in (0, 4))
    assert alone.lines == 0 < beside.lines
    assert beside.residual.mean() > alone.residual.mean()
    # Without the priority of batches, lines would fill the steps of online prompts.
    assert alone.ttft.mean() < beside.ttft.mean() < 1.5 * alone.ttft.mean()
