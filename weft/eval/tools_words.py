"""The tools of tools-mini: names, arguments, and the held-out side.

The name of a useful tool is (stem, word, word), with optional words. The name of a useless tool is (verb,
noun). A hash of the name puts about one in six names on the test side, and a hash of the argument names does
the same. The plain names (``calculator``, ``add`` ...), which a reader would try first, are always on the
training side.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from weft.eval import gsm_words as words
from weft.eval.gsm_story import Impossible, Op, Rng
from weft.eval.gsm_templates import stable_hash

Kind = Literal["expression", "+", "-", "x", "/", "other"]
Arguments = tuple[tuple[str, str], ...]

HELD_OUT_NAME_MODULUS = 6
MADE_UP_SHARE = 0.7  # share of the training tools with made-up names


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """An offered tool: name, computation, and argument names with JSON types, in order."""

    name: str
    kind: Kind
    arguments: Arguments

    def declaration(self) -> dict[str, Any]:
        """Return the tool in the format of ``tools`` in chat completions."""
        parameters = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.arguments},
            "required": [name for name, _ in self.arguments],
        }
        function = {"name": self.name, "description": _DESCRIPTIONS[self.kind], "parameters": parameters}
        return {"type": "function", "function": function}


_DESCRIPTIONS: dict[Kind, str] = {
    "expression": "Evaluates an arithmetic expression.",
    "+": "Adds two numbers.",
    "-": "Subtracts the second number from the first.",
    "x": "Multiplies two numbers.",
    "/": "Divides the first number by the second.",
    "other": "Something else.",
}
_STEMS: dict[Kind, tuple[str, ...]] = {
    "expression": ("calculator", "calculate", "calc", "compute", "evaluate", "eval", "math", "arithmetic"),
    "+": ("add", "plus", "sum", "addition"),
    "-": ("subtract", "minus", "difference", "sub"),
    "x": ("multiply", "times", "product", "mul"),
    "/": ("divide", "div", "quotient", "division"),
}
_WORDS = (
    "numbers", "two", "values", "tool", "v2", "it", "exact", "all", "fn", "ints", "pair", "op", "now", "safe",
    "fast", "api", "helper", "v1", "simple", "result",
)  # fmt: skip
_SUFFIXES = ("", *(f"_{word}" for word in _WORDS))
_VERBS = ("get", "find", "read", "send", "show", "play", "open", "list", "make", "search", "set", "look_up")
_NOUNS = (
    "weather", "time", "mail", "file", "music", "page", "news", "price", "map", "event", "user", "photo",
    "word", "contact", "report", "alarm", "flight", "recipe", "number", "date",
)  # fmt: skip
_EXPRESSION_NAMES = ("expression", "expr", "formula", "input", "equation", "problem", "calculation", "text")
_PAIR_NAMES = (
    ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"), ("lhs", "rhs"),
    ("one", "two"), ("num1", "num2"), ("a1", "a2"), ("u", "v"), ("p", "q"), ("value", "other"), ("i", "j"),
    ("start", "end"),
)  # fmt: skip
_OTHER_NAMES = (
    "city", "name", "path", "query", "topic", "place", "url", "day", "title", "id", "language", "limit",
    "unit",
)  # fmt: skip
_NUMBER_TYPES = ("number", "integer")
_CONSONANTS = "bcdfghjklmnprstvwxz"
_LETTERS = "aaabccddeeeeffgghhiiijkllllmmnnnnooooppqrrrrssssttttuuuvwxyz"


def is_held_out_name(name: str) -> bool:
    """Return True if a tool's name belongs to the test side."""
    if name in _PLAIN_NAMES:
        return False
    return stable_hash("tools-mini name " + name) % HELD_OUT_NAME_MODULUS == 0


def are_held_out_arguments(names: tuple[str, ...]) -> bool:
    """Return True if the argument names of a useful tool belong to the test side."""
    if names in (("expression",), ("a", "b")):
        return False
    return stable_hash("tools-mini arguments " + " ".join(names)) % HELD_OUT_NAME_MODULUS == 0


_PLAIN_NAMES = frozenset(stems[0] for stems in _STEMS.values())
_NAMES: dict[tuple[Kind, bool], list[str]] = {}
for _kind, _stems in _STEMS.items():
    _all = ["".join(parts) for parts in itertools.product(_stems, _SUFFIXES, _SUFFIXES)]
    _all = list(dict.fromkeys(name for name in _all if len(set(parts := name.split("_"))) == len(parts)))
    for _side in (False, True):
        _NAMES[_kind, _side] = [name for name in _all if is_held_out_name(name) is _side]
for _side in (False, True):
    _all = [f"{verb}_{noun}" for verb, noun in itertools.product(_VERBS, _NOUNS)]
    _NAMES["other", _side] = [name for name in _all if is_held_out_name(name) is _side]


