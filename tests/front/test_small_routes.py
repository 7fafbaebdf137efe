"""Tokenization, routes for operators, other origins and limits of keys, through real HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.slowness import deadline
from weft.front.http.access import ADMIN_PATHS
from weft.front.requests.tokenizing import MAX_TOKENS

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = [256, *b"user\nhello", 257, *b"\n", 256, *b"assistant\n"]
ADMIN = {"authorization": "Bearer admin"}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found = answer.json()
    assert found.keys() == {"error"}
    error: dict[str, Any] = found["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# -- text to ids and back ----------------------------------------------------------------------------


def tokenize(fake: Any, **fields: Any) -> Any:
    return fake.http.post("/tokenize", json=fields)


@pytest.mark.requirement("G15")
def test_a_text_and_back(fake: Any) -> None:
    got = tokenize(fake, model="fake", prompt="hé").json()
    assert got == {"count": 3, "max_model_len": 512, "tokens": list("hé".encode()), "token_strs": None}
    assert fake.http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "hé"}


def test_pieces_of_tokens(fake: Any) -> None:
    got = tokenize(fake, prompt="ab", return_token_strs=True).json()
    assert got["token_strs"] == ["a", "b"]


@pytest.mark.requirement("G15")
def test_a_conversation_as_the_model_is_prompted_with_it(fake: Any) -> None:
    assert tokenize(fake, **CHAT).json()["tokens"] == PROMPT
    assert tokenize(fake, **CHAT, add_generation_prompt=False).json()["tokens"] == PROMPT[:-11]
    last = [*CHAT["messages"], {"role": "assistant", "content": "yes"}]
    got = tokenize(fake, messages=last, continue_final_message=True).json()["tokens"]
    assert got == [*PROMPT, *b"yes"]
    assert fake.http.post("/detokenize", json={"tokens": [256]}).json() == {"prompt": "<|im_start|>"}


@pytest.mark.requirement("F32")
def test_special_tokens_typed_as_text_are_text(fake: Any) -> None:
    assert tokenize(fake, prompt="<|im_end|>").json()["tokens"] == list(b"<|im_end|>")


@pytest.mark.slow
@pytest.mark.requirement("F2")
def test_long_texts_and_large_bodies(fake: Any) -> None:
    assert tokenize(fake, prompt="x" * 100_000).json()["count"] == 100_000  # read by a process
    answer = tokenize(fake, prompt="x" * (MAX_TOKENS + 100_000))
    assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")
    answer = fake.http.post("/detokenize", json={"tokens": [120] * 100_000})
    assert answer.json() == {"prompt": "x" * 100_000}


@pytest.mark.parametrize(
    ("route", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", **CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "nope": 1}, 400, "nope"),
        ("/tokenize", {"prompt": "x", "model": "nope"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
    ],
)
def test_what_cannot_be_tokenized(
    fake: Any, route: str, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = fake.http.post(route, json=fields)
    assert (answer.status_code, error_of(answer)["param"]) == (status, param)


def test_an_empty_text_has_no_tokens(fake: Any) -> None:
    assert tokenize(fake, prompt="").json()["tokens"] == []
    assert fake.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


# -- routes for operators -----------------------------------------------------------------------------

CONTROL = sorted(ADMIN_PATHS)


@pytest.fixture(scope="module")
def guarded(start_fake: Any) -> Any:
    return start_fake(api_key=["user"], admin_key=["admin"])


@pytest.mark.requirement("F7")
def test_control_routes_are_closed_without_an_admin_key(fake: Any) -> None:
    for route in (*CONTROL, "/admin/drain/"):
        answer = fake.http.post(route, json={"rid": "x"})
        assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden")
        assert "--admin-key" in error_of(answer)["message"]
    assert fake.http.get("/ready").status_code == 200


@pytest.mark.requirement("F7")
def test_control_routes_want_the_admin_key_and_no_browser(guarded: Any) -> None:
    for route in CONTROL:
        for headers in ({}, {"authorization": "Bearer user"}, {"x-api-key": "wrong"}):
            answer = guarded.http.post(route, json={"rid": "x"}, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        answer = guarded.http.post(
            route, json={"rid": "x"}, headers={**ADMIN, "origin": "https://example.org"}
        )
        assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden")
    answer = guarded.http.post("/v1/completions", json={"model": "fake", "prompt": "x"}, headers=ADMIN)
    assert answer.status_code == 401, "the admin key opens what it is for, and nothing else"
    # Keys of a URL: the user name is the API key, the password is the admin key.
    assert guarded.http.get("/server_info", auth=("user", "admin")).status_code == 200
    assert guarded.http.get("/server_info", auth=("admin", "user")).status_code == 401
    page = {"origin": guarded.url}
    assert guarded.http.get("/server_info", auth=("user", "admin"), headers=page).status_code == 401
    assert guarded.http.get("/ready").status_code == 200


def abort(server: Any, rid: Any) -> httpx.Response:
    answer: httpx.Response = server.http.post("/abort_request", json={"rid": rid}, headers=ADMIN)
    return answer


@pytest.mark.requirement("F26")
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_abort_by_exact_id(guarded: Any, route: str) -> None:
    body = {"model": "fake", "max_tokens": 480, "stream": True, "n": 2, "seed": 102}
    body |= CHAT if "chat" in route else {"prompt": "hello"}  # type: ignore[operator]
    headers = {"authorization": "Bearer user", "x-request-id": "mine"}
    with (
        httpx.Client(base_url=guarded.url, timeout=guarded.http.timeout) as client,
        client.stream("POST", route, json=body, headers=headers) as stream,
    ):
        assert stream.headers["x-request-id"] == "mine"
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        rid = json.loads(next(lines))["id"]
        for other in (rid[:-1], rid[:12], rid + "0", rid.upper(), "mine", rid.partition("-")[2]):
            assert abort(guarded, other).status_code == 404, other
        assert abort(guarded, rid).json() == {"status": "aborted"}
        rest = list(lines)
    assert rest[-1] == "[DONE]"
    ends = [
        c["finish_reason"] for line in rest[:-1] for c in json.loads(line)["choices"] if c["finish_reason"]
    ]
    assert ends == ["abort", "abort"]
    guarded.wait(lambda: guarded.http.get("/metrics", headers={"x-api-key": "user"}).status_code == 200)
    assert abort(guarded, rid).status_code == 404
    for bad in (None, 5, "", "*", "a b", "x\nabort y", "x" * 129, ["x"]):
        assert abort(guarded, bad).status_code == 400


def test_abort_whichever_front_has_the_request(start_fake: Any) -> None:
    server = start_fake(admin_key=["admin"], fronts=3)
    with server.stream(max_tokens=480, seed=102) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        rid = json.loads(next(lines))["id"]
        assert abort(server, rid[:-1]).status_code == 404
        for _ in range(12):  # connections are spread over the fronts
            with httpx.Client(base_url=server.url, timeout=server.http.timeout) as client:
                answers = client.post("/abort_request", json={"rid": rid}, headers=ADMIN).status_code
            assert answers == 200 or _ > 0
        assert list(lines)[-1] == "[DONE]"


@pytest.mark.requirement("F7")
def test_a_drain_lets_requests_finish(start_fake: Any) -> None:
    server = start_fake(admin_key=["admin"])
    with server.stream(max_tokens=100) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.http.post("/admin/drain", headers=ADMIN).json() == {"status": "draining"}
        server.wait(lambda: server.http.get("/ready").status_code == 503)
        assert server.chat(max_tokens=1).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(deadline(20)) == 0


@pytest.mark.requirement("F7")
def test_a_drain_of_several_fronts_ends_them_all(start_fake: Any) -> None:
    server = start_fake(admin_key=["admin"], fronts=2)
    assert server.http.post("/admin/drain", headers=ADMIN).json() == {"status": "draining"}
    assert server.process.wait(deadline(20)) == 0


def test_only_what_is_retired_is_revived(guarded: Any) -> None:
    answer = guarded.http.post("/admin/revive", json={"group": "decode7"}, headers=ADMIN)
    assert (answer.status_code, error_of(answer)["param"]) == (404, "group")
    assert error_of(answer)["message"] == "unknown group 'decode7'; the groups are 0"
    answer = guarded.http.post("/admin/revive", json={"group": "0"}, headers=ADMIN)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "group")
    answer = guarded.http.post("/admin/revive", json={}, headers=ADMIN)
    assert answer.status_code == 400


def test_groups_are_listed_and_named_in_refusals(guarded: Any) -> None:
    (engine,) = guarded.http.get("/admin/groups", headers=ADMIN).json()["engines"]
    assert (engine["name"], engine["state"], engine["alive"]) == ("0", "running", True)
    for path, body, status, says in (
        ("/admin/drain", {"group": "decode7"}, 404, "the groups are 0"),
        ("/admin/drain", {"group": "0"}, 400, "without a unified group"),
        ("/admin/drain", {"group": ""}, 400, "group must be the name of a group"),
        ("/admin/restart", {"group": "decode7"}, 404, "the groups are 0"),
        ("/admin/scale", {"base": "0", "groups": 2}, 404, "weft up FILE"),
        ("/admin/scale", {"base": "0"}, 400, "groups"),
    ):
        answer = guarded.http.post(path, json=body, headers=ADMIN)
        assert answer.status_code == status, (path, body, answer.text)
        assert says in error_of(answer)["message"]
    assert guarded.http.get("/ready").status_code == 200


def test_a_profile_needs_a_folder(guarded: Any) -> None:
    answer = guarded.http.post("/admin/profile", json={}, headers=ADMIN)
    assert answer.status_code == 400
    assert "--profile-dir" in error_of(answer)["message"]


def test_a_flush_needs_a_tier(guarded: Any) -> None:
    answer = guarded.http.post("/admin/cache/flush", json={"all": True}, headers=ADMIN)
    assert answer.status_code == 400
    assert "--kv-disk" in error_of(answer)["message"]


# -- other origins -----------------------------------------------------------------------------------

SITE = "https://app.example.org"


def preflight(server: Any, origin: str, **headers: str) -> httpx.Response:
    asks = {"origin": origin, "access-control-request-method": "POST", **headers}
    answer: httpx.Response = server.http.options("/v1/chat/completions", headers=asks)
    return answer


def test_without_origins_no_page_may_read_answers(fake: Any) -> None:
    answer = fake.http.get("/v1/models", headers={"origin": SITE})
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in preflight(fake, SITE).headers


def test_allowed_origins(start_fake: Any) -> None:
    server = start_fake(allowed_origins=[SITE], api_key=["user"])
    asked = preflight(server, SITE, **{"access-control-request-headers": "authorization, x-stainless-os"})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == SITE
    assert asked.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in asked.headers["access-control-allow-methods"]
    answer = server.http.get("/v1/models", headers={"origin": SITE, "authorization": "Bearer user"})
    assert answer.headers["access-control-allow-origin"] == SITE
    assert answer.headers["vary"] == "Origin"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id", "retry-after"} <= set(exposed)
    refused = server.http.get("/v1/models", headers={"origin": SITE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, SITE)
    for other in ("https://evil.example", SITE + ".evil.example", "null"):
        assert "access-control-allow-origin" not in preflight(server, other).headers
        got = server.http.get("/health", headers={"origin": other})
        assert "access-control-allow-origin" not in got.headers
    odd = preflight(server, SITE, **{"access-control-request-headers": "a;b"})
    assert ";" not in odd.headers["access-control-allow-headers"]


def test_all_origins(start_fake: Any) -> None:
    server = start_fake(allowed_origins=["*"])
    answer = server.chat(max_tokens=1)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert preflight(server, SITE).headers["access-control-allow-origin"] == "*"


# -- limits of keys ----------------------------------------------------------------------------------


@pytest.mark.requirement("F31")
def test_requests_a_minute(start_fake: Any) -> None:
    server = start_fake(api_key=["one", "two"], rate_limit_requests=2)

    def complete(key: str) -> httpx.Response:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 1}
        made: httpx.Response = server.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        return made

    first = complete("one")
    assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "2")
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert complete("one").status_code == 200
    refused = complete("one")
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert error_of(refused)["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert complete("two").status_code == 200
    assert server.http.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200


@pytest.mark.requirement("F31")
def test_tokens_a_minute(start_fake: Any) -> None:
    server = start_fake(rate_limit_tokens=100)
    assert server.complete("x" * 90, max_tokens=20).status_code == 200
    refused = server.complete("x", max_tokens=1)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-limit-tokens"] == "100"
    assert 1 <= int(refused.headers["retry-after"]) <= 10


@pytest.mark.requirement("F66")
def test_metrics_for_dashboards_made_for_others(start_fake: Any) -> None:
    server = start_fake(vllm_metrics=True)
    server.chat(max_tokens=2)
    page = server.http.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="fake"' in page
    assert "weft:num_requests_running{" in page
    for name in ("time_to_first_token_seconds_count", "prefix_cache_hits_total", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in page
