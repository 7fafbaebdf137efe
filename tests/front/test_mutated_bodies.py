"""Random mutations of valid bodies cause no server error and no hang, and the server stays unchanged."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.slowness import deadline

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
#: Valid bodies by route. Every field of a route should occur in some body.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["z"],
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}},
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT, "metadata": {"a": "b"}}),
    (
        "/v1/chat/completions",
        {"messages": TURNS, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "medium", "priority": 3},
    ),
    ("/v1/chat/completions", {"prompt_token_ids": [1, 2, 3], "return_token_ids": True, "cache_salt": "x"}),
    ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2}),
    (
        "/v1/completions",
        {"prompt": [[1, 2], [3]], "min_tokens": 1, "bad_words": ["x"], "allowed_token_ids": [1, 2]},
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "guided_regex": "[a-z]+", "stream": True, "ignore_eos": True}),
    (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"choice": ["x", "y"]}, "repetition_penalty": 1.1},
    ),
    (
        "/v1/completions",
        {"prompt": "a", "guided_grammar": 'start: "a" | "b"', "stop_token_ids": [7], "min_p": 0.1},
    ),
    (
        "/v1/messages",
        {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "system": "s", "top_k": 3},
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "stop_sequences": ["x"],
            "stream": True,
            "metadata": {"user_id": "u"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "go on"},
            ],
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ),
    ("/v1/responses", {"input": "hi", "instructions": "i", "max_output_tokens": 4, "metadata": {"a": "b"}}),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "hi"}]},
                {"role": "user", "content": "x"},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                {"role": "user", "content": "go on"},
            ],
            "max_output_tokens": 4,
            "stream": True,
            "store": False,
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "truncation": "auto",
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
            "tool_choice": {"type": "function", "name": "f"},
            "previous_response_id": None,
        },
    ),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    (
        "/inference/v1/generate",
        {
            "token_ids": [97, 98],
            "sampling_params": {"max_tokens": 3, "logprobs": 1, "stop": ["z"], "output_kind": 1},
            "stream": True,
            "stream_options": {"include_usage": True},
            "request_id": "r",
            "output_mode": "text",
            "priority": 1,
            "kv_transfer_params": {"do_remote_decode": False},
        },
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [97], "sampling_params": {"structured_outputs": {"regex": "[a-z]+", "choice": None}}},
    ),
    ("/v1/chat/completions/render", {"messages": MESSAGES, "response_format": FORMAT, "stop": ["z"]}),
    ("/v1/completions/render", {"prompt": ["a", "b"], "guided_regex": "[a-z]+", "logprobs": 1}),
]
JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    1.5,
    -0.0,
    1e-39,
    1e308,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    "",
    "x",
    "5",
    "\x00",
    "\ud800",
    "<|im_end|>",
    "{{7*7}}",
    "../../etc/passwd",
    "💥" * 50,
    "a" * 3000,
    [],
    {},
    [None],
    [[]],
    {"": None},
    [1, "x", None],
    {"type": "text"},
    {"type": "function"},
    ["x"] * 300,
    list(range(300)),
    "required",
    "none",
    "auto",
    "json_object",
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    [0.5, True],
]
NAMES = [
    "model",
    "messages",
    "prompt",
    "n",
    "stream",
    "stop",
    "tools",
    "tool_choice",
    "response_format",
    "guided_json",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "best_of",
    "system",
    "thinking",
    "chat_template",
    "chat_template_kwargs",
    "prompt_logprobs",
    "stream_options",
    "logit_bias",
    "user",
    "priority",
    "cache_salt",
    "thinking_token_budget",
    "reasoning_effort",
    "include_reasoning",
    "structural_tag",
    "kv_transfer_params",
    "__proto__",
    "role",
    "content",
    "type",
    "name",
    "function",
    "parameters",
    "tokens",
    "continue_final_message",
    "add_generation_prompt",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*path, key), *places(inner, (*path, key))]]


def mutated(body: dict[str, Any], dice: random.Random) -> Any:
    """``body`` with a few values changed, added, left out, swapped or wrapped."""
    body = copy.deepcopy(body)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        if not (known := places(body)):
            return dice.choice(JUNK)
        *path, key = dice.choice(known)
        at: Any = body
        for step in path:
            at = at[step]
        kind = dice.randrange(6)
        if kind == 0:
            del at[key]
        elif kind == 1:
            body[dice.choice(NAMES)] = copy.deepcopy(dice.choice(JUNK))
        elif kind == 2:
            at[key] = [at[key]] if dice.random() < 0.5 else {"type": at[key]}
        elif kind == 3 and isinstance(at, dict):
            at[dice.choice(NAMES)] = at.pop(key)
        else:
            at[key] = copy.deepcopy(dice.choice(JUNK))
    return body


def written(body: Any, dice: random.Random) -> bytes:
    """Return the JSON of the body, sometimes with corrupted bytes."""
    data = bytearray(json.dumps(body).encode())
    if dice.random() < 0.15:
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(data) + 1)
            kind = dice.randrange(3)
            if kind == 0:
                del data[at : at + dice.randint(1, 30)]
            elif kind == 1:
                data[at:at] = dice.choice(
                    [b"\xff", b"\x00", b"{", b"]", b'"', b"\\u", b",", b"1e999", b"NaN"]
                )
            elif at < len(data):
                data[at] = dice.randrange(256)
    return bytes(data)


async def send_all(url: str, bodies: int, seed: int) -> dict[str, list[str]]:
    """Return answers with 5xx and missing answers, by kind of failure."""
    wrong: dict[str, list[str]] = {}
    numbers = iter(range(bodies))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            dice = random.Random(f"{seed}/{number}")
            route, body = dice.choice(BODIES)
            content = written(mutated({"model": "fake", **body}, dice), dice)
            try:
                answer = await http.post(route, content=content, headers={"content-type": "application/json"})
            except httpx.HTTPError as error:
                wrong.setdefault(type(error).__name__, []).append(f"{route} {content[:300]!r}")
                continue
            failed = b'"server_error"' in answer.content or b'"api_error"' in answer.content
            if answer.status_code >= 500 or failed:
                wrong.setdefault(str(answer.status_code), []).append(f"{route} {content[:300]!r}")

    async with httpx.AsyncClient(base_url=url, timeout=deadline(60)) as http:
        await asyncio.gather(*(client(http) for _ in range(8)))
    return wrong


def memory(pid: int) -> int:
    """KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def attack(server: Any, bodies: int, seed: int) -> None:
    warm = bodies // 3
    wrong = asyncio.run(send_all(server.url, warm, seed))
    before = memory(server.process.pid)
    wrong |= asyncio.run(send_all(server.url, bodies - warm, seed + 1))
    assert not wrong, json.dumps(wrong, indent=1)[:4000]
    assert memory(server.process.pid) - before < 48 << 10, "KiB"
    server.wait(lambda: server.metric("front_sequences") == 0)
    server.wait(lambda: server.metric("num_requests_running") == 0)
    answer = server.chat(max_tokens=11).json()
    assert answer["choices"][0]["message"]["content"] == "user\nhello"


@pytest.mark.slow
@pytest.mark.requirement("F64")
def test_right_bodies_are_answered(fake: Any) -> None:
    def ask(one: tuple[str, dict[str, Any]]) -> httpx.Response:
        route, body = one
        return fake.http.post(route, json={"model": "fake", **body})

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, BODIES))
    for (route, body), answer in zip(BODIES, answers, strict=True):
        tools = "tools" in body  # the template of the model does not use tools
        assert answer.status_code == (400 if tools else 200), (route, body, answer.text)


@pytest.mark.slow
@pytest.mark.requirement("F1")
def test_hundreds_of_mutated_bodies(fake: Any) -> None:
    attack(fake, 700, seed=1)


@pytest.mark.requirement("F1")
@pytest.mark.grid
def test_twenty_thousand_mutated_bodies(start_fake: Any) -> None:
    attack(start_fake(), 20_000, seed=100)
