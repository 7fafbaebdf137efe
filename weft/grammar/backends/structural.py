"""Convert a lowered grammar to a structural tag of xgrammar, which matches bytes and tokens without a
lexer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
)
from weft.grammar.json_schema.patterns import ECMA, whole_pattern

MARK = "\x01weft\x01"
"""Part of the bytes of every control token, and excluded from free text: xgrammar does not require UTF-8 in
free text."""


def to_format(
    node: Node,
    controls: Mapping[str, int],
    json_format: Callable[[Json], dict[str, Any]],
    client_rules: Callable[[str], str],
) -> dict[str, Any]:
    """Return the structural-tag format of ``node``.

    ``json_format`` returns the format of a JSON value, ``client_rules`` the EBNF of a client's grammar.
    Raises InvalidRequest for a part that xgrammar cannot express.
    """

    def convert(part: Node) -> dict[str, Any]:
        match part:
            case Literal():
                return {"type": "const_string", "value": part.text}
            case Token():
                return {"type": "token", "token": controls[part.text]}
            case Until():
                return _until(part)
            case Pattern():
                return {"type": "regex", "pattern": whole_pattern(f"^(?:{part.regex})$", ECMA)}
            case Json():
                return json_format(part)
            case Rules():
                return {"type": "grammar", "grammar": client_rules(part.source)}
            case GrammarChoice():
                return {"type": "or", "elements": [convert(inner) for inner in part.parts]}
            case GrammarChain():
                if not part.parts:
                    return {"type": "const_string", "value": ""}
                return {"type": "sequence", "elements": [convert(inner) for inner in part.parts]}
            case Loop():
                most = -1 if part.most is None else part.most
                return {"type": "repeat", "min": part.least, "max": most, "content": convert(part.part)}
        raise AssertionError(part)

    return convert(node)


def _until(node: Until) -> dict[str, Any]:
    """Return the format of free text. Raises InvalidRequest for an end that overlaps with itself."""
    without = [text for text in node.without if text != node.end]
    text = {"type": "any_text", "excludes": [MARK, *without]}
    if not node.end:
        return text
    # After a partial match, xgrammar does not look for an end that began inside the partial match.
    if any(node.end.startswith(node.end[cut:]) for cut in range(1, len(node.end))):
        raise InvalidRequest(
            f"xgrammar does not support free text that ends with {node.end!r}, because this end overlaps "
            "with itself; use --grammar-backend llguidance"
        )
    return {"type": "tag", "begin": "", "content": text, "end": node.end}
