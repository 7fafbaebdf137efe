"""Every system message reaches the model, whatever roles and orders the chat template supports."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.support.text_folders import write_tokenizer
from tests.text.published.files import VARIABLE, source, template_names
from weft.common.errors import InvalidRequest
from weft.text.chat import ChatFormat
from weft.text.tokenizer import Tokenizer

REAL = os.environ.get(VARIABLE)
ANY = "{%- for m in messages -%}{{- '[' + m.role + ']' + m.content -}}{%- endfor -%}"
FIRST = """
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('only first') }}{%- endif -%}
{{- '[' + m.role + ']' + m.content -}}
{%- endfor -%}
"""
"""Template that refuses a system message after the first message."""
SILENT = """
{%- if messages[0].role in ('system', 'developer') -%}{{- '[system]' + messages[0].content -}}{%- endif -%}
{%- for m in messages if m.role not in ('system', 'developer') -%}
{{- '[' + m.role + ']' + m.content -}}
{%- endfor -%}
"""
"""Leaves out a later one without a word."""
LAST = """
{%- set ns = namespace(system='') -%}
{%- for m in messages if m.role == 'system' -%}{%- set ns.system = m.content -%}{%- endfor -%}
{{- '[system]' + ns.system -}}
{%- for m in messages if m.role != 'system' -%}{{- '[' + m.role + ']' + m.content -}}{%- endfor -%}
"""
"""Shows the last one alone."""
NONE = """
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('in turn') }}{%- endif -%}
{{- '[' + m.role + ']' + m.content -}}
{%- endfor -%}
"""
"""Knows no system message, and wants the user and the assistant in turn."""


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.load(folder)


def rendered(chat: ChatFormat, roles: tuple[str, ...]) -> str:
    """The rendering of one message for each role, which say m0, m1, ..."""
    messages = [{"role": role, "content": f"m{number}"} for number, role in enumerate(roles)]
    return chat.encode(messages, add_generation_prompt=False).text


def shown(tokenizer: Tokenizer, template: str, *roles: str) -> str:
    return rendered(ChatFormat(tokenizer, template), roles)


@pytest.mark.parametrize("template", [ANY, FIRST, SILENT, LAST])
@pytest.mark.parametrize("second", ["system", "developer"])
def test_system_messages_before_anything_else_are_one(
    tokenizer: Tokenizer, template: str, second: str
) -> None:
    assert shown(tokenizer, template, "system", second, "user") == "[system]m0\n\nm1[user]m2"


def test_a_developer_message_without_a_user_takes_the_users_place(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, ANY, "system", "developer") == "[system]m0[system]m1"
    assert shown(tokenizer, FIRST, "system", "developer") == f"[system]m0[user]{reminder('m1')}"
    assert shown(tokenizer, FIRST, "system", "system") == "[system]m0\n\nm1"


def test_a_developer_message_has_the_form_of_a_system_message(tokenizer: Tokenizer) -> None:
    template = (
        "{%- for m in messages %}[{{ m.role if m.role == 'developer' else 'x' }}]{{ m.content }}{% endfor %}"
    )
    assert shown(tokenizer, template, "developer", "user") == "[developer]m0[x]m1"


def test_a_later_one_stays_where_the_template_shows_it(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, ANY, "user", "system", "user") == "[user]m0[system]m1[user]m2"


@pytest.mark.parametrize("template", [FIRST, SILENT, LAST])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_later_one_is_a_part_of_the_users_turn(tokenizer: Tokenizer, template: str, role: str) -> None:
    made = shown(tokenizer, template, "system", "user", role, "assistant", "user")
    assert made == f"[system]m0[user]m1\n{reminder('m2')}[assistant]m3[user]m4"
    assert shown(tokenizer, template, "system", "user", "assistant", role).endswith(
        f"[assistant]m2[user]{reminder('m3')}"
    )


def test_a_template_without_system_messages(tokenizer: Tokenizer) -> None:
    made = shown(tokenizer, NONE, "system", "user", "assistant", "system", "user", "user")
    assert made == f"[user]{reminder('m0')}\nm1[assistant]m2[user]{reminder('m3')}\nm4\nm5"


def test_a_conversation_in_order_is_unchanged(tokenizer: Tokenizer) -> None:
    for template in (ANY, FIRST, SILENT):
        assert shown(tokenizer, template, "system", "user", "assistant", "user") == (
            "[system]m0[user]m1[assistant]m2[user]m3"
        )


def test_parts_of_a_system_message_are_kept(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [
        {"role": "system", "content": parts},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    made = ChatFormat(tokenizer, FIRST).encode(messages, add_generation_prompt=False)
    assert made.text == "[system]a\nb\n\nc[user]d"


def test_an_error_names_the_message_of_the_request(tokenizer: Tokenizer) -> None:
    messages: list[Any] = [{"role": "system", "content": "a"}] * 2 + [{"role": "user", "content": 5}]
    with pytest.raises(InvalidRequest) as caught:
        ChatFormat(tokenizer, FIRST).encode(messages)
    assert str(caught.value.param).startswith("messages[2]")


ORDERS = [
    ("system", "system", "user"),
    ("system", "developer", "user"),
    ("developer", "system", "user"),
    ("system", "user", "system", "user"),
    ("user", "assistant", "developer", "user"),
    ("system", "user", "assistant", "user", "system"),
]
NEED_MORE = ("command-r-plus-tool_use", "firefunction-v2", "hermes2_pro_tool_use")
"""Templates that need tools or variables for every conversation."""


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason=f"{VARIABLE} names no folder with real chat templates")
def test_published_templates_show_every_message(tokenizer: Tokenizer) -> None:
    names = template_names()
    assert names, f"{VARIABLE} names a folder without templates"
    lost = []
    for name in names:
        if any(other in name for other in NEED_MORE):
            continue
        chat = ChatFormat(tokenizer, source(name))
        for roles in ORDERS:
            text = rendered(chat, roles)
            if any(f"m{number}" not in text for number in range(len(roles))):
                lost.append((name, roles))
    assert not lost
