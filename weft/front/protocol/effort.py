"""Reasoning effort and reasoning switches, as variables of a chat template."""

from __future__ import annotations

import re
from typing import Any

from weft.common.errors import InvalidRequest

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts, lowest first."""
_SWITCHES = ("enable_thinking", "thinking")


def effort_variables(effort: str, source: str, thinks: bool = True) -> dict[str, Any]:
    """Return name to value of the variables for ``reasoning_effort`` in the template ``source``.

    A template has a variable of that name, a variable that switches reasoning, both or neither. Without a
    variable, only the model's default can be requested: medium, and none for a model without reasoning. The
    result is then empty. Raises InvalidRequest otherwise.
    """
    found: dict[str, Any] = {}
    switches = [name for name in _SWITCHES if _mentions(source, name)]
    if _mentions(source, "reasoning_effort") and not (
        # A template with a switch may reject the word "none".
        effort == "none" and switches and not _quotes(source, "none")
    ):
        found["reasoning_effort"] = _known_effort(effort, source)
    for name in switches:
        found[name] = effort != "none"
    if not found and effort != "medium" and (thinks or effort != "none"):
        raise InvalidRequest(
            "this model's chat template has no setting for reasoning_effort; leave reasoning_effort out, or "
            "set it to medium (the model's default)",
            param="reasoning_effort",
        )
    return found


def switch_variables(on: bool, source: str, thinks: bool = True) -> dict[str, Any]:
    """Return the variables that switch reasoning on or off in the template ``source``.

    A model without such a variable always or never reasons: a request to switch reasoning on has no effect.
    Raises InvalidRequest, naming ``enable_thinking``, if reasoning cannot be switched off.
    """
    found = {name: on for name in _SWITCHES if _mentions(source, name)}
    if found or on or not thinks:
        return found
    if _mentions(source, "reasoning_effort") and _quotes(source, "none"):
        return {"reasoning_effort": "none"}
    raise InvalidRequest(
        "this model's chat template has no setting to switch reasoning off; leave enable_thinking out",
        param="enable_thinking",
    )


def _known_effort(effort: str, source: str) -> str:
    """Return the template's level for ``effort``.

    A template with a list of levels gets the lowest level at or above the effort, or the highest level.
    Other templates get the effort itself, except xhigh and max. For these two, the template gets the nearest
    of the two levels in its text, otherwise high, the maximum known to every model.
    """
    if effort not in LEVELS:
        return effort
    # The list in a check such as `reasoning_effort not in ["low", "high"]`.
    listed = re.search(r"\breasoning_effort\s+not\s+in\s*[\[(]([^\])]*)[\])]", source)
    known = [level for level in LEVELS if _quotes(source if listed is None else listed[1], level)]
    if listed is None and effort not in ("xhigh", "max"):
        return effort
    if listed is None:
        known = [level for level in known if level in ("xhigh", "max")]
    enough = [level for level in known if LEVELS.index(level) >= LEVELS.index(effort)]
    return (enough[:1] or known[-1:] or ["high"])[0]


def _quotes(source: str, word: str) -> bool:
    return re.search(rf"['\"]{word}['\"]", source) is not None


def _mentions(source: str, name: str) -> bool:
    """Return True if a template reads a variable: not a field of an object, and not a quoted word."""
    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])(?!\s*=[^=])", source) is not None
