"""Texts of models with images and rotation by frame, row and column: Qwen2-VL and Qwen2.5-VL.

Sources: arXiv 2409.12191, 2502.13923.
"""

from __future__ import annotations

import msgspec

from weft.config.families.common import window_layers
from weft.config.families.declared.ropes import RopeInput, RopeTraits, one_rope
from weft.config.families.declared.row import Row
from weft.config.families.facts import Facts

FLAT = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
}
"""Architecture with the fields of the text model at the top of older files -> type of the text model."""
_DEFAULT = (16, 24, 24)


def flat_text(facts: Facts) -> dict[str, object] | None:
    """Return the fields of the text model at the top of an older file; None for other architectures."""
    kind = FLAT.get(facts.get("architectures")[0])
    if kind is None:
        return None
    given = {name: value for name, value in facts.unread().items() if name != "vision_config"}
    return {**given, "model_type": kind}


def section_rope(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return one rotary embedding with contiguous pairs for frames, rows and columns.

    Older files call the type ``mrope``. Raise ConfigError for sections that do not cover all pairs.
    """
    name = "rope_scaling" if facts.get("rope_scaling") else "rope_parameters"
    parameters = facts.get(name) or {}
    if not isinstance(parameters, dict):
        raise facts.fail(name, f"must be an object, not {parameters!r}")
    read = Facts(parameters, file=f"{facts.file} ({name})")
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind == "dynamic":
        raise read.fail("rope_type", "dynamic is not supported for models that see images")
    if read.flag("mrope_interleaved", False):
        raise read.fail("mrope_interleaved", "must be false for this architecture")
    sections = read.integers("mrope_section") or _DEFAULT
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != given.head_dim // 2:
        pairs = given.head_dim // 2
        raise read.fail("mrope_section", f"must be three numbers with the sum {pairs}, not {sections!r}")
    kept = {key: value for key, value in parameters.items() if key not in ("type", "rope_type")}
    kept["rope_type"] = "default" if kind in (None, "mrope") else kind
    theta = given.theta if isinstance(given.theta, float) else 10000.0
    kept.setdefault("rope_theta", facts.number("rope_theta", theta))
    made = one_rope(Facts({"rope_parameters": kept}, file=facts.file), given)
    rope = msgspec.structs.replace(made.rope, sections=tuple(sections), interleaved=False)
    return msgspec.structs.replace(made, rope=rope)


QWEN2_VL = Row(
    config="Qwen2VLTextConfig",
    stated=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    qkv_bias=True,
    windows=window_layers,
    ropes=section_rope,
)
QWEN2_5_VL = msgspec.structs.replace(QWEN2_VL, config="Qwen2_5_VLTextConfig")
