"""Membership of sessions, and the server's state per session."""

from __future__ import annotations

from typing import Any

import pytest

from weft.front.http.access import SESSION_HEADERS, session_of

FLOOD = 60
"""Number of prompts that together exceed the cache several times."""
BASE = "Tom has 3 pens and Ann has 4 apples. " * 8


@pytest.mark.requirement("G14")
def test_a_session_is_named_by_headers_or_the_body() -> None:
    names = {session_of({header: "one"}) for header in SESSION_HEADERS}
    assert len(names) == 1
    assert session_of({"session-id": "two", "x-session-id": "one"}) in names
    assert session_of({}, "one") in names
    assert session_of({"x-session-id": ""}, "one") in names
    assert session_of({"x-session-id": "two"}, "one") not in names
    assert session_of({}) == ""
    assert len(session_of({"x-session-id": "x" * 5000})) == 32


def test_nobody_takes_part_in_a_session_of_another_key() -> None:
    keys: list[dict[str, str]] = [{}, {"authorization": "Bearer a"}, {"x-api-key": "b"}, {"x-api-key": "ba"}]
    assert len({session_of({**key, "x-session-id": "a"}) for key in keys}) == 4


@pytest.mark.requirement("G14")
def test_what_a_session_has_cached_outlives_others(start_weft: Any) -> None:
    server = start_weft(
        *("--explain-cache", "all", "--block-size", "16", "--max-model-len", "512"),
        *("--max-num-seqs", "2", "--kv-cache-memory", "8M"),
    )

    def ask(prompt: str, **headers: str) -> Any:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 2}
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]

    whole = {"x-session-id": "agent"}
    assert ask(BASE, **whole)["cached_tokens"] == 0
    assert ask("Another one. " + BASE)["cached_tokens"] == 0
    for number in range(FLOOD):
        ask(f"{number} {BASE}{number}")
    assert ask("Another one. " + BASE)["cache_miss"]["reason"] == "evicted"
    again = ask(BASE + " And?", **whole)
    assert again["cached_tokens"] > 0
    assert again["cache_miss"]["reason"] in ("none", "new")
