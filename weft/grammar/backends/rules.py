"""Context-free grammars of clients: notation and limits."""

from __future__ import annotations

import re

from weft.common.errors import InvalidRequest

MAX_RULES = 500
"""Maximum number of rules. Backends recurse from rule to rule."""
_DIRECTIVES = frozenset({"ignore", "import"})
_SKIPPED = re.compile(r'"(?:[^"\\\n]|\\.)*"i?|/(?![/*])(?:[^/\\\n]|\\.)+/[a-z]*|//[^\n]*|#[^\n]*')
_DIRECTIVE = re.compile(r"%\s*([A-Za-z_]\w*)")
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_][\w.\-]*(?:\[[^\]]*\])?(?:\.-?\d+)?\s*(?:::=|:)", re.MULTILINE)


def is_gbnf(source: str) -> bool:
    """Return True for GBNF or another EBNF (``root ::= ...``), False for Lark (``start: ...``)."""
    return "::=" in _SKIPPED.sub(" ", source)


def check_rules(source: str) -> None:
    """Raise InvalidRequest for a grammar with too many rules, or with a reference outside the source.

    JSON schemas, options and other grammars inside the source would bypass their own checks.
    """
    plain = _SKIPPED.sub('""', source)
    if len(_RULE.findall(plain)) > MAX_RULES:
        raise InvalidRequest(f"the context-free grammar has more than {MAX_RULES} rules")
    for name in _DIRECTIVE.findall(plain):
        if name not in _DIRECTIVES:
            raise InvalidRequest(f"%{name} is not supported in a context-free grammar")
    if "@" in plain:
        raise InvalidRequest("@ (another grammar) is not supported in a context-free grammar")
    if "<[" in plain or "<~" in plain:
        raise InvalidRequest("token ids are not supported in a context-free grammar; name the token")
