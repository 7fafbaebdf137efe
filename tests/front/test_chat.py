"""Chat completions over a scripted engine, through real HTTP. The engine repeats the prompt."""

from __future__ import annotations

from typing import Any

import pytest

PROMPT = [256, *b"user\nhello", 257, *b"\n", 256, *b"assistant\n"]
USAGE = {
    "prompt_tokens": len(PROMPT),
    "completion_tokens": 11,
    "total_tokens": len(PROMPT) + 11,
    "prompt_tokens_details": {"cached_tokens": 2},
}


@pytest.mark.requirement("F65")
def test_a_whole_answer(fake: Any) -> None:
    answer = fake.chat(max_tokens=11)
    assert answer.status_code == 200
    got = answer.json()
    assert got["object"] == "chat.completion"
    assert got["id"].startswith("chatcmpl-")
    assert got["model"] == "fake"
    (choice,) = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user\nhello", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert got["usage"] == USAGE


@pytest.mark.requirement("E10", "F61")
def test_the_form_of_a_stream(fake: Any, sse: Any) -> None:
    with fake.stream(max_tokens=11, stream_options={"include_usage": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        got = sse(answer)
    assert got.pop() == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in got}) == 1
    assert got[0]["object"] == "chat.completion.chunk"
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = got.pop()
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert all(c["usage"] is None for c in got)
    assert [c["choices"][0]["finish_reason"] for c in got] == [None] * (len(got) - 1) + ["length"]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in got) == "user\nhello"
    assert all("role" not in c["choices"][0]["delta"] for c in got[1:])


def test_usage_so_far_in_every_chunk(fake: Any, sse: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with fake.stream(max_tokens=11, stream_options=options) as answer:
        got = sse(answer)
    assert got.pop() == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts)
    assert got[-1]["usage"] == USAGE
    assert {chunk["usage"]["prompt_tokens"] for chunk in got} == {USAGE["prompt_tokens"]}


@pytest.mark.requirement("F61")
def test_usage_is_left_out_unless_asked_for(fake: Any, sse: Any) -> None:
    with fake.stream(max_tokens=3) as answer:
        got = sse(answer)
    assert got.pop() == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in got)


