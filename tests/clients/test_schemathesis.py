"""schemathesis over /openapi.json: no status 500, and no undocumented answer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import Play
from weft.common import env

pytestmark = pytest.mark.clients

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    # Half of what is generated names the model that is served, and gets beyond that check.
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 2 == 0:
        body["model"] = "recorded"
    return body
"""
EXAMPLES = 40
"""Requests per operation and phase."""


@pytest.mark.requirement("F60")
def test_every_operation_keeps_to_the_document(play: Play, tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: make test-clients")
    server = play([{"text": "<think>\nhm\n</think>\n\nAn answer.", "repeat": True}])
    (tmp_path / "weft_hooks.py").write_text(HOOKS)
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += ["--checks", CHECKS, "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"]
    command += ["--request-timeout", "30", "--generation-database", "none"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=env.child_environment(SCHEMATHESIS_HOOKS="weft_hooks", PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert server.http.get("/health").status_code == 200
    assert server.metric("generation_tokens_total") > 100  # the scripted server generated these tokens
