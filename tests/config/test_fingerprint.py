"""Facts of a model in the fingerprint of its caches."""

from __future__ import annotations

import msgspec

from weft.config.families import load_spec
from weft.config.fingerprint import spec_facts
from weft.config.hub import bundled_models


def test_fields_of_this_release_do_not_count_at_their_defaults() -> None:
    """Groups of two releases exchange caches of a model that needs no new field."""
    facts = spec_facts(load_spec(bundled_models()["spool-text"]))
    assert facts["family"] == "qwen3_moe"
    assert not {"attention", "norms", "ropes", "mamba"} & facts.keys()
    assert "on_input" not in facts["moe"]
    changed = msgspec.structs.replace(load_spec(bundled_models()["spool-text"]), gated=False)
    assert spec_facts(changed)["gated"] is False
