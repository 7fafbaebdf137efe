"""The line about load."""

from __future__ import annotations

from weft.front.monitoring.throughput import Throughput
from weft.types.messages import EngineStats


def test_a_line_counts_what_all_engines_did_since_the_last_one() -> None:
    made = Throughput(100.0)
    one = EngineStats(prompt_tokens=50, generation_tokens=200, running=2, kv_usage=0.25)
    two = EngineStats(prompt_tokens=50, generation_tokens=100, waiting=3, prefix_queries=40, prefix_hits=10)
    assert made.line(110.0, [("0", one), ("1", two)]) == (
        "prompt 10.0 tokens/s, output 30.0 tokens/s, running 2, waiting 3, KV cache 25.0 % used, "
        "prefix cache hit rate 25.0 %"
    )
    more = EngineStats(prompt_tokens=50, generation_tokens=300, kv_usage=0.5)
    idle = EngineStats(prompt_tokens=50, generation_tokens=100, prefix_queries=40, prefix_hits=10)
    assert made.line(120.0, [("0", more), ("1", idle)]) == (
        "prompt 0.0 tokens/s, output 10.0 tokens/s, running 0, waiting 0, KV cache 50.0 % used, "
        "prefix cache hit rate -"
    )


def test_an_idle_server_logs_nothing_and_one_that_only_waits_does() -> None:
    made = Throughput(0.0)
    assert made.line(10.0, []) is None
    assert made.line(20.0, [("0", EngineStats())]) is None
    assert made.line(30.0, [("0", EngineStats(waiting=1))]) is not None


def test_an_engine_that_was_started_again_counts_from_nothing() -> None:
    made = Throughput(0.0)
    made.line(10.0, [("0", EngineStats(generation_tokens=1000))])
    line = made.line(20.0, [("0", EngineStats(generation_tokens=100))])
    assert line is not None
    assert "output 10.0 tokens/s" in line
