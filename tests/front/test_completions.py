"""Text completions over a scripted engine, through real HTTP. The engine repeats the prompt."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_whole_answer(fake: Any) -> None:
    got = fake.complete("hello", max_tokens=7).json()
    assert got["object"] == "text_completion"
    assert got["id"].startswith("cmpl-")
    assert got["choices"] == [{"index": 0, "text": "hellohe", "logprobs": None, "finish_reason": "length"}]
    assert got["usage"]["prompt_tokens"] == 5
    assert got["usage"]["completion_tokens"] == 7


def test_sixteen_tokens_by_default(fake: Any) -> None:
    assert fake.complete("x").json()["usage"]["completion_tokens"] == 16
    assert fake.complete("x" * 510).json()["usage"]["completion_tokens"] == 2, "or what the context leaves"


def test_the_form_of_a_stream(fake: Any, sse: Any) -> None:
    with fake.stream(
        "/v1/completions", prompt="abc", max_tokens=4, stream_options={"include_usage": True}
    ) as answer:
        got = sse(answer)
    assert got.pop() == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in got}) == 1
    last = got.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert "".join(c["choices"][0]["text"] for c in got) == "abca"
    assert [c["choices"][0]["finish_reason"] for c in got][-2:] == [None, "length"]


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_many_prompts(fake: Any, prompt: Any) -> None:
    got = fake.complete(prompt, max_tokens=2, n=2).json()
    assert [(c["index"], c["text"]) for c in got["choices"]] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert got["usage"]["prompt_tokens"] == 4
    assert got["usage"]["completion_tokens"] == 8
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.requirement("F63")
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(fake: Any, sse: Any, stream: bool) -> None:
    asked = {"echo": True, "logprobs": 1, "max_tokens": 2}
    if stream:
        with fake.stream("/v1/completions", prompt="aé", **asked) as answer:
            choices = [c["choices"][0] for c in sse(answer)[:-1]]
        text = "".join(c["text"] for c in choices)
        parts = [c["logprobs"] for c in choices if c["logprobs"]]
        logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    else:
        choice = fake.complete("aé", **asked).json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    # The prompt is a, C3, A9; the output is a, C3 and ends inside a character.
    assert text == "aéa\ufffd"
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "a", "\ufffd"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"a": -0.5}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abé", [97, 98, 0xC3, 0xA9]])
def test_the_prompt_alone(fake: Any, sse: Any, script: Any, prompt: Any, stream: bool) -> None:
    """With echo and no output tokens the engine's extra token is neither shown nor counted."""
    fields = {"echo": True, "max_tokens": 0, "logprobs": 1, "n": 2, "return_token_ids": True}
    if stream:
        fields["stream_options"] = {"include_usage": True}
        with fake.stream("/v1/completions", prompt=prompt, **fields) as answer:
            *chunks, last, done = sse(answer)
        assert (done, last["choices"]) == ("[DONE]", [])
        usage, choices = last["usage"], []
        for index in (0, 1):
            echoed, end = (c["choices"][0] for c in chunks if c["choices"][0]["index"] == index)
            assert (end["text"], end["logprobs"], end["token_ids"]) == ("", None, [])
            choices.append({**echoed, "finish_reason": end["finish_reason"], "token_ids": end["token_ids"]})
    else:
        got = fake.complete(prompt, **fields).json()
        usage, choices = got["usage"], got["choices"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 0, 4)
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == ("abé", "length")
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98, 0xC3, 0xA9], [])
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "\ufffd", "\ufffd"]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert logprobs["top_logprobs"][:2] == [None, {"b": -0.5}]
        assert logprobs["text_offset"] == [0, 1, 2, 2]


def test_the_prompt_alone_ends_for_its_length(fake: Any, script: Any) -> None:
    """The finish reason is "length" even if the hidden token would stop the sequence; no metric counts the
    token.
    """
    before = fake.metric("request_generation_tokens_sum")
    for seed in (script.HONEST, 1):
        got = fake.complete("ab", echo=True, max_tokens=0, stop_token_ids=[97], seed=seed).json()
        assert got["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]
        assert got["usage"]["completion_tokens"] == 0
    assert fake.metric("request_generation_tokens_sum") == before
    answer = fake.complete("ab", max_tokens=0)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    answer = fake.complete("ab", echo=True, max_tokens=0, seed=script.FAIL)
    assert answer.status_code == 200, "the engine fails later than anybody asked"


def test_echo_of_token_ids(fake: Any) -> None:
    got = fake.complete([104, 105], echo=True, max_tokens=1).json()
    assert got["choices"][0]["text"] == "hih"
    assert got["choices"][0]["logprobs"] is None


def test_logprobs(fake: Any) -> None:
    got = fake.complete("ab", logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert got == {
        "tokens": ["a", "b", "a"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"a": -0.5, "b": -1.5}],
        "text_offset": [0, 1, 2],
    }
    bare = fake.complete("ab", logprobs=0, max_tokens=3).json()["choices"][0]["logprobs"]
    assert (bare["top_logprobs"], bare["token_logprobs"]) == (None, [-0.5] * 3)


def test_prompt_logprobs_and_token_ids(fake: Any) -> None:
    (choice,) = fake.complete("ab", prompt_logprobs=0, max_tokens=1, return_token_ids=True).json()["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [97])


@pytest.mark.requirement("F14")
def test_what_the_model_does_not_have(fake: Any) -> None:
    cases = {
        "prompt": {"prompt": [300]},
        "logit_bias": {"logit_bias": {"300": 1}},
        "allowed_token_ids": {"allowed_token_ids": [300]},
        "stop_token_ids": {"stop_token_ids": [300]},
    }
    for param, fields in cases.items():
        answer = fake.complete(**fields)
        assert answer.status_code == 400, param
        assert answer.json()["error"]["param"] == param


def test_the_models_own_ends_count_beside_the_tokenizers(start_fake: Any, script: Any) -> None:
    """Ids that end a turn only according to the model folder stop the output, as with --tokenizer FOLDER."""
    server = start_fake(eos_ids=[ord("c")])
    choice = server.complete("abcd", seed=script.HONEST, max_tokens=8).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


@pytest.mark.requirement("F11")
def test_the_context_is_full(fake: Any) -> None:
    for fields, param in (({"prompt": "x" * 512}, "prompt"), ({"max_tokens": 508}, "max_tokens")):
        answer = fake.complete(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == param
    answer = fake.chat("x" * 600)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = fake.complete(min_tokens=17)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


@pytest.mark.requirement("F32")
def test_lone_surrogates_and_nul(fake: Any) -> None:
    body = b'{"model": "fake", "max_tokens": 1, "prompt": "%s"}'
    headers = {"content-type": "application/json"}
    assert fake.http.post("/v1/completions", content=body % b"\\ud800", headers=headers).status_code == 400
    got = fake.http.post("/v1/completions", content=body % b"\\u0000", headers=headers)
    assert got.json()["choices"][0]["text"] == "\0"
