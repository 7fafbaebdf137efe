"""Names of published tensors, found from the checkpoint: the spelling of each role.

A weight map is written in one spelling (of Llama, where Llama has the role). ``spelled_as`` replaces the
spelling of each role by the spelling of the checkpoint. A checkpoint with two spellings of one role is
refused: two readings would fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from weft.common.errors import ConfigError
from weft.models.weights import WeightMap

_LAYER = re.compile(r"^((?:.*\.)?layers\.\d+\.)(.+)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Role:
    """A part of the names within a layer, with its spellings. The first is the spelling of the map."""

    what: str
    spellings: tuple[str, ...]
    before: str = "^"
    """Pattern of the name before the part."""
    after: str = r"\."
    """Pattern of the name after the part."""

    def pattern(self, spelling: str) -> re.Pattern[str]:
        """Return the pattern of a name within a layer in ``spelling``: before, part, after."""
        return re.compile(f"({self.before})({re.escape(spelling)})(?={self.after})")


_EXPERT = r"\.experts\.(?:\d+|N)\."
ROLES = (
    Role("feed-forward block", ("mlp", "block_sparse_moe")),
    Role("gate of an expert", ("gate_proj", "w1"), before=_EXPERT),
    Role("up matrix of an expert", ("up_proj", "w3"), before=_EXPERT),
    Role("down matrix of an expert", ("down_proj", "w2"), before=_EXPERT),
)


def spelled_as(weights: WeightMap, names: Collection[str], roles: Iterable[Role] = ROLES) -> WeightMap:
    """Return ``weights`` in the spellings of a checkpoint with tensors ``names``. Raise ConfigError."""
    prefixes = {m[1] for name in weights.placements if (m := _LAYER.match(name))}
    leaves = {_NUMBER.sub("N", m[2]) for name in names if (m := _LAYER.match(name)) and m[1] in prefixes}
    changes: list[tuple[re.Pattern[str], str]] = []
    for role in roles:
        present = [one for one in role.spellings if any(map(role.pattern(one).search, leaves))]
        if len(present) > 1:
            raise ConfigError(
                f"the checkpoint has two spellings of the {role.what}: {' and '.join(present)}",
                param="--model",
            )
        if present and present[0] != role.spellings[0]:
            changes.append((role.pattern(role.spellings[0]), rf"\g<1>{present[0]}"))
    return _renamed(weights, changes) if changes else weights


def _renamed(weights: WeightMap, changes: Iterable[tuple[re.Pattern[str], str]]) -> WeightMap:
    """Return ``weights`` with ``changes`` applied, in order, to the names within layers."""
    named = _renamer(tuple(changes))
    return WeightMap(
        {named(name): placed for name, placed in weights.placements.items()},
        [tuple(tuple(map(named, form)) for form in forms) for forms in weights.choices],
        {named(name): named(other) for name, other in weights.same_as.items()},
        weights.ignored,
    )


def _renamer(changes: Iterable[tuple[re.Pattern[str], str]]) -> Callable[[str], str]:
    def named(name: str) -> str:
        found = _LAYER.match(name)
        if found is None:
            return name
        leaf = found[2]
        for pattern, replacement in changes:
            leaf = pattern.sub(replacement, leaf)
        return found[1] + leaf

    return named
