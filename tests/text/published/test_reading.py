"""The parser that ``auto`` chooses reads back turns with calls as published templates write them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.text.published.conversations import (
    ONE,
    THOUGHT,
    TOOLS,
    TURNS,
    Messages,
    calling,
    result,
    said,
    user,
)
from tests.text.published.files import common_length, model, template_names
from weft.common.errors import InvalidRequest
from weft.text.model import TextModel
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.parser import OutputSpec
from weft.text.template import ChatTemplate

pytestmark = pytest.mark.slow

_NO_TOOLS = "the template shows no tools, and its tokenizer has no marks of calls"
NOT_SUPPORTED = {
    "data--v1": "Mistral's first tokenizer has no calls, and its template refuses results",
    "data--v1_spm": "Mistral's first tokenizer has no calls, and its template refuses results",
    "models--CohereForAI-c4ai-command-r-plus-tool_use": "it refuses objects without additionalProperties",
    "models--HuggingFaceTB-SmolLM3-3B": _NO_TOOLS,
    "models--fireworks-ai-llama-3-firefunction-v2": "it wants tools in a variable that no API has",
    "models--google-gemma-2-2b-it": _NO_TOOLS,
    "models--llama-cpp-rwkv-world": _NO_TOOLS,
    "mrs--gemma3n": _NO_TOOLS,
    "trl--cohere2": _NO_TOOLS,
    "trl--idefics3": _NO_TOOLS,
    "trl--llava_next": _NO_TOOLS,
    "trl--phi3": _NO_TOOLS,
    "trl--qwen2_5_vl": "the template of Qwen 2.5 VL, which has no calls",
    "trl--smolvlm": _NO_TOOLS,
}
_REFUSED = "the template refuses text beside calls"
_DROPPED = "the template drops text or calls where a message has both"
_ONE = "the template has one call a message"
_RAW = "the template writes line ends inside of quotes"
SHOWS_LESS = {
    "data--v2": {"call with text": _REFUSED},
    "data--v3": {"call with text": _REFUSED},
    "data--v3_image": {"call with text": _REFUSED},
    "data--v3_image_spm": {"call with text": _REFUSED},
    "data--v3_spm": {"call with text": _REFUSED},
    "models--Cohere2MoE": {"call with text": _DROPPED},
    "models--GigaChat3-10B-A1.8B": {"two calls": _ONE},
    "models--GigaChat3.1-10B-A1.8B": {"two calls": _ONE},
    "models--deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"call with text": "it writes the text last"},
    "models--llama-cpp-deepseek-r1": {"call with text": _DROPPED},
    "models--meta-llama-Llama-3.1-8B-Instruct": {"two calls": _ONE, "call with text": _DROPPED},
    "models--meta-llama-Llama-3.2-3B-Instruct": {"two calls": _ONE, "call with text": _DROPPED},
    "models--mistralai-Mistral-Nemo-Instruct-2407": {"call with text": _DROPPED},
    "models--openai-gpt-oss-120b": {"two calls": _ONE, "call with text": "it writes the text as a thought"},
    "mrs--mistral_nemo_tool_call": {"call with text": _DROPPED},
    "mrs--nousresearch_hermes2_pro_tool_use": {"call with text": _DROPPED},
    "tok--deepseek_v3": {"call with text": _DROPPED},
    "tok--mistral_nemo": {"call with text": _DROPPED},
    "trl--deepseek_r1_distill": {"call with text": _DROPPED},
    "trl--lfm2_2_5": {"nested arguments": _RAW},
    "trl--lfm2_2_5_v2": {"nested arguments": _RAW},
}
"""Turns that a template writes incompletely, also in the reference library."""
WRITES_OTHERWISE = {
    "mrs--nousresearch_hermes2_pro_tool_use": "the template writes a result otherwise once an answer follows",
    "trl--diffusion_gemma": "the template opens a second turn for an answer behind a result",
}


def turn_of(text_model: TextModel, before: Messages, turn: dict[str, Any]) -> tuple[str, bool]:
    """Return (text of ``turn`` up to the end of the turn, True if the text begins inside reasoning).

    The text equals the engine's output: special tokens that are not markup are removed.
    """
    chat, declared = text_model.chat, text_model.output.declared
    assert chat.source is not None
    assert declared is not None
    tools = TOOLS if ChatTemplate(chat.source).uses_tools else ()
    prompt = chat.encode(before, tools=tools).text
    try:
        whole = chat.encode([*before, turn], tools=tools, add_generation_prompt=False).text
    except InvalidRequest:  # the template requires results after calls
        results = [result(number) for number in range(len(turn.get("tool_calls", ())))]
        whole = chat.encode([*before, turn, *results], tools=tools, add_generation_prompt=False).text
    start = common_length(prompt, whole)
    marks = re.compile("|".join(map(re.escape, sorted(text_model.tokenizer.special, key=len, reverse=True))))
    start = next((one.start() for one in marks.finditer(whole) if one.start() < start < one.end()), start)
    in_reasoning = text_model.output.in_reasoning(whole[:start], "")
    for thought in declared.reasoning:
        if prompt.endswith(thought.close) and whole[start:].startswith(thought.close):
            start += len(thought.close)  # a prompt that asks for no reasoning ends with the closing mark
        if thought.close in whole[start:] and thought.open not in whole[start:]:
            in_reasoning = in_reasoning or text_model.output.in_reasoning(prompt, "")
    text = whole[start:]
    visible = text_model.output.visible
    made = ""
    for piece in re.split(f"({marks.pattern})", text):
        number = text_model.tokenizer.special.get(piece)
        if number in text_model.end_ids:
            break
        made += piece if number is None or number in visible else ""
    return made, in_reasoning


def read(text_model: TextModel, text: str, *, in_reasoning: bool) -> list[OutputEvent]:
    spec = OutputSpec(tools=TOOLS, tool_calls=True, reasoning=True, in_reasoning=in_reasoning)
    parser = text_model.output.parser(spec)
    return [*parser.feed(text), *parser.close()]


def spoken(events: list[OutputEvent]) -> dict[str, Any]:
    """Return the content of ``events`` in the form of an assistant message."""
    names = [event.name for event in events if isinstance(event, CallBegin)]
    whole = {event.call for event in events if isinstance(event, CallEnd)}
    arguments = [
        "".join(one.text for one in events if isinstance(one, CallArguments) and one.call == number)
        for number in range(len(names))
    ]
    return {
        "calls": [
            (name, json.loads(text) if number in whole else text)
            for number, (name, text) in enumerate(zip(names, arguments, strict=True))
        ],
        "content": "".join(one.text for one in events if isinstance(one, Content)).strip(),
        "thought": "".join(one.text for one in events if isinstance(one, Reasoning)).strip(),
    }


def meant(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    return {
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "content": turn.get("content") or "",
        "thought": turn.get("reasoning_content", ""),
    }


SAID = {**said(), "reasoning_content": THOUGHT}
WHOLE: Messages = [
    *(user(), {**ONE, "reasoning_content": THOUGHT}, result(), SAID),
    *(user("And tomorrow?"), calling(("now", {}), first=5), result(5, "noon"), said("Sun."), user("Thanks.")),
    said("You are welcome."),
]
"""Thought, call, result, answer, and two more turns."""


def difference(name: str, before: Messages, turn: dict[str, Any]) -> str:
    """Return a message if a template's text of ``turn`` parses differently from ``turn``, otherwise ""."""
    try:
        text, in_reasoning = turn_of(model(name), before, turn)
    except InvalidRequest as error:
        return error.message
    wanted = meant(turn)
    if wanted["thought"] not in text:  # many templates show no reasoning
        wanted["thought"] = ""
    found = spoken(read(model(name), text, in_reasoning=in_reasoning))
    return "" if found == wanted else f"{found}, not {wanted}, of {text!r}"


@pytest.mark.parametrize("name", template_names())
def test_turns_with_calls_are_read_back(name: str) -> None:
    if name in NOT_SUPPORTED:
        pytest.skip(f"{name}: {NOT_SUPPORTED[name]}")
    assert model(name).output.tells_calls
    wrong = [
        f"{kind}: {found}"
        for kind, turn in TURNS.items()
        if kind not in SHOWS_LESS.get(name, {}) and (found := difference(name, [user()], turn))
    ]
    assert not wrong, "\n".join([name, *wrong])


@pytest.mark.parametrize("name", template_names())
def test_every_turn_of_a_whole_conversation_is_read_back(name: str) -> None:
    if name in NOT_SUPPORTED:
        pytest.skip(f"{name}: {NOT_SUPPORTED[name]}")
    if name in WRITES_OTHERWISE:
        pytest.skip(WRITES_OTHERWISE[name])
    # Templates drop the reasoning of earlier turns once an answer follows.
    past = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in WHOLE]
    wrong = [
        f"message {number}: {found}"
        for number, message in enumerate(WHOLE)
        if message["role"] == "assistant" and (found := difference(name, past[:number], message))
    ]
    assert not wrong, "\n".join([name, *wrong])
