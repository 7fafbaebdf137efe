"""No published template loses a call or a result of a turn with several calls."""

from __future__ import annotations

import pytest

from tests.text.published.conversations import TOOLS, Messages, calling, result, user
from tests.text.published.files import model, source, template_names
from weft.common.errors import InvalidRequest
from weft.text.template import ChatTemplate

FIRST, SECOND = ("get_weather", {"city": "Oslo"}), ("now", {"zone": "Bergen"})
BOTH = calling(FIRST, SECOND)
RAIN, NOON = result(0, "rain-there"), result(1, "noon-here")
ALONE: Messages = [calling(FIRST), RAIN, calling(SECOND, first=1), NOON]
"""The turn with one call per message."""
ORDERS: dict[str, Messages] = {
    "results in order": [BOTH, RAIN, NOON],
    "results in another order": [BOTH, NOON, RAIN],
}
APART: Messages = [calling(FIRST), calling(SECOND, first=1), NOON, RAIN]
"""One message per call, with the results behind both."""
SINGLE = {
    "models--GigaChat3-10B-A1.8B",
    "models--GigaChat3.1-10B-A1.8B",
    "models--meta-llama-Llama-3.1-8B-Instruct",
    "models--meta-llama-Llama-3.2-3B-Instruct",
    "models--openai-gpt-oss-120b",
}
"""Templates with one call per message. Llama's templates refuse a second call; the others drop it."""


def text_of(name: str, messages: Messages) -> str:
    tools = TOOLS if ChatTemplate(source(name)).uses_tools else ()
    return model(name).chat.encode([user(), *messages], tools=tools).text


@pytest.mark.parametrize("name", template_names(default=4))
def test_every_call_and_every_result_of_a_turn_is_shown(name: str) -> None:
    try:
        shows = "Oslo" in text_of(name, ALONE[:2])
    except InvalidRequest:
        shows = False
    if not shows:
        pytest.skip("the template shows no calls of earlier turns, or refuses results")
    assert model(name).chat.one_call == (name in SINGLE)
    for order, messages in ORDERS.items():
        text = text_of(name, messages)
        missing = [word for word in ("Oslo", "Bergen", "rain-there", "noon-here") if word not in text]
        assert not missing, (order, missing, text)
        if name in SINGLE:
            assert text == text_of(name, ALONE), order
    if name in SINGLE:
        assert text_of(name, APART) == text_of(name, ALONE)


@pytest.mark.parametrize("name", template_names(default=4))
def test_a_required_call_is_one_call_where_the_template_shows_one(name: str) -> None:
    if name not in SINGLE:
        pytest.skip("the template shows several calls of a message")
    output = model(name).output
    made = output.call_grammar(TOOLS, "required")
    assert made == output.call_grammar(TOOLS, "required", parallel=False)
    assert made is not None
