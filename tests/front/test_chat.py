"""Chat completions over a scripted head, through real HTTP."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

PROMPT = [256, *b"user\nhello", 257, *b"\n", 256, *b"assistant\n"]


def test_a_whole_answer(fake: Any) -> None:
    answer = fake.chat(max_tokens=12)
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
    assert got["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 12,
        "total_tokens": len(PROMPT) + 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
