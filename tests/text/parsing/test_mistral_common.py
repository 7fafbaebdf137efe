"""Mistral's lists of calls against the writer of mistral-common."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.text.parsing.checks import read
from tests.text.parsing.families import FAMILIES, SPEC, Call, Calls, by_value
from tests.text.parsing.outputs import Maker


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    module = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    return module.MistralTokenizer.v3(is_tekken=True)


def written(tokenizer: Any, calls: Calls) -> str:
    """Return the assistant's turn as mistral-common writes it."""
    from mistral_common.protocol.instruct import messages, request, tool_calls

    made = [
        tool_calls.ToolCall(
            id=f"call{number:05d}",
            function=tool_calls.FunctionCall(name=call.name, arguments=json.dumps(call.arguments)),
        )
        for number, call in enumerate(calls.calls)
    ]
    turns = [messages.UserMessage(content="q"), messages.AssistantMessage(content=None, tool_calls=made)]
    turns += [
        messages.ToolMessage(content="r", tool_call_id=f"call{number:05d}", name=call.name)
        for number, call in enumerate(calls.calls)
    ]
    text = tokenizer.encode_chat_completion(request.ChatCompletionRequest(messages=turns)).text
    return str(text).partition("[/INST]")[2].partition("</s>")[0]


@pytest.mark.requirement("G4")
@pytest.mark.parametrize("seed", range(40))
def test_reads_what_the_reference_writes(tokenizer: Any, seed: int) -> None:
    family = FAMILIES["mistral_list"]
    maker = Maker(family, random.Random(seed))
    # mistral-common accepts no dots in names
    known = [call for call in maker.calls().calls if "." not in call.name]
    calls = Calls(tuple(known) or (Call("get", {"days": 1}),))
    text = written(tokenizer, calls)
    assert text.startswith("[TOOL_CALLS]")
    events = read(family.declared, SPEC, maker.pieces(text))
    assert by_value(events) == by_value(family.expected([calls]))
