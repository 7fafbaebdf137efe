"""Forms of a conversation's turns that chat templates accept, found by rendering."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import weft
from tests.support.tool_template import TEMPLATE
from weft.common.errors import ContextLength, InvalidRequest
from weft.front.protocol.turns import Turns, effort_shown, renamed, shows_system_inside, shows_users_apart
from weft.front.sealed_reasoning import sealed, unsealed
from weft.text.chat import ChatFormat
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "checkpoints/spool-text"
STRICT = """
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
{{ m.role + ': ' + m.content }}
{%- endfor -%}
"""
SILENT = "{%- for m in messages if m.role != 'system' -%}{{ m.content }}{%- endfor -%}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.mark.parametrize(
    ("template", "inside", "apart"), [(TEMPLATE, True, True), (STRICT, False, False), (SILENT, False, True)]
)
def test_what_a_template_takes(tokenizer: Tokenizer, template: str, inside: bool, apart: bool) -> None:
    chat = ChatFormat(tokenizer, template)
    assert shows_system_inside(chat) is inside
    assert shows_users_apart(chat) is apart


def test_what_a_strict_template_refuses_is_joined(tokenizer: Tokenizer) -> None:
    turns = Turns(system_inside=False, join_users=True)
    turns.user([{"type": "text", "text": "one"}])
    turns.system("two")
    turns.user([{"type": "text", "text": "three"}])
    turns.says("four")
    turns.says(" five")
    rendered = ChatFormat(tokenizer, STRICT).encode(turns.messages, add_generation_prompt=False).text
    assert rendered == "user: one\n<system-reminder>\ntwo\n</system-reminder>\nthreeassistant: four five"


def cost_of_pieces(count: int) -> float:
    """CPU seconds of turns of so many pieces: the least of three."""
    seconds = []
    for _ in range(3):
        turns = Turns(system_inside=False, join_users=True)
        began = time.process_time()
        for _ in range(count):
            turns.system("s" * 64)
        for _ in range(count):
            turns.thinks("t" * 64)
            turns.says("w" * 64)
        system, assistant = turns.messages
        seconds.append(time.process_time() - began)
        assert system["content"] == "\n\n".join(["s" * 64] * count)
        assert assistant["content"] == "w" * 64 * count
        assert assistant["reasoning_content"] == "t" * 64 * count
    return min(seconds)


def test_a_turn_of_many_pieces_is_joined_once() -> None:
    """The cost of a piece does not depend on earlier pieces: eight times as many pieces cost about eight
    times as much, not 64 times.
    """
    assert cost_of_pieces(80_000) < 30 * cost_of_pieces(10_000)


def test_an_effort_is_a_wish(tokenizer: Tokenizer) -> None:
    assert effort_shown("none", ChatFormat(tokenizer, TEMPLATE)) == "none", "it has enable_thinking"
    assert effort_shown("high", ChatFormat(tokenizer, STRICT)) is None
    assert effort_shown(None, ChatFormat(tokenizer, TEMPLATE)) is None


def test_errors_name_the_apis_own_parameter() -> None:
    error = renamed(
        ContextLength("messages[3].content is long", param="messages[3].content"), {"messages": "input"}
    )
    assert (type(error), error.param, error.message) == (ContextLength, "input", "input is long")
    same = InvalidRequest("x", param="tools")
    assert renamed(same, {"messages": "input"}) is same


def test_reasoning_in_their_opaque_form() -> None:
    for reasoning in ("", "x", "語\n\x00", "a" * 10_000):
        assert unsealed(sealed(reasoning)) == reasoning
    for text in ("", "gAAAAB", "weft1.", "weft1.!", "weft1.gA==", "weft1." + "A" * 5):
        assert unsealed(text) == ""
