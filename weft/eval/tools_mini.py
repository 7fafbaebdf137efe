"""tools-mini: generated questions for a calculator tool, with the correct calls.

A problem is of one of three kinds. A bare problem offers tools and asks for a result ("What is 4821 + 377?").
A story problem tells a gsm-mini story, with usual or larger numbers; each step needs one call. The third kind
offers only useless tools: the answer is then worked out in the text, as without tools.

Held out of training are sentence templates and number pairs as in ``gsm_mini``, tool names, and some argument
names (see ``tools_words``). Every test problem has only held-out templates and held-out tools, and needs a
held-out pair. Training problems never have any of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from weft.eval.gsm_mini import Split, is_held_out_pair, pair_key
from weft.eval.gsm_plots import write_story
from weft.eval.gsm_story import Impossible, Op, Rng, Step, Story
from weft.eval.gsm_templates import TemplateGroup, group
from weft.eval.tools_words import OfferedTool, draw_offer, draw_others

TEST_SEED = 2026
SIGNS: dict[Op, str] = {"+": "+", "-": "-", "x": "*", "/": "/"}
FORMS = (*("N",) * 8, '{"result": N}', "N.0")
"""Result formats of tools. The first is by far the most frequent."""

_JOINS = ("", "Please help: ", "Hello, ", "Now ", "One question: ")
_TAILS = ("", " Use a tool.", " Use the tools.", " Thanks.", " Show the answer.")
_FRAMES = (
    "what is <v>?", "how much is <v>?", "find <v>.", "work out <v>.", "compute <v>.", "calculate <v>.",
    "what do you get for <v>?", "tell me what <v> is.", "I need <v>.", "can you tell me <v>?",
)  # fmt: skip


def _asks(name: str, *phrases: str) -> TemplateGroup:
    return group(name, _JOINS, _FRAMES, phrases, _TAILS)


ASKS: dict[Op, TemplateGroup] = {
    "+": _asks("ask-sum", "{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}"),
    "-": _asks("ask-less", "{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} less {b}"),
    "x": _asks(
        "ask-product", "{a} x {b}", "{a} * {b}", "{a}*{b}", "{a} times {b}", "the product of {a} and {b}"
    ),
    "/": _asks("ask-quotient", "{a} / {b}", "{a}/{b}", "{a} divided by {b}", "{a} over {b}"),
}
ASK_THREE = _asks("ask-three", "{a}")


@dataclass(frozen=True, slots=True)
class AskedCall:
    """One call of a solution, with the tool's result."""

    name: str
    arguments: dict[str, str | int]
    result: int


@dataclass(frozen=True, slots=True)
class ToolProblem:
    """A question with tools, the calls of the solution in order, and the text with the answer.

    ``form`` is the result format of the tools, with ``N`` for the number.
    """

    question: str
    tools: tuple[OfferedTool, ...]
    calls: tuple[AskedCall, ...]
    solution: str
    answer: int
    template_ids: tuple[str, ...]
    pairs: tuple[tuple[str, int, int], ...]
    form: str = "N"


class LargeStory(Story):
    """A story with numbers too large for mental arithmetic."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.largest = 10_000_000

    def amount(self) -> int:
        """Return a first amount."""
        return draw_number(self.rng, 2, 5)

    def more(self) -> int:
        """Return an amount to gain."""
        return draw_number(self.rng, 2, 5)

    def less(self) -> int:
        """Return an amount to take from the running value."""
        return self.rng.between(2, self.value - 1)

    def factors(self, limit: int = 0) -> tuple[int, int]:
        """Return two factors. Raises Impossible for a product above ``limit``; 0 means no limit."""
        small, large = draw_number(self.rng, 1, 2), draw_number(self.rng, 2, 3)
        if limit and small * large > limit:
            raise Impossible
        return (small, large) if self.rng.chance(0.5) else (large, small)


def draw_number(rng: Rng, least: int, most: int) -> int:
    """Return an integer above 1 with ``least`` to ``most`` digits. All digit counts are equally likely."""
    digits = rng.between(least, most)
    return max(2, rng.between(10 ** (digits - 1), 10**digits - 1))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A drafted question, before the check if the split may contain the question."""

    question: str
    steps: tuple[Step, ...]
    template_ids: tuple[str, ...]
    whole: str = ""  # the single expression for the call, if the steps are parts of one expression


def _draw_step(rng: Rng) -> Step:
    """Return a step with a random operation and random numbers."""
    op: Op = ("+", "+", "-", "-", "x", "x", "/")[rng.below(7)]
    if op == "/":
        b = draw_number(rng, 1, 3)
        return Step("/", b * draw_number(rng, 2, 4), b)
    if op == "x":
        return Step("x", draw_number(rng, 2, 5), draw_number(rng, 1, 4))
    a, b = draw_number(rng, 2, 6), draw_number(rng, 1, 6)
    return Step("-", max(a, b) + 1, min(a, b)) if op == "-" else Step("+", a, b)


def _write(rng: Rng, held_out: bool, asks: TemplateGroup, **slots: int | str) -> tuple[str, str]:
    """Return (question, id of the template) from the given side of ``asks``."""
    template = rng.pick(asks.test if held_out else asks.train)
    text = template.text
    for key, value in slots.items():
        text = text.replace("{" + key + "}", str(value))
    return text[0].upper() + text[1:], template.id


def _bare(rng: Rng, held_out: bool) -> _Draft:
    step = _draw_step(rng)
    text, template = _write(rng, held_out, ASKS[step.op], a=step.a, b=step.b)
    return _Draft(text, (step,), (template,))


