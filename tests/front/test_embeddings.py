"""/v1/embeddings of a real server, used through openai-python."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.slowness import deadline
from weft import LLM


@pytest.fixture(scope="module")
def server(start_weft: Any) -> Any:
    return start_weft("--pooling", "mean", "--max-response-bytes", "200000")


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=deadline(60))


def refused(server: Any, **body: Any) -> tuple[int, str | None, str]:
    answer = server.http.post("/v1/embeddings", json={"model": server.model, "input": "a", **body})
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


def test_the_client_gets_the_model_s_vectors(server: Any, client: openai.OpenAI) -> None:
    texts = ["Tom has 3 pens.", "Ann buys four apples.", "Tom has 3 pens."]
    got = client.embeddings.create(model=server.model, input=texts)
    assert [one.index for one in got.data] == [0, 1, 2]
    with LLM() as llm:
        made = llm.embed(texts, pooling="mean", use_tqdm=False)
        ids = [one.prompt_token_ids for one in made]
    for one, expected in zip(got.data, made, strict=True):
        vector = np.array(one.embedding)
        assert float((vector**2).sum()) == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(vector, expected.embedding, atol=2e-2)  # in bf16, in other batches
    assert got.model == server.model
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(map(len, ids))
    again = client.embeddings.create(model=server.model, input=ids)
    np.testing.assert_allclose(again.data[1].embedding, got.data[1].embedding, atol=2e-2)


def test_forms_of_input_and_answer(server: Any) -> None:
    def ask(**body: Any) -> Any:
        answer = server.http.post("/v1/embeddings", json={"model": server.model, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    whole = ask(input="abc", user="u", encoding_format="float", priority=3, cache_salt="s")
    assert set(whole) == {"object", "data", "model", "usage"}
    assert (whole["object"], whole["data"][0]["object"]) == ("list", "embedding")
    packed = ask(input=["abc"], encoding_format="base64")["data"][0]["embedding"]
    numbers = np.frombuffer(base64.b64decode(packed), "<f4")
    np.testing.assert_allclose(numbers, whole["data"][0]["embedding"], atol=2e-2)
    assert len(ask(input=[40, 50])["data"]) == 1
    assert len(ask(input=[[40, 50], [60]])["data"]) == 2


def test_what_is_refused(server: Any) -> None:
    assert refused(server, dimensions=64)[:2] == (400, "dimensions")
    assert refused(server, truncate_prompt_tokens=0)[:2] == (400, "truncate_prompt_tokens")
    assert refused(server, truncate_prompt_tokens=1 << 20)[:2] == (400, "truncate_prompt_tokens")
    assert refused(server, pooling="mean") == (400, "pooling", "unsupported_parameter")
    assert refused(server, encoding_format="int8")[:2] == (400, "encoding_format")
    assert refused(server, input="")[:2] == (400, "input")
    assert refused(server, input=[])[:2] == (400, "input")
    assert refused(server, input=["a", 3])[:2] == (400, "input")
    assert refused(server, input=[[1], []])[:2] == (400, "input")
    assert refused(server, input=[1 << 30])[:2] == (400, "input")
    assert refused(server, input="word " * 100000) == (400, "input", "context_length_exceeded")
    assert refused(server, input=["a"] * 2049)[:2] == (400, "input")
    assert refused(server, stream=True)[:2] == (400, "stream")
    assert refused(server, model="other")[:2] == (404, "model")
    status, param, code = refused(server, input=["a"] * 100)
    assert (status, param, code) == (400, "input", "response_too_large")
    assert server.metric("num_requests_running") == 0


def test_it_is_described(server: Any) -> None:
    document = server.http.get("/openapi.json").json()
    route = document["paths"]["/v1/embeddings"]["post"]
    assert list(route["responses"]["200"]["content"]) == ["application/json"]
    assert "EmbeddingRequest" in document["components"]["schemas"]


def test_where_prefill_and_decode_are_apart(start_weft: Any) -> None:
    server = start_weft("--prefill", "1", "--decode", "1")
    answer = server.http.post("/v1/embeddings", json={"model": server.model, "input": ["one", "two"]})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 2
    assert server.complete("one", max_tokens=3).status_code == 200
    assert server.metric("front_pairs_total") == 1
