"""Facts of a model in the fingerprint of its caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from weft.config.families import load_spec
from weft.config.fingerprint import spec_facts
from weft.config.hub import bundled_models
from weft.config.parts.first_fields import FIRST_FIELDS
from weft.config.parts.traits import ScaleSpec
from weft.config.spec import ModelSpec


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield ``kind``, and all structs in its fields."""
    found = [kind]
    for one in found:
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            yield one
            inner = [field.type for field in msgspec.structs.fields(one)]
        else:
            inner = list(get_args(one))
        found += [each for each in inner if each not in found]


def digest(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spool-text", "f38d980ff4b08780029aab8d4d162687"),
        ("spool-mla", "64430d11e79acfa3aeca45884a5d6bc0"),
        ("spool-vision", "f3e707dd99e8d6d903f799e9f870558d"),
    ],
)
def test_facts_are_those_of_the_first_release(name: str, text: str) -> None:
    """The digests come from the code of the commit in tests/releases/version1.json."""
    spec = load_spec(bundled_models()[name])
    assert digest(spec_facts(msgspec.structs.replace(spec, vision=None))) == text
    if spec.vision is not None:
        assert digest(spec_facts(spec.vision)) == "96e84f21611b69d8609e940160c2b5c8"


def test_no_field_of_the_first_release_is_gone_and_later_fields_have_defaults() -> None:
    """A field that is gone, or a later field without a default, parts this release from the earlier ones."""
    kinds = {kind.__name__: kind for kind in structs(ModelSpec)}
    assert kinds.keys() >= FIRST_FIELDS.keys()
    for name, first in FIRST_FIELDS.items():
        fields = {field.name: field for field in msgspec.structs.fields(kinds[name])}
        assert first <= fields.keys(), name
        later = [field.name for field in fields.values() if field.required and field.name not in first]
        assert not later, f"{name}: give these fields a default, the value of earlier releases: {later}"


def test_a_later_field_counts_where_it_differs() -> None:
    spec = load_spec(bundled_models()["spool-text"])
    scaled = msgspec.structs.replace(spec, scales=ScaleSpec(attention_softcap=50.0))
    assert spec_facts(scaled)["scales"] == {"attention_softcap": 50.0}
    assert "scales" not in spec_facts(spec)


def test_fields_of_this_release_do_not_count_at_their_defaults() -> None:
    """Groups of two releases exchange caches of a model that needs no new field."""
    facts = spec_facts(load_spec(bundled_models()["spool-text"]))
    assert facts["family"] == "qwen3_moe"
    assert not {"attention", "norms", "ropes", "mamba"} & facts.keys()
    assert "on_input" not in facts["moe"]
    changed = msgspec.structs.replace(load_spec(bundled_models()["spool-text"]), gated=False)
    assert spec_facts(changed)["gated"] is False
