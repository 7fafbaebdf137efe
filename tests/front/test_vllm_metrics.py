"""Dashboards made for vLLM find their metrics; a proxy's path and an unauthenticated Prometheus are
served.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.servers import Running, Servers
from weft.common.errors import ConfigError
from weft.config.flags import from_keywords
from weft.config.sections.front_section import check_front

#: Series and types in the Grafana dashboards that vLLM ships.
PLOTTED = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_success_total": "counter",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:num_preemptions_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:prompt_tokens_cached_total": "counter",
    "vllm:prompt_tokens_by_source_total": "counter",
    "vllm:spec_decode_num_drafts_total": "counter",
    "vllm:spec_decode_num_draft_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_total": "counter",
    "vllm:cache_config_info": "gauge",
    "http_requests_total": "counter",
    # The dashboards Overview, Instances, KV Cache and Speculative Decoding, and the older status board.
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:mm_cache_queries_total": "counter",
    "vllm:mm_cache_hits_total": "counter",
    "vllm:prompt_tokens_cached_by_source_total": "counter",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "counter",
    "vllm:engine_sleep_state": "gauge",
    "http_request_duration_seconds": "histogram",
    "process_start_time_seconds": "gauge",
    "process_cpu_seconds_total": "counter",
    "process_resident_memory_bytes": "gauge",
    "process_open_fds": "gauge",
    "process_max_fds": "gauge",
}
#: Label values that panels select. The dashboards select all series with a model by ``engine``, too.
SELECTED = (
    ("vllm:num_requests_waiting_by_reason", 'reason="capacity"'),
    ("vllm:num_requests_waiting_by_reason", 'reason="deferred"'),
    ("vllm:prompt_tokens_by_source_total", 'source="local_compute"'),
    ("vllm:prompt_tokens_by_source_total", 'source="local_cache_hit"'),
    ("vllm:prompt_tokens_cached_by_source_total", 'source="device"'),
    ("vllm:request_success_total", 'finished_reason="error"'),
    ("vllm:engine_sleep_state", 'sleep_state="awake"'),
    ("vllm:engine_sleep_state", 'sleep_state="discard_all"'),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"'),
    ("http_request_duration_seconds_sum", 'handler="/v1/completions"'),
    ("http_requests_total", 'handler="/v1/completions"'),
    *(
        ("vllm:time_to_first_token_seconds_bucket", f'le="{bound}"')
        for bound in ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0")
    ),
    *(
        ("vllm:request_time_per_output_token_seconds_bucket", f'le="{bound}"')
        for bound in ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5")
    ),
)
PER_ENGINE = ("num_requests_running", "kv_cache_usage_perc", "request_queue_time_seconds_sum")


@pytest.fixture(scope="module")
def server(servers: Servers) -> Running:
    """Start a server with an operator's path, metrics and log format."""
    flags = ("--vllm-metrics", "--open-metrics", "--root-path", "/llm", "--log-format", "json")
    flags += ("--speculative-method", "ngram")
    return servers.weft("--threads", "1", *flags, "--log-requests", WEFT_API_KEY="sesame")


@pytest.mark.requirement("F66")
def test_the_dashboards_series_are_there(server: Running) -> None:
    body = {"model": server.model, "prompt": "Tom", "max_tokens": 8, "n": 2, "ignore_eos": True}
    key = {"authorization": "Bearer sesame"}
    assert server.http.post("/v1/completions", json=body, headers=key).status_code == 200
    counted = re.compile(r"^weft:request_queue_time_seconds_count{.*} 2\.0$", re.MULTILINE)
    server.wait(lambda: counted.search(server.http.get("/metrics").text) is not None)
    text = server.http.get("/metrics").text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert {name: types.get(name) for name in PLOTTED} == PLOTTED
    for name, kind in PLOTTED.items():
        sample = f"{name}_sum" if kind == "histogram" else name
        found = re.findall(rf"^{sample}(?:\{{(.*)\}})? (\S+)$", text, re.M)
        assert found, sample
        if name.startswith("vllm:"):
            assert all(f'model_name="{server.model}"' in labels for labels, _ in found)
            assert all('engine="0"' in labels for labels, _ in found), name
    for name, selector in SELECTED:
        assert re.search(rf"^{name}\{{(.*,)?{re.escape(selector)}[,}}]", text, re.M), (name, selector)
    assert re.search(r'^vllm:request_success_total{engine="0",finished_reason="error",.*} 0\.0$', text, re.M)
    assert re.search(r"^vllm:iteration_tokens_total_sum{.*} [1-9]", text, re.M)
    for name in PER_ENGINE:
        assert re.search(rf'^vllm:{name}{{engine="0",', text, re.M), name
    assert re.search(
        r'^vllm:request_success_total{engine="0",finished_reason="length",model_name=".*"} 2\.0$', text, re.M
    )
    assert re.search(r"^vllm:request_max_num_generation_tokens_sum{.*} 8\.0$", text, re.M)
    assert re.search(r"^vllm:request_params_n_sum{.*} 2\.0$", text, re.M)
    assert re.search(
        r'^http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1\.0$', text, re.M
    )
    (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1\.0$", text, re.M)
    blocks = re.search(r'num_gpu_blocks="([1-9][0-9]*)"', labels)
    assert blocks is not None
    assert re.search(r'(^|,)block_size="64"(,|$)', labels)
    lines = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(lines) == len(set(lines)), "no metric is described twice"


def test_metrics_alone_need_no_key(server: Running) -> None:
    for path in ("/metrics", "/llm/metrics", "/metrics/", "/llm/health"):
        assert server.http.get(path).status_code == 200, path
    for path in ("/v1/models", "/llm/v1/models", "/llmx/metrics", "/llm/llm/metrics"):
        assert server.http.get(path).status_code == 401, path


def test_requests_bring_the_root_path_or_not(server: Running) -> None:
    key = {"authorization": "Bearer sesame"}
    for path in ("/v1/models", "/llm/v1/models", "/llm/v1/models/"):
        assert server.http.get(path, headers=key).status_code == 200, path
    assert server.http.get("/llm", headers=key).status_code == 200
    assert server.http.get("/llm/nothing", headers=key).status_code == 404
    described = server.http.get("/llm/openapi.json", headers=key).json()
    assert described["servers"] == [{"url": "/llm"}]
    assert "/llm/v1/chat/completions" in server.http.get("/docs", headers=key).text


def test_metrics_need_a_key_by_default(start_fake: Any) -> None:
    server = start_fake(api_key=["sesame"])
    assert server.http.get("/metrics").status_code == 401


@pytest.mark.parametrize("wrong", ["llm", "/llm/", "/", "//x", "/a b", "https://x"])
def test_a_wrong_root_path_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--root-path"):
        check_front(from_keywords({"root_path": wrong}).front)