@pytest.mark.requirement("F63")
@pytest.mark.parametrize("stream", [False, True])
def test_choices_by_index(fake: Any, sse: Any, stream: bool) -> None:
    if stream:
        with fake.stream(max_tokens=6, n=3, stream_options={"include_usage": True}) as answer:
            got = sse(answer)[:-1]
        usage = got.pop()["usage"]
        texts = {0: "", 1: "", 2: ""}
        ends = dict.fromkeys(texts, 0)
        roles = dict.fromkeys(texts, 0)
        for chunk in got:
            (choice,) = chunk["choices"]
            assert not ends[choice["index"]], "nothing follows a choice's last chunk"
            texts[choice["index"]] += choice["delta"].get("content", "")
            ends[choice["index"]] += choice["finish_reason"] is not None
            roles[choice["index"]] += "role" in choice["delta"]
        assert list(ends.values()) == [1, 1, 1]
        assert list(roles.values()) == [1, 1, 1]
    else:
        got = fake.chat(max_tokens=6, n=3).json()
        usage = got["usage"]
        assert [c["index"] for c in got["choices"]] == [0, 1, 2]
        texts = {c["index"]: c["message"]["content"] for c in got["choices"]}
    assert texts == dict.fromkeys(range(3), "user\n")
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == 18
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(fake: Any, sse: Any, stream: bool) -> None:
    """The text ends before the stop string, the engine is told, and usage counts the completing token."""
    before = fake.metric("num_preemptions_total")
    if stream:
        with fake.stream(
            max_tokens=400, stop=["zzz", "hell"], stream_options={"include_usage": True}
        ) as answer:
            got = sse(answer)[:-1]
        usage = got.pop()["usage"]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in got)
        reason = got[-1]["choices"][0]["finish_reason"]
    else:
        body = fake.chat(max_tokens=400, stop=["zzz", "hell"]).json()
        usage, choice = body["usage"], body["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason, usage["completion_tokens"]) == ("user\n", "stop", 10)
    fake.wait(lambda: fake.metric("num_preemptions_total") == before + 1)
    fake.wait(lambda: fake.metric("front_sequences") == 0)
    assert fake.metric("num_requests_running") == 0


def test_include_stop_str_in_output(fake: Any) -> None:
    got = fake.chat(max_tokens=400, stop="hell", include_stop_str_in_output=True).json()
    assert got["choices"][0]["message"]["content"] == "user\nhell"


def test_a_character_is_never_split(fake: Any, sse: Any) -> None:
    with fake.stream(messages=[{"role": "user", "content": "ä€😀"}], max_tokens=15) as answer:
        got = sse(answer)[:-1]
    pieces = [c["choices"][0]["delta"].get("content", "") for c in got]
    assert "".join(pieces) == "user\nä€😀"
    # A busy client may get several characters in one piece, and never a part of one.
    assert not any("\ufffd" in piece for piece in pieces)
    whole = fake.chat("ä€😀", max_tokens=13).json()["choices"][0]["message"]["content"]
    assert whole == "user\nä€\ufffd", "cut inside a character, whose bytes are replaced as one decode does"


@pytest.mark.requirement("F63")
def test_logprobs(fake: Any, sse: Any) -> None:
    whole = fake.chat(max_tokens=3, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["<|im_start|>", "u", "s"]
    entry = whole["content"][1]
    assert (entry["logprob"], entry["bytes"]) == (-0.5, [ord("u")])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("u", -0.5), ("v", -1.5)]
    with fake.stream(max_tokens=3, logprobs=True, top_logprobs=2) as answer:
        got = sse(answer)[:-1]
    streamed = [e for c in got for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["content"]
    bare = fake.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(e["top_logprobs"] == [] and e["logprob"] == -0.5 for e in bare)


def test_prompt_logprobs_and_token_ids(fake: Any, sse: Any) -> None:
    got = fake.chat(max_tokens=3, prompt_logprobs=1, return_token_ids=True).json()
    assert got["prompt_token_ids"] == PROMPT
    assert got["choices"][0]["token_ids"] == PROMPT[:3]
    assert len(got["prompt_logprobs"]) == len(PROMPT)
    assert got["prompt_logprobs"][0] is None
    assert got["prompt_logprobs"][1][str(ord("u"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "u"}
    with fake.stream(max_tokens=3, return_token_ids=True) as answer:
        chunks = sse(answer)[:-1]
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == PROMPT[:3]


def test_special_tokens_typed_as_text_stay_text(fake: Any) -> None:
    got = fake.chat("a<|im_end|>b", max_tokens=1, return_token_ids=True).json()
    assert got["prompt_token_ids"].count(257) == 1
    got = fake.complete("<|im_end|>", max_tokens=1, return_token_ids=True).json()
    assert got["choices"][0]["prompt_token_ids"] == list(b"<|im_end|>")


def test_every_kind_of_message(fake: Any) -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "e"},
    ]
    got = fake.chat(messages=messages, max_tokens=1, return_token_ids=True).json()
    text = bytes(i for i in got["prompt_token_ids"] if i < 256).decode()
    assert text == "system\nd\nuser\na\nb\nassistant\nc\nuser\ne\nassistant\n"


def test_continue_final_message(fake: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    got = fake.chat(
        messages=messages, continue_final_message=True, max_tokens=1, return_token_ids=True
    ).json()
    assert bytes(got["prompt_token_ids"][-2:]) == b"so"


def test_the_alias_is_reported_back(fake: Any) -> None:
    assert fake.chat(model="org/alias", max_tokens=1).json()["model"] == "org/alias"


def test_ends_of_turn_give_no_text(fake: Any, script: Any) -> None:
    got = fake.chat(seed=script.EARLY_STOP).json()
    assert got["choices"][0]["finish_reason"] == "stop"
    assert got["choices"][0]["message"]["content"] == "u"


@pytest.mark.requirement("F12")
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_bad_messages(fake: Any, message: Any, param: str) -> None:
    answer = fake.chat(messages=[message])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.requirement("F18")
@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "add_generation_prompt"])
def test_template_variables_that_are_not_the_clients(fake: Any, name: str) -> None:
    answer = fake.chat(chat_template_kwargs={name: True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert fake.chat(chat_template_kwargs={"enable_thinking": False}, max_tokens=1).status_code == 200
