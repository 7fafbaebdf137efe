"""/v1/rerank, /v1/score and /v1/classify of real servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft import LLM

TEXTS = ["Tom has 3 pens.", "Ann buys four apples.", "pens"]
TOKENS = {"classifier_from_token": ["F", "G"], "method": "from_2_way_softmax", "is_matryoshka": True}


@pytest.fixture(scope="module")
def plain(start_weft: Any) -> Any:
    """A server of a model without classes."""
    return start_weft("--max-response-bytes", "200000")


@pytest.fixture(scope="module")
def judge(start_weft: Any) -> Any:
    """A server of a model that scores by two tokens."""
    return start_weft("--hf-overrides", json.dumps(TOKENS))


def ask(server: Any, route: str, status: int = 200, **body: Any) -> Any:
    answer = server.http.post(route, json={"model": server.model, **body})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def test_documents_in_the_order_of_their_scores(plain: Any) -> None:
    for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
        made = ask(plain, route, query="pens", documents=[*TEXTS[:2], {"text": TEXTS[2]}])
        assert set(made) == {"id", "model", "results", "usage"}
        scores = [one["relevance_score"] for one in made["results"]]
        assert scores == sorted(scores, reverse=True)
        best = made["results"][0]
        assert (best["index"], best["document"]) == (2, {"text": "pens"})  # equal to the query
        assert best["relevance_score"] == pytest.approx(1.0)
    short = ask(plain, "/v1/rerank", query="pens", documents=TEXTS, top_n=2, return_documents=False)
    assert [set(one) for one in short["results"]] == [{"index", "relevance_score"}] * 2
    ids = [plain.http.post("/tokenize", json={"prompt": text}).json()["count"] for text in TEXTS]
    assert made["usage"]["prompt_tokens"] == made["usage"]["total_tokens"] == sum(ids)  # "pens" counts once


def test_scores_of_pairs(plain: Any) -> None:
    made = ask(plain, "/v1/score", text_1="pens", text_2=TEXTS)
    assert (made["object"], [one["index"] for one in made["data"]]) == ("list", [0, 1, 2])
    ranked = ask(plain, "/v1/rerank", query="pens", documents=TEXTS)
    for one in ranked["results"]:
        assert one["relevance_score"] == pytest.approx(made["data"][one["index"]]["score"], abs=2e-2)
    both = ask(plain, "/score", queries=["pens", TEXTS[0]], documents=["pens", TEXTS[0]])
    assert [one["score"] for one in both["data"]] == pytest.approx([1.0, 1.0])


def test_a_judge_by_two_tokens(judge: Any) -> None:
    with LLM(hf_overrides=TOKENS) as llm:
        expected = [one.score for one in llm.score("pens", TEXTS, use_tqdm=False)]
        classes = llm.classify(TEXTS, use_tqdm=False)
    made = ask(judge, "/v1/score", text_1="pens", text_2=TEXTS)
    assert [one["score"] for one in made["data"]] == pytest.approx(expected, abs=2e-2)
    ranked = ask(judge, "/v1/rerank", query="pens", documents=TEXTS)
    scores = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    assert [scores[number] for number in range(3)] == pytest.approx(expected, abs=2e-2)
    found = ask(judge, "/v1/classify", input=TEXTS)["data"]
    for one, other in zip(found, classes, strict=True):
        assert (one["label"], one["num_classes"]) == ("LABEL_0", 1)
        assert one["probs"] == pytest.approx(other.probs.tolist(), abs=2e-2)
    raw = ask(judge, "/classify", input=TEXTS, use_activation=False)["data"]
    assert any(not 0 <= one["probs"][0] <= 1 for one in raw)
    assert judge.complete("pens", max_tokens=3).status_code == 200


def test_short_vectors_and_short_prompts(judge: Any) -> None:
    whole = ask(judge, "/v1/embeddings", input="pens and apples")["data"][0]["embedding"]
    short = ask(judge, "/v1/embeddings", input="pens and apples", dimensions=16)["data"][0]["embedding"]
    scale = sum(value * value for value in whole[:16]) ** 0.5
    assert short == pytest.approx([value / scale for value in whole[:16]], abs=2e-2)
    cut = ask(judge, "/v1/embeddings", input="pens " * 5000, truncate_prompt_tokens=7)
    assert cut["usage"]["prompt_tokens"] == 7
    least = ask(judge, "/v1/rerank", query="pens", documents=["a " * 5000], truncate_prompt_tokens=-1)
    assert least["usage"]["prompt_tokens"] > 7
    assert ask(judge, "/v1/embeddings", 400, input="a", dimensions=1 << 20)["param"] == "dimensions"


def test_what_is_refused(plain: Any, judge: Any) -> None:
    def param(route: str, server: Any = plain, **body: Any) -> str:
        return str(ask(server, route, 400, **body)["param"])

    assert param("/v1/classify", input="a") == "model"
    assert param("/v1/rerank", documents=["a"]) == "query"
    assert param("/v1/rerank", query="a") == "documents"
    assert param("/v1/rerank", query="a", documents=[]) == "documents"
    assert param("/v1/rerank", query="a", documents=[{"image": "b"}]) == "documents"
    assert param("/v1/rerank", query="a", documents=["b"], top_n=-1) == "top_n"
    assert param("/v1/rerank", query="a", documents=["b"], max_tokens_per_doc=3) == "max_tokens_per_doc"
    assert param("/v1/rerank", query="a", documents=["b"], instruction="c") == "instruction"
    assert param("/v1/rerank", query="a", documents=["b " * 90000]) == "documents"
    assert param("/v1/rerank", judge, query="a", documents=["b " * 90000]) == "documents"
    assert param("/v1/score", text_1="a") == "text_2"
    assert param("/v1/score", text_1="a", queries="b", text_2="c") == "queries"
    assert param("/v1/score", text_1=["a", "b"], text_2=["c"]) == "text_2"
    assert param("/v1/score", text_1="a", text_2="b", stream=True) == "stream"
    assert param("/v1/rerank", query="a", documents=["b" * 300000]) == "documents"
    assert plain.metric("num_requests_running") == 0


@pytest.mark.slow
def test_where_prefill_and_decode_are_apart(start_weft: Any) -> None:
    server = start_weft("--prefill", "1", "--decode", "1", "--hf-overrides", json.dumps(TOKENS))
    scores = [one["score"] for one in ask(server, "/v1/score", text_1="pens", text_2=TEXTS)["data"]]
    assert all(0 < score < 1 for score in scores)
