"""Rows of declared architectures: fields, defaults of configuration classes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.conftest import CASES
from weft.common.errors import ConfigError
from weft.config.families import FAMILIES, load_spec
from weft.config.families.declared.class_defaults import FILE, class_defaults
from weft.config.families.declared.rows import MODEL_TYPES, ROWS
from weft.config.flags import from_keywords
from weft.config.resolve import resolve

Fields = dict[str, Any]
SEED: Fields = {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def _write(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**SEED, **changes}))
    return str(folder)


def test_missing_fields_have_the_defaults_of_the_class(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path))
    assert spec.family == "declared"
    assert spec.head_dim == 128  # of the class, not 64 / 4
    assert spec.qkv_bias
    assert not spec.o_bias
    assert spec.max_position == 524288
    assert spec.eos_ids == (2,)


@pytest.mark.parametrize(
    "fields",
    [
        {"a_new_kind_of_gate": True},
        {"sliding_window": 128},
        {"embedding_multiplier": 2.0},
        {"residual_scale": 0},
        {"attention_chunk_size": 8192},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_an_unread_field_is_refused_by_name(fields: Fields, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} = .* is not supported"):
        load_spec(_write(tmp_path, **fields))


def test_harmless_fields_and_defaults_are_accepted(tmp_path: Path) -> None:
    fields = {
        "unsloth_version": "2026.1",
        "residual_dropout": 0.3,
        "initializer_range": 1,
        "pad_token_id": 7,
        "pretraining_tp": 4,
    }
    plain = load_spec(_write(tmp_path))
    assert load_spec(_write(tmp_path, **fields, an_unset_field=None)) == plain


SMOLLM2: Fields = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}


@pytest.mark.parametrize(
    "fields",
    [
        SMOLLM2,
        {"is_decoder": True, "tf_legacy_loss": True, "output_scores": True, "max_new_tokens": 64},
        {"neftune_noise_alpha": 5.0, "loss_type": "ForCausalLM", "train_batch_size": 8},
        {"trained_with": "a tool", "padding_side": "left", "model_parallel": True},
    ],
)
def test_fields_of_tools_are_accepted(fields: Fields, tmp_path: Path) -> None:
    assert load_spec(_write(tmp_path, **fields)) == load_spec(_write(tmp_path))


def test_no_unknown_field_is_accepted_beside_code(tmp_path: Path) -> None:
    """Code of a checkpoint may read any field."""
    folder = _write(tmp_path, is_llama_config=True, auto_map={"AutoConfig": "c.C"})
    with pytest.raises(ConfigError, match="is_llama_config = True is not supported"):
        load_spec(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    "name", ["quantization", "rope_condense_ratio", "dual_chunk", "qk_layernorm", "mup_scale", "n_groups"]
)
def test_names_with_a_word_of_a_computation_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        load_spec(_write(tmp_path, **{name: {"bits": 4}}))


def test_rope_parameters_without_types_describe_full_layers(tmp_path: Path) -> None:
    """As ``rope_scaling`` and ``rope_theta`` do in older files."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    more: Fields = {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 8}
    old = load_spec(_write(tmp_path, **more, rope_scaling=scaling, rope_theta=3e5))
    assert (old.rope.kind, old.ropes[0].kind) == ("linear", "default")
    flat = {**scaling, "rope_theta": 3e5, "original_max_position_embeddings": None}
    assert load_spec(_write(tmp_path, **more, rope_parameters=flat)) == old
    typed = {"full_attention": {**scaling, "rope_theta": 3e5}, "sliding_attention": {"rope_theta": 3e5}}
    assert load_spec(_write(tmp_path, **more, rope_parameters=typed)) == old
    with pytest.raises(ConfigError, match="rope_parameters must be an object"):
        load_spec(_write(tmp_path, **more, rope_parameters=[1]))


def test_dual_chunk_attention_is_served_within_one_chunk(tmp_path: Path) -> None:
    setting: Fields = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 64}
    more: Fields = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 4096}
    spec = load_spec(_write(tmp_path, **more, dual_chunk_attention_config=setting, attention_bias=True))
    assert spec.max_position == 48
    setting["local_size"] = 64
    with pytest.raises(ConfigError, match="chunk_size above local_size"):
        load_spec(_write(tmp_path, **more, dual_chunk_attention_config=setting))


