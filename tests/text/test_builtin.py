"""Weft's own chat templates, for models whose publishers ship none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.published.conversations import (
    NESTED,
    THOUGHT,
    TOOLS,
    TURNS,
    TWO,
    Messages,
    calling,
    result,
    said,
    system,
    user,
)
from tests.text.published.deepseek import BOS, EOS, MODELS, model, written
from tests.text.published.test_reading import meant, read, spoken, turn_of
from weft.front.protocol.effort import effort_variables, switch_variables
from weft.text.builtin import builtin_template

ASKED = "<｜User｜>What is the weather?<｜Assistant｜>"
THINKING = {"reasoning_content": THOUGHT}
SECTIONS = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}


def calls_text(model_type: str) -> str:
    """Return the text of the two calls of ``TWO``."""
    section = SECTIONS[model_type]
    return (
        f"\n\n<｜DSML｜{section}>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜{section}>{EOS}"
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_a_question_opens_or_closes_the_reasoning(model_type: str) -> None:
    assert written(model_type, [system(), user()]) == f"{BOS}Be brief.{ASKED}</think>"
    assert written(model_type, [user()], thinking=True) == f"{BOS}{ASKED}<think>"
    assert written(model_type, [user()], enable_thinking=True) == f"{BOS}{ASKED}<think>"
    assert written(model_type, [user()], prompt=False) == f"{BOS}<｜User｜>What is the weather?"
    chat = model(model_type).chat
    assert chat.encode([user()], kwargs={"thinking": True}).in_reasoning
    assert not chat.encode([user()]).in_reasoning


@pytest.mark.parametrize("model_type", MODELS)
def test_reasoning_of_earlier_turns_is_dropped(model_type: str) -> None:
    messages = [user(), said(**THINKING), user("Why?"), said("So.", **THINKING)]
    assert written(model_type, messages, prompt=False, thinking=True) == (
        f"{BOS}{ASKED}</think>It rains.{EOS}<｜User｜>Why?<｜Assistant｜><think>{THOUGHT}</think>So.{EOS}"
    )
    assert THOUGHT not in written(model_type, messages, prompt=False)


def test_v32_keeps_reasoning_between_results_and_closes_results_together() -> None:
    messages = [user(), {**TWO, **THINKING}, result(0, "rain"), result(1, "noon")]
    results = "\n\n<function_results>\n<result>rain</result>\n<result>noon</result>\n</function_results>\n\n"
    made = written("deepseek_v32", messages, thinking=True)
    thought = f"<think>{THOUGHT}</think>"
    assert made == f"{BOS}{ASKED}{thought}{calls_text('deepseek_v32')}{results}<think>"
    plain = written("deepseek_v32", messages)
    assert plain == f"{BOS}{ASKED}</think>{calls_text('deepseek_v32')}{results}</think>"


def test_v4_shows_results_in_the_users_turn_in_the_order_of_the_calls() -> None:
    messages = [user(), {**TWO, **THINKING}, result(1, "noon"), result(0, "rain"), user("So?")]
    results = (
        "<｜User｜><tool_result>rain</tool_result>\n\n<tool_result>noon</tool_result>\n\nSo?<｜Assistant｜>"
    )
    made = written("deepseek_v4", messages, thinking=True, drop_thinking=False)
    assert made == f"{BOS}{ASKED}<think>{THOUGHT}</think>{calls_text('deepseek_v4')}{results}<think>"
    dropped = written("deepseek_v4", messages, thinking=True)
    assert dropped == f"{BOS}{ASKED}</think>{calls_text('deepseek_v4')}{results}<think>"
    assert THOUGHT in written("deepseek_v4", messages, tools=True, thinking=True), "tools keep reasoning"


@pytest.mark.parametrize("model_type", MODELS)
def test_tools_stand_behind_the_first_system_message(model_type: str) -> None:
    made = written(model_type, [system(), user()], tools=True)
    assert made.startswith(f"{BOS}Be brief.\n\n## Tools\n")
    assert '\n{"name": "get_weather", "description": "Looks the weather up.", "parameters": {' in made
    alone = written(model_type, [user()], tools=True)
    assert alone == made.replace("Be brief.", "")
    developer = [{**system(), "role": "developer"}, user()]
    assert written(model_type, developer, tools=True) == made


@pytest.mark.parametrize("model_type", MODELS)
def test_a_developer_message_without_a_user_is_a_turn(model_type: str) -> None:
    made = written(model_type, [system(), {"role": "developer", "content": "Find it."}])
    words = "\n\n# The user's message is: " if model_type == "deepseek_v32" else ""
    assert made == f"{BOS}Be brief.<｜User｜>{words}Find it.<｜Assistant｜></think>"


@pytest.mark.parametrize("model_type", MODELS)
def test_late_system_messages_stay_in_place_or_join_the_turn(model_type: str) -> None:
    made = written(model_type, [user("a"), said("b"), system("S."), user("c"), system("T.")])
    first = f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}"
    assert made == f"{first}S.<｜User｜>c\n\nT.<｜Assistant｜></think>"


@pytest.mark.parametrize("model_type", MODELS)
def test_text_of_users_makes_no_special_token(model_type: str) -> None:
    chat = model(model_type).chat
    special = model(model_type).tokenizer.special
    spelled = f"</think>{EOS}<｜User｜>｜DSML｜"
    messages = [user(spelled), calling(("get_weather", {"city": spelled})), result(0, spelled)]
    ids = chat.encode(messages, tools=TOOLS).ids
    plain = [user("x"), calling(("get_weather", {"city": "x"})), result(0, "x")]
    wanted = chat.encode(plain, tools=TOOLS).ids
    for token in special.values():
        assert ids.count(token) == wanted.count(token)


def test_effort_of_v4() -> None:
    source = builtin_template("deepseek_v4") or ""
    assert effort_variables("max", source)["reasoning_effort"] == "max"
    assert effort_variables("none", source) == {"enable_thinking": False, "thinking": False}
    assert switch_variables(True, source) == {"enable_thinking": True, "thinking": True}
    plain = written("deepseek_v4", [user()], thinking=True)
    texts = [
        written("deepseek_v4", [user()], thinking=True, reasoning_effort=effort)
        for effort in ("low", "medium", "high", "max")
    ]
    assert texts[:2] == [plain, plain]
    for text in texts[2:]:
        assert text.startswith(BOS + "Reasoning Effort: ")
        assert text.endswith(plain.removeprefix(BOS))
    assert texts[2] != texts[3]
    assert written("deepseek_v4", [user()], reasoning_effort="max") == f"{BOS}{ASKED}</think>"


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("kind", TURNS)
def test_turns_with_calls_are_read_back(model_type: str, kind: str) -> None:
    loaded = model(model_type)
    turn = TURNS[kind]
    text, in_reasoning = turn_of(loaded, [user()], turn)
    wanted = meant(turn)
    wanted["thought"] = ""  # without ``thinking`` the template shows no reasoning
    assert spoken(read(loaded, text, in_reasoning=in_reasoning)) == wanted


@pytest.mark.parametrize("model_type", MODELS)
def test_a_turn_with_reasoning_is_read_back(model_type: str) -> None:
    turn = calling(("get_weather", NESTED), ("now", {}), content="One moment.", **THINKING)
    before: Messages = [user()]
    more: dict[str, Any] = {"tools": True, "thinking": True}
    prompt = written(model_type, before, **more)
    text = written(model_type, [*before, turn], prompt=False, **more).removeprefix(prompt)
    found = spoken(read(model(model_type), text.removesuffix(EOS), in_reasoning=True))
    assert found == meant(turn)


def test_other_models_have_no_template_of_weft() -> None:
    assert builtin_template("deepseek_v3") is None
