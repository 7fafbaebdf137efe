"""A model in a GGUF file has the parameters of its source checkpoint."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import tests.support.gguf_files
from tests.support.ggml_blocks import DRAWN, drawn
from tests.support.gguf_files import some_texts, write_model
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.hub import resolve_model_path, resolve_tokenizer_path
from weft.gguf.checkpoint_folder import gguf_files, weights_of
from weft.gguf.container import PLAIN, QUANTIZED, Container, shards
from weft.models.gguf_tensor import GGUFTensor, Maps
from weft.models.loader import load_model
from weft.ops.coded import dequantize

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "routed_scaling_factor": 1.5,
}
SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-head-dim": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "q_lora_rank": None},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}),
    "glm-dsa": (
        "GlmMoeDsa",
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
            "indexer_types": ["full", "shared"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3-next": ("Qwen3Next", {**HYBRID, **EXPERTS, **SHARED, "norm_topk_prob": True}),
    "qwen3.5": ("Qwen3_5Text", HYBRID),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**HYBRID, **EXPERTS, **SHARED}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "head_dim": 16}),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(case: str, **more: Any) -> Any:
    family, settings = CASES[case]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **more})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def loaded(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, torch.Tensor]]:
    folder = resolve_model_path(name)
    spec = load_spec(folder)
    model = load_model(folder, spec, dtype, CPU, progress=False, pack=False)
    return spec, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    model = made(case)
    (tmp_path / "saved").mkdir()
    model.save_pretrained(tmp_path / "saved")
    more: dict[str, Any] = {}
    if case == "gpt-oss":
        more = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        more["rope.scaling.original_context_length"] = 64
    write_model(tmp_path / "model.gguf", model, **more)
    theirs, expected = loaded(str(tmp_path / "saved"))
    spec, found = loaded(str(tmp_path / "model.gguf"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        if name.endswith("log_rate"):  # the file has the exponential
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found[name], weight), name
    assert spec.dtype == "float32"
    for fact in (
        "family",
        "mla",
        "caches",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "hidden",
        "tied",
        "rope",
        "norm_eps",
        "moe",
        "delta",
        "index",
    ):
        assert getattr(spec, fact) == getattr(theirs, fact), fact
    assert spec.eos_ids == (2,)


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3.5-moe"])
def test_codes_of_delta_nets_are_reordered_without_a_change(case: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", made(case), kind="Q8_0")
    (file,) = gguf_files(Path(resolve_model_path(str(tmp_path / "model.gguf"))))
    maps = Maps()
    seen = set()
    for name, weight in weights_of(file).items():
        tensor = GGUFTensor(weight, maps)
        if ".linear_attn." in name and (codes := tensor.codes(lambda _: True)) is not None:
            (piece,) = codes[1]
            assert torch.equal(dequantize(piece.codes, torch.float32), tensor[()]), name
            seen.add(name.rpartition("linear_attn.")[2])
    assert seen == (
        {"in_proj_qkvz.weight", "in_proj_ba.weight"}
        if case == "qwen3-next"
        else {f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}
    )


@pytest.mark.parametrize(
    ("case", "architecture"), [("qwen2", "QWEN2VL"), ("qwen3", "QWEN3VL"), ("qwen3-moe", "QWEN3VLMOE")]
)
def test_text_models_of_models_with_images(
    case: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(case)
    write_model(tmp_path / "plain.gguf", model)
    kind = model.config.model_type
    monkeypatch.setitem(tests.support.gguf_files.ARCHITECTURES, kind, getattr(gguf.MODEL_ARCH, architecture))
    more = {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}
    write_model(tmp_path / "images.gguf", model, **more)
    assert Container(tmp_path / "images.gguf").metadata["general.architecture"] == architecture.lower()
    theirs, expected = loaded(str(tmp_path / "plain.gguf"))
    spec, found = loaded(str(tmp_path / "images.gguf"))
    assert spec == theirs
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
def test_numbers_are_those_that_the_format_says(kind: str, tmp_path: Path) -> None:
    model = made("qwen3-moe")
    write_model(tmp_path / "model.gguf", model, kind=kind)
    _, found = loaded(str(tmp_path / "model.gguf"))
    path = tmp_path / "model.gguf"
    stored = {tensor.name: tensor for tensor in Container(path).tensors()}
    down = stored["blk.1.ffn_down_exps.weight"]
    assert down.kind == kind
    expected = gguf.quants.dequantize(down.data, gguf.GGMLQuantizationType[kind])
    assert torch.equal(found["blocks.1.feed_forward.experts.down"], torch.from_numpy(expected))
    original = model.state_dict()["model.layers.1.mlp.experts.down_proj"]
    error = (found["blocks.1.feed_forward.experts.down"] - original).abs().max() / original.abs().max()
    assert 0 < error < {"F16": 1e-3, "BF16": 5e-3, "Q8_0": 1e-2, "Q5_1": 5e-2}.get(kind, 0.3)


def test_experts_in_mxfp4_stay_as_they_are_published(tmp_path: Path) -> None:
    """The codes equal the published checkpoint's, in another order of bytes."""
    model = made("gpt-oss")
    write_model(tmp_path / "model.gguf", model, kind="MXFP4")
    folder = resolve_model_path(str(tmp_path / "model.gguf"))
    assert load_spec(folder).quantized is not None
    _, found = loaded(str(tmp_path / "model.gguf"))
    stored = {tensor.name: tensor for tensor in Container(tmp_path / "model.gguf").tensors()}
    for what, name in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
        tensor = stored[f"blk.1.ffn_{what}_exps.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType.MXFP4))
        rows = found[f"blocks.1.feed_forward.experts.{name}"]
        n = expected.shape[1]
        begin = n if what == "up" else 0
        assert torch.equal(rows[:, begin : begin + n], expected), what


def test_types_are_all_that_the_package_dequantizes() -> None:
    found = []
    for kind in gguf.GGMLQuantizationType:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    assert set(QUANTIZED) == set(DRAWN)
    # Another version may dequantize more types, or have fewer.
    if version("gguf") == "0.19.0":
        assert set(found) - set(PLAIN) == set(QUANTIZED)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_numbers_of_every_type_are_the_packages(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random blocks, because the package cannot write every type."""

    def write(values: np.ndarray, _: Any) -> np.ndarray:
        raw = drawn(kind, values.size // values.shape[-1], values.shape[-1], seed=values.shape[0])
        return raw.reshape(*values.shape[:-1], -1)

    monkeypatch.setattr(gguf.quants, "quantize", write)
    monkeypatch.setattr(tests.support.gguf_files, "fitted", lambda _, values: write(values, kind))
    write_model(tmp_path / "model.gguf", made("llama", hidden_size=256, intermediate_size=256), kind=kind)
    _, found = loaded(str(tmp_path / "model.gguf"))
    stored = {tensor.name: tensor for tensor in Container(tmp_path / "model.gguf").tensors()}
    assert stored["blk.0.ffn_down.weight"].kind == kind
    made_type = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(stored["blk.0.ffn_down.weight"].data, made_type)
    assert np.isfinite(expected).all()
    assert torch.equal(found["blocks.0.feed_forward.down.weight"], torch.from_numpy(expected))
    assert len(np.unique(expected)) > (15 if kind == "MXFP4" else 100)


def test_scaled_rotations_of_llama_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file contains the divisor of each frequency."""
    factors = []
    for pair in range(8):
        length = 2 * math.pi * 500000.0 ** (2 * pair / 16)
        smooth = min(1.0, max(0.0, (8192 / length - 1.0) / 3.0))
        factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    model = made("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    import tests.support.gguf_files as files

    stored = files._stored
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    monkeypatch.setattr(files, "_stored", lambda config, weights: stored(config, weights) | extra)
    write_model(tmp_path / "model.gguf", model)
    spec, _ = loaded(str(tmp_path / "model.gguf"))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_max_position) == ("llama3", 32.0, 8192)
    extra["rope_freqs.weight"] = np.array(factors[::-1], np.float32)
    write_model(tmp_path / "other.gguf", model)
    with pytest.raises(ConfigError, match="rope_freqs"):
        resolve_model_path(str(tmp_path / "other.gguf"))


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    model = made("qwen3")
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    scaling["rope.scaling.original_context_length"] = 64
    write_model(tmp_path / "model.gguf", model, **scaling)
    spec, _ = loaded(str(tmp_path / "model.gguf"))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_max_position) == ("yarn", 4.0, 64)
    write_model(
        tmp_path / "linear.gguf", model, **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    )
    spec, _ = loaded(str(tmp_path / "linear.gguf"))
    assert (spec.rope.kind, spec.rope.factor) == ("linear", 2.0)


def test_the_folder_is_made_once_and_anew_for_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, made("llama"))
    first = resolve_model_path(str(path))
    before = (Path(first) / "config.json").stat().st_mtime_ns
    assert resolve_model_path(str(path)) == first
    assert (Path(first) / "config.json").stat().st_mtime_ns == before
    write_model(path, made("llama", rms_norm_eps=0.25))
    second = resolve_model_path(str(path))
    assert second != first
    assert json.loads((Path(second) / "config.json").read_text())["rms_norm_eps"] == 0.25


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no such file")
    with pytest.raises(ConfigError, match=r"text\.gguf is damaged or not a GGUF file"):
        resolve_model_path(str(tmp_path / "text.gguf"))
    writer = gguf.GGUFWriter(str(tmp_path / "rwkv6.gguf"), "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'rwkv6' is not supported; there are: llama, qwen2"):
        resolve_model_path(str(tmp_path / "rwkv6.gguf"))
    write_model(tmp_path / "pre.gguf", made("llama"), texts={**some_texts(), "pre": "unheard-of"})
    folder = resolve_model_path(str(tmp_path / "pre.gguf"))  # --tokenizer may name another
    with pytest.raises(ConfigError, match="'unheard-of' is not supported"):
        resolve_tokenizer_path(None, folder)