def test_k_exaone_as_published(tmp_path: Path) -> None:
    more: Fields = {"architectures": ["ExaoneMoEForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    more |= {"moe_intermediate_size": 32, "num_shared_experts": 1, "num_hidden_layers": 3}
    more |= {"sliding_window_pattern": "LLLG", "scoring_func": "sigmoid", "sliding_window": 8}
    flags = [False, True, False]
    spec = load_spec(_write(tmp_path, **more, first_last_k_dense_replace=1, is_moe_layer=flags))
    assert spec.architecture == "ExaoneMoeForCausalLM"
    assert spec.moe is not None
    assert spec.moe.layers == (1,)
    spec = load_spec(_write(tmp_path, **more, first_last_k_dense_replace=2))
    assert spec.moe is not None
    assert spec.moe.layers == (2,)
    with pytest.raises(ConfigError, match="is_moe_layer must have an entry"):
        load_spec(_write(tmp_path, **more, is_moe_layer=[0, 1, 1]))


PHI4_MINI: Fields = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "resid_pdrop": 0.0,
    "sliding_window": 262144,
    "partial_rotary_factor": 0.75,
    "pad_token_id": 0,
}
HUNYUAN: Fields = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "num_experts": 4,
    "moe_topk": [2, 2],
    "moe_intermediate_size": [96, 96],
    "num_shared_expert": [1, 1],
    "use_mla": False,
    "use_cla": False,
    "cla_share_factor": 2,
    "q_lora_rank": None,
    "vit_path": "x",
    "image_token_id": 9,
    "dense_list": [64, 0],
}

MINIMAX_M2: Fields = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192,
    "shared_moe_mode": "sigmoid",
    "shared_intermediate_size": 0,
}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (PHI4_MINI, {"lm_head_bias": True}),
        (PHI4_MINI, {"full_attn_mod": 2}),
        (HUNYUAN, {"use_cla": True}),
        (MINIMAX_M2, {"layernorm_full_attention_alpha": 3.5}),
        ({"architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}, {"clip_qkv": 8}),
        (
            {"architectures": ["NemotronForCausalLM"], "rope_percent": 0.5, "kv_channels": 16},
            {"qk_norm": True},
        ),
        (HUNYUAN, {"num_shared_expert": [1, 2]}),
        ({"architectures": ["SolarOpenForCausalLM"], "partial_rotary_factor": 1.0}, {"attn_scale": 0.5}),
    ],
)
def test_further_fields_of_published_files(fields: Fields, wrong: Fields, tmp_path: Path) -> None:
    """Each field has the value that is implemented. Another value is refused."""
    assert load_spec(_write(tmp_path, **fields)).family == "declared"
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        load_spec(_write(tmp_path, **{**fields, **wrong}))


def test_the_model_type_alone_names_the_row(tmp_path: Path) -> None:
    assert load_spec(_write(tmp_path, architectures=None)).architecture == "SeedOssForCausalLM"


def test_two_names_of_one_field_must_agree(tmp_path: Path) -> None:
    fields = {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    assert load_spec(_write(tmp_path, **fields, num_local_experts=8)).moe is not None
    assert load_spec(_write(tmp_path, **fields, num_local_experts=None)).moe is not None
    with pytest.raises(ConfigError, match="contradicts the same field under another name"):
        load_spec(_write(tmp_path, **fields, num_local_experts=9))


def test_every_row_has_a_class_a_type_and_a_case() -> None:
    cases = {family.removesuffix("Text") for family, _ in CASES.values()}
    for name, row in ROWS.items():
        assert row.config in class_defaults(), name
        assert name in FAMILIES
        assert name in MODEL_TYPES.values(), name
        assert name.removesuffix("ForCausalLM") in cases, f"{name} has no case"


@pytest.mark.slow
def test_the_defaults_are_those_of_the_installed_transformers() -> None:
    from scripts.class_defaults import described

    for name in class_defaults():
        assert json.loads(FILE.read_text())[name] == json.loads(json.dumps(described(name))), name


def test_longrope_follows_the_longest_context(tmp_path: Path) -> None:
    scaling = {"type": "su", "long_factor": [3.0] * 8, "short_factor": [1.0] * 8}
    folder = _write(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        rope_scaling=scaling,
        original_max_position_embeddings=64,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=0,
    )
    long = load_spec(folder)
    assert long.rope.kind == "longrope"
    assert long.rope.divisors == (3.0,) * 8
    assert long.rope.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)  # log 4 / log 64
    config = {"model": folder, "load_format": "dummy", "device": "cpu", "kv_cache_memory": "1M"}
    for length, divisors in ((64, (1.0,) * 8), (65, (3.0,) * 8)):
        assert resolve(from_keywords({**config, "max_model_len": length})).spec.rope.divisors == divisors
    bad = {**scaling, "long_factor": [1]}
    with pytest.raises(ConfigError, match="long_factor must be a list of 8 positive numbers"):
        load_spec(_write(tmp_path, architectures=["Phi3ForCausalLM"], rope_scaling=bad))
