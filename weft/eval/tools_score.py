"""Dialogue and scoring of tools-mini, without a model: calls are read, run and answered until the model gives
an answer.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from weft.eval.gsm_mini import extract_answer
from weft.eval.tools_mini import SIGNS, AskedCall, ToolProblem

MAX_ROUNDS = 6  # no problem needs more than four calls
_MAX_EXPRESSION = 200  # characters
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?")
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

MALFORMED = "malformed"
"""The name of an unreadable call."""
Made = tuple[str, Any]
"""A call made by the model: name and arguments. Arguments are a mapping unless the model wrote something
else.
"""


def read_calls(text: str) -> list[Made]:
    """Return (name, arguments) of each call in an answer with calls in ``<tool_call>`` tags: JSON objects of
    name and arguments.

    An unreadable call has the name ``MALFORMED`` and its text.
    """
    made: list[Made] = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            made.append((str(call["name"]), call["arguments"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            made.append((MALFORMED, body))
    return made


def tree(expression: str) -> Any:
    """Return an arithmetic expression as nested (operator, left, right). The order of + and * operands is
    normalized.

    Raises ValueError for anything except numbers, + - * / and brackets.
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError("the expression is too long")
    try:
        return _tree(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None


def _tree(node: ast.expr) -> Any:
    """Return a node as nested (operator, left, right). Raises ValueError for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        op, sides = _OPERATORS[type(node.op)], [_tree(node.left), _tree(node.right)]
        return (op, *(sorted(sides, key=repr) if op in "+*" else sides))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ("-", Fraction(0), _tree(node.operand))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    raise ValueError("only numbers, + - * / and brackets are understood")


def value(made: Any) -> Fraction:
    """Return the value of a tree. Raises ValueError for a division by zero."""
    if isinstance(made, Fraction):
        return made
    op, left, right = made[0], value(made[1]), value(made[2])
    if op == "/" and right == 0:
        raise ValueError("division by zero")
    return {"+": left + right, "-": left - right, "*": left * right}[op] if op != "/" else left / right


def _asked(problem: ToolProblem, name: str, arguments: Any) -> Any:
    """Return the computation of a call as a tree. Raises ValueError for a call that no tool accepts."""
    tool = next((tool for tool in problem.tools if tool.name == name), None)
    if tool is None:
        raise ValueError(f"there is no tool {name!r}"[:100])
    # The names must match exactly; the order of the arguments does not matter.
    if not isinstance(arguments, Mapping) or set(arguments) != {key for key, _ in tool.arguments}:
        raise ValueError("the arguments are not those of the tool")
    given = [str(arguments[key]) for key, _ in tool.arguments]
    if tool.kind == "other":
        raise ValueError("nothing found")
    if tool.kind == "expression":
        return tree(given[0])
    if not all(_NUMBER.fullmatch(text) for text in given):
        raise ValueError("the arguments are not numbers")
    left, right = (Fraction(text) for text in given)
    sides = [left, right]
    return (SIGNS[tool.kind], *(sorted(sides, key=repr) if tool.kind in "+x" else sides))


def run_call(problem: ToolProblem, name: str, arguments: Any) -> str:
    """Return the tool's reply: a number, or an error in words."""
    try:
        found = value(_asked(problem, name, arguments))
    except ValueError as error:
        return f"error: {error}"
    if found.denominator > 1:
        return f"{float(found):.6g}"
    return problem.form.replace("N", str(found.numerator))


def same_call(problem: ToolProblem, expected: AskedCall, name: str, arguments: Any) -> bool:
    """Return True if a call has the expected tool's name and equal arguments, as numbers or expressions."""
    try:
        return name == expected.name and _asked(problem, name, arguments) == _asked(
            problem, expected.name, expected.arguments
        )
    except ValueError:
        return False


@dataclass
class Dialogue:
    """The dialogue of one problem: messages so far, calls made, and the final answer once given."""

    problem: ToolProblem
    messages: list[dict[str, Any]] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    text: str | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        self.messages = [{"role": "user", "content": self.problem.question}]

    @property
    def declarations(self) -> list[dict[str, Any]]:
        """The tools in the format of chat completions."""
        return [tool.declaration() for tool in self.problem.tools]

    def take(self, text: str, calls: Sequence[Made]) -> None:
        """Add an answer of the model with its calls, and count the round.

        An answer without calls, or after ``MAX_ROUNDS``, sets ``text`` and ends the dialogue. Otherwise the
        calls run, and calls and results become messages.
        """
        self.rounds += 1
        self.made += calls
        if not calls or self.rounds == MAX_ROUNDS:
            self.text = text
            return
        entries: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for number, (name, given) in enumerate(calls):
            id_ = f"call_{self.rounds}_{number}"
            function = {"name": name, "arguments": json.dumps(given)}
            entries.append({"id": id_, "type": "function", "function": function})
            answer = run_call(self.problem, name, given)
            results.append({"role": "tool", "tool_call_id": id_, "content": answer})
        self.messages += [{"role": "assistant", "content": None, "tool_calls": entries}, *results]

    @property
    def calls_right(self) -> bool:
        """True if the calls made equal the calls of the solution, in order."""
        expected = self.problem.calls
        return len(self.made) == len(expected) and all(
            same_call(self.problem, call, *made) for call, made in zip(expected, self.made, strict=True)
        )

    @property
    def answer_right(self) -> bool:
        """True if the last text gives the problem's answer."""
        return self.text is not None and extract_answer(self.text) == self.problem.answer


def totals(dialogues: Iterable[Dialogue]) -> dict[str, int]:
    """Return the counts of right ``calls``, right ``answers``, ``both``, and all dialogues (``total``)."""
    pairs = [(one.calls_right, one.answer_right) for one in dialogues]
    return {
        "calls": sum(calls for calls, _ in pairs),
        "answers": sum(answer for _, answer in pairs),
        "both": sum(calls and answer for calls, answer in pairs),
        "total": len(pairs),
    }
