"""Keys, routes, bodies, errors, metrics: HTTP around the completions."""

from __future__ import annotations

import concurrent.futures
import gzip
import html
import json
import random
import re
import shlex
import socket
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.slowness import deadline
from weft.bench.process import free_port
from weft.front.http.access import ApiKeys
from weft.front.monitoring import adapter_metrics
from weft.front.monitoring.metrics import describe
from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.completions_request import CompletionRequest

ROOT = Path(__file__).parent.parent.parent
PROBES = ["/health", "/ping", "/live", "/ready"]
ROUTES = ["/v1/models", "/v1/models/fake", "/metrics", "/version", "/docs", "/openapi.json", "/nowhere"]


@pytest.fixture(scope="module")
def locked(start_fake: Any) -> Any:
    return start_fake(
        api_key=["sesame", "second"], max_request_bytes=4096, max_num_seqs=2, max_queued_requests=2
    )


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert not re.search(r"/tmp/|/usr/|/home/|0x|Traceback|\.py|<.* object", answer.text)
    assert answer.headers["x-request-id"]
    return body["error"]


@pytest.mark.requirement("F8", "F60")
def test_routes(fake: Any) -> None:
    for route in ("/", *ROUTES[:-1]):
        assert fake.http.get(route).status_code == 200, route
    models = fake.http.get("/v1/models").json()
    assert [m["id"] for m in models["data"]] == ["fake", "org/alias"]
    assert models["data"][0] == fake.http.get("/v1/models/fake").json()
    assert fake.http.get("/v1/models/org/alias").json()["max_model_len"] == 512
    for path in ("/nowhere", "/v1", "/v1/", "/v1/embedding", "/health//", "/v1/chat/completions/x"):
        answer = fake.http.get(path)
        assert answer.status_code == 404, path
        error_of(answer)
    for method, path, allow in (
        ("GET", "/v1/chat/completions", "OPTIONS, POST"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("PUT", "/ping", "GET, HEAD, OPTIONS, POST"),
        ("PATCH", "/docs", "GET, HEAD, OPTIONS"),
        ("PROPFIND", "/live/", "GET, HEAD, OPTIONS"),
    ):
        answer = fake.http.request(method, path)
        assert answer.status_code == 405
        assert error_of(answer)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == allow


@pytest.mark.requirement("F8")
def test_head_is_get_without_a_body(fake: Any) -> None:
    for path in (*ROUTES, *PROBES, "/health/"):
        got, head = fake.http.get(path), fake.http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        if path != "/metrics":  # the length of /metrics differs on every request
            for name in ("content-type", "content-length"):
                assert head.headers[name] == got.headers[name], path
    answer = fake.http.head("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")
    assert fake.http.get("/version").status_code == 200, "on the same connection"
    assert 'method="HEAD",route="/health",status="200"' in fake.http.get("/metrics").text


def test_options(fake: Any) -> None:
    allowed = {"/v1/models": "GET, HEAD, OPTIONS", "/ping": "GET, HEAD, OPTIONS, POST"}
    for path, allow in {**allowed, "/v1/chat/completions/": "OPTIONS, POST"}.items():
        answer = fake.http.options(path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allow, b"")
    answer = fake.http.options("/nowhere")
    assert answer.status_code == 404
    error_of(answer)


def test_a_slash_at_the_end_changes_nothing(fake: Any) -> None:
    for path in (*ROUTES[:-1], *PROBES):
        assert fake.http.get(path + "/").status_code == 200, path
    assert [m["id"] for m in fake.http.get("/v1/models/").json()["data"]] == ["fake", "org/alias"]
    assert fake.http.get("/v1/models/org/alias/").json()["id"] == "org/alias"
    body = {"model": "fake", "prompt": "ab", "max_tokens": 2}
    assert fake.http.post("/v1/completions/", json=body).json()["choices"][0]["text"] == "ab"
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert fake.http.post("/v1/chat/completions/", json=chat).status_code == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/v1/api/chat", "/api/chat"),
        ("/v1/messages/batches", None),
        ("/nowhere", None),
        ("/" + "x/" * 9 + "v1/messages", None),
    ],
)
def test_a_wrong_base_url_is_told(fake: Any, path: str, meant: str | None) -> None:
    answer = fake.http.post(path, json={})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    hint = "" if meant is None else f": did you mean {meant}? Check the base URL of the client"
    assert message == f"there is no such route{hint}"


