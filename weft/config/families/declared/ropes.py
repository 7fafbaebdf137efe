"""Readers of rotary embeddings for rows: one for all layers, one per kind of layer, none in some layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from weft.config.families.common import SLIDING
from weft.config.families.facts import Facts
from weft.config.families.rope_settings import rope_spec
from weft.config.spec import RopeSpec


class RopeInput(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the reader of a row, beside config.json."""

    head_dim: int
    max_position: int
    theta: float | dict[str, float]
    """Default base, in some configuration classes by kind of layer."""
    partial: float | None
    types: Sequence[str]
    """Type of each layer."""

    def read(self, facts: Facts, theta: float | None = None, head_dim: int = 0) -> RopeSpec:
        """Return the rotary embedding that ``facts`` describes, with ``theta`` as default base."""
        if theta is None:
            theta = self.theta if isinstance(self.theta, float) else 10000.0
        return rope_spec(facts, head_dim or self.head_dim, self.max_position, theta, self.partial)


class RopeTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embeddings of a model; see ``ModelSpec.ropes`` and ``AttentionSpec.rope_of``."""

    rope: RopeSpec
    more: tuple[RopeSpec, ...] = ()
    rope_of: tuple[int, ...] = ()


Ropes: TypeAlias = Callable[[Facts, RopeInput], RopeTraits]


def one_rope(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding for all layers. Raise ConfigError."""
    return RopeTraits(rope=given.read(facts))


def rope_of_size(name: str) -> Ropes:
    """Return the reader of one rotary embedding of as many dims as the field ``name`` states, if any."""

    def read(facts: Facts, given: RopeInput) -> RopeTraits:
        dims = facts.optional_integer(name)
        share = given.partial if dims is None else dims / given.head_dim
        return one_rope(facts, msgspec.structs.replace(given, partial=share))

    return read