def _three(rng: Rng, held_out: bool) -> _Draft:
    """Draft a question with three numbers and two operations, answered by one expression."""
    a, b, c = draw_number(rng, 2, 4), draw_number(rng, 2, 4), draw_number(rng, 1, 3)
    roll = rng.below(4)
    if roll == 0:
        first, second, text = Step("+", a, b), Step("+", a + b, c), f"{a} + {b} + {c}"
    elif roll == 1:
        first, second, text = Step("x", b, c), Step("+", a, b * c), f"{a} + {b} x {c}"
    elif roll == 2:
        first, second, text = Step("+", a, b), Step("x", a + b, c), f"({a} + {b}) x {c}"
    else:
        first, second, text = Step("+", a, b), Step("-", a + b, min(a, c)), f"{a} + {b} - {min(a, c)}"
    question, template = _write(rng, held_out, ASK_THREE, a=text)
    return _Draft(question, (first, second), (template,), text.replace("x", "*"))


def _tale(rng: Rng, held_out: bool, kind: type[Story]) -> _Draft:
    story = write_story(rng, held_out, kind)
    if kind is LargeStory and len(story.steps) > 2:
        raise Impossible
    return _Draft(story.question(), tuple(story.steps), tuple(story.template_ids))


def call_of(step: Step, tools: tuple[OfferedTool, ...]) -> AskedCall:
    """Return the call that works out a step with one of ``tools``. Raises Impossible without such a tool."""
    for tool in tools:
        names = [name for name, _ in tool.arguments]
        if tool.kind == "expression":
            return AskedCall(tool.name, {names[0]: f"{step.a} {SIGNS[step.op]} {step.b}"}, step.result)
        if tool.kind == step.op:
            return AskedCall(tool.name, {names[0]: step.a, names[1]: step.b}, step.result)
    raise Impossible


def _solve(draft: _Draft, tools: tuple[OfferedTool, ...], form: str) -> ToolProblem:
    """Return the problem with the calls possible with ``tools``.

    If no tool helps, the solution is the worked text. Raises Impossible if the tools fit only partly.
    """
    last = draft.steps[-1].result
    calls: tuple[AskedCall, ...] = ()
    solution = f"#### {last}"
    helpless = all(tool.kind == "other" for tool in tools)
    if helpless:
        solution = "\n".join([*(step.text() for step in draft.steps), solution])
    elif draft.whole:
        tool = next((tool for tool in tools if tool.kind == "expression"), None)
        if tool is None:
            raise Impossible
        calls = (AskedCall(tool.name, {tool.arguments[0][0]: draft.whole}, last),)
    else:
        calls = tuple(call_of(step, tools) for step in draft.steps)
    # Only a worked text shows the inner additions of a step.
    parts = [part for step in draft.steps for part in (step, *(step.parts() if helpless else ()))]
    pairs = tuple(pair_key(part.op, part.a, part.b) for part in parts)
    return ToolProblem(draft.question, tools, calls, solution, last, draft.template_ids, pairs, form)


def _draw(rng: Rng, held_out: bool, given: tuple[OfferedTool, ...] = ()) -> ToolProblem:
    """Draw a problem of any kind, with the ``given`` tools or with drawn tools.

    Raises Impossible if the draws do not fit.
    """
    # Shares: 44 bare, 10 with three numbers, 18 large stories, 20 stories, 8 stories without a useful tool.
    roll = rng.below(92 if given else 100)
    if roll < 44:
        draft = _bare(rng, held_out)
    elif roll < 54:
        draft = _three(rng, held_out)
    else:
        draft = _tale(rng, held_out, LargeStory if roll < 72 else Story)
    ops = tuple(step.op for step in draft.steps)
    tools = given
    if not tools:
        tools = draw_others(rng, held_out, least=1) if roll >= 92 else draw_offer(rng, ops, held_out)
    return _solve(draft, tools, FORMS[rng.below(len(FORMS))])


def tool_problems(split: Split, seed: int) -> Iterator[ToolProblem]:
    """Yield problems of a split forever, in an order fixed by ``seed``."""
    rng = Rng(f"tools-mini {split} {seed}")
    while True:
        problem = _attempt(rng, split == "test")
        if problem is not None:
            yield problem


def _attempt(rng: Rng, held_out: bool, given: tuple[OfferedTool, ...] = ()) -> ToolProblem | None:
    """Return a drawn problem of the right side.

    Return None if the draws do not fit, or belong to the other side.
    """
    try:
        problem = _draw(rng, held_out, given)
    except Impossible:
        return None
    return problem if any(is_held_out_pair(*pair) for pair in problem.pairs) is held_out else None


def another(rng: Rng, tools: tuple[OfferedTool, ...]) -> ToolProblem | None:
    """Return a training problem for the same tools, or None if none of 20 draws fits."""
    if all(tool.kind == "other" for tool in tools):
        return None
    return next((made for _ in range(20) if (made := _attempt(rng, False, tools)) is not None), None)


@cache
def _test_problems(n: int) -> tuple[ToolProblem, ...]:
    """Return the first ``n`` distinct problems of the fixed test set."""
    seen: dict[str, ToolProblem] = {}
    for problem in tool_problems("test", TEST_SEED):
        seen.setdefault(problem.question, problem)
        if len(seen) == n:
            break
    return tuple(seen.values())


def tool_test_set(n: int = 500) -> list[ToolProblem]:
    """Return the first ``n`` distinct problems of the fixed test set."""
    return list(_test_problems(n))
