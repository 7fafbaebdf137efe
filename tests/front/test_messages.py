"""Chat messages: what is taken, and the place that a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from weft.common.errors import InvalidRequest
from weft.front.messages import RESERVED_KWARGS, check_messages, check_template_kwargs


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "name": ""}, "messages[0].name"),
        ({"role": "user", "content": "x", "name": "n" * 65}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "secret": 1}, "messages[0].field"),
    ],
)
def test_refusals_name_their_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages([message])
    assert caught.value.param == param


def test_an_echoed_answer_is_taken() -> None:
    echoed = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None, "audio": None}
    named = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "tom"}
    assert check_messages([echoed, named]) == [{"role": "assistant", "content": "x"}, named]


@pytest.mark.parametrize("name", [*sorted(RESERVED_KWARGS), "__class__", "a b"])
def test_template_kwargs_can_not_change_how_the_template_is_applied(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_template_kwargs({name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_template_kwargs_that_are_variables() -> None:
    assert check_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    assert check_template_kwargs(None) == {}