def _in_parts(source: Path, folder: Path) -> list[Path]:
    """Write the model of ``source`` in two parts, as llama.cpp's gguf-split does."""
    reader = gguf.GGUFReader(str(source))
    made = []
    for number in range(2):
        path = folder / f"m-{number + 1:05d}-of-00002.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture" and number == 0:
                kind, *inner = field.types
                writer.add_key_value(key, field.contents(), kind, *inner[:1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made.append(path)
    return made


def test_parts_behind_links(tmp_path: Path) -> None:
    """The client of the hub stores files under their digests, and links to the files."""
    write_model(tmp_path / "whole.gguf", made("llama"))
    _, expected = loaded(str(tmp_path / "whole.gguf"))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    for number, part in enumerate(_in_parts(tmp_path / "whole.gguf", tmp_path)):
        part.rename(blobs / f"{number}d")
        (snapshot / part.name).symlink_to(f"../blobs/{number}d")
    (snapshot / "m.mmproj-Q8_0.gguf").touch()
    for name in (snapshot, snapshot / "m-00002-of-00002.gguf"):
        _, found = loaded(str(name))
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())
    (tmp_path / "one.gguf").symlink_to(snapshot / "m-00001-of-00002.gguf")
    with pytest.raises(ConfigError, match=r"one\.gguf is one of 2 parts .* NAME-00001-of-00002\.gguf"):
        resolve_model_path(str(tmp_path / "one.gguf"))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_linear_scaling_without_its_name(key: str, tmp_path: Path) -> None:
    """llama.cpp scales linearly by a factor without a kind. Older files have another name of the factor."""
    write_model(tmp_path / "model.gguf", made("llama"), **{key: 4.0})
    rope = load_spec(resolve_model_path(str(tmp_path / "model.gguf"))).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.3),
        ("attention.scale", "x"),
        ("attention.causal", False),
        ("logit_scale", 2.0),
        ("embedding_scale", 12.0),
    ],
)
def test_keys_of_other_architectures_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", made("llama"), **{key: value})
    with pytest.raises(ConfigError, match=rf"llama\.{key} = .* is not supported for this architecture"):
        resolve_model_path(str(tmp_path / "model.gguf"))
    harmless = {"attention.scale": 0.25, "attention.causal": True}.get(key, 1.0)
    write_model(tmp_path / "other.gguf", made("llama"), **{key: harmless})
    assert load_spec(resolve_model_path(str(tmp_path / "other.gguf"))).heads == 4


def test_a_file_beside_the_configuration_of_its_model(tmp_path: Path) -> None:
    """Publishers put config.json beside GGUF files. Other weights in the folder come first."""
    write_model(tmp_path / "model.gguf", made("llama"))
    (tmp_path / "config.json").write_text("{}")
    folder = resolve_model_path(str(tmp_path))
    assert load_spec(folder).heads == 4
    assert resolve_model_path(folder) == folder
    (tmp_path / "pytorch_model.bin").touch()
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
    (tmp_path / "config.json").unlink()
    assert resolve_model_path(str(tmp_path)) == folder


def test_a_vision_tower_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "mmproj.gguf"), "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="the vision tower of a model: name the model's file"):
        resolve_model_path(str(tmp_path / "mmproj.gguf"))


def test_parts_of_a_model(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").touch()
    assert [part.name[2:7] for part in shards(tmp_path / "m-00002-of-00003.gguf")] == [
        "00001",
        "00002",
        "00003",
    ]
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match=r"m-00003-of-00003\.gguf is missing"):
        shards(tmp_path / "m-00001-of-00003.gguf")