@pytest.mark.requirement("F8")
def test_unknown_models(fake: Any) -> None:
    for answer in (fake.http.get("/v1/models/x"), fake.chat(model="x"), fake.complete(model="x")):
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"
        assert error_of(answer)["message"].endswith("GET /v1/models lists the models")


@pytest.mark.requirement("F8")
def test_a_folders_path_is_accepted_and_never_shown(fake: Any) -> None:
    path = "/data/models/fake"
    assert fake.chat(model=path, max_tokens=1).status_code == 200
    assert fake.complete(model=path, max_tokens=1).status_code == 200
    assert fake.http.get("/v1/models/" + path).json()["id"] == "fake"
    for route in ("/v1/models", "/metrics", "/docs"):
        assert path not in fake.http.get(route).text
    assert 'weft:engine_up{head="0",model_name="fake",role="unified"}' in fake.http.get("/metrics").text


@pytest.mark.requirement("F40")
def test_health_and_readiness(fake: Any) -> None:
    assert fake.http.get("/health").json() == {"status": "alive"}
    assert fake.http.get("/ready").json() == {"status": "ready"}
    for answer in (fake.http.get("/live"), fake.http.get("/ping"), fake.http.post("/ping")):
        assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


@pytest.mark.requirement("F40")
def test_probes_while_the_model_loads(start_fake: Any, tmp_path: Path) -> None:
    """Only /live succeeds before the server can answer. Repeated probes log nothing."""
    loaded, log, port = tmp_path / "loaded", tmp_path / "log", free_port()
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=deadline(30)) as http,
    ):
        starting = pool.submit(start_fake, port=port, loaded=[str(loaded)], log_file=str(log))
        try:
            until = time.monotonic() + deadline(60)
            while True:
                try:
                    http.get("/live")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < until
                    time.sleep(0.05)
            for _ in range(20):
                for path in ("/health", "/ping", "/ready", "/health/"):
                    answer = http.get(path)
                    found = {"status": "starting", "missing": {"unified": 1}}
                    assert (answer.status_code, answer.json()) == (503, found), path
                assert http.post("/ping").status_code == http.head("/health").status_code == 503
                assert http.get("/live").json() == {"status": "alive"}
                body = {"model": "fake", "prompt": "x"}
                early = http.post("/v1/completions", json=body)
                assert early.status_code == 503
                error_of(early)
            assert not starting.done()
            told = log.read_text()
        finally:
            loaded.touch()
        server = starting.result()
        assert server.http.get("/health").json() == {"status": "alive"}
        counted = 'weft:http_requests_total{method="GET",route="/ready",status="503"} 20.0'
        assert counted in server.http.get("/metrics").text
    assert "answered with" not in told
    assert len(told.splitlines()) < 5, told


