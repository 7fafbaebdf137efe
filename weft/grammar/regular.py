"""Convert regular context-free grammars of clients to one pattern.

A pattern can stand in a JSON schema, so a grammar can constrain a tool's text inside JSON. A grammar in
Lark's notation counts as regular here if no rule leads to itself.
"""

from __future__ import annotations

import json
import re

MAX_PATTERN = 16 << 10
"""Maximum characters of a pattern. Rules with many uses of other rules grow without this limit."""
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
    """Return the pattern of the whole texts accepted by a grammar in Lark's notation.

    Return None if a rule leads to itself, for unsupported notation (``%ignore``, templates, flags), and for a
    pattern longer than ``MAX_PATTERN``.
    """
    rules = _rules(source)
    if rules is None or "start" not in rules:
        return None
    try:
        return f"^(?:{_Writer(rules).rule('start')})$"
    except (_NotRegularError, RecursionError):
        return None


class _NotRegularError(Exception):
    """No pattern accepts the same texts."""


def _rules(source: str) -> dict[str, list[tuple[str, str]]] | None:
    """Return the rules by name, each a list of (kind, text); None for unsupported notation."""
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
            # The rule is defined twice, or a common terminal has the same name.
            if current:
                return None
        elif kind not in ("space", "alias"):
            if current is None:
                return None
            current.append((kind, found[0]))
    return rules


_KINDS = ("space", "text", "regex", "import", "alias", "rule", "name", "times", "mark")


class _Writer:
    """Writes rules as patterns, each rule once."""

    def __init__(self, rules: dict[str, list[tuple[str, str]]]) -> None:
        self._rules = rules
        self._made: dict[str, str | None] = {}
        """Patterns of rules by name; None while the rule is being written."""

    def rule(self, name: str) -> str:
        """Return the pattern of a rule. Raise _NotRegularError for an unknown or recursive rule."""
        if name not in self._made:
            if name not in self._rules:
                raise _NotRegularError
            self._made[name] = None
            items = list(reversed(self._rules[name]))
            made = self._either(items)
            if items or len(made) > MAX_PATTERN:
                raise _NotRegularError
            self._made[name] = made
        # None: the rule is being written further up the call stack, so the rule is recursive.
        known = self._made[name]
        if known is None:
            raise _NotRegularError
        return known

    def _either(self, items: list[tuple[str, str]]) -> str:
        """Read alternatives up to a closing bracket and return their pattern.

        ``items`` is in reverse order; read items are removed. Raises _NotRegularError, also for a pattern
        longer than ``MAX_PATTERN``.
        """
        options, total = [""], 0
        while items and items[-1] not in (("mark", ")"), ("mark", "]")):
            kind, text = items.pop()
            if (kind, text) == ("mark", "|"):
                options.append("")
                continue
            one = self._item(kind, text, items)
            # Several repetitions in a row apply one after another.
            while items and items[-1][0] == "times":
                one = _group(one) + _times(items.pop()[1])
            options[-1] += one
            total += len(one)
            if total > MAX_PATTERN:
                raise _NotRegularError
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _item(self, kind: str, text: str, items: list[tuple[str, str]]) -> str:
        """Return the pattern of one item.

        A bracket also removes its content from ``items``. Raise _NotRegularError for an item without a
        pattern.
        """
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
            # Square brackets mean an optional part in Lark.
            inner = _group(self._either(items))
            if not items or items.pop()[1] != (")" if text == "(" else "]"):
                raise _NotRegularError
            return inner if text == "(" else inner + "?"
        raise _NotRegularError


def _group(pattern: str) -> str:
    """Return ``pattern`` as a single unit for a following repetition."""
    if len(pattern) == 1 or re.fullmatch(r"\\.|\[[^\[\]\\]*\]|\(\?:[^()]*\)", pattern):
        return pattern
    return f"(?:{pattern})"


def _times(text: str) -> str:
    """Return a repetition of Lark as a suffix of a pattern."""
    if text[0] != "~":
        return text
    least, _, most = text[1:].replace(" ", "").partition("..")
    return f"{{{least},{most}}}" if most else f"{{{least}}}"
