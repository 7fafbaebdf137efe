"""Reasoning with a budget of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers import Running
from tests.support.text_folders import write_tokenizer
from weft.front.requests.thinking import ReasoningBudget, after, single
from weft.text.parsing.events import OutputEvent
from weft.types.messages import Submit, TokenEvent, ids_from_bytes, ids_to_bytes
from weft.types.sampling import TokenParams

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if opened is defined -%}{{- '<think>\n' -}}{%- endif -%}{%- endif -%}"
)
CLOSE = "</think>\n\n"


class Letters:
    """``(`` and ``)`` are tags."""

    def __init__(self, thinking: bool) -> None:
        self.thinking = thinking

    def feed(self, text: str) -> list[OutputEvent]:
        for letter in text:
            self.thinking = letter == "(" or (self.thinking and letter != ")")
        return []


@pytest.mark.parametrize(
    ("tokens", "texts", "opened", "spent_after"),
    [
        (0, [], True, 0),
        (0, ["c", "("], False, 2),
        (2, ["t", "t"], True, 2),
        (2, ["", "tt"], True, 2),
        (2, ["(", "t", "t"], False, 3),
        (2, ["t", ")", "c", "(", "t", "t"], True, 5),
        (3, ["t", "t", "t)", "c"], True, None),
        (3, ["t", "t", ")", ""], True, None),
    ],
)
def test_tokens_inside_are_counted(
    tokens: int, texts: list[str], opened: bool, spent_after: int | None
) -> None:
    budget = ReasoningBudget(tokens, Letters(opened))
    states = [budget.spent]
    for text in texts:
        budget.take(text)
        states.append(budget.spent)
    assert (states.index(True) if True in states else None) == spent_after


def test_an_event_as_events_of_one_token() -> None:
    event = TokenEvent(
        sequence=5, token_ids=(1, 2, 3), finish="stop", stop_id=3, num_cached=7, accepted=2, rejected=1
    )
    parts = list(single(event))
    assert [part.token_ids for part in parts] == [(1,), (2,), (3,)]
    assert [part.finish for part in parts] == [None, None, "stop"]
    assert [part.accepted for part in parts] == [1, 1, 0]
    assert sum(part.rejected for part in parts) == 1
    assert parts[0].num_cached == 7
    assert list(single(event.__class__(sequence=5, finish="length"))) == [
        TokenEvent(sequence=5, finish="length")
    ]


def test_the_sequence_that_goes_on() -> None:
    params = TokenParams(max_tokens=9, prompt_logprobs=2)
    first = Submit(
        sequence=1, request=2, choice=3, seed=4, prompt_ids=ids_to_bytes([1]), params=params, salt="s"
    )
    made = after(first, [5, 6], sequence=7, request=8)
    assert (made.sequence, made.request, made.choice, made.seed, made.salt) == (7, 8, 3, 4, "s")
    assert ids_from_bytes(made.emitted_ids).tolist() == [5, 6]
    assert (made.params.max_tokens, made.params.prompt_logprobs) == (9, -1)


@pytest.fixture(scope="module")
def server(start_scripted: Any, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Start a server with outputs in file order: a continued prompt gets the first output with a matching
    beginning.
    """
    folder = tmp_path_factory.mktemp("thinker")
    write_tokenizer(folder, added=["<think>", "</think>"], template=TEMPLATE)
    texts = {
        "opens itself": [
            "<think>abcdefgh</think>\n\nown",
            f"<think>abcd{CLOSE}short",
            f"<think>{CLOSE}none",
        ],
        "was opened": ["abcdefgh</think>\n\nown", f"abcd{CLOSE}short", f"{CLOSE}none"],
    }
    entries = [
        {"match": match, "text": text, "chunks": chunks, "num_cached": 3, "repeat": True}
        for match, outputs in texts.items()
        for text, chunks in zip(outputs, ([3, 1, 4], 2, 5), strict=True)
    ]
    made: Running = start_scripted(entries, "--tokenizer", str(folder), "--max-model-len", "1024")
    return made


def ask(server: Running, text: str, **fields: Any) -> Any:
    if text == "was opened":
        fields["chat_template_kwargs"] = {"opened": True}
    answer = server.chat(text, return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.requirement("F64")
@pytest.mark.parametrize("text", ["opens itself", "was opened"])
def test_a_reasoning_ends_with_its_budget(server: Running, text: str) -> None:
    got = ask(server, text, thinking_token_budget=4, n=2)
    for choice in got["choices"]:
        message = choice["message"]
        assert (message["reasoning"], message["content"].strip()) == ("abcd", "short")
        assert choice["finish_reason"] == "stop"
    ids = [len(choice["token_ids"]) for choice in got["choices"]]
    assert got["usage"]["completion_tokens"] == sum(ids)
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("text", ["opens itself", "was opened"])
def test_a_stream_has_the_same(server: Running, sse: Any, text: str) -> None:
    whole = ask(server, text, thinking_token_budget=4)["choices"][0]
    more = {"chat_template_kwargs": {"opened": True}} if text == "was opened" else {}
    messages = [{"role": "user", "content": text}]
    fields = {"messages": messages, "return_token_ids": True, "thinking_token_budget": 4, **more}
    with server.stream(**fields) as response:
        choices = [choice for event in sse(response)[:-1] for choice in event["choices"]]
    assert [token for c in choices for token in c.get("token_ids", [])] == whole["token_ids"]
    for name in ("reasoning", "content"):
        assert "".join(c["delta"].get(name, "") for c in choices) == whole["message"][name]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]


def test_no_reasoning_at_all(server: Running) -> None:
    for text in ("was opened", "opens itself"):
        message = ask(server, text, thinking_token_budget=0)["choices"][0]["message"]
        assert "reasoning" not in message
        assert message["content"].strip() == "none"


def test_a_budget_that_is_not_used_up_changes_nothing(server: Running) -> None:
    for text in ("opens itself", "was opened"):
        for budget in (9, 10):
            got = ask(server, text, thinking_token_budget=budget)["choices"]
            assert got == ask(server, text)["choices"]


def test_no_room_for_an_answer(server: Running) -> None:
    choice = ask(server, "was opened", thinking_token_budget=4, max_tokens=6)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning"] == "abcdef"


def test_what_cannot_be_asked(server: Running, fake: Any) -> None:
    for one, fields in ((server, {"logprobs": True}), (server, {"thinking_token_budget": -1}), (fake, {})):
        answer = one.chat(**{"thinking_token_budget": 4, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