def test_what_is_no_request_is_counted_and_not_logged(start_fake: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = start_fake(log_file=str(log))
    before = log.read_text()
    address = ("127.0.0.1", httpx.URL(server.url).port)
    for _ in range(5):
        with socket.create_connection(address, timeout=deadline(10)) as raw:
            raw.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
            assert raw.makefile("rb").readline().split()[1] == b"400"
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        assert server.http.get("/version", headers=upgrade).status_code == 200
    counted = 'weft:http_requests_total{method="other",route="other",status="400"} 5.0'
    assert counted in server.http.get("/metrics").text
    assert log.read_text() == before


@pytest.mark.requirement("F5", "F6")
def test_a_key_on_every_route(locked: Any) -> None:
    for path in ROUTES:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic sesame"},
            {"authorization": ""},
        ):
            answer = locked.http.get(path, headers=headers)
            assert answer.status_code == 401, path
            told = error_of(answer)
            assert told["code"] == "invalid_api_key"
            assert "Authorization" in told["message"]
            assert "x-api-key" in told["message"]
    for path in (*ROUTES, "/v1/models/", "/v1/chat/completions"):
        assert locked.http.head(path).status_code == 401
        assert locked.http.options(path).status_code == 401
    assert locked.chat().status_code == 401
    for host in ("x/?", "a/#", "x/health?"):
        assert locked.http.get("/v1/models", headers={"host": host}).status_code == 401
    for path in (
        "/v1/models?/health",
        "/health/../v1/models",
        "//health",
        "/v1/models#/health",
        "/health%2f..%2fv1",
    ):
        with socket.create_connection(("127.0.0.1", httpx.URL(locked.url).port), timeout=deadline(5)) as raw:
            raw.sendall(
                b"GET " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert raw.makefile("rb").readline().split()[1] == b"401", path
    for key in ("sesame", "second"):
        headers = {"authorization": f"Bearer {key}"}
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
        assert locked.http.get("/v1/models", headers={"X-API-Key": key}).status_code == 200
        assert locked.http.get("/v1/models", auth=(key, "other")).status_code == 200
        page = {"origin": "https://example.org"}
        assert locked.http.get("/v1/models", auth=(key, ""), headers=page).status_code == 401
        assert locked.http.get("/v1/models", auth=("", key)).status_code == 401
    wrong = {"authorization": "Bearer wrong", "x-api-key": "sesame"}
    assert locked.http.get("/v1/models", headers=wrong).status_code == 401, "Authorization counts"
    assert locked.http.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
    for path in PROBES:
        for answer in (locked.http.get(path), locked.http.get(path + "/"), locked.http.head(path)):
            assert answer.status_code == 200
    assert locked.http.post("/ping").status_code == 200


@pytest.mark.requirement("F5")
def test_keys() -> None:
    assert ApiKeys([]).find(None) == 0
    keys = ApiKeys(["a", "b"])
    assert keys.find(b"bearer b") == 1
    assert keys.find(b"Bearer  a ") == 0
    for wrong in (None, b"", b"Bearer", b"Bearer ", b"Bearer c", b"a", b"Bearer ab", b"Token a"):
        assert keys.find(wrong) is None
    assert ApiKeys([]).find(b"Basic x", b"y") == 0
    assert keys.find(None, b" b ") == 1
    assert keys.find(b"Bearer a", b"wrong") == 0
    for authorization, x_api_key in ((b"", b"a"), (b"Bearer c", b"a"), (None, b""), (None, b"Bearer a")):
        assert keys.find(authorization, x_api_key) is None


@pytest.mark.requirement("F1", "F4")
def test_bodies_that_are_not_json(fake: Any) -> None:
    route, json_type = "/v1/chat/completions", {"content-type": "application/json; charset=utf-8"}
    for content in (b"", b"{", b"[" * 10_000 + b"]" * 10_000, b"\xff"):
        answer = fake.http.post(route, content=content, headers=json_type)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "invalid_json"
    for headers in ({"content-type": "text/plain"}, {}, {**json_type, "content-encoding": "gzip"}):
        answer = fake.http.post(route, content=b"{}", headers=headers)
        assert answer.status_code == 415
        error_of(answer)


@pytest.mark.requirement("F4")
@pytest.mark.parametrize("kind", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_ollama_takes_any_content_type_except_from_pages(fake: Any, kind: dict[str, str]) -> None:
    route, body = "/api/chat", json.dumps({"model": fake.model}).encode()
    for path in (route, "/api/show"):
        assert fake.http.post(path, content=body, headers=kind).status_code == 200
    for page in ({"origin": "https://a.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert fake.http.post(route, content=body, headers={**kind, **page}).status_code == 415
    assert fake.http.post("/v1//api/chat", content=body, headers=kind).status_code == 404


@pytest.mark.requirement("F4")
def test_a_packed_body_is_never_unpacked(fake: Any) -> None:
    """A packed gibibyte is refused for the encoding before the server reads the body."""
    packed = gzip.compress(bytes(1 << 20)) * 1024
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        try:
            answer = httpx.post(fake.url + "/v1/chat/completions", content=packed, headers=headers)
        except (httpx.WriteError, httpx.RemoteProtocolError):
            continue  # the server closed while we wrote
        assert answer.status_code == 415
        assert "compressed" in error_of(answer)["message"]
    assert fake.chat(max_tokens=1).status_code == 200


@pytest.mark.requirement("F2")
def test_bodies_over_the_limit_are_cut_early(locked: Any) -> None:
    sent = 0

    def endless() -> Any:
        nonlocal sent
        while sent < 1 << 30:
            sent += 1024
            yield b" " * 1024

    headers = {"content-type": "application/json", "authorization": "Bearer sesame"}
    answer = httpx.post(locked.url + "/v1/completions", content=b" " * 5000, headers=headers)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"
    try:
        answer = httpx.post(locked.url + "/v1/completions", content=endless(), headers=headers)
    except (httpx.WriteError, httpx.RemoteProtocolError):
        pass  # the server closed while we wrote
    else:
        assert answer.status_code == 413
    assert sent < 1 << 24
    assert locked.http.post("/v1/completions", content=b"{}", headers=headers).status_code == 400


def test_headers_over_the_limit(fake: Any) -> None:
    answer = fake.http.get("/health", headers={"x-long": "x" * (65 << 10)})
    assert answer.status_code == 431
    error_of(answer)


@pytest.mark.requirement("F26")
def test_request_ids(fake: Any) -> None:
    def echoed(given: str) -> str:
        return str(fake.http.get("/health", headers={"x-request-id": given}).headers["x-request-id"])

    assert echoed("abc-1.2_X") == "abc-1.2_X"
    for bad in ("a b", "10.0.0.1:80/x", "x" * 129, "a\tb", ""):
        assert re.fullmatch(r"req-[0-9a-f]{24}", echoed(bad))
    first, second = (fake.chat(max_tokens=1).json()["id"] for _ in range(2))
    assert first != second


@pytest.mark.requirement("F35")
def test_what_is_not_supported_is_refused(fake: Any) -> None:
    for name, value in (("tools", [{}]), ("echo", True), ("response_format", {"type": "xml"})):
        answer = fake.chat(**{name: value})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == name
    answer = fake.complete(suffix="x")
    assert (answer.status_code, error_of(answer)["param"]) == (400, "suffix")


@pytest.mark.parametrize("stream", [False, True])
def test_the_heads_refusals_have_their_status(fake: Any, script: Any, stream: bool) -> None:
    answer = fake.chat(seed=script.REJECT, stream=stream)
    assert answer.status_code == 429
    assert error_of(answer)["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.requirement("F61")
@pytest.mark.parametrize("seed", ["FAIL", "FAIL_AT_ONCE"])
def test_a_failed_stream_keeps_the_tokens_before_the_failure(
    fake: Any, script: Any, sse: Any, seed: str
) -> None:
    with fake.stream(seed=getattr(script, seed)) as answer:
        got = sse(answer)
    said = [one["choices"][0]["delta"].get("content") for one in got[:-1]]
    assert "".join(text for text in said if text) == "us"  # the prompt's first special token and "user"
    assert got[-1]["error"]["code"] == "non_finite_logits"


@pytest.mark.requirement("F61")
def test_failures_after_the_first_byte_are_events(fake: Any, script: Any, sse: Any) -> None:
    with fake.stream(seed=script.FAIL) as answer:
        assert answer.status_code == 200
        got = sse(answer)
    assert got[-1]["error"]["code"] == "non_finite_logits"
    assert "[DONE]" not in got
    answer = fake.chat(seed=script.FAIL)
    assert answer.status_code == 500
    error_of(answer)
    assert fake.chat(max_tokens=2).status_code == 200


@pytest.mark.requirement("F31")
def test_over_capacity(locked: Any, script: Any) -> None:
    """Two run and two wait; the fifth gets 429 at once, and the others are not disturbed."""
    headers = {"authorization": "Bearer sesame"}
    body = {"model": "fake", "prompt": "x", "seed": script.HANG_AFTER}
    url = locked.url + "/v1/completions"
    with (
        concurrent.futures.ThreadPoolExecutor(4) as pool,
        httpx.Client(timeout=deadline(1.5), headers=headers) as client,
    ):
        waiting = [pool.submit(client.post, url, json=body) for _ in range(4)]
        metrics = httpx.Client(base_url=locked.url, headers=headers, timeout=deadline(30))
        locked.wait(lambda: 'weft:front_sequences{model_name="fake"} 4.0' in metrics.get("/metrics").text)
        answer = httpx.post(url, json=body, headers=headers)
        assert answer.status_code == 429
        assert error_of(answer)["code"] == "overloaded"
        assert answer.headers["retry-after"]
        for future in waiting:
            with pytest.raises(httpx.ReadTimeout):
                future.result(deadline(5))
    locked.wait(lambda: 'weft:front_sequences{model_name="fake"} 0.0' in metrics.get("/metrics").text)
    assert httpx.post(url, json={**body, "seed": 1}, headers=headers).status_code == 200
    answer = httpx.post(url, json={**body, "n": 5}, headers=headers)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "n"), "can never be served"
    answer = httpx.post(url, json={**body, "n": 3}, headers=headers)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "n"), "more than the queue takes at once"


def test_a_deadline(start_fake: Any, script: Any, sse: Any) -> None:
    server = start_fake(request_timeout=deadline(0.5))

    def streamed() -> Any:
        with server.stream(seed=script.HANG_AFTER) as answer:
            return sse(answer)[-1]["error"]["code"]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(server.chat, seed=seed) for seed in (script.HANG, script.HANG_AFTER)]
        silent = pool.submit(server.chat, seed=script.HANG, stream=True)
        begun = pool.submit(streamed)
    for answer in (one.result() for one in whole):
        assert answer.status_code == 504
        assert error_of(answer)["code"] == "deadline_exceeded"
    assert silent.result().status_code == 504
    assert begun.result() == "deadline_exceeded"
    server.wait(lambda: server.metric("num_requests_running") == 0)
    assert server.chat(max_tokens=1).status_code == 200


def test_metrics(fake: Any) -> None:
    before = (
        fake.metric("request_success_total")
        if "request_success_total{" in fake.http.get("/metrics").text
        else 0
    )
    assert fake.chat(max_tokens=5, n=2).status_code == 200
    assert fake.metric("request_success_total") == before + 2
    assert fake.metric("time_to_first_token_seconds_count") >= 1
    assert fake.metric("inter_token_latency_seconds_count") >= 8
    assert fake.metric("e2e_request_latency_seconds_sum") > 0
    assert fake.metric("engine_steps_total") > 0
    assert fake.metric("engine_up") == 1
    text = fake.http.get("/metrics").text
    assert re.search(
        r'weft:http_requests_total{method="POST",route="/v1/chat/completions",status="200"} ', text
    )
    fake.http.get("/" + "x" * 50)
    assert "xxxxx" not in fake.http.get("/metrics").text


def test_the_list_of_metrics_is_frozen(fake: Any) -> None:
    listed = (ROOT / "docs" / "metrics.txt").read_text()
    assert listed == describe(), "run: python -m weft.front.monitoring.metrics > docs/metrics.txt"
    text = fake.http.get("/metrics").text
    exposed = set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    # tests/front/test_adapters.py reads the metric of a server with adapters.
    of_adapters = {(f"weft:{adapter_metrics.REQUESTS[0]}", "gauge")}
    # tests/front/test_several_models.py reads these of a server of several models.
    of_models = {pair for pair in pairs_of(listed) if pair[0].startswith("weft:model_")}
    # tests/front/test_batches.py reads the metrics of a server with batches.
    of_batches = {pair for pair in pairs_of(listed) if pair[0].startswith("weft:batch")}
    assert exposed == pairs_of(listed) - of_adapters - of_models - of_batches


def pairs_of(listed: str) -> set[tuple[str, ...]]:
    """Return (name, type) of each line of docs/metrics.txt."""
    return {tuple(line.split()[:2]) for line in listed.splitlines()}


@pytest.mark.requirement("F60")
def test_openapi(fake: Any) -> None:
    document = fake.http.get("/openapi.json").json()
    post = document["paths"]["/v1/chat/completions"]["post"]
    schemas = document["components"]["schemas"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert {"messages", "top_k", "stream_options", "continue_final_message"} <= schemas["ChatRequest"][
        "properties"
    ].keys()
    assert not schemas["ChatRequest"].get("required")  # token ids may stand for messages
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in schemas
    assert {*PROBES, "/v1/models", "/metrics", "/version"} <= document["paths"].keys()
    assert document["components"]["securitySchemes"].keys() == {"bearer", "x-api-key"}
    assert document["paths"]["/ping"]["post"]["security"] == []


KNOWN = {
    "GET": [*PROBES, "/v1/models", "/v1/models/{model}", "/metrics", "/version"],
    "POST": [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/v1/classify",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    ],
}


@pytest.mark.requirement("F60")
def test_every_route_that_clients_know(fake: Any) -> None:
    paths = fake.http.get("/openapi.json").json()["paths"]
    for method, routes in KNOWN.items():
        for route in routes:
            assert method.lower() in paths[route], route
            path = route.replace("{model}", "fake")
            answer = fake.http.request(method, path, **({"json": {}} if method == "POST" else {}))
            # An empty body is refused for its missing fields, which shows that the handler read the body.
            assert answer.status_code == (400 if method == "POST" else 200), route
    for page in ("/", "/docs", "/openapi.json"):
        assert fake.http.get(page).status_code == 200


class Page(HTMLParser):
    """Check that elements close in order, and collect all references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        for name, value in attrs:
            assert name in ("lang", "charset", "name", "content", "id", "class", "href"), name
            if name == "href":
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in ("meta", "td", "th"):  # which need no end
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("td", "th"):
            assert self.open.pop() == tag


@pytest.mark.requirement("F6")
def test_the_docs_need_no_other_host(fake: Any, start_fake: Any) -> None:
    answer = start_fake(allowed_hosts=["*"]).http.get("/docs", headers={"host": 'evil"><script>'})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "evil" not in answer.text
    answer = fake.http.get("/docs")
    assert set(re.findall(r"https?://[^/'\s]*", answer.text)) == {fake.url}
    assert "url(" not in answer.text
    page = Page()
    page.feed(answer.text)
    page.close()
    assert page.open == []
    assert not page.seen & {"script", "link", "img", "iframe", "object"}
    assert len(set(page.ids)) == len(page.ids)
    document = fake.http.get("/openapi.json").json()
    assert len(page.ids) == sum(map(len, document["paths"].values()))
    for link in page.links:
        assert link == "openapi.json" or link.removeprefix("#") in page.ids
    for name in document["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in answer.text
    shown = re.search(rf"curl {fake.url}/v1/completions -H .*\n  -d (.*)</pre>", answer.text)
    assert shown is not None, "an example"
    body = shlex.split(html.unescape(shown[1]))[0]
    headers = {"content-type": "application/json"}
    assert fake.http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_no_request_makes_a_server_error(fake: Any) -> None:
    """No mistake of a client yields 5xx."""
    rng = random.Random(3)
    junk = [
        None,
        True,
        -1,
        0,
        1,
        3.5,
        2**64,
        "",
        "x",
        "\0",
        [],
        [""],
        [1],
        ["x", 1],
        [[1]],
        {},
        {"1": 1},
        {"a": [{}]},
    ]
    names = sorted(ChatRequest.__struct_fields__ + CompletionRequest.__struct_fields__)
    seen = set()
    for number in range(300):
        fields = {rng.choice(names): rng.choice(junk) for _ in range(rng.choice([1, 1, 2]))}
        ask = fake.chat if number % 2 else fake.complete
        answer = ask(**{"max_tokens": 2, "model": "fake", **fields})
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (fields, answer.text)
        if answer.status_code != 200:
            error_of(answer)
    assert {200, 400} <= seen
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    assert fake.chat(chat_template_kwargs={"a": deep}, max_tokens=1).status_code in (200, 400)


def test_garbage_from_the_head_is_dropped_and_counted(fake: Any, script: Any) -> None:
    before = fake.metric("front_bad_frames_total")
    got = fake.complete("ab", seed=script.GARBAGE, max_tokens=3).json()
    assert got["choices"][0]["text"] == "aba"
    assert fake.metric("front_bad_frames_total") == before + 12


@pytest.mark.requirement("F46")
def test_a_slow_reader_holds_up_nobody_and_loses_nothing(fake: Any, script: Any) -> None:
    """Sixteen choices of 490 tokens arrive while the client reads nothing. Other clients are served, and the
    waiting output arrives merged and complete.
    """
    asked = {"model": "fake", "prompt": "x", "seed": script.FLOOD, "max_tokens": 490, "n": 16, "logprobs": 20}
    body = json.dumps({**asked, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    before = fake.metric("inter_token_latency_seconds_count")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", httpx.URL(fake.url).port))
        raw.sendall(head + body)
        fake.wait(lambda: fake.metric("inter_token_latency_seconds_count") >= before + 16 * 489)
        start = time.monotonic()
        assert fake.chat(max_tokens=20).status_code == 200
        assert time.monotonic() - start < deadline(2)
        data = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    chunks = [json.loads(line) for line in re.findall(rb"^data: ({.*})\r?$", data, re.M)]
    texts: dict[int, int] = dict.fromkeys(range(16), 0)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += len(choice["logprobs"]["tokens"]) if choice["logprobs"] else 0
    assert texts == dict.fromkeys(range(16), 490)
    assert data.count(b"data: [DONE]") == 1
    assert len(chunks) < 16 * 490 / 4
