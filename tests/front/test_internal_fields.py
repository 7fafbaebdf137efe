"""Internal fields of transfers are never accepted from a client."""

from __future__ import annotations

from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 2}},
}
ROOM = {"room": 1, "attempt": 0, "incarnation": 7}
FIELDS: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [1, 2]},
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 1,
    "room": {"key": ROOM, "sends": True, "peer": {"address": "ipc:///tmp/x", "incarnation": 1}},
    "rooms": [ROOM],
    "key": ROOM,
    "attempt": 3,
    "incarnation": 7,
    "blocks": [1, 2],
    "block_ids": [[1, 2]],
    "endpoint": {"transport": "tcp", "address": "10.0.0.1|80", "incarnation": 1},
    "data_parallel_rank": 1,
    "sequence": 9,
}


@pytest.mark.requirement("F25")
@pytest.mark.parametrize("route", BODIES)
def test_fields_of_transfers_are_refused_by_name(route: str, fake: Any) -> None:
    assert fake.http.post(route, json={"model": "fake", **BODIES[route]}).status_code == 200
    for name, value in FIELDS.items():
        answer = fake.http.post(route, json={"model": "fake", **BODIES[route], name: value})
        assert answer.status_code == 400, (name, answer.text)
        assert name in answer.json()["error"]["message"]
    assert fake.http.post(route, json={"model": "fake", **BODIES[route]}).status_code == 200
