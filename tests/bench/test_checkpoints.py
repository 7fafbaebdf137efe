"""Generated checkpoints are complete, of the right size, readable by transformers, and varied in output."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.slow import mostly_slow
from weft.bench import checkpoints
from weft.bench.bench_tokenizer import SPECIAL, write_tokenizer
from weft.common.errors import ConfigError
from weft.config.families import load_spec

MILLIONS = {
    "qwen3-dense-s": 108,
    "deepseek-moe-s": 117,
    "deepseek-moe-k576": 122,
    "qwen3next-s": 103,
    "gpt-oss-s": 123,
}


SEEING = "qwen3vl-s"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe with two layers (qwen3-next: four, the last attends) and fewer, smaller experts."""
    for name, recipe in checkpoints.RECIPES.items():
        layers = 4 if recipe.model_type == "qwen3_next" else 2
        less: dict[str, Any] = {
            "num_hidden_layers": layers,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
        }
        if "layer_types" in recipe.config:
            less["layer_types"] = recipe.config["layer_types"][:layers]
        config = {**recipe.config, **less}
        if recipe.processor is not None:
            vision = {**config["vision_config"], "depth": 2, "deepstack_visual_indexes": [0]}
            config = {"text_config": {**config["text_config"], **less}, "vision_config": vision, **IDS}
        changed = replace(recipe, config=config)
        monkeypatch.setitem(checkpoints.RECIPES, name, changed)


IDS = {name: value for name, value in checkpoints.RECIPES[SEEING].config.items() if name.endswith("_id")}


def header(folder: Path) -> dict[str, Any]:
    with (folder / "model.safetensors").open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        found: dict[str, Any] = json.loads(file.read(size))
    found.pop("__metadata__")
    return found


@pytest.mark.slow
def test_the_dense_one_has_its_size_and_is_one_that_weft_serves(tmp_path: Path) -> None:
    folder = checkpoints.make("qwen3-dense-s", tmp_path / "dense", progress=False)
    tensors = header(folder)
    assert {one["dtype"] for one in tensors.values()} == {"BF16"}
    numbers = 0
    for one in tensors.values():
        size = 1
        for side in one["shape"]:
            size *= side
        numbers += size
    assert round(numbers / 1e6) == MILLIONS["qwen3-dense-s"]
    spec = load_spec(str(folder))
    assert (spec.vocab_size, spec.layers, spec.hidden, spec.eos_ids) == (16_384, 12, 768, (16_382,))
    assert spec.max_position >= 32_768 + 256