def rope_of_latent(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return the rotary embedding of the rotated dims of latent attention. Raise ConfigError."""
    return RopeTraits(rope=given.read(facts, head_dim=facts.integer("qk_rope_head_dim")))


def alpha_rope(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding. With ``alpha``, type dynamic means a base stretched once for all lengths.

    Raise ConfigError.
    """
    for name in ("rope_scaling", "rope_parameters"):
        scaling = facts.get(name)
        if not isinstance(scaling, dict) or not scaling.get("alpha"):
            continue
        read = Facts(scaling)
        if (scaling.get("rope_type") or scaling.get("type")) != "dynamic" or read.number("factor", 1.0) != 1:
            raise facts.fail(name, "with alpha must have type dynamic and factor 1")
        dim = given.head_dim
        theta = read.number("rope_theta", facts.number("rope_theta", 10000.0))
        return RopeTraits(
            rope=RopeSpec(
                theta=theta * read.number("alpha") ** (dim / (dim - 2)),
                dim=dim,
                max_position=given.max_position,
            )
        )
    return one_rope(facts, given)


def rope_or(parameters: dict[str, Any]) -> Ropes:
    """Return the reader of one rotary embedding, with ``parameters`` if config.json has none."""

    def read(facts: Facts, given: RopeInput) -> RopeTraits:
        if facts.get("rope_parameters") is None and facts.get("rope_scaling") is None:
            theta = facts.number("rope_theta", parameters["rope_theta"])
            facts = Facts({"rope_parameters": {**parameters, "rope_theta": theta}}, file=facts.file)
        return one_rope(facts, given)

    return read


apertus_rope = rope_or(
    {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
)


cwm_rope = rope_or(
    {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
)


def phi_rope(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding. Older files call longrope ``su`` or ``yarn``. Raise ConfigError."""
    for name in ("rope_scaling", "rope_parameters"):
        parameters = facts.get(name)
        if isinstance(parameters, dict) and parameters:
            kind = parameters.get("rope_type") or parameters.get("type")
            kept = {key: value for key, value in parameters.items() if key not in ("type", "rope_type")}
            kept["rope_type"] = "longrope" if kind in ("su", "yarn") else kind or "default"
            # Without longrope the field has no effect.
            original = facts.optional_integer("original_max_position_embeddings")
            if kept["rope_type"] == "longrope":
                kept["original_max_position_embeddings"] = (
                    kept.get("original_max_position_embeddings") or original
                )
            kept.setdefault("rope_theta", facts.number("rope_theta", 10000.0))
            kept.setdefault("partial_rotary_factor", facts.number("partial_rotary_factor", 1.0))
            return one_rope(Facts({"rope_parameters": kept}, file=facts.file), given)
    facts.get("original_max_position_embeddings")
    return one_rope(facts, given)


def ministral_rope(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding. The temperature of the queries is read elsewhere. Raise ConfigError."""
    for name in ("rope_scaling", "rope_parameters"):
        parameters = facts.get(name)
        if isinstance(parameters, dict) and parameters:
            kept = {key: value for key, value in parameters.items() if key != "llama_4_scaling_beta"}
            theta = facts.number("rope_theta", kept.get("rope_theta", given.theta))
            kept.setdefault("rope_theta", theta)
            return one_rope(Facts({"rope_parameters": kept}, file=facts.file), given)
    raise facts.fail("rope_parameters", "is missing")


def rope_in_windows(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding for window layers. Full layers do not rotate, if there is a window."""
    rope = given.read(facts)
    if facts.get("sliding_window") is None:
        return RopeTraits(rope=rope)
    return RopeTraits(rope=rope, rope_of=tuple(0 if one == SLIDING else -1 for one in given.types))


def rope_by_list(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding for the layers with a 1 in ``no_rope_layers``.

    Without the list, every ``no_rope_layer_interval``-th layer does not rotate. Raise ConfigError.
    """
    layers = len(given.types)
    rotated = facts.integers("no_rope_layers")
    every = facts.integer("no_rope_layer_interval", 4)
    if not rotated:
        rotated = tuple(int((i + 1) % every != 0) for i in range(layers))
    if len(rotated) < layers:
        raise facts.fail("no_rope_layers", f"has {len(rotated)} entries for {layers} layers")
    numbers = tuple(0 if one else -1 for one in rotated[:layers])
    return RopeTraits(rope=given.read(facts), rope_of=numbers if -1 in numbers else ())


def ropes_by_type(local_theta: str = "") -> Ropes:
    """Return the reader of one rotary embedding for full layers and one for window layers.

    ``rope_parameters`` has an entry per type. In older files ``rope_scaling`` and ``rope_theta``, or
    ``rope_parameters`` without types, describe full layers; the field ``local_theta`` has the base of window
    layers (empty: the same base).
    """

    def read(facts: Facts, given: RopeInput) -> RopeTraits:
        """Return the traits. Raise ConfigError."""
        bases = given.theta if isinstance(given.theta, dict) else {}
        theta = given.theta if isinstance(given.theta, float) else 10000.0
        nested = facts.get("rope_parameters") or {}
        flat = _without_types(facts, nested)
        scaling = facts.get("rope_scaling") or flat
        full_theta = facts.number("rope_theta", bases.get("global", theta), above=1.0)
        full_theta = Facts(flat, file=facts.file).number("rope_theta", full_theta, above=1.0)
        local = facts.number(local_theta, bases.get("local", theta)) if local_theta else full_theta
        made = []
        for kind, base in (("full_attention", full_theta), (SLIDING, local)):
            parameters: dict[str, Any] = dict(nested.get(kind) or {})
            if kind != SLIDING and scaling and not parameters:
                parameters = dict(scaling)
            parameters.setdefault("rope_theta", base)
            inner = Facts({"rope_parameters": parameters}, file=facts.file)
            made.append(given.read(inner, base))
        numbers = tuple(int(one == SLIDING) for one in given.types)
        if made[0] == made[1]:
            return RopeTraits(rope=made[0])
        return RopeTraits(rope=made[0], more=(made[1],), rope_of=numbers)

    return read


def _without_types(facts: Facts, parameters: Any) -> dict[str, Any]:
    """Return the rope parameters if no entry is for a type of layer, else {}. Raise ConfigError."""
    if not isinstance(parameters, dict):
        raise facts.fail("rope_parameters", f"must be an object, not {parameters!r}")
    typed = any(isinstance(value, dict) for value in parameters.values())
    return {} if typed else {name: value for name, value in parameters.items() if value is not None}


def sizes_of_full_layers(facts: Facts) -> tuple[int, int | None]:
    """Return (head size, KV heads or None for those of window layers) of full layers of Gemma 4.

    Newer files have ``per_layer_config``, with equal entries for all full layers. Raise ConfigError.
    """
    size = facts.integer("global_head_dim", 512)
    heads = facts.optional_integer("num_global_key_value_heads")
    if not facts.flag("attention_k_eq_v", False):
        heads = None
    layers = facts.get("per_layer_config")
    if layers is None:
        return size, heads
    entries = list(layers.values()) if isinstance(layers, dict) else [layers]
    first = Facts(entries[0] if entries and isinstance(entries[0], dict) else {}, file="per_layer_config")
    if any(entry != entries[0] for entry in entries):
        raise facts.fail("per_layer_config", "must be the same for all full layers")
    size, heads = first.integer("head_dim", size), first.optional_integer("num_key_value_heads")
    if unknown := first.unread():
        raise facts.fail("per_layer_config", f"has {', '.join(unknown)}, which is not supported")
    return size, heads


def gemma4_ropes(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return the rotary embeddings of full layers (proportional) and of window layers. Raise ConfigError."""
    nested = facts.get("rope_parameters") or {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    parameters = Facts(nested.get("full_attention") or {}, file=facts.file)
    dim, _ = sizes_of_full_layers(facts)
    if parameters.get("rope_type") != "proportional":
        raise facts.fail("rope_parameters", "must have type proportional for full_attention")
    full = RopeSpec(
        kind="proportional",
        theta=parameters.number("rope_theta"),
        dim=dim,
        factor=parameters.number("factor", 1.0),
        pairs=int(parameters.number("partial_rotary_factor", 1.0) * dim / 2),
        max_position=given.max_position,
    )
    window = given.read(Facts({"rope_parameters": nested.get(SLIDING)}, file=facts.file))
    return RopeTraits(rope=full, more=(window,), rope_of=tuple(int(one == SLIDING) for one in given.types))
