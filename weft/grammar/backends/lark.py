"""Convert a lowered grammar to llguidance's dialect of Lark.

llguidance matches on two levels: terminals, by longest match, and rules over terminals. Any regular part
becomes *one* terminal, however deep the part's tree is. Longest match then applies only to the end of the
whole part. Before JSON or rules, a terminal takes the longest possible text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark as gbnf_to_lark

from weft.common.errors import InvalidRequest
from weft.grammar.backends.lowering import (
    GrammarChain,
    GrammarChoice,
    Json,
    Literal,
    Loop,
    Node,
    Pattern,
    Rules,
    Token,
    Until,
    is_regular,
)
from weft.grammar.backends.rules import check_rules, is_gbnf
from weft.grammar.json_schema.keywords import LLGUIDANCE
from weft.grammar.json_schema.schema import read_schema

_ANY = "/(?s:.*)/"
_SOME = "/(?s:.+)/"

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Any tokens may spell a text without alternatives. Without the option, the library calls the tokenizer."""

ALLOWED_ESCAPES = '"\\bfnrt'
"""Escapes allowed in a JSON string. Without ``\\u``, each text has one spelling, so that no key can imitate
another key."""


def to_lark(node: Node, controls: Mapping[str, int]) -> str:
    """Return ``node`` in llguidance's JSON form. ``controls``: text to id of control tokens. Raises
    InvalidRequest."""
    return _LarkWriter(controls).write(node)


class _LarkWriter:
    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        self._lines: list[str] = []
        self._nested: list[dict[str, Any]] = []
        self._names: dict[Node, str] = {}

    def write(self, node: Node) -> str:
        start = self._rule(node)
        source = "\n".join([_OPTIONS, f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": source}, *self._nested]})

    def _rule(self, node: Node) -> str:
        """Return an expression for use in rules.

        Parts become rules and terminals of their own, added to this writer. Raises InvalidRequest for an
        invalid schema or a rule that is not allowed.
        """
        if node == GrammarChain(()):
            return '""'
        # One terminal for the whole regular part: see the top of this file.
        if is_regular(node):
            return self._define("T", node, _terminal(node))
        match node:
            case Token():
                return f"<[{self._controls[node.text]}]>"
            case Json():
                return self._nest(node, {"json_schema": _schema_with_options(node)})
            case Rules():
                return self._nest(node, {"lark_grammar": _rules(node.source)})
            case GrammarChoice():
                return self._define("r", node, " | ".join(self._rule(part) for part in node.parts))
            case GrammarChain():
                return self._define("r", node, " ".join(map(self._rule, _merge(node.parts))))
            case Loop():
                return self._define("r", node, f"({self._rule(node.part)}){_times(node)}")
        raise AssertionError(node)

    def _define(self, kind: str, node: Node, text: str) -> str:
        """Return the name of the rule or terminal for ``node``. Equal nodes share a name."""
        if node not in self._names:
            self._names[node] = f"{kind}{len(self._names)}"
            self._lines.append(f"{self._names[node]}: {text}")
        return self._names[node]

    def _nest(self, node: Node, entry: dict[str, Any]) -> str:
        """Return the name of the nested grammar for ``node``. Equal nodes share a name."""
        if node not in self._names:
            self._names[node] = f"@n{len(self._names)}"
            self._nested.append({"name": self._names[node][1:], **entry})
        return self._names[node]


def _merge(parts: tuple[Node, ...]) -> list[Node]:
    """Return ``parts`` with each run of neighbouring regular parts as one part."""
    result: list[Node] = []
    run: list[Node] = []
    # The final None flushes the last run.
    for part in (*parts, None):
        if part is not None and is_regular(part):
            run.append(part)
            continue
        if run:
            result.append(run[0] if len(run) == 1 else GrammarChain(tuple(run)))
            run = []
        if part is not None:
            result.append(part)
    return result


def _times(loop: Loop) -> str:
    return f"{{{loop.least},{'' if loop.most is None else loop.most}}}"


def _terminal(node: Node) -> str:
    """Return a regular node as an expression for terminals."""
    match node:
        case Literal():
            return json.dumps(node.text, ensure_ascii=False)
        case Pattern():
            return _slashed(node.regex)
        case Until():
            return _until(node)
        case GrammarChoice():
            return "(" + " | ".join(map(_terminal, node.parts)) + ")"
        case GrammarChain():
            return "(" + " ".join(map(_terminal, node.parts)) + ")" if node.parts else '""'
        case Loop():
            return f"({_terminal(node.part)}){_times(node)}"
    raise AssertionError(node)


def _until(node: Until) -> str:
    """Return free text as a terminal: any text, minus the texts with a stop inside."""
    if not node.without:
        return f"({_ANY} {json.dumps(node.end)})" if node.end else _ANY
    stops = "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in node.without) + ")"
    if not node.end:
        return f"({_ANY} & ~({_ANY} {stops} {_ANY}))"
    end = json.dumps(node.end, ensure_ascii=False)
    return f"(({_ANY} {end}) & ~({_ANY} {stops} {_SOME}))"


def _slashed(regex: str) -> str:
    """Return a regular expression between slashes. Line breaks become escapes."""
    text = regex.replace("\n", "\\n").replace("\r", "\\r")
    result = ""
    escaped = False
    for char in text:
        result += "\\/" if char == "/" and not escaped else char
        escaped = char == "\\" and not escaped
    return f"/{result}/"


def _rules(source: str) -> str:
    """Return the Lark text for the library, with the library's options, from a client's Lark or GBNF text.

    Raises InvalidRequest for a rule that is not allowed, and for GBNF that cannot be read. Errors of the Lark
    text show only at the compile.
    """
    check_rules(source)
    if is_gbnf(source):
        try:
            source = gbnf_to_lark(source).replace("%llguidance {}", "")
        except Exception:  # the translation raises bare Exception, with internal names in the text
            raise InvalidRequest("the grammar cannot be read as GBNF") from None
    return f"{_OPTIONS}\n{source}"


WHITE_SPACE = r"( |\n[ \t]{0,16})?"
"""White space between two parts of a JSON value that is not compact: none, one blank, or a line end and
indentation. Without a bound, a model with a preference for white space would write white space forever."""


def _schema_with_options(node: Json) -> Any:
    """Return the schema with options for escapes and white space.

    The options overwrite any options in the client's schema. Raises InvalidRequest for an invalid or
    unsupported schema.
    """
    schema = read_schema(node.schema, LLGUIDANCE)
    if schema is True:
        schema = {}
    options: dict[str, Any] = {
        "json_allowed_escapes": ALLOWED_ESCAPES,
        "json_allow_general_unicode_escapes": False,
        "lenient": False,
        "coerce_one_of": False,
    }
    if node.compact:
        options.update(whitespace_flexible=False, item_separator=", ", key_separator=": ")
    else:
        options["whitespace_pattern"] = WHITE_SPACE
    return {**schema, "x-guidance": options}
