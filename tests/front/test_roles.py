"""An API server over scripted prefill and decode engines, with real messages."""

from __future__ import annotations

import re
from typing import Any

import pytest


@pytest.mark.requirement("E10", "E23")
def test_answers_and_metrics_of_a_pair(start_fake: Any) -> None:
    server = start_fake(roles=["prefill", "decode"])
    answer = server.complete("abc", max_tokens=8, n=2)
    assert answer.status_code == 200
    body = answer.json()
    assert [choice["text"] for choice in body["choices"]] == ["abcabcab"] * 2
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert server.complete("abc", max_tokens=1).json()["choices"][0]["text"] == "a"
    server.wait(lambda: server.metric("transfers_done_total") == 2, 20)
    page = server.http.get("/metrics").text
    up = re.findall(r'^weft:engine_up{head="(\d)",model_name="fake",role="(\w+)"} 1.0$', page, re.M)
    assert up == [("0", "prefill"), ("1", "decode")]
    assert 'weft:transfers_done_total{head="0",model_name="fake",role="prefill"} 2.0' in page
    assert 'weft:num_requests_running{head="1",model_name="fake",role="decode"}' in page
    assert server.metric("front_pairs_total") == 3
    assert server.metric("front_local_prefills_total") == 0
    assert server.metric("engines_without_partner") == 0
    assert server.http.get("/ready").status_code == 200
    assert server.http.get("/health").json() == {"status": "alive"}


@pytest.mark.requirement("E12")
def test_the_policy_is_a_flag(start_fake: Any, script: Any) -> None:
    server = start_fake(engines=2, routing_policy="round-robin")
    asked = {"prompt": "abc", "seed": script.HANG_AFTER, "max_tokens": 9}

    def running() -> list[str]:
        page = server.http.get("/metrics").text
        return re.findall(r"^weft:num_requests_running{.*} (\S+)$", page, re.M)

    with (
        server.stream("/v1/completions", n=2, **asked),
        server.stream("/v1/completions", **asked),
        server.stream("/v1/completions", **asked),  # the least loaded would be the second
    ):
        server.wait(lambda: running() == ["3.0", "1.0"], 20)
