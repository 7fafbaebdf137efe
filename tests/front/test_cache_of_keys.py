"""Cached prefixes of one API key say nothing to another one."""

from __future__ import annotations

from typing import Any

import pytest

from weft.front.http.access import ApiKeys

BASE = "Tom has 3 pens and Ann has 4 apples. " * 12


@pytest.fixture(scope="module")
def server(start_weft: Any) -> Any:
    return start_weft("--api-key", "one", "--api-key", "two", "--block-size", "16")


def cached(server: Any, key: str, **more: Any) -> int:
    body = {"model": server.model, "prompt": BASE, "max_tokens": 1, "temperature": 0, **more}
    answer = server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("more", [{}, {"cache_salt": "team"}])
def test_a_key_cannot_tell_that_another_one_sent_a_prompt(server: Any, more: dict[str, Any]) -> None:
    assert cached(server, "one", **more) == 0
    assert cached(server, "one", **more) > 0
    assert cached(server, "two", **more) == 0


def test_salts_of_keys_differ_and_stay() -> None:
    keys = ApiKeys(["one", "two"])
    assert len({keys.salt_of(number, salt) for number in (0, 1) for salt in ("", "a")}) == 4
    assert keys.salt_of(0, "a") == ApiKeys(["one"]).salt_of(0, "a")
    assert ApiKeys([]).salt_of(0, "a") == "a"


def test_payers_of_keys_differ_stay_and_hide_the_key() -> None:
    keys = ApiKeys(["one", "two"])
    assert keys.payer_of(0) != keys.payer_of(1)
    assert keys.payer_of(0) == ApiKeys(["one"]).payer_of(0)
    assert ApiKeys([]).payer_of(0) == ""
    assert len(keys.payer_of(0)) == 32
    assert keys.payer_of(0) not in (keys.salt_of(0, ""), keys.salt_of(0, "")[:32])


def test_a_request_names_its_payer(server: Any) -> None:
    cached(server, "two")  # the engine takes a Submit with a payer
