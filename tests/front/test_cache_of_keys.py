"""Cached prefixes of one API key say nothing to another one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.front.http.access import ApiKeys
from weft.store import layout
from weft.store.records import PAGE
from weft.store.segment import walk

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


@pytest.mark.slow
def test_blocks_on_disk_belong_to_the_key_of_the_request(start_weft: Any, tmp_path: Path) -> None:
    keys = ("--api-key", "one", "--api-key", "two", "--block-size", "16")
    server = start_weft(*keys, "--kv-disk", "64M", "--kv-disk-dir", str(tmp_path), "--kv-store", "all")
    cached(server, "one")
    cached(server, "two")
    payers = {layout.owner_hash("payer", ApiKeys(["one", "two"]).payer_of(number)) for number in (0, 1)}
    until, seen = time.monotonic() + deadline(30), set[bytes]()
    while seen != payers and time.monotonic() < until:
        time.sleep(0.1)
        for file in tmp_path.glob("*/*.kv"):
            with file.open("rb") as opened:
                identity = layout.identity_of(opened.read(PAGE))
                assert identity is not None
                entries, _ = walk(opened.fileno(), identity, file.stat().st_size)
            seen |= {payer.tobytes() for payer in entries["payer"]}
    assert seen == payers
