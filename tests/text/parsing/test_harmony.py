"""GPT-OSS's format against openai-harmony, the reference implementation."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.text.parsing.checks import read
from tests.text.parsing.families import FAMILIES, SPEC, TOOLS, Calls, Part, ReasoningMarks, by_value
from tests.text.parsing.outputs import Maker
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning

_VOCABULARY = "fb374d419588a4632f3f557e76b4b70aebbca790"
"""Cache name of the o200k vocabulary in tiktoken; litellm ships the file."""


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the reference encoding. The package lacks the vocabulary and would download it."""
    module = pytest.importorskip("openai_harmony")
    found = importlib.util.find_spec("litellm")
    if found is None or found.origin is None:
        pytest.skip("the vocabulary of the encoding comes with litellm")
    file = Path(found.origin).parent / "litellm_core_utils" / "tokenizers" / _VOCABULARY
    if not file.is_file():
        pytest.skip("this litellm brings no vocabulary of the encoding")
    folder = tmp_path_factory.mktemp("encodings")
    shutil.copy(file, folder / "o200k_base.tiktoken")
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    try:
        yield module.load_harmony_encoding(module.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        if before is None:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]
        else:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


def events_of(messages: list[Any]) -> list[OutputEvent]:
    """Return the events that the reference's messages mean."""
    events: list[OutputEvent] = []
    calls = 0
    for message in messages:
        text = message.content[0].text
        if message.recipient is not None and message.recipient.startswith("functions."):
            name = message.recipient.removeprefix("functions.")
            events += [CallBegin(call=calls, name=name), CallArguments(call=calls, text=text)]
            events.append(CallEnd(call=calls))
            calls += 1
        elif text:
            events.append(Reasoning(text) if message.channel == "analysis" else Content(text))
    return events


def rendered(harmony: Any, parts: list[Part]) -> str:
    """Return parts in the reference's form, after the role at the end of the prompt."""
    import openai_harmony as module

    def message(text: str) -> Any:
        return module.Message.from_role_and_content(module.Role.ASSISTANT, text)

    messages = []
    for part in parts:
        if isinstance(part, ReasoningMarks):
            made = [message(part.text).with_channel("analysis")]
        elif isinstance(part, Calls):
            made = [
                message(json.dumps(call.arguments, ensure_ascii=False))
                .with_channel("commentary")
                .with_recipient(f"functions.{call.name}")
                .with_content_type("<|constrain|>json")
                for call in part.calls
            ]
        else:
            made = [message(part).with_channel("final")]
        messages += made
    ids: list[int] = []
    for one in messages:
        ids += harmony.render(one)
    text: str = harmony.decode(ids)
    return text.removeprefix("<|start|>assistant")


@pytest.mark.requirement("G4")
@pytest.mark.parametrize("seed", range(150))
def test_reads_what_the_reference_reads(harmony: Any, seed: int) -> None:
    import openai_harmony as module

    family = FAMILIES["gpt_oss"]
    maker = Maker(family, random.Random(seed))
    parts = maker.parts()
    if "<|call|>" in family.render(parts).replace("}<|call|>", ""):
        return  # inside an argument the text is plain, but the reference lacks the context
    for text in (family.render(parts), rendered(harmony, parts)):
        ids = harmony.encode(text, allowed_special="all")
        messages = harmony.parse_messages_from_completion_tokens(ids, module.Role.ASSISTANT)
        ours = read(family.declared, SPEC, maker.pieces(text))
        assert ours == read(family.declared, SPEC, [text])
        assert by_value(ours) == by_value(events_of(messages)), text


def test_a_preamble_and_its_call(harmony: Any) -> None:
    import openai_harmony as module

    text = (
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary "
        f'to=functions.{TOOLS[0].name} <|constrain|>json<|message|>{{"city": "x"}}<|call|>'
    )
    ids = harmony.encode(text, allowed_special="all")
    messages = harmony.parse_messages_from_completion_tokens(ids, module.Role.ASSISTANT)
    assert read(FAMILIES["gpt_oss"].declared, SPEC, [text]) == events_of(messages)
