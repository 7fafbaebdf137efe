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

_NAME = re.compile(r"^((?:.*\.)?layers\.\d+\.|(?:.*\.)?(?=[^.]+\.[^.]+$))(.+)$")
"""(part of the layer, or prefix of the model; rest of the name)."""
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
        return re.compile(f"({self.before}){re.escape(spelling)}(?={self.after})")


_BLOCK = r"^(?:mlp|block_sparse_moe|feed_forward)\."
_EXPERT = r"\.experts\.(?:\d+|N)\."
_SHARED = r"^(?:mlp\.shared_experts|mlp\.shared_mlp|shared_mlp)\."
ROLES = (
    # Parts of a block stand before the block: the patterns read the names in the map's spelling.
    Role("gate and up of the shared experts", ("gate_up_proj", "input_linear"), before=_SHARED),
    Role("down matrix of the shared experts", ("down_proj", "output_linear"), before=_SHARED),
    Role(
        "shared experts",
        (
            "mlp.shared_experts",
            "mlp.shared_expert",
            "mlp.shared_mlp",
            "shared_mlp",
            "feed_forward.shared_expert",
        ),
    ),
    Role("gate of the shared expert", ("mlp.shared_experts_gate", "mlp.shared_expert_gate")),
    Role("gate and up of all experts", ("experts.gate_up_proj", "input_linear.weight"), _BLOCK, "$"),
    Role("down matrices of all experts", ("experts.down_proj", "output_linear.weight"), _BLOCK, "$"),
    Role("gate of an expert", ("gate_proj", "w1"), _EXPERT),
    Role("up matrix of an expert", ("up_proj", "w3"), _EXPERT),
    Role("down matrix of an expert", ("down_proj", "w2"), _EXPERT),
    Role("router", ("gate", "router.layer", "gate.wg", "router"), _BLOCK, r"\.weight$"),
    Role(
        "correction of the router",
        ("gate.e_score_correction_bias", "e_score_correction_bias", "moe_statics.e_score_correction_bias"),
        _BLOCK,
        "$",
    ),
    Role("feed-forward block", ("mlp", "block_sparse_moe", "feed_forward")),
    Role("norm of queries", ("q_norm", "query_layernorm", "q_layernorm"), r"^self_attn\."),
    Role("output matrix of attention", ("o_proj", "dense"), r"^self_attn\."),
    Role("first matrix of the feed-forward", ("up_proj", "c_fc", "fc1"), r"^mlp\."),
    Role("second matrix of the feed-forward", ("down_proj", "c_proj", "fc2"), r"^mlp\."),
    Role("norm before attention", ("input_layernorm", "attention_layernorm")),
    Role(
        "norm before the feed-forward",
        ("post_attention_layernorm", "pre_feedforward_layernorm", "feedforward_layernorm"),
    ),
    Role("last norm", ("norm", "final_layernorm"), after=r"\.(?:weight|bias)$"),
    Role("norm of keys", ("k_norm", "key_layernorm", "k_layernorm"), r"^self_attn\."),
)

#: Name that stands for a form -> changes of names within a layer, in order. A name of the form may be another
#: weight elsewhere, so the spellings count together.
FORMS = {
    "post_self_attn_layernorm.weight": (
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    ),
}


def spelled_as(weights: WeightMap, names: Collection[str], roles: Iterable[Role] = ROLES) -> WeightMap:
    """Return ``weights`` in the spellings of a checkpoint with tensors ``names``. Raise ConfigError."""
    ours = [name for name, placed in weights.placements.items() if not placed.parameter.startswith("vision.")]
    prefixes = {m[1] for name in ours if (m := _NAME.match(name))}
    leaves = {_NUMBER.sub("N", m[2]) for name in names if (m := _NAME.match(name)) and m[1] in prefixes}
    # Names that the map already has are roles, not other spellings: for example each of four norms.
    other = leaves - {_NUMBER.sub("N", m[2]) for name in weights.placements if (m := _NAME.match(name))}
    changes: list[tuple[re.Pattern[str], str]] = []
    for mark, renamed in FORMS.items():
        if mark in leaves:
            changes += [(re.compile(rf"^{old}(?=\.)"), new) for old, new in renamed]
    for role in roles:
        first, *more = role.spellings
        present = [first] if any(map(role.pattern(first).search, leaves)) else []
        present += [one for one in more if any(map(role.pattern(one).search, other))]
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
    text = _renamer(tuple(changes))
    towers = {name for name, placed in weights.placements.items() if placed.parameter.startswith("vision.")}

    def named(name: str) -> str:
        return name if name in towers else text(name)

    return WeightMap(
        {named(name): placed for name, placed in weights.placements.items()},
        [tuple(tuple(map(named, form)) for form in forms) for forms in weights.choices],
        {named(name): named(other) for name, other in weights.same_as.items()},
        weights.ignored,
    )


def _renamer(changes: Iterable[tuple[re.Pattern[str], str]]) -> Callable[[str], str]:
    def named(name: str) -> str:
        found = _NAME.match(name)
        if found is None:
            return name
        leaf = found[2]
        for pattern, replacement in changes:
            leaf = pattern.sub(replacement, leaf)
        return found[1] + leaf

    return named