def _syllables(rng: Rng) -> str:
    return "".join(rng.pick(_CONSONANTS) + rng.pick("aeiou") for _ in range(rng.between(1, 3)))


def _letters(rng: Rng) -> str:
    return "".join(rng.pick(_LETTERS) for _ in range(rng.between(1, rng.pick((2, 4, 7)))))


def _piece(rng: Rng) -> str:
    """Return a word of the stories, or a part of such a word."""
    word = rng.pick(words.THINGS + words.FOODS + words.CONTAINERS)
    begin = rng.below(len(word) - 2) if rng.chance(0.4) else 0
    return word[begin : begin + rng.between(2, 7)]


def _word(rng: Rng) -> str:
    """Return a made-up word of letters, syllables or word parts, so that tokenizers split the words in many
    ways.
    """
    parts = [(_letters, _syllables, _piece)[rng.below(3)](rng) for _ in range(1 + rng.chance(0.25))]
    return "".join(parts)[:10] + (str(rng.below(10)) if rng.chance(0.2) else "")


def _made_up(rng: Rng, kind: Kind) -> OfferedTool:
    """Return a training tool with partly made-up names, which a model can only copy. Raises Impossible for
    held-out names.
    """
    if kind == "other":
        name = f"{_word(rng)}_{rng.pick(_NOUNS)}"
    else:
        after = [rng.pick(_WORDS) if rng.chance(0.2) else _word(rng) for _ in range(rng.between(0, 2))]
        name = "_".join([rng.pick(_STEMS[kind]), *after])
    names = tuple(_word(rng) for _ in range(1 if kind == "expression" else 2))
    # Some pairs differ only in a final digit.
    if len(names) == 2 and rng.chance(0.2):
        names = (f"{names[0]}1", f"{names[0]}2")
    types: tuple[str, ...] = _NUMBER_TYPES if kind in ("+", "-", "x", "/") else ("string",)
    if kind == "other":
        types = ("string", *_NUMBER_TYPES)
    if is_held_out_name(name) or are_held_out_arguments(names) or len(set(names)) < len(names):
        raise Impossible
    of = rng.pick(types)
    return OfferedTool(name, kind, tuple((name, of) for name in names))


def draw_tool(rng: Rng, kind: Kind, held_out: bool) -> OfferedTool:
    """Return a tool of a kind. On the test side the name is held out, and the argument names sometimes are.

    Raises Impossible if two drawn argument names are equal.
    """
    if not held_out and rng.chance(MADE_UP_SHARE):
        return _made_up(rng, kind)
    # Plain tools have the first name and the first argument names of their kind.
    plain = not held_out and kind != "other" and rng.chance(0.2)
    name = _STEMS[kind][0] if plain else rng.pick(_NAMES[kind, held_out])
    if kind == "other":
        count = 1 if rng.chance(0.7) else 2
        names = [rng.pick(_OTHER_NAMES) for _ in range(count)]
        if len(set(names)) < count:
            raise Impossible
        types = ["string" if rng.chance(0.8) else "number" for _ in names]
        return OfferedTool(name, kind, tuple(zip(names, types, strict=True)))
    choices = [(name,) for name in _EXPRESSION_NAMES] if kind == "expression" else list(_PAIR_NAMES)
    chosen: tuple[str, ...] = choices[0]
    if not plain:
        chosen = rng.pick([names for names in choices if held_out or not are_held_out_arguments(names)])
    of = "string" if kind == "expression" else _NUMBER_TYPES[rng.below(2)]
    return OfferedTool(name, kind, tuple((name, of) for name in chosen))


def draw_others(rng: Rng, held_out: bool, least: int = 0) -> tuple[OfferedTool, ...]:
    """Return up to two useless tools, at least ``least``, with distinct names. Raises Impossible for equal
    names.
    """
    count = max(least, (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)[rng.below(10)])
    tools = tuple(draw_tool(rng, "other", held_out) for _ in range(count))
    if len({tool.name for tool in tools}) < count:
        raise Impossible
    return tools


def draw_offer(rng: Rng, needed: tuple[Op, ...], held_out: bool) -> tuple[OfferedTool, ...]:
    """Return tools for the operations of a problem, together with useless tools, in random order.

    Raises Impossible for equal names or more than five tools.
    """
    if rng.chance(0.6):
        tools = [draw_tool(rng, "expression", held_out)]
    else:
        kinds: list[Op] = [op for op in ("+", "-", "x", "/") if op in needed or rng.chance(0.2)]
        tools = [draw_tool(rng, op, held_out) for op in kinds]
    tools += draw_others(rng, held_out)
    if len(tools) > 5 or len({tool.name for tool in tools}) < len(tools):
        raise Impossible
    # Fisher-Yates with ``Rng``, whose draws are stable across Python versions.
    for i in range(len(tools) - 1, 0, -1):
        j = rng.below(i + 1)
        tools[i], tools[j] = tools[j], tools[i]
    return tuple(tools)
