"""An engine is killed in the middle of a stream, before a given token. The client's joined output must equal
the undisturbed output. Two replicas of the bundled model, over HTTP.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running, Servers, events
from tests.support.slowness import deadline
from tests.support.tool_template import TEMPLATE

PATIENCE = deadline(200.0)
"""Maximum seconds for a request, whatever happens."""
MOST = 110
"""Output tokens at most."""
TIMES = 8
"""Maximum deaths of an engine before the same token."""
PERSON = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 8},
        "apples": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["who", "apples"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "count", "parameters": PERSON, "strict": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
CLOSING = 14
"""Maximum tokens that close the reasoning; closing tokens are not sampled."""
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
OPENED = {"chat_template_kwargs": {"opened": True}, "thinking_token_budget": 9}
CASES: dict[str, dict[str, Any]] = {
    "a tool call": {**PLAIN, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "a schema": {**PLAIN, "response_format": FORM},
    "a sample": {"n": 2, "ignore_eos": True, "max_tokens": 24},
    "a thought": {**OPENED, "ignore_eos": True, "max_tokens": 40},
    "a thought and a schema": {**OPENED, "response_format": FORM},
    "a stop's prefix": {"ignore_eos": True, "max_tokens": 40},
}


class Drills:
    """Run a server whose engines die on request."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._folder = folder
        self._times = [0] * MOST
        template = folder / "chat.jinja"
        template.write_text(TEMPLATE.removesuffix("{%- endif -%}") + OPENS)
        faults = [
            {
                "rank": rank,
                "phase": "sample",
                "deed": "kill",
                "after": number % MOST,
                "mark": str(folder / f"mark{number}"),
                "needs": str(folder / f"go{number}"),
            }
            for number in range(MOST * TIMES)
            for rank in (0, 1)  # the engine with the sequence dies: the first of them makes the mark
        ]
        front = {
            "chat_template": str(template),
            "tool_call_parser": "hermes",
            "reasoning_parser": "qwen3",
            "engine_restarts": MOST * TIMES,
        }
        settings = {"data_parallel_size": 2, "max_model_len": 512, "longest_wait": 0.1}
        (folder / "faults.json").write_text(json.dumps(faults))
        script = [sys.executable, "-m", "tests.faults.faulty_server", str(folder), "[]", "[]"]
        self.server: Running = servers.start(
            [*script, json.dumps({**settings, "front": front, "faults": str(folder / "faults.json")})],
            200,
            HF_HUB_OFFLINE="1",
        )
        self.server.http.timeout = PATIENCE

    def ask(self, fields: dict[str, Any]) -> tuple[list[dict[str, str]], int]:
        """Return a client's joined output of each choice, and the number of output tokens."""
        asked = {"max_tokens": MOST, "temperature": 1.0, **fields, "stream_options": {"include_usage": True}}
        asked["prompt_cache_key"] = "drill"  # the continuation after reasoning goes to the same engine
        messages = [{"role": "user", "content": "Tom has 12 apples."}]
        with self.server.stream(messages=messages, **asked) as lines:
            told = events(lines)
        assert told[-1] == "[DONE]", told
        joined: list[dict[str, str]] = [{} for _ in range(asked.get("n", 1))]
        for choice in (choice for event in told[:-1] for choice in event["choices"]):
            own = joined[choice["index"]]
            parts = {name: choice["delta"].get(name) for name in ("content", "reasoning")}
            parts["why"] = choice["finish_reason"]
            for call in choice["delta"].get("tool_calls") or []:
                for name, part in call["function"].items():
                    parts[f"{name} {call['index']}"] = part
            for name, part in parts.items():
                own[name] = own.get(name, "") + (part or "")
        return joined, told[-2]["usage"]["completion_tokens"]

    def kill_before(self, token: int, fields: dict[str, Any]) -> list[dict[str, str]]:
        """Return a client's joined output while an engine is killed before it samples output token ``token``
        (from 0).
        """
        number = token + MOST * self._times[token]
        self._times[token] += 1
        self.server.wait(lambda: self.server.http.get("/ready").status_code == 200, PATIENCE)
        self.server.wait(lambda: self.server.metric("engine_up") == 2, PATIENCE)
        before = self.server.metric("front_failovers_total")
        (self._folder / f"go{number}").touch()
        joined, _ = self.ask(fields)
        assert (self._folder / f"mark{number}").exists(), "nobody died"
        assert self.server.metric("front_failovers_total") > before
        return joined


OPENS = "{%- if opened is defined -%}{{- '<think>\\n' -}}{%- endif -%}{%- endif -%}"


@pytest.fixture(scope="module")
def drills() -> Iterator[Drills]:
    folder = Path(tempfile.mkdtemp(prefix="w"))  # sockets have short paths
    servers = Servers()
    with servers.scope():
        yield Drills(servers, folder)
    shutil.rmtree(folder, ignore_errors=True)


def with_stops(drills: Drills, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with two stop strings from the output: one only begins there, the other ends the
    output.
    """
    (free,), _ = drills.ask(fields)
    text = free["content"]
    return {**fields, "stop": [f"{text[len(text) // 3 :][:3]}\x01", text[-6:-2]]}


def check(drills: Drills, case: str, every: bool) -> None:
    for seed in range(40):  # try seeds until the model's output fits the case
        fields = {**CASES[case], "seed": seed}
        if case == "a stop's prefix":
            fields = with_stops(drills, fields)
        wanted, tokens = drills.ask(fields)
        if is_about(case, wanted):
            break
    else:
        raise AssertionError(f"no seed makes {case}")
    tokens = tokens // len(wanted) - CLOSING * ("thought" in case)
    for token in range(tokens) if every else (tokens // 2,):
        assert drills.kill_before(token, fields) == wanted, token


def is_about(case: str, wanted: list[dict[str, str]]) -> bool:
    """Return True if the undisturbed answer fits the case."""
    first = wanted[0]
    if case == "a tool call":
        if first["why"] != "tool_calls" or first["reasoning"]:
            return False
        made = first["arguments 0"]
        assert first["name 0"] == "count"
    elif "schema" in case:
        if first["why"] != "stop" or bool(first["reasoning"]) != ("thought" in case):
            return False
        made = first["content"]
    elif case == "a sample":
        return wanted[0] != wanted[1]
    else:
        assert "think>" not in "".join(first.values())
        return first["why"] == "stop" if "stop" in case else len(first["reasoning"]) > 4
    assert json.loads(made).keys() == {"who", "apples"}
    return True


PARTS = {"a schema", "a thought"}
"""Cases whose tests "a thought and a schema" repeats."""


MARKS = {case: [pytest.mark.grid] for case in PARTS}
MARKS |= {case: [pytest.mark.slow] for case in ("a tool call", "a thought and a schema")}


@pytest.mark.requirement("E33", "G8")
@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [])) for case in CASES])
def test_a_client_joins_what_it_would_have_without_the_death(drills: Drills, case: str) -> None:
    check(drills, case, every=False)


@pytest.mark.requirement("E33")
@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_death_before_each_token(drills: Drills, case: str) -> None:
    check(drills, case, every=True)
