"""Published chat templates render conversations like the reference library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.text.published.conversations import CONVERSATIONS, TOOLS, Messages, reference
from tests.text.published.files import VARIABLE, common_length, model, source, template_names
from weft.common.errors import InvalidRequest
from weft.text.parsing.write_calls import written_calls
from weft.text.template import ChatTemplate

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def test_the_templates_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    where = os.environ.get(VARIABLE)
    if where is None:
        pytest.skip(f"{VARIABLE} names no folder of published files")
    found = list((Path(where) / "templates").glob("*.jinja"))
    assert found, f"{VARIABLE} names {where}, which has no templates/*.jinja"
    with capsys.disabled():
        print(f"{len(found)} published chat templates")


def _moved(messages: Messages, made: str, wanted: str) -> bool:
    """True if the template loses a system message, or shows a late one only in some conversations, and Weft
    shows the message in the user's turn.
    """
    told = [message["content"] for message in messages if message["role"] == "system"]
    lost = any(isinstance(text, str) and text not in wanted for text in told)
    late = any(message["role"] == "system" for message in messages[1:])
    return (lost or late) and "<system-reminder>" in made and all(text in made for text in told)


AS_TEXT = {
    "models--LFM2-8B-A1B",
    "models--LFM2.5-Instruct",
    "models--ibm-granite-granite-3.3-2B-Instruct",
    "mrs--smollm3",
    "tok--llama3",
    "trl--lfm2",
    "trl--llama3",
}
"""Templates without calls, in models with a known call format: Weft writes calls into the content."""


def _calls_as_text(name: str, messages: Messages) -> Messages:
    """Return messages with calls as text in the content, in the model's format."""
    declared = model(name).output.declared
    assert declared is not None
    made: Messages = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        if "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
            text = "".join(piece.text for piece in written_calls(declared, calls))
            rest["content"] = "\n".join(filter(None, (message.get("content"), text)))
        made.append(rest)
    return made


@pytest.mark.parametrize("name", template_names())
def test_every_kind_of_conversation_is_rendered_as_by_the_reference(name: str) -> None:
    wrong: list[str] = []
    knows = ChatTemplate(source(name)).uses_tools  # requests with tools are refused otherwise
    for kind, (messages, given) in CONVERSATIONS.items():
        options = {**given, "tools": knows and given.get("tools", False)}
        shown = _calls_as_text(name, messages) if name in AS_TEXT else messages
        wanted = reference(source(name), shown, options)
        try:
            made = (
                model(name)
                .chat.encode(
                    messages,
                    tools=TOOLS if options["tools"] else (),
                    add_generation_prompt=options.get("prompt", True),
                    continue_final_message=options.get("continued", False),
                )
                .text
            )
        except InvalidRequest as error:
            made = None
            if wanted is not None:
                wrong.append(f"{kind}: {error.message}")
        if made is not None and wanted is not None and made != wanted and not _moved(messages, made, wanted):
            at = common_length(made, wanted)
            wrong.append(f"{kind}: {made[at - 30 : at + 80]!r}, not {wanted[at - 30 : at + 80]!r}")
    assert not wrong, "\n".join([name, *wrong])
