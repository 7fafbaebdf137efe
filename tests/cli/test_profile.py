"""``POST /admin/profile``: engines of a real server write traces of torch's profiler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_serve import start
from tests.support.slowness import deadline

__all__ = ["start"]


@pytest.mark.slow
@pytest.mark.requirement("F47")
def test_engines_write_profiles_when_they_are_asked(checkpoint: str, start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    flags = ("--port", "0", "--admin-key", "admin", "--profile-dir", str(folder))
    base = start(checkpoint, *flags).url()
    with httpx.Client(
        base_url=base, headers={"authorization": "Bearer admin"}, timeout=deadline(60)
    ) as client:
        asked = client.post("/admin/profile", json={"seconds": 60})
        assert (asked.status_code, asked.json()) == (200, {"status": "requested from 1 engines"})
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert not folder.exists()
        assert client.post("/admin/profile", json={"seconds": 0}).status_code == 200
        until = time.monotonic() + deadline(30)
        while not (found := list(folder.glob("*.json"))):
            assert time.monotonic() < until
            time.sleep(0.05)
        (file,) = found
        assert file.stat().st_mode & 0o777 == 0o600
        events = json.loads(file.read_text())["traceEvents"]
        assert any(event.get("cat") == "cpu_op" for event in events)
        refused = client.post("/admin/profile", json={"seconds": 61})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seconds")
        assert client.post("/v1/completions", json=body).status_code == 200
