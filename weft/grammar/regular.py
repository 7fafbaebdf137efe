"""Context-free grammars of clients that are regular, as one pattern.

A pattern can stand in a JSON schema, so a tool's text can be held to it inside of JSON. A grammar in Lark's
notation is regular here if no rule leads to itself.
"""

from __future__ import annotations

import json
import re

MAX_PATTERN = 16 << 10
"""Characters of a pattern. Rules that use rules many times grow without it."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"(?!i))
    |(?P<regex>/(?![/*])(?:[^/\\\n]|\\.)+/(?![a-z]))
    |(?P<import>%import\s+common\.(?P<known>\w+)(?:\s*->\s*(?P<as>\w+))?)
    |(?P<alias>->\s*\w+)
    |(?P<rule>[?!]?(?P<defined>[A-Za-z_]\w*)(?:\.-?\d+)?\s*:)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<times>[?*+]|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\d*,?\d*\})
    |(?P<mark>[|()\[\]])""",
    re.VERBOSE,
)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "LETTER": "[A-Za-z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
}
_SPECIAL = frozenset("\\^$.|?*+()[]{}/-")


def regular_pattern(source: str) -> str | None:
    """The pattern of the whole text that a grammar in Lark's notation takes.

    None where a rule leads to itself, and for notation that is not read here (``%ignore``, templates, flags).
    """
    rules = _rules(source)
    if rules is None or "start" not in rules:
        return None
    try:
        return f"^(?:{_Writer(rules).rule('start')})$"
    except (_NotRegularError, RecursionError):
        return None


class _NotRegularError(Exception):
    """No pattern has the same texts."""


def _rules(source: str) -> dict[str, list[tuple[str, str]]] | None:
    """Rules by name, each a list of (kind, text); None for notation that is not read."""
    rules: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] | None = None
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            return None
        at = found.end()
        kind = next(name for name in _KINDS if found[name] is not None)
        if kind == "import":
            known = _COMMON.get(found["known"])
            if known is None:
                return None
            rules[found["as"] or found["known"]] = [("pattern", known)]
            current = None
        elif kind == "rule":
            current = rules.setdefault(found["defined"], [])
            if current:
                return None
        elif kind not in ("space", "alias"):
            if current is None:
                return None
            current.append((kind, found[0]))
    return rules


_KINDS = ("space", "text", "regex", "import", "alias", "rule", "name", "times", "mark")


class _Writer:
    """Writes rules as patterns, each once."""

    def __init__(self, rules: dict[str, list[tuple[str, str]]]) -> None:
        self._rules = rules
        self._made: dict[str, str | None] = {}
        """Patterns of rules; None while a rule is being written."""

    def rule(self, name: str) -> str:
        if name not in self._made:
            if name not in self._rules:
                raise _NotRegularError
            self._made[name] = None
            items = list(reversed(self._rules[name]))
            made = self._either(items)
            if items or len(made) > MAX_PATTERN:
                raise _NotRegularError
            self._made[name] = made
        known = self._made[name]
        if known is None:
            raise _NotRegularError
        return known

    def _either(self, items: list[tuple[str, str]]) -> str:
        """Alternatives, up to a closing bracket. ``items``: last one first; those that are read are taken."""
        options, total = [""], 0
        while items and items[-1] not in (("mark", ")"), ("mark", "]")):
            kind, text = items.pop()
            if (kind, text) == ("mark", "|"):
                options.append("")
                continue
            one = self._item(kind, text, items)
            while items and items[-1][0] == "times":
                one = _group(one) + _times(items.pop()[1])
            options[-1] += one
            total += len(one)
            if total > MAX_PATTERN:
                raise _NotRegularError
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _item(self, kind: str, text: str, items: list[tuple[str, str]]) -> str:
        if kind == "text":
            try:
                return "".join(f"\\{char}" if char in _SPECIAL else char for char in json.loads(text))
            except ValueError:
                raise _NotRegularError from None
        if kind == "regex":
            return _group(text[1:-1].replace("\\/", "/"))
        if kind == "pattern":
            return _group(text)
        if kind == "name":
            return _group(self.rule(text))
        if kind == "mark" and text in "([":
            inner = _group(self._either(items))
            if not items or items.pop()[1] != (")" if text == "(" else "]"):
                raise _NotRegularError
            return inner if text == "(" else inner + "?"
        raise _NotRegularError


def _group(pattern: str) -> str:
    """``pattern`` as one item."""
    if len(pattern) == 1 or re.fullmatch(r"\\.|\[[^\[\]\\]*\]|\(\?:[^()]*\)", pattern):
        return pattern
    return f"(?:{pattern})"


def _times(text: str) -> str:
    if text[0] != "~":
        return text
    least, _, most = text[1:].replace(" ", "").partition("..")
    return f"{{{least},{most}}}" if most else f"{{{least}}}"
