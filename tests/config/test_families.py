"""From config.json to facts: every family, both forms of rope settings, refusals by name."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from weft.common.errors import ConfigError
from weft.config import hub
from weft.config.families import FAMILIES, load_spec
from weft.config.families.generation import sampling_defaults
from weft.config.families.load import MODEL_TYPES
from weft.config.spec import ModelSpec, RopeSpec
from weft.layers.rope import attention_factor

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


def _load(folder: Path, override: int | None = None, trust: bool = False, **changes: Any) -> ModelSpec:
    config = {k: v for k, v in {**_BASE, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(str(folder), override, trust_remote_code=trust)


def test_llama_2(tmp_path: Path) -> None:
    spec = _load(tmp_path, num_key_value_heads=..., eos_token_id=2, bos_token_id=1, rms_norm_eps=1e-5)
    assert (spec.family, spec.kv_heads, spec.head_dim, spec.norm_eps) == ("declared", 4, 8, 1e-5)
    assert (spec.eos_ids, spec.bos_id, spec.dtype, spec.tied) == ((2,), 1, "float32", False)
    assert [(c.kind, c.layers, c.window) for c in spec.caches] == [("full", (0, 1, 2, 3), 0)]
    assert spec.rope.kind == "default"
    assert spec.rope.theta == 10000.0


def test_llama_biases_and_head_dim(tmp_path: Path) -> None:
    spec = _load(tmp_path, attention_bias=True, mlp_bias=True, head_dim=20, tie_word_embeddings=True)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.tied, spec.head_dim) == (
        True,
        True,
        True,
        True,
        20,
    )


def test_mistral_window(tmp_path: Path) -> None:
    architectures = ["MistralForCausalLM"]
    spec = _load(tmp_path, architectures=architectures, sliding_window=100)
    assert [(c.kind, c.window) for c in spec.caches] == [("window", 100)]
    assert _load(tmp_path, architectures=architectures, sliding_window=None).caches[0].kind == "full"
    assert _load(tmp_path, architectures=architectures).caches[0].window == 4096


def test_qwen2_kinds(tmp_path: Path) -> None:
    qwen: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"]}
    spec = _load(tmp_path, **qwen, sliding_window=8, max_window_layers=2)
    assert (spec.qkv_bias, spec.o_bias) == (True, False)
    assert [c.kind for c in spec.caches] == ["full"], "use_sliding_window is off by default"
    spec = _load(tmp_path, **qwen, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert [(c.kind, c.layers) for c in spec.caches] == [("full", (0,)), ("window", (1, 2, 3))]
    types = ["sliding_attention", "full_attention"] * 2
    spec = _load(tmp_path, **qwen, use_sliding_window=True, sliding_window=8, layer_types=types)
    assert [(c.kind, c.layers) for c in spec.caches] == [("full", (1, 3)), ("window", (0, 2))]
    assert [spec.cache_of(layer) for layer in range(4)] == [1, 0, 1, 0]
    spec = _load(tmp_path, 1, **qwen, use_sliding_window=True, sliding_window=8, layer_types=types)
    assert [(c.kind, c.layers) for c in spec.caches] == [("window", (0,))]
    with pytest.raises(ConfigError, match="layer_types"):
        _load(tmp_path, **qwen, layer_types=types)


def test_qwen3(tmp_path: Path) -> None:
    spec = _load(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (spec.qk_norm, spec.qkv_bias, spec.head_dim) == (True, False, 128)


def test_qwen3_moe_layers(tmp_path: Path) -> None:
    moe: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    }
    spec = _load(tmp_path, **moe, num_experts=8, norm_topk_prob=True)
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.top_k, spec.moe.intermediate) == (8, 2, 16)
    assert (spec.moe.renormalize, spec.moe.layers, spec.head_dim) == (True, (0, 1, 2, 3), 8)
    spec = _load(tmp_path, **moe, num_local_experts=4, decoder_sparse_step=2, mlp_only_layers=[1])
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.layers, spec.moe.renormalize) == (4, (3,), False)
    spec = _load(tmp_path, **moe, num_experts=4, use_sliding_window=True, sliding_window=16)
    assert [(c.kind, c.window, len(c.layers)) for c in spec.caches] == [("window", 16, 4)]
    with pytest.raises(ConfigError, match="num_experts_per_tok 2 is more than the 1 experts"):
        _load(tmp_path, **moe, num_experts=1)


def test_mixtral(tmp_path: Path) -> None:
    spec = _load(tmp_path, architectures=["MixtralForCausalLM"], num_local_experts=6, sliding_window=None)
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.top_k, spec.moe.intermediate, spec.moe.renormalize) == (6, 2, 64, True)
    assert (spec.rope.theta, spec.norm_eps) == (1e6, 1e-5)


def test_both_forms_of_rope_settings_agree(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    old = _load(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = _load(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope
    assert (old.rope.kind, old.rope.theta, old.rope.original_max_position) == ("llama3", 5e5, 128)
    older = _load(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    assert (older.rope.kind, older.rope.factor, older.max_position) == ("linear", 2.0, 1024)


def test_files_with_both_forms_of_rope_settings(tmp_path: Path) -> None:
    """Neither form may be ignored."""
    scaling = {"type": "linear", "factor": 2.0}
    both = {
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    }
    for theta in (..., 5e5):
        found = _load(tmp_path, rope_theta=theta, **both).rope
        assert (found.kind, found.factor, found.theta) == ("linear", 2.0, 5e5)
    with pytest.raises(
        ConfigError, match=r"rope_parameters has rope_theta = 500000\.0, and another .* 10000"
    ):
        _load(tmp_path, rope_theta=10000.0, **both)
    with pytest.raises(ConfigError, match=r"rope_parameters has factor = 2\.0, and another .* has 4\.0"):
        _load(tmp_path, **{**both, "rope_scaling": {"type": "linear", "factor": 4.0}})


def test_scaling_that_is_added_to_a_plain_rotation(tmp_path: Path) -> None:
    """Guides for long contexts say so. A file that says the opposite is refused."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = _load(tmp_path, rope_theta=5e5, rope_scaling=scaling, rope_parameters=plain).rope
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs == {**scaling, "rope_theta": rope.theta}
    assert (rope.kind, rope.factor) == (theirs["rope_type"], theirs["factor"])
    with pytest.raises(ConfigError, match=r"rope_type = 'yarn', and another .* 'default': delete one"):
        _load(tmp_path, rope_theta=..., rope_scaling={"rope_type": "default"}, rope_parameters=scaling)


