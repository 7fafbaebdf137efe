"""Rotary embedding settings from either form of ``config.json``.

Old form: ``rope_theta`` plus ``rope_scaling`` (with ``type`` or ``rope_type``). New form (transformers 5):
all fields in ``rope_parameters``. A file may have both forms if no field has two values. A kind in
``rope_scaling`` replaces the kind ``default`` in ``rope_parameters``.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts
from weft.config.spec import ModelSpec, RopeSpec

_RENAMED = {"su": "longrope"}
"""Kind in older files of Phi-3 -> kind."""
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

#: Fields that each kind reads besides theta. Any other field is refused, because it would be ignored.
_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "attn_factor",
            "apply_yarn_scaling",
            "extrapolation_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON = frozenset(
    {"type", "rope_type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
)
_SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
#: Fields left over from other kinds, without effect on the kinds above. (Sections divide the pairs among the
# three axes of images. A text token has the same position on all axes.)
_IGNORED = frozenset({"finetuned", "max_position_embeddings"}) | _SECTIONS


def _parameters(facts: Facts) -> dict[str, Any]:
    """Return the rope parameters of either form; {} for none. Raise ConfigError, also if both forms have a
    field with two values."""
    found = dict[str, Any]()
    for name in ("rope_scaling", "rope_parameters"):
        value = facts.get(name)
        if value is None or value == {}:
            continue
        if not isinstance(value, dict):
            raise facts.fail(name, f"must be an object, not {value!r}")
        nested = [key for key, entry in value.items() if isinstance(entry, dict)]
        if nested:
            raise facts.fail(
                name, f"with one entry for each layer type ({', '.join(nested)}) is not supported"
            )
        # Only the new form has the base of the rotation. Some files have both forms.
        given = {key: entry for key, entry in value.items() if key not in ("type", "rope_type")}
        kind = value.get("rope_type") or value.get("type")
        # Guides for long contexts add rope_scaling to files with the plain rotation in rope_parameters.
        if kind and not (kind == "default" and "rope_type" in found):
            given["rope_type"] = _RENAMED.get(kind, kind) if isinstance(kind, str) else kind
        base = facts.get("rope_theta") if name == "rope_parameters" and found else None
        for key, entry in given.items():
            known = base if key == "rope_theta" and key not in found else found.get(key)
            if known is not None and entry is not None and known != entry:
                other = f"another field of config.json has {known!r}"
                raise facts.fail(name, f"has {key} = {entry!r}, and {other}: delete one of the two")
        found |= {key: entry for key, entry in given.items() if entry is not None}
    return found


def _kind(parameters: dict[str, Any]) -> str:
    """Return the kind of scaling. Raise ConfigError for an unknown kind."""
    kind = parameters.get("rope_type") or "default"
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported; there are: {', '.join(_KINDS)}",
            param="--model",
        )
    return str(kind)


def _refuse_unknown(kind: str, parameters: dict[str, Any]) -> None:
    """Raise ConfigError for fields that the kind does not use."""
    unknown = sorted(
        name
        for name, value in parameters.items()
        if value is not None and name not in _FIELDS[kind] | _COMMON | _IGNORED
    )
    # Fields of another kind with kind "default" come from hand-edited files: the author meant a scaling.
    if unknown:
        raise ConfigError(
            f"config.json: rope type {kind!r} does not use {', '.join(unknown)}; correct or remove it",
            param="--model",
        )


def rope_spec(
    facts: Facts,
    head_dim: int,
    max_position: int,
    default_theta: float,
    partial: float | None = None,
    sections: tuple[int, int, int] | None = None,
) -> RopeSpec:
    """Return the rotary embedding of a model with ``max_position_embeddings`` = ``max_position``.

    ``partial``: default share of rotated dims if ``partial_rotary_factor`` is missing; None for families that
    rotate all dims. ``sections``: default sections of families with images.

    Raise ConfigError for an unknown kind, a field that the kind does not use, a missing field, or a head size
    that cannot be rotated.
    """
    parameters = _parameters(facts)
    kind = _kind(parameters)
    _refuse_unknown(kind, parameters)
    read = Facts(parameters)
    dim = head_dim
    if partial is not None:
        dim = int(
            head_dim * read.number("partial_rotary_factor", facts.number("partial_rotary_factor", partial))
        )
    elif parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise facts.fail("partial_rotary_factor", "other than 1 is not supported")
    if dim < 2 or dim > head_dim or dim % 2 or (kind == "dynamic" and dim < 4):
        raise facts.fail("head_dim", f"{head_dim} cannot be rotated" + f" in {dim} dims" * (dim != head_dim))
    theta = facts.number("rope_theta", default_theta, above=1.0)
    # A theta inside the rope parameters wins over the top-level field.
    theta = read.number("rope_theta", theta, above=1.0)
    original = read.optional_integer("original_max_position_embeddings")
    original = facts.optional_integer("original_max_position_embeddings") or original or max_position
    common: dict[str, Any] = {"kind": kind, "theta": theta, "dim": dim, "max_position": max_position}
    common["sections"] = None if sections is None else _sections(read, kind, sections)
    if kind == "default":
        return RopeSpec(**common)
    if kind == "longrope":
        return _longrope(read, common, original)
    if kind == "yarn":
        return _yarn(read, common, original)
    common["factor"] = read.number("factor")
    if kind != "llama3":
        return RopeSpec(**common)
    low = read.number("low_freq_factor")
    high = read.number("high_freq_factor")
    if high < low:
        raise read.fail("high_freq_factor", "must be at least low_freq_factor")
    return RopeSpec(**common, original_max_position=original, low_freq_factor=low, high_freq_factor=high)


def _sections(read: Facts, kind: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the rotated pairs per axis: (frame, row, column), alternating.

    Sections do not affect text. Raise ConfigError.
    """
    if kind == "dynamic":
        raise read.fail("rope_type", "dynamic is not supported for models that see images")
    if not read.flag("mrope_interleaved", True):
        raise read.fail("mrope_interleaved", "must be true for this architecture")
    found = read.integers("mrope_section") or default
    if len(found) != 3 or min(found) < 0:
        raise read.fail("mrope_section", f"must be a list of three numbers, not {found!r}")
    return found[0], found[1], found[2]


