"""Efforts and switches of thinking, as the variables of a chat template."""

from __future__ import annotations

import re
from typing import Any

from weft.common.errors import InvalidRequest

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""From the least effort to the most."""
_SWITCHES = ("enable_thinking", "thinking")


def effort_variables(effort: str, source: str, thinks: bool = True) -> dict[str, Any]:
    """The variables that ``reasoning_effort`` sets in the template ``source``.

    Templates have a variable of that name, or one that switches thinking on and off. Where there is neither,
    only what the model does by itself can be asked for: medium, and none of one that does not think. Raises
    InvalidRequest otherwise.
    """
    found: dict[str, Any] = {}
    switches = [name for name in _SWITCHES if _mentions(source, name)]
    if _mentions(source, "reasoning_effort") and not (
        # A template with a switch may refuse the word.
        effort == "none" and switches and not _quotes(source, "none")
    ):
        found["reasoning_effort"] = _known_effort(effort, source)
    for name in switches:
        found[name] = effort != "none"
    if not found and effort != "medium" and (thinks or effort != "none"):
        raise InvalidRequest(
            "this model's chat template has no variable for reasoning_effort: only medium, what the model "
            "does by itself, can be asked for",
            param="reasoning_effort",
        )
    return found


def switch_variables(on: bool, source: str, thinks: bool = True) -> dict[str, Any]:
    """The variables that switch thinking ``on`` or off in the template ``source``.

    Without any, a model thinks or does not as it was made: asking it to think has no effect. Raises
    InvalidRequest, naming ``enable_thinking``, for a model whose thinking cannot be switched off.
    """
    found = {name: on for name in _SWITCHES if _mentions(source, name)}
    if found or on or not thinks:
        return found
    if _mentions(source, "reasoning_effort") and _quotes(source, "none"):
        return {"reasoning_effort": "none"}
    raise InvalidRequest(
        "this model's chat template has no variable for enable_thinking: it cannot be switched off",
        param="enable_thinking",
    )


def _known_effort(effort: str, source: str) -> str:
    """The level that a template has for ``effort``.

    A template that lists its levels gets the lowest one that is not less, else its highest. Others get the
    level as it is, except that high is the most which every model has learned: beyond it goes a template
    alone that names the level.
    """
    if effort not in LEVELS:
        return effort
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
    """Whether a template reads a variable: not a field of something, and not a word in quotes."""
    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])(?!\s*=[^=])", source) is not None