def test_the_older_name_of_longrope(tmp_path: Path) -> None:
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    more = {"original_max_position_embeddings": 128, "max_position_embeddings": 512}
    old = _load(tmp_path, rope_scaling={"type": "su", **factors}, **more)
    assert old.rope == _load(tmp_path, rope_scaling={"type": "longrope", **factors}, **more).rope


def test_context_of_stretching_kinds(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert _load(tmp_path, rope_scaling=yarn).max_position == 4096
    assert _load(tmp_path, rope_scaling=yarn, max_position_embeddings=4096).max_position == 4096
    spec = _load(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (spec.max_position, spec.rope.max_position) == (2048, 1024)


def test_yarn_factor_from_the_contexts(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": None, "original_max_position_embeddings": 256}
    assert _load(tmp_path, rope_scaling=yarn).rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "long_factor must be a list",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a number greater than 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "does not use beta_fast"),
        ({"rope_scaling": {"factor": 2.0}}, "'default' does not use factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu_10"}, "hidden_act 'gelu_10' is not supported; there are: silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method = 'bitsandbytes'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 cannot be rotated"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ({"vocab_size": 10**12}, "vocab_size must be at most"),
        ({"rope_theta": 1.0}, "rope_theta must be a number greater than 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures must name one architecture"),
        ({"architectures": ...}, "architectures must name one architecture"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, **changes)
    assert named in raised.value.message


def test_unknown_architecture_lists_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, architectures=["Qwen3MoEForCausalLM"])
    assert "Did you mean 'Qwen3MoeForCausalLM'?" in raised.value.message
    for name in FAMILIES:
        assert name in raised.value.message


def test_other_models_are_not_suggested(tmp_path: Path) -> None:
    for name in ("MiniMaxM3ForCausalLM", "Qwen4ForCausalLM", "GraniteHForCausalLM"):
        with pytest.raises(ConfigError, match=f"no architecture called '{name}'. There are: Apertus"):
            _load(tmp_path, architectures=[name])


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({"architectures": ..., "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mistral"}, "MistralForCausalLM"),
        ({"architectures": [], "model_type": "qwen3"}, "Qwen3ForCausalLM"),
        ({"architectures": ["Qwen3Model"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["LLaMAForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["MistralModel"]}, "MistralForCausalLM"),
        ({"architectures": ["Qwen2Model"], "model_type": "qwen2"}, "Qwen2ForCausalLM"),
    ],
)
def test_architectures_by_other_names(tmp_path: Path, fields: dict[str, Any], architecture: str) -> None:
    spec = _load(tmp_path, **fields)
    assert spec.architecture == architecture
    assert spec.classify is None


def test_every_model_type_means_an_architecture_that_exists() -> None:
    assert set(MODEL_TYPES.values()) <= set(FAMILIES)


def test_a_type_of_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"architectures must name one.*model_type 'bloom' is none of: qwen3_next"
    ):
        _load(tmp_path, architectures=..., model_type="bloom")
    with pytest.raises(ConfigError, match="no architecture called 'NobodysModel'"):
        _load(tmp_path, architectures=["NobodysModel"])


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_an_automatic_dtype_is_that_of_the_weights(tmp_path: Path, name: str) -> None:
    """Some FP8 checkpoints state the type of their matrices."""
    save_file({"a.weight": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    for value in ("auto", "float8_e4m3fn", "torch.float8_e4m3fn"):
        assert _load(tmp_path, **{"torch_dtype": ..., name: value}).dtype == "bfloat16"


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("BF16", "bfloat16")])
def test_short_names_of_types(name: str, dtype: str, tmp_path: Path) -> None:
    assert _load(tmp_path, torch_dtype=name).dtype == dtype


@pytest.mark.parametrize("field", ["is_causal", "use_bidirectional_attention"])
def test_attention_to_later_tokens_is_refused(tmp_path: Path, field: str) -> None:
    """Some embedding models keep the architecture of their base model but attend to later tokens."""
    causal = field == "is_causal"
    assert _load(tmp_path, **{field: causal}).family == "declared"
    with pytest.raises(ConfigError, match=f"{field} = {not causal}"):
        _load(tmp_path, **{field: not causal})


def test_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    def saved(*names: str, **changes: Any) -> bool:
        save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
        return _load(tmp_path, **changes).head

    assert saved("model.norm.weight", "lm_head.weight")
    assert saved("model.norm.weight", "model.lm_head.weight")
    assert saved("norm.weight", "language_model.lm_head.qweight")
    assert saved("norm.weight", tie_word_embeddings=True)
    assert not saved("norm.weight", "layers.0.mlp.gate_proj.weight")
    assert not saved("norm.weight", "model.layers.61.shared_head.head.weight")
    (tmp_path / "model.safetensors").unlink()
    assert _load(tmp_path).head, "nothing is known of weights that are not there"


def _rope(folder: Path, **more: Any) -> RopeSpec:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    return _load(folder, rope_scaling={**yarn, **more}).rope


def test_factors_of_yarn(tmp_path: Path) -> None:
    """``attention_factor`` replaces the whole factor; ``attn_factor`` multiplies the factor."""
    temperature = 0.1 * math.log(4.0) + 1.0
    for more, factor in (
        ({}, temperature),
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": None, "attn_factor": None}, temperature),
        ({"attn_factor": 1.0}, temperature),
        ({"attn_factor": 1.5}, 1.5 * temperature),
        ({"attn_factor": 1, "attention_factor": 1.5}, 1.5),
        ({"attn_factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 2.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, temperature / (0.05 * math.log(4.0) + 1.0)),
        ({"apply_yarn_scaling": False}, 1.0),
        ({"apply_yarn_scaling": True, "extrapolation_factor": 1.0}, temperature),
    ):
        assert attention_factor(_rope(tmp_path, **more)) == pytest.approx(factor, rel=1e-12), more
    with pytest.raises(ConfigError, match="attention_factor and attn_factor"):
        _rope(tmp_path, attention_factor=1.5, attn_factor=2.0)
    with pytest.raises(ConfigError, match="extrapolation_factor other than 1"):
        _rope(tmp_path, extrapolation_factor=2.0)
    with pytest.raises(ConfigError, match="'linear' does not use attn_factor"):
        _load(tmp_path, rope_scaling={"type": "linear", "factor": 2.0, "attn_factor": 1.0})


def test_the_form_of_other_tools_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 64}')
    with pytest.raises(ConfigError, match=r"no config\.json, but the params\.json of Mistral's own form"):
        load_spec(str(tmp_path))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_spec(str(tmp_path), None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        load_spec(str(tmp_path), None)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not readable JSON"):
        load_spec(str(tmp_path), None)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_spec(str(tmp_path), None)
    with pytest.raises(ConfigError, match="does not exist"):
        load_spec(str(tmp_path / "nothing"), None)


@pytest.mark.requirement("F34")
def test_remote_code_is_refused_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('executed')")
    auto_map = {"AutoModelForCausalLM": "modeling_x.X"}
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        _load(tmp_path, auto_map=auto_map)
    assert _load(tmp_path, trust=True, auto_map=auto_map).family == "declared"


def test_end_of_text_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3], "temperature": 0.6}')
    assert _load(tmp_path, eos_token_id=7).eos_ids == (3, 7, 9)
    assert _load(tmp_path, eos_token_id=[9, 1]).eos_ids == (1, 3, 9)
    assert _load(tmp_path, eos_token_id=None).eos_ids == (3, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "9"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be"):
        _load(tmp_path)


def test_sampling_defaults_of_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(
        '{"temperature": 0.6, "top_p": null, "top_k": 20, "min_p": 5, "do_sample": false, "x": 1}'
    )
    with caplog.at_level(logging.WARNING, "weft"):
        assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    assert "min_p must be" in caplog.text
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"top_k": 7}')
    assert sampling_defaults(tmp_path, str(tmp_path / "other")) == {"top_k": 7}
    assert sampling_defaults(tmp_path, "none") == {}
    with pytest.raises(ConfigError, match="--generation-config must be auto, none, or a folder"):
        sampling_defaults(tmp_path, str(tmp_path / "missing"))


def test_layer_override(tmp_path: Path) -> None:
    assert _load(tmp_path, 2).layers == 2
    for bad in (0, 5):
        with pytest.raises(ConfigError, match="--num-hidden-layers-override"):
            _load(tmp_path, bad)


def test_dtype_from_the_weights_where_the_config_is_silent(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert _load(tmp_path, torch_dtype=...).dtype == "bfloat16"
    assert _load(tmp_path, torch_dtype=..., dtype="float16").dtype == "float16"
    (tmp_path / "model.safetensors").write_bytes(b"\x05")
    assert _load(tmp_path, torch_dtype=...).dtype == "float32"


def test_bundled_checkpoint_loads() -> None:
    path = hub.resolve_model_path("spool-text")
    assert load_spec(path, None).family == "declared"
