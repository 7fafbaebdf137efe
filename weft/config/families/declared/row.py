"""A row: the description of one architecture as data.

A trait is a value, or the ``field`` of config.json with the value. Missing fields have the default of the
architecture's configuration class in transformers (``class_defaults.json``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from weft.config.families.common import uniform_window
from weft.config.families.declared.ropes import Ropes, one_rope
from weft.config.families.facts import Facts
from weft.config.parts.traits import NormSpec
from weft.config.spec import ModelSpec, MoESpec


class Field(msgspec.Struct, frozen=True):
    """A trait that a field of config.json states."""

    name: str


def field(name: str) -> Any:
    """Return a trait that the field ``name`` of config.json states."""
    return Field(name)


def flag(trait: Any, facts: Facts) -> bool:
    """Return the value of a trait: true or false. Raise ConfigError."""
    return facts.flag(trait.name, False) if isinstance(trait, Field) else bool(trait)


Windows: TypeAlias = Callable[[Facts, int], tuple[int | None, list[str]]]
Experts: TypeAlias = Callable[[Facts, int], MoESpec | None]
Change: TypeAlias = Callable[[Facts, ModelSpec], ModelSpec]


def no_window(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) for full attention everywhere."""
    return uniform_window(None, layers)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. The defaults describe Llama."""

    config: str
    """Configuration class in transformers. The key of the class's defaults in ``class_defaults.json``."""
    qkv_bias: bool | Field = False
    o_bias: bool | Field = False
    mlp_bias: bool | Field = False
    qk_norm: bool | Field = False
    """Norm of queries and keys."""
    norm_over: Literal["head", "all", "behind", "unit"] = "head"
    """Form of the norm of queries and keys: see ``AttentionSpec.norm``."""
    norms: NormSpec = NormSpec()
    interleaved: bool = False
    """True if rotated pairs are neighbours."""
    centred_norms: bool = False
    """True if norm weights are published as the difference from 1."""
    gated: bool = True
    """False for a feed-forward without a gate."""
    ropes: Ropes = one_rope
    """Reader of the rotary embeddings."""
    partial: float | None = None
    """Share of a head's dims that rotate, if config.json states none. None: all dims."""
    windows: Windows = no_window
    """Reader of the window and of the type of each layer."""
    experts: Experts | None = None
    """Reader of the routed experts; None for a dense model."""
    change: Sequence[Change] = ()
    """Readers of further traits: each returns the spec with more traits."""
    renamed: dict[str, str] = {}
    """Field of this architecture -> the name that readers know."""
    only: dict[str, tuple[Any, ...]] = {}
    """Fields with the values that the implementation has. Any other value is refused."""
    unused: tuple[str, ...] = ()
    """Patterns of fields without effect on the results of this architecture."""
    stated: tuple[str, ...] = ()
    """Sizes that config.json must state, because the class's defaults fit no published checkpoint."""
    modules: bool = False
    """True if modules that predict further tokens are published as layers behind the last layer."""
