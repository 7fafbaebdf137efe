"""Mistral's published templates in Weft write the text of mistral-common."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.text.published.conversations import CONVERSATIONS, TOOLS, Messages, tool_dicts
from tests.text.published.files import BOS, EOS, model, template_names
from weft.common.errors import InvalidRequest

MADE = {"data--v2": "v2", "data--v3": "v3 tekken", "data--v3_spm": "v3", "data--v7_spm": "v7"}
"""Template -> tokenizer that mistral-common ships."""
LATE = {"late system", "call with text", "markup in text"}
"""Conversations that some versions of mistral-common refuse."""


@functools.cache
def _tokenizer(version: str) -> Any:
    module = pytest.importorskip(
        "mistral_common.tokens.tokenizers.mistral", reason="needs the package mistral-common"
    )
    name, _, kind = version.partition(" ")
    maker = getattr(module.MistralTokenizer, name)
    return maker(is_tekken=True) if kind else maker()


def _theirs(version: str, messages: Messages, *, tools: bool) -> str | None:
    """Return the text of mistral-common; None if the package refuses the conversation."""
    tokenizer = _tokenizer(version)
    from mistral_common.exceptions import MistralCommonException
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    names = {call["id"]: call["function"]["name"] for one in messages for call in one.get("tool_calls", ())}
    asked = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in messages]
    for one in asked:
        if one["role"] == "tool":
            one["name"] = names[one["tool_call_id"]]
    try:
        made = ChatCompletionRequest.from_openai(asked, tools=tool_dicts() if tools else None)
        text: str = tokenizer.encode_chat_completion(made).text
    except MistralCommonException:
        return None
    return text


def _plain(text: str) -> str:
    """Return text without the space that SentencePiece puts behind a special token, and with real line
    ends."""
    text = text.replace("\u2581", " ").replace("<0x0A>", "\n").replace(BOS, "<s>").replace(EOS, "</s>")
    return re.sub(r"(\[/?[A-Z_]+\]|</?s>) ", r"\1", text)


@pytest.mark.parametrize("name", template_names(MADE))
def test_conversations_are_rendered_as_by_mistral_common(name: str) -> None:
    compared = set()
    for kind, (messages, given) in CONVERSATIONS.items():
        tools = bool(given.get("tools"))
        if not given.get("prompt", True):
            continue
        wanted = _theirs(MADE[name], messages, tools=tools)
        if wanted is None:
            continue
        try:
            made = model(name).chat.encode(messages, tools=TOOLS if tools else ()).text
        except InvalidRequest as error:
            made = error.message
        assert _plain(made) == _plain(wanted), kind
        compared.add(kind)
    expected = {kind for kind, (_, given) in CONVERSATIONS.items() if given.get("prompt", True)}
    assert compared >= expected - LATE
