"""Weft's own chat templates of DeepSeek V3.2 and V4 write what the publisher's encoders write.

The encoders are read from ``encoders/`` in the folder of ``WEFT_REAL_FILES``: ``encoding_dsv32.py`` and
``encoding_dsv4.py``, as the publisher ships the files with the models.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.text.published.conversations import (
    NESTED,
    ONE,
    THOUGHT,
    TWO,
    Messages,
    calling,
    result,
    said,
    system,
    tool_dicts,
    user,
)
from tests.text.published.deepseek import MODELS, written
from tests.text.published.files import VARIABLE

pytestmark = pytest.mark.slow


@functools.cache
def _encoder(model_type: str) -> Any:
    """Return the publisher's encoder as a module. Skip the test without the file."""
    name = MODELS[model_type]
    where = os.environ.get(VARIABLE)
    path = Path(where or ".") / "encoders" / f"{name}.py"
    if where is None or not path.is_file():
        pytest.skip(f"{VARIABLE} names no folder with encoders/{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _theirs(model_type: str, messages: Messages, *, tools: bool, thinking: bool, **more: Any) -> str:
    """Return the text of the publisher's encoder, with the tools at the first system message."""
    asked = copy.deepcopy(messages)
    if tools:
        if asked[0]["role"] != "system":
            asked.insert(0, system(""))
        asked[0]["tools"] = tool_dicts()
    text: str = _encoder(model_type).encode_messages(
        asked, thinking_mode="thinking" if thinking else "chat", **more
    )
    return text


THINKING = {"reasoning_content": THOUGHT}
LATER = calling(("now", {}), first=5, **THINKING)
CONVERSATIONS: dict[str, Messages] = {
    "plain": [user()],
    "system": [system(), user()],
    "several turns": [
        system(),
        user(),
        said(**THINKING),
        user("And now?"),
        said("Sun.", **THINKING),
        user("x"),
    ],
    "results": [user(), {**ONE, **THINKING}, result()],
    "results, then a turn": [system(), user(), {**ONE, **THINKING}, result(), said(**THINKING), user("x")],
    "two results": [user(), {**TWO, **THINKING}, result(0, "a"), result(1, "b")],
    "calls in two turns": [user(), {**ONE, **THINKING}, result(), said(), user("x"), LATER, result(5, "z")],
    "calls one after another": [user(), {**ONE, **THINKING}, result(), LATER, result(5, "z")],
    "nested arguments": [user(), calling(("get_weather", NESTED), **THINKING), result()],
    "call with text": [user(), {**ONE, **THINKING, "content": "One moment."}, result()],
    "users in a row": [user("a"), user("b")],
    "late system": [user(), said(**THINKING), system("Now in French."), user("x")],
    "developer": [system(), {"role": "developer", "content": "Find it."}],
    "markup in text": [user("a <b> {{ c }} [d] 'e' \"f\" é 你\n\n g ")],
}


@pytest.mark.parametrize(("thinking", "tools"), itertools.product((False, True), repeat=2))
@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_conversation_is_written_as_by_the_publisher(
    model_type: str, kind: str, thinking: bool, tools: bool
) -> None:
    messages = CONVERSATIONS[kind]
    wanted = _theirs(model_type, messages, tools=tools, thinking=thinking)
    assert written(model_type, messages, tools=tools, thinking=thinking) == wanted


@pytest.mark.parametrize("model_type", MODELS)
def test_random_conversations_are_written_as_by_the_publisher(model_type: str) -> None:
    for seed in range(60):
        source = random.Random(seed)
        messages = _random_conversation(source)
        tools, thinking = source.random() < 0.5, source.random() < 0.5
        more: dict[str, Any] = {"drop_thinking": source.random() < 0.7} if model_type == "deepseek_v4" else {}
        wanted = _theirs(model_type, messages, tools=tools, thinking=thinking, **more)
        made = written(model_type, messages, tools=tools, thinking=thinking, **more)
        assert made == wanted, (seed, messages)


def _random_conversation(source: random.Random) -> Messages:
    """Return whole turns of the user and the assistant, with calls and their results, up to a prompt."""
    messages: Messages = [system()] if source.random() < 0.5 else []
    number = 0
    for turn in range(source.randint(1, 4)):
        messages.append(user(f"question {turn}"))
        for _ in range(source.randint(0, 2)):
            count = source.randint(1, 3)
            names = [source.choice((("get_weather", NESTED), ("now", {}))) for _ in range(count)]
            messages.append(calling(*names, first=number, **THINKING))
            messages += [result(number + at, f"result {at}") for at in range(count)]
            number += count
        messages.append(said(f"answer {turn}", **THINKING))
    return messages[:-1] if source.random() < 0.8 else messages


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_effort_is_written_as_by_the_publisher(effort: str) -> None:
    if not hasattr(_encoder("deepseek_v4"), "REASONING_EFFORT_PROMPTS"):
        pytest.skip("this release of the encoder has other levels")
    wanted = _theirs("deepseek_v4", [user()], tools=False, thinking=True, reasoning_effort=effort)
    assert written("deepseek_v4", [user()], thinking=True, reasoning_effort=effort) == wanted