def _longrope(read: Facts, common: dict[str, Any], original: int) -> RopeSpec:
    """Return the spec for longrope, for long contexts. Source: arXiv 2402.13753. Raise ConfigError."""
    pairs = common["dim"] // 2
    divisors = {}
    for name in ("long_factor", "short_factor"):
        values = read.get(name)
        if (
            not isinstance(values, list)
            or len(values) != pairs
            or not all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values)
        ):
            raise read.fail(name, f"must be a list of {pairs} positive numbers")
        divisors[name] = tuple(map(float, values))
    stretch = read.number("factor", common["max_position"] / original)
    derived = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeSpec(
        **common,
        factor=stretch,
        original_max_position=original,
        attention_factor=read.number("attention_factor", derived),
        divisors=divisors["long_factor"],
        short_divisors=divisors["short_factor"],
    )


def fit_context(spec: ModelSpec, positions: int) -> ModelSpec:
    """Return ``spec`` for contexts of at most ``positions`` tokens.

    longrope has two sets of divisors. transformers chooses by the length of each sequence, so cached keys do
    not fit when a sequence grows. Here all sequences of an engine have the set of the longest context.
    """
    rope = spec.rope
    if rope.kind != "longrope" or positions > rope.original_max_position:
        return spec
    return msgspec.structs.replace(spec, rope=msgspec.structs.replace(rope, divisors=rope.short_divisors))


def _yarn(read: Facts, common: dict[str, Any], original: int) -> RopeSpec:
    # As in transformers: a null or zero beta means the default, and a missing factor means the ratio of the
    # two context lengths.
    """Return the spec for yarn. Raise ConfigError."""
    beta_fast = read.number("beta_fast", above=-1.0, default=32.0) or 32.0
    beta_slow = read.number("beta_slow", above=-1.0, default=1.0) or 1.0
    if read.number("extrapolation_factor", 1.0) != 1.0:
        raise read.fail("extrapolation_factor", "other than 1 is not supported")
    spec = RopeSpec(
        **common,
        factor=read.number("factor", common["max_position"] / original),
        original_max_position=original,
        attention_factor=read.optional_number("attention_factor"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=read.optional_number("mscale", above=-1.0),
        mscale_all_dim=read.optional_number("mscale_all_dim", above=-1.0),
        truncate=read.flag("truncate", True),
    )
    return msgspec.structs.replace(spec, attention_factor=_attention_factor(read, spec))


def _attention_factor(read: Facts, spec: RopeSpec) -> float | None:
    """Return the stated factor for cos and sin; None to use the temperature of ``spec``. Raise ConfigError.

    ``attention_factor`` is the whole factor. ``attn_factor``, from the method's own code, multiplies the
    temperature. ``apply_yarn_scaling`` false drops the temperature. Source: arXiv 2309.00071.
    """
    more = read.number("attn_factor", 1.0)
    applied = read.flag("apply_yarn_scaling", True)
    if spec.attention_factor is not None:
        if more != 1.0 or not applied:
            raise read.fail("attention_factor", "and attn_factor or apply_yarn_scaling contradict each other")
        return spec.attention_factor
    if not applied:
        return more
    return None if more == 1.0 else more * spec.temperature


def served_positions(rope: RopeSpec) -> int:
    """Return the maximum context length in tokens: ``max_position_embeddings``, stretched for dynamic and
    yarn.

    ``dynamic`` serves ``factor`` times the base context. ``yarn`` serves ``factor`` times the original
    context, because published files set ``max_position_embeddings`` to either length. ``linear`` and
    ``llama3`` files state the stretched length.
    """
    if rope.kind == "dynamic":
        return int(rope.max_position * rope.factor)
    if rope.kind == "yarn":
        return max(rope.max_position, int(rope.original_max_position * rope.factor))
    return rope.max_position
