"""The tools-mini task: held-out problems stay held out, calls are correct, and calls are scored correctly."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from weft.eval import tools_words
from weft.eval.gsm_mini import is_held_out_pair
from weft.eval.gsm_story import Rng
from weft.eval.tools_mini import ToolProblem, another, tool_problems, tool_test_set
from weft.eval.tools_score import (
    MALFORMED,
    MAX_ROUNDS,
    Dialogue,
    read_calls,
    run_call,
    same_call,
    totals,
    tree,
    value,
)
from weft.eval.tools_words import OfferedTool

TRAIN_COUNT = 20_000
_WORD = re.compile(r"[A-Za-z']+")
CALCULATOR = OfferedTool("calculator", "expression", (("expression", "string"),))
MINUS = OfferedTool("minus", "-", (("a", "number"), ("b", "number")))
OTHER = OfferedTool("get_time", "other", (("city", "string"),))


@pytest.fixture(scope="module")
def train() -> list[ToolProblem]:
    """The first problems of one training stream, each followed by more questions for the same tools."""
    draws = Rng("more")
    first = list(itertools.islice(tool_problems("train", 0), TRAIN_COUNT))
    return first + [more for p in first[:4000] if (more := another(draws, p.tools)) is not None]


def _digest(asked: list[ToolProblem]) -> str:
    lines = []
    for p in asked:
        tools = json.dumps([tool.declaration() for tool in p.tools])
        calls = json.dumps([[call.name, call.arguments, call.result] for call in p.calls])
        lines.append(f"{p.question}\t{tools}\t{calls}\t{p.solution}\t{p.answer}\t{p.template_ids}\t{p.form}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def a_problem(*tools: OfferedTool, form: str = "N") -> ToolProblem:
    """Return a problem with the given tools and arbitrary calls."""
    return replace(tool_test_set(1)[0], tools=tools, form=form)


@pytest.mark.slow
def test_templates_of_the_test_set_never_occur_in_training(train: list[ToolProblem]) -> None:
    seen = {template for p in train for template in p.template_ids}
    asked = {template for p in tool_test_set() for template in p.template_ids}
    assert len(asked) > 300
    assert not seen & asked
    assert not {p.question for p in train} & {p.question for p in tool_test_set()}


@pytest.mark.slow
@pytest.mark.requirement("G21")
def test_names_of_tools_of_the_test_set_never_occur_in_training(train: list[ToolProblem]) -> None:
    seen = {tool.name for p in train for tool in p.tools}
    asked = {tool.name for p in tool_test_set() for tool in p.tools}
    assert len(asked) > 200
    assert not seen & asked
    plain = {"calculator", "add", "subtract", "multiply", "divide"}
    assert plain <= seen


@pytest.mark.slow
def test_some_names_of_arguments_of_the_test_set_never_occur_in_training(train: list[ToolProblem]) -> None:
    def names(asked: list[ToolProblem]) -> list[tuple[str, ...]]:
        tools = [tool for p in asked for tool in p.tools if tool.kind != "other"]
        return [tuple(name for name, _ in tool.arguments) for tool in tools]

    seen = set(names(train))
    assert not any(map(tools_words.are_held_out_arguments, seen))
    unseen = [shown for shown in names(tool_test_set()) if shown not in seen]
    assert len(unseen) > 100
    assert len(set(unseen)) >= 5


@pytest.mark.slow
def test_every_test_problem_needs_a_number_pair_that_never_occurs_in_training(
    train: list[ToolProblem],
) -> None:
    seen = {pair for p in train for pair in p.pairs}
    assert not any(is_held_out_pair(*pair) for pair in seen)
    for p in tool_test_set():
        assert any(pair not in seen and is_held_out_pair(*pair) for pair in p.pairs), p


def test_every_word_of_the_test_set_occurs_in_training(train: list[ToolProblem]) -> None:
    seen = {word for p in train for word in _WORD.findall(p.question)}
    assert {word for p in tool_test_set() for word in _WORD.findall(p.question)} <= seen


def test_following_the_solution_is_right(train: list[ToolProblem]) -> None:
    kinds = set()
    for p in [*train[:3000], *tool_test_set()]:
        dialogue = Dialogue(p)
        for call in p.calls:
            assert run_call(p, call.name, call.arguments) == p.form.replace("N", str(call.result))
            dialogue.take("", [(call.name, call.arguments)])
            assert dialogue.text is None
        dialogue.take(p.solution, [])
        assert (dialogue.calls_right, dialogue.answer_right) == (True, True), p
        helps = any(tool.kind != "other" for tool in p.tools)
        assert bool(p.calls) is helps
        assert ("=" in p.solution) is not helps, "it is worked out in the text where no tool helps"
        assert len({tool.name for tool in p.tools}) == len(p.tools)
        kinds.add((helps, len(p.calls)))
    assert kinds >= {(False, 0), (True, 1), (True, 2), (True, 3)}


def test_same_seed_same_problems(train: list[ToolProblem]) -> None:
    assert list(itertools.islice(tool_problems("train", 0), 50)) == train[:50]
    assert list(itertools.islice(tool_problems("train", 1), 50)) != train[:50]
    assert len({p.question for p in tool_test_set()}) == len(tool_test_set()) == 500
    assert tool_test_set(20) == tool_test_set(500)[:20]


def test_digests_are_pinned(train: list[ToolProblem]) -> None:
    """A change means that published scores are no longer comparable."""
    assert (_digest(tool_test_set()), _digest(train[:1000])) == ("095a3e397954f28f", "13618799c6511d6b")


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        (
            'Sure.<tool_call>{"name":"f","arguments":{}}</tool_call> <tool_call>{"name":"g","arguments":{}}'
            "</tool_call>",
            [("f", {}), ("g", {})],
        ),
        ("<tool_call>\nf(1)\n</tool_call>", [(MALFORMED, "f(1)")]),
        ('<tool_call>{"name": "f"}</tool_call>', [(MALFORMED, '{"name": "f"}')]),
        ("#### 19", []),
        ('<tool_call>{"name": "f"', []),
    ],
)
def test_calls_are_read_from_text(text: str, made: list[Any]) -> None:
    assert read_calls(text) == made


def test_expressions_are_compared_as_trees() -> None:
    assert tree("12 + 7") == tree("7+12.0")
    assert tree("(2 + 3) * 4") == tree("4 * (3 + 2)")
    assert tree("12 - 7") != tree("7 - 12")
    assert tree("2 + 3 * 4") != tree("(2 + 3) * 4")
    assert value(tree("2 + 3 * 4 / -8")) == Fraction(1, 2)
    for text in ("", "f(1)", "1 +", "2 ** 9", "a + 1", "'x' * 9", "1j", "True + 1", "1 + " * 60 + "1"):
        with pytest.raises(ValueError, match=r"."):
            tree(text)


@pytest.mark.parametrize(
    ("form", "name", "arguments", "result"),
    [
        ("N", "calculator", {"expression": "12 + 7"}, "19"),
        ("N", "calculator", {"expression": "1 / 8"}, "0.125"),
        ('{"result": N}', "minus", {"a": 5, "b": 7}, '{"result": -2}'),
        ("N.0", "minus", {"b": "7", "a": "12.0"}, "5.0"),
        ("N", "calculator", {"expression": "1 / 0"}, "error: division by zero"),
        ("N", "calculator", {"expression": 12}, "12"),
        ("N", "calculator", {"expr": "12"}, "error: the arguments are not those of the tool"),
        ("N", "calculator", "12", "error: the arguments are not those of the tool"),
        ("N", "minus", {"a": "1/2", "b": 1}, "error: the arguments are not numbers"),
        ("N", "get_time", {"city": "Rome"}, "error: nothing found"),
        ("N", "plus", {}, "error: there is no tool 'plus'"),
    ],
)
def test_a_tool_answers(form: str, name: str, arguments: Any, result: str) -> None:
    assert run_call(a_problem(CALCULATOR, MINUS, OTHER, form=form), name, arguments) == result


def test_calls_are_the_same_by_value() -> None:
    plus = OfferedTool("plus", "+", (("a", "number"), ("b", "number")))
    p = next(p for p in tool_test_set() if p.calls)
    call = p.calls[0]
    sum_call = replace(call, name="plus", arguments={"a": 12, "b": 7})
    problem = a_problem(plus, MINUS)
    assert same_call(problem, sum_call, "plus", {"b": "12", "a": 7.0})
    assert not same_call(problem, sum_call, "minus", {"a": 12, "b": 7})
    assert not same_call(problem, sum_call, "plus", {"a": 12, "b": 8})
    assert not same_call(problem, sum_call, "plus", ["12", "7"])
    less = replace(call, name="minus", arguments={"a": 12, "b": 7})
    assert not same_call(problem, less, "minus", {"a": 7, "b": 12})


def test_dialogues_end_and_are_counted() -> None:
    p = next(p for p in tool_test_set() if len(p.calls) == 1)
    call = p.calls[0]
    silent, endless, wrong = Dialogue(p), Dialogue(p), Dialogue(p)
    silent.take(p.solution, [])
    while endless.text is None:
        endless.take("again", [(call.name, call.arguments)])
    assert endless.rounds == MAX_ROUNDS
    wrong.take("", [("nothing", {})])
    assert wrong.messages[-1] == {
        "role": "tool",
        "tool_call_id": "call_1_0",
        "content": "error: there is no tool 'nothing'",
    }
    wrong.take("#### 1000000", [])
    right = Dialogue(p)
    right.take("", [(call.name, call.arguments)])
    right.take(f"It is #### {p.answer}", [])
    counted = totals([silent, endless, wrong, right])
    assert counted == {"calls": 1, "answers": 2, "both": 1, "total": 4}
