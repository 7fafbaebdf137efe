"""``--explain-cache`` on a real server: answers and metrics say why prompts were not cached."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.front.conftest import events

BASE = "Tom has 3 pens and Ann has 4 apples. " * 12


@pytest.fixture(scope="module")
def server(start_weft: Any) -> Any:
    return start_weft("--explain-cache", "asked", "--block-size", "16")


def ask(server: Any, prompt: str, header: str = "1", **more: Any) -> Any:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    answer = server.http.post("/v1/completions", json=body, headers={"x-weft-explain-cache": header})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]


@pytest.mark.requirement("G12")
def test_reasons_and_texts(server: Any) -> None:
    assert ask(server, BASE)["cache_miss"]["reason"] == "new"
    again = ask(server, BASE)
    assert again["cache_miss"]["reason"] == "none"
    assert again["cached_tokens"] == again["cache_miss"]["position"] > 0
    miss = ask(server, BASE[:200] + "Bob sells everything." + BASE[200:])["cache_miss"]
    assert miss["reason"] == "differs"
    assert miss["ours"].lstrip().startswith("Bob sells")
    assert BASE[200:].startswith(miss["theirs"][:10]) or miss["theirs"] in BASE
    assert ask(server, BASE, cache_salt="another")["cache_miss"] == {"reason": "salt", "position": 0}
    assert ask(server, BASE, header="0") == {"cached_tokens": again["cached_tokens"]}
    page = server.http.get("/metrics").text
    counted = dict(re.findall(r'^weft:prefix_cache_misses_total{.*reason="(\w+)"} (\S+)$', page, re.M))
    assert counted == {"new": "1.0", "none": "1.0", "differs": "1.0", "salt": "1.0"}


@pytest.mark.requirement("G12")
def test_streams_and_chats_say_it_too(server: Any) -> None:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": BASE}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = server.http.post("/v1/chat/completions", json=body, headers={"x-weft-explain-cache": "1"})
    usage = events(answer)[-2]["usage"]
    assert usage["prompt_tokens_details"]["cache_miss"]["reason"] in ("new", "differs")
