"""Accepted forms of requests, and the parameter that each refusal names."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.common.errors import InvalidRequest
from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.completions_request import CompletionRequest
from weft.front.protocol.fields import CHAT_ONLY, NEUTRAL, NO_TOOLS, UNSUPPORTED
from weft.front.protocol.parse import parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({**CHAT, **fields}).encode(), ChatRequest)


def text(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({**TEXT, **fields}).encode(), CompletionRequest)


def refused(make: Any, **fields: Any) -> InvalidRequest:
    def use() -> None:
        made = make(**fields)
        made.sampling()
        made.constraint()
        if isinstance(made, ChatRequest):
            made.tool_use()

    with pytest.raises(InvalidRequest) as caught:
        use()
    assert caught.value.http_status == 400
    return caught.value


@pytest.mark.requirement("F1")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"model": 1e999}',
    ],
)
def test_what_is_not_a_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, ChatRequest)
    assert caught.value.error_code == "invalid_json"


def test_a_body_that_is_no_json_says_where() -> None:
    for body, why in (
        (b'{"model": x}', "byte 10"),
        (b'{"model"', "truncated"),
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"user": "\\ud83d", "n": 1}', r"surrogate pair \(byte 16\)"),
        (b'{"user": "x\\ud83d"}', r"surrogate pair \(byte 17\)"),
        (b'{"user": "x\\ud83d\\n"}', r"surrogate pair \(byte 17\)"),
        (b'{"user": "x\\ud83d"} \n', r"surrogate pair \(byte 17\)"),
        (b'{"messages": [{"content": "x\\uD83Da"}]}', r"surrogate pair \(byte 34\)"),
        (b'{"user": "x\\\\ud83d"', "truncated"),
        (b'{"user": "}', "truncated"),
        (b'{"user": "x\\ud83d', "truncated"),
        (b'{"user": "x\\ud83d\\ude', "truncated"),
        (b'{"model": 1e999}', "range"),
        (b'{"a": "\xff"}', "UTF-8"),
    ):
        with pytest.raises(InvalidRequest, match=f"the body is not valid JSON: .*{why}"):
            parse(body, ChatRequest)
    good = b'{"messages": [{"role": "user", "content": "x"}]}'
    assert parse(codecs.BOM_UTF8 + good, ChatRequest) == parse(good, ChatRequest)


@pytest.mark.requirement("E11", "F9", "F10", "F13", "F15", "F16")
@pytest.mark.parametrize("make", [chat, text])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("n", 0),
        ("n", -1),
        ("n", 10**9),
        ("n", True),
        ("temperature", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 101),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ["x"] * 10_000),
        ("stop", ["x" * 1_000_000]),
        ("stop", [""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("bad_words", [""]),
        ("bad_words", "x"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", [1]),
        ("logit_bias", {"99999999999": 1}),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("user", 5),
        ("user", "x" * 513),
        ("safety_identifier", 5),
        ("prompt_cache_key", "x" * 513),
        ("prompt_cache_retention", ["24h"]),
        ("best_of", 2),
        ("model", ""),
        ("model", 5),
        ("store", "yes"),
        ("verbosity", "loud"),
        ("prediction", "x"),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("priority", 1.5),
        ("priority", 2**31),
        ("priority", True),
        ("cache_salt", "a b"),
        ("cache_salt", "a\r\nb"),
        ("cache_salt", "x" * 257),
        ("response_format", "json_object"),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
        ("response_format", {"type": "yaml"}),
        ("structured_outputs", {"json": {}, "regex": "x"}),
        ("structured_outputs", {}),
        ("structured_outputs", {"json_object": False}),
        ("structured_outputs", {"yaml": "x"}),
        ("guided_json", 5),
        ("guided_json", False),
        ("guided_json", "{"),
        ("guided_regex", ""),
        ("guided_choice", []),
        ("guided_choice", [""]),
        ("guided_choice", "ab"),
        ("guided_grammar", " "),
    ],
)
def test_values_out_of_range_name_their_parameter(make: Any, name: str, value: Any) -> None:
    assert refused(make, **{name: value}).param == name


@pytest.mark.requirement("F10")
def test_min_tokens_may_not_pass_max_tokens() -> None:
    assert refused(chat, max_tokens=4, min_tokens=5).param == "min_tokens"
    assert chat(max_tokens=4, min_tokens=4).sampling().min_tokens == 4


@pytest.mark.requirement("F35")
@pytest.mark.parametrize(
    "name", sorted(UNSUPPORTED | {"echo", "safe_prompt", "separate_reasoning", "stream_reasoning"})
)
def test_known_parameters_that_are_not_supported(name: str) -> None:
    error = refused(chat, **{name: [{"type": "function"}]})
    assert (error.param, error.error_code) == (name, "unsupported_parameter")
    assert chat(**{name: None}) == chat()


@pytest.mark.requirement("F35")
def test_unknown_parameters() -> None:
    error = refused(chat, tempreature=1)
    assert (error.param, error.error_code) == ("tempreature", "unknown_parameter")
    assert refused(text, **{"a\r\nb": 1}).param == "a??b"
    assert len(refused(text, **{"x" * 5000: 1}).message) < 200
    assert refused(text, messages=[]).param == "messages"
    assert refused(chat, prompt="x").param == "prompt"
    assert refused(chat, echo=True).param == "echo"
    assert refused(text, suffix="x").param == "suffix"
    assert refused(chat, stream=True, stream_options={"x": 1}).param == "stream_options"
    error = refused(chat, stream=True, stream_options={"include_obfuscation": True})
    assert (error.param, error.error_code) == ("stream_options", "unsupported_parameter")
    assert "include_obfuscation" in error.message
    assert chat(stream=True, stream_options={"include_obfuscation": False}).usage_in_stream is False


#: Parameter -> (values without effect, values with an effect).
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "tools": ([[]], [[{"type": "function"}], {}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "response_format": ([{"type": "text"}], [{"type": "json_objects"}, {"type": "text", "x": 1}, {}]),
    "modalities": ([["text"]], [["text", "audio"], []]),
    "metadata": ([{}], []),
    "user": ([""], []),
    "safety_identifier": ([""], []),
    "prompt_cache_key": ([""], []),
    "prompt_cache_retention": ([""], []),
    "suffix": ([""], ["x", " "]),
    "echo": ([False], []),
    "logprobs": ([False], []),
    "top_logprobs": ([0], []),
    "use_beam_search": ([False], [True, 0]),
    "length_penalty": ([1, 1.0], [0.5, True]),
    "early_stopping": ([False], [True, "never"]),
    "documents": ([[]], [[{"text": "x"}]]),
    "mm_processor_kwargs": (
        [{}, {"do_pan_and_scan": False, "pan_and_scan_max_num_crops": None}],
        [{"num_crops": 4}, {"do_pan_and_scan": True}, {"do_resize": False}],
    ),
    "logits_processors": ([[]], [["x"]]),
    "spaces_between_special_tokens": ([True], [False, 1]),
    "return_tokens_as_token_ids": ([False], [True]),
    "cache_salt": ([""], ["x y", "é", "x" * 257, 5]),
    "vllm_xargs": ([{}], [{"a": 1}]),
    "typical_p": ([1.0], [0.9]),
    "mirostat_mode": ([0], [2]),
    "no_repeat_ngram_size": ([0], [3]),
    "cache_prompt": ([True], [False]),
    "grammar": ([""], ["root ::= x"]),
    "kv_transfer_params": (
        [{}, {"do_remote_decode": False, "do_remote_prefill": None, "remote_host": None}],
        [{"do_remote_prefill": True}, {"do_remote_decode": 0}, {"remote_block_ids": [1]}, "x"],
    ),
    "stream_options": (
        [{}, {"include_usage": False}, {"include_obfuscation": False, "include_usage": None}],
        [{"include_usage": True}, {"other": False}, {"include_usage": 0}, "x"],
    ),
}


def test_every_neutral_value_is_listed_here() -> None:
    assert VALUES.keys() == NEUTRAL.keys()


@pytest.mark.parametrize("name", sorted(VALUES))
def test_values_that_ask_for_nothing_are_accepted(name: str) -> None:
    neutral, others = VALUES[name]
    for value in neutral:
        assert chat(**{name: value}) == chat(), value
        assert text(**{name: value}) == text(), value
    for value in others:
        for make in (chat, text):
            assert refused(make, **{name: value}).param == name, value


NO_TOOLS_VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "tool_choice": (["none", "auto"], ["required", {"type": "function", "function": {"name": "f"}}]),
    "parallel_tool_calls": ([True, False], [1, "yes"]),
    "include_reasoning": ([True, False], [1]),
}


@pytest.mark.parametrize("name", sorted(NO_TOOLS))
def test_values_that_ask_for_nothing_where_there_are_no_tools(name: str) -> None:
    neutral, others = NO_TOOLS_VALUES[name]
    for value in neutral:
        assert text(**{name: value}) == text(), value
    for value in others:
        assert refused(text, **{name: value}).param == name, value


@pytest.mark.requirement("F35")
@pytest.mark.parametrize("name", sorted(CHAT_ONLY))
def test_a_text_completion_has_no_place_for_it(name: str) -> None:
    error = refused(text, **{name: ["x"]})
    assert (error.param, error.error_code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("make", [chat, text])
@pytest.mark.parametrize("label", ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"])
def test_labels_are_taken_and_change_nothing(make: Any, label: str) -> None:
    labelled = make(**{label: "24h"})
    assert getattr(labelled, label) == "24h"
    assert labelled.sampling() == make().sampling()


def test_required_fields() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(b'{"model": "m"}', ChatRequest)
    assert (caught.value.param, caught.value.error_code) == ("messages", "missing_required_parameter")
    assert refused(chat, messages=[]).param == "messages"
    assert refused(chat, messages="hi").param == "messages"
    assert refused(chat, messages=["hi"]).param == "messages"


@pytest.mark.requirement("F15")
def test_chat_logprobs() -> None:
    assert chat().sampling().logprobs is None
    assert chat(logprobs=False).sampling().logprobs is None
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling().logprobs == 5
    for value in (21, -1):
        assert refused(chat, logprobs=True, top_logprobs=value).param == "top_logprobs"
    assert refused(chat, top_logprobs=2).param == "top_logprobs"
    assert refused(chat, logprobs=3).param == "logprobs"
    assert refused(text, logprobs=True).param == "logprobs"
    assert refused(text, logprobs=21).param == "logprobs"


def test_max_completion_tokens() -> None:
    assert chat(max_completion_tokens=7).sampling().max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).sampling().max_tokens == 7
    assert refused(chat, max_completion_tokens=7, max_tokens=8).param == "max_tokens"
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refused(text, max_completion_tokens=7).param == "max_completion_tokens"


@pytest.mark.requirement("F9", "F12")
@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["x", 1],
        [1, "x"],
        [1, True],
        [True],
        [1.0],
        [-1],
        [2**31],
        [[1], "x"],
        [[1, None]],
        [None],
        5,
        True,
        {"text": "x"},
        ["x"] * 257,
        ["x"] * 100_000,
    ],
)
def test_bad_prompts(prompt: Any) -> None:
    assert refused(text, prompt=prompt).param == "prompt"


def test_every_form_of_prompt() -> None:
    assert text(prompt="a").prompts() == ["a"]
    assert text(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert text(prompt=[1, 2]).prompts() == [[1, 2]]
    assert text(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]
    assert refused(text, prompt=["a"] * 256, n=5).param == "n"


@pytest.mark.parametrize("make", [chat, text])
def test_best_of_must_ask_for_nothing(make: Any) -> None:
    assert make(best_of=1).sampling() == make().sampling()
    assert make(best_of=3, n=3).sampling().n == 3
    assert refused(make, best_of=1, n=2).param == "best_of"


def test_no_output_needs_echo() -> None:
    asked = text(max_tokens=0, echo=True, logprobs=1)
    assert asked.prompt_only
    assert (asked.sampling().max_tokens, asked.sampling().prompt_logprobs) == (1, 1)
    assert not text(max_tokens=1, echo=True).prompt_only
    assert not text(echo=True).prompt_only
    assert refused(text, max_tokens=0, echo=False).param == "max_tokens"
    assert refused(text, max_tokens=0, echo=True, min_tokens=1).param == "min_tokens"
    assert refused(text, max_tokens=False, echo=True).param == "max_tokens"


@pytest.mark.requirement("F64")
def test_sampling_gets_every_parameter() -> None:
    given = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": -5,
        "n": 3,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 2,
    }
    lists = {"stop": ["a", "b"], "stop_token_ids": [3], "bad_words": ["w"], "allowed_token_ids": [1, 2]}
    made = chat(**given, **lists, logit_bias={"3": -1.5}).sampling()
    for name, value in given.items():
        assert getattr(made, name) == value
    for name, items in lists.items():
        assert getattr(made, name) == tuple(items)
    assert made.logit_bias == {3: -1.5}
    assert chat(stop="a").sampling().stop == ("a",)


def test_metadata_is_bounded() -> None:
    assert chat(metadata={"a": "b"}).metadata == {"a": "b"}
    assert refused(chat, metadata={"a": 1}).param == "metadata"
    assert refused(chat, metadata={str(i): "" for i in range(17)}).param == "metadata"


def test_prompt_logprobs_are_not_streamed() -> None:
    assert refused(chat, stream=True, prompt_logprobs=1).param == "prompt_logprobs"


numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
scalars = (
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.sampled_from([1, 0.5, "x", ["x"], [1]])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(("cls", "base"), [(ChatRequest, CHAT), (CompletionRequest, TEXT)])
@given(data=st.data())
def test_no_value_of_any_field_makes_anything_but_a_refusal(cls: Any, base: Any, data: st.DataObject) -> None:
    names = sorted(cls.__struct_fields__) + sorted(UNSUPPORTED)
    fields = data.draw(st.dictionaries(st.sampled_from(names), anything, min_size=1, max_size=3))
    body = json.dumps({**base, **fields}).encode()
    refusal = None
    try:
        parse(body, cls).sampling()
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or refusal.param in names or refusal.error_code == "invalid_json"