@pytest.mark.parametrize("name", ["deepseek-moe-s", "deepseek-moe-k576", "qwen3next-s", "gpt-oss-s"])
def test_sizes_of_the_others(name: str) -> None:
    import torch
    import transformers

    recipe = checkpoints.RECIPES[name]
    config = transformers.AutoConfig.for_model(recipe.model_type, **{**checkpoints._COMMON, **recipe.config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert abs(millions - MILLIONS[name]) < 1


@pytest.mark.slow
def test_the_one_that_sees(small: None, tmp_path: Path) -> None:
    """The vision checkpoint loads, has placeholders, and its output depends on the image."""
    from PIL import Image

    from weft import LLM, SamplingParams

    folder = checkpoints.make(SEEING, tmp_path / SEEING, progress=False)
    with LLM(str(folder), device="cpu", max_model_len=2048, kv_cache_memory="64M") as llm:
        chats = []
        for colour in ("red", "white"):
            image = {"type": "image", "image": Image.new("RGB", (256, 320), colour)}
            chats.append([{"role": "user", "content": [image, {"type": "text", "text": "what"}]}])
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        red, white = llm.chat(chats, params, use_tqdm=False)
    assert red.prompt_token_ids.count(IDS["image_token_id"]) == 8 * 10
    assert red.outputs[0].token_ids != white.outputs[0].token_ids


@mostly_slow("name", list(MILLIONS), 2)
def test_transformers_runs_them_and_tokens_vary(name: str, small: None, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

    folder = checkpoints.make(name, tmp_path / name, progress=False)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "deepseek_v3":
        assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    coded = {"quantization_config": Mxfp4Config(dequantize=True)} if name == "gpt-oss-s" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **coded).eval()
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.eos_token_id) == (16_384, 16_382)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text.startswith("<|im_start|>user\nhi")
    ids = torch.randint(512, 15_000, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
        made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 16:].tolist()
    assert torch.isfinite(logits).all()
    assert len(set(logits.argmax(-1)[0].tolist())) > 4
    assert len(set(made)) > 1


def test_gpt_oss_has_its_experts_in_mxfp4_and_weft_serves_it(small: None, tmp_path: Path) -> None:
    """The checkpoint has OpenAI's published form: the same names, packed experts, and nearly the drawn
    values.
    """
    import torch
    from safetensors.torch import load_file

    from weft import LLM, SamplingParams
    from weft.bench import gpt_oss
    from weft.models.quantized.float4 import from_blocks

    folder = checkpoints.make("gpt-oss-s", tmp_path / "gpt", progress=False)
    tensors = load_file(folder / "model.safetensors")
    experts = "model.layers.1.mlp.experts"
    stored = {name: one.dtype for name, one in tensors.items() if name.startswith(f"{experts}.gate_up")}
    assert stored == {
        f"{experts}.gate_up_proj_blocks": torch.uint8,
        f"{experts}.gate_up_proj_scales": torch.uint8,
        f"{experts}.gate_up_proj_bias": torch.bfloat16,
    }
    drawn = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)) * 0.06
    drawn[0] = 0
    blocks, scales = gpt_oss.mxfp4(drawn)
    back = from_blocks(blocks, scales, torch.float32).T
    largest = drawn.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    # Codes 4 and 6 are 2 apart, and values from 6 to at most 8 become 6.
    assert ((back - drawn).abs() <= 0.26 * largest).all()
    with LLM(str(folder), device="cpu", max_model_len=512, kv_cache_memory="16M") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": list(range(1000, 1200))}], params, use_tqdm=False)
    assert len(set(answer.outputs[0].token_ids)) > 1


@pytest.mark.slow
def test_it_is_made_once_and_is_the_same_from_the_same_seed(small: None, tmp_path: Path) -> None:
    one = checkpoints.make("qwen3-dense-s", tmp_path / "one", progress=False)
    stamp = (one / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.make("qwen3-dense-s", one, progress=False) == one
    assert (one / "model.safetensors").stat().st_mtime_ns == stamp
    same = checkpoints.make("qwen3-dense-s", tmp_path / "same", progress=False)
    other = checkpoints.make("qwen3-dense-s", tmp_path / "other", seed=1, progress=False)
    data = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert data[0] == data[1] != data[2]
    with pytest.raises(ConfigError, match="other contents"):
        checkpoints.make("qwen3-dense-s", one, seed=1, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "same"]
    (one / "weft_bench.json").write_text('{"name": "qwen3-dense-s", "seed": 0, "format": 0}')
    with pytest.raises(ConfigError, match="another version"):
        checkpoints.make("qwen3-dense-s", one, progress=False)


def test_a_failure_leaves_nothing(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoints, "write_tokenizer", fail)
    with pytest.raises(OSError, match="full"):
        checkpoints.make("qwen3-dense-s", tmp_path / "one", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other contents"):
        checkpoints.make("qwen3-dense-s", tmp_path, progress=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"weft\[reference\]"):
        checkpoints.make("qwen3next-s", tmp_path / "x", progress=False)


def test_the_tokenizer_reads_back_any_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 16_384, 1024)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 16_384
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [16_381, 16_382, 16_383]
    text = "Tom has 12 apples, naïve 漢字 🙂\n"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert len(encoded.ids) < len(text.encode())
    assert all(tokenizer.decode([number]) for number in range(256, 16_381))
    with pytest.raises(ConfigError, match="vocabulary of 100"):
        write_tokenizer(tmp_path, 100, 1024)
