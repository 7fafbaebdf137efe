"""llm-comply's checks of chat completions, Responses and Messages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Play
from tests.clients.outputs import call
from tests.support.servers import Running
from tests.support.slowness import deadline

pytestmark = pytest.mark.clients

FORMATS = {
    "openai-chat": ("openai_chat.json", "gpt-5-recorded"),
    "open-responses": ("openresponses.json", "gpt-5-recorded"),
    "anthropic": ("anthropic.json", "claude-opus-recorded"),
}
"""Format -> (schema of its answers, model name that the tool treats as a reasoning model)."""
DECLINED = {
    "chat-image-input": "image",
    "image-input": "image",
    "anth-image-input": "image",
    "chat-reasoning-summary": "reasoning",  # a parameter of Responses, here beside reasoning_effort
}
"""Check -> a word of the 400 that declines the feature by name."""


@pytest.fixture(scope="module")
def server(play: Play) -> Running:
    names = ",".join({name for _, name in FORMATS.values()})
    weather = call("get_weather", location="San Francisco")
    entries = [
        {"match": "weather in San Francisco", "text": weather, "repeat": True},
        {"match": "15 * 37", "text": "<think>\n15 * 37 = 555\n</think>\n\n555", "repeat": True},
        {"text": "Hello there, you.", "repeat": True},
    ]
    return play(entries, "--served-model-name", names)


def checks() -> list[Any]:
    """Return all checks of the package, or a skipped parameter without the package."""
    try:
        tests = importlib.import_module("llm_comply.tests")
    except ImportError:
        return [pytest.param(None, None, marks=pytest.mark.skip(reason="llm-comply is not installed"))]
    return [pytest.param(kind, case, id=case.id) for kind in FORMATS for case in tests.get_tests(kind)]


@pytest.mark.parametrize(("kind", "case"), checks())
def test_a_check(server: Running, kind: str, case: Any) -> None:
    from llm_comply import schema
    from llm_comply.config import ComplianceConfig
    from llm_comply.http import make_request
    from llm_comply.result import TestStatus
    from llm_comply.runner import TestRunner

    file, model = FORMATS[kind]
    config = ComplianceConfig(base_url=server.url + "/v1", api_key="none", model=model, timeout=deadline(30))
    if case.id in DECLINED:
        status, answer, _ = make_request(config, case.endpoint, case.build_request(config))
        assert status == 400
        assert DECLINED[case.id] in str(answer["error"]["message"])
        return
    spec = schema.SpecLoader(str(Path(schema.__file__).parent / "specs" / file))
    result = TestRunner(config, [case], spec).run_one(case)
    assert result.status == TestStatus.PASSED, result.errors
