"""``thinking_token_budget`` of a real model cuts reasoning at the same token for every drafter and every
number of steps in flight, and the answer follows.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.servers import Running
from tests.support.tool_template import TEMPLATE

OPENS = "{%- if opened is defined -%}{{- '<think>\\n' -}}{%- endif -%}{%- endif -%}"
COMMON = ("--dtype", "float64", "--reasoning-parser", "qwen3", "--max-model-len", "512")
DRAFTS = ("--speculative-method", "ngram", "--num-speculative-tokens", "3", "--steps-in-flight", "2")
BUDGET = 12


@pytest.fixture(scope="module")
def pair(start_weft: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Running]:
    template = tmp_path_factory.mktemp("thinker") / "chat.jinja"
    template.write_text(TEMPLATE.removesuffix("{%- endif -%}") + OPENS)
    return [start_weft("--chat-template", str(template), *COMMON, *more) for more in ((), DRAFTS)]


@pytest.mark.requirement("F64")
@pytest.mark.slow
def test_a_real_models_reasoning_is_cut_at_the_same_token_in_every_topology(pair: list[Running]) -> None:
    made = []
    for server in pair:
        for seed in range(4):
            fields = {"seed": seed, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
            fields |= {"chat_template_kwargs": {"opened": True}, "thinking_token_budget": BUDGET}
            answer = server.chat("Tom has 12 apples.", return_token_ids=True, **fields)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            (choice,) = body["choices"]
            made.append((choice["token_ids"], choice["message"]["reasoning"], choice["message"]["content"]))
            assert choice["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) == 60
            assert "</think>" not in choice["message"]["content"]
            reasoning = server.http.post("/detokenize", json={"tokens": choice["token_ids"][:BUDGET]}).json()
            shown = re.sub(r"<\|\w+\|>", "", reasoning["prompt"])  # a sampled thought may hold special tokens
            assert choice["message"]["reasoning"].strip() == shown.strip()
    assert made[:4] == made[4:]
    assert pair[1].metric("spec_decode_num_draft_tokens_total") > 0
