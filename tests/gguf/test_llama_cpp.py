"""GGUF files against llama.cpp, the format's own implementation: probabilities, and ids of texts."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.gguf import test_rows
from tests.support import gguf_files, gguf_rows
from weft import LLM, SamplingParams
from weft.config.hub import bundled_models, resolve_model_path
from weft.gguf.gguf_tokenizer import NORMALIZED
from weft.text.tokenizer import Tokenizer

xllamacpp = pytest.importorskip("xllamacpp")

PROMPTS = [[1, 300, 400, 500, 12, 13, 14, 15], [333, 496, 16, 40, 41, 42], [777]]
TOP = 5


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def server(path: Path) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def reference(made: Any, prompt: list[int]) -> dict[int, float]:
    """Return the most likely tokens after ``prompt`` with their log-probabilities."""
    answer = made.handle_completions({"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": TOP})
    (token,) = answer["choices"][0]["logprobs"]["content"]
    return {top["id"]: top["logprob"] for top in token["top_logprobs"]}


def bundled(name: str) -> tuple[Any, dict[str, Any]]:
    folder = bundled_models()[name]
    texts = gguf_files.texts_of(Path(folder), "qwen2") | {"eos_token_id": 2}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), texts


def text_model() -> tuple[Any, dict[str, Any]]:
    return bundled("spool-text")


def llama() -> tuple[Any, dict[str, Any]]:
    """Random, with the rows of queries and keys in llama.cpp's order."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    _, texts = text_model()
    return transformers.LlamaForCausalLM(config), texts | {"pre": "llama-bpe"}


def wide_llama() -> tuple[Any, dict[str, Any]]:
    """Random; inputs are whole blocks of 256."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
    )
    _, texts = llama()
    return transformers.LlamaForCausalLM(config), texts


def latent_model() -> tuple[Any, dict[str, Any]]:
    """DeepSeek V3: latent attention, experts chosen in groups by sigmoid and bias."""
    return bundled("spool-mla")


def gpt_oss() -> tuple[Any, dict[str, Any]]:
    """Return a random model with sinks, a window in every second layer, and expert biases.

    Yarn is off: llama.cpp rounds its range of pairs to whole pairs, unlike the published model.
    """
    torch.manual_seed(2)
    config = transformers.GptOssConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    )
    _, texts = text_model()
    model = transformers.GptOssForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() < 3 and "norm" not in name:
            torch.nn.init.normal_(weight, 0.0, 0.2)
    return model, texts


@pytest.mark.parametrize(
    ("make", "kind", "tolerance"),
    [
        (latent_model, "F32", 1e-3),
        (gpt_oss, "F32", 1e-3),
        (gpt_oss, "MXFP4", 0.05),
        # llama.cpp computes attention with 16-bit queries.
        (text_model, "F32", 1e-3),
        (llama, "F32", 1e-3),
        # llama.cpp rounds activations to 8 bits where weights are quantized.
        (text_model, "Q8_0", 0.05),
        (text_model, "Q4_0", 0.05),
        (wide_llama, "Q8_0", 0.05),
        (wide_llama, "Q4_K", 0.05),
        (wide_llama, "Q6_K", 0.05),
        (wide_llama, "Q4_K_M", 0.05),
    ],
)
def test_probabilities(make: Any, kind: str, tolerance: float, tmp_path: Path) -> None:
    model, texts = make()
    kinds = {}
    if kind == "Q4_K_M":  # a mixture
        kinds = dict.fromkeys(("attn_v", "ffn_down", "output"), "Q6_K")
    stored = kind.removesuffix("_M")
    gguf_files.write_model(tmp_path / "model.gguf", model, kind=stored, kinds=kinds, texts=texts)
    theirs = server(tmp_path / "model.gguf")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP)
    with LLM(str(tmp_path / "model.gguf"), dtype="float32", max_num_seqs=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference(theirs, prompt)
        found = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        common = expected.keys() & found.keys()
        assert len(common) >= (TOP if kind == "F32" else 3)
        for token in common:
            assert abs(math.exp(found[token]) - math.exp(expected[token])) < tolerance, (prompt, token)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma", "gemma2", "starcoder2", "llama4", "falcon-h1", "granitehybrid", "granitehybrid-experts"),
        *("command-r", "glm4", "qwen2moe"),
    ],
)
def test_probabilities_of_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_rows.SIZES, "vocab_size", 1024)
    monkeypatch.setattr(gguf_rows, "some_texts", lambda: text_model()[1])
    case, path = test_rows.CASES[name], tmp_path / "model.gguf"
    test_rows.write(case, tmp_path / "saved", path, test_rows.saved(case, tmp_path / "saved"))
    theirs = server(path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP)
    with LLM(str(path), dtype="float32", max_num_seqs=2, max_model_len=256) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference(theirs, prompt)
        found = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        assert found.keys() == expected.keys()
        for token in found:
            assert abs(math.exp(found[token]) - math.exp(expected[token])) < 5e-3, (prompt, token)


TEXTS = [
    "We'll pay 12345.67 dollars, DON'T we?",
    "fooBar's HTTPServer\n\n\n  x = 'y'\t\tz\r\n",
    "Gr\u00fc\u00dfe \u4e16\u754c \U0001f600\U0001f600 na\u00efve caf\u00e9",
    "   leading, trailing   ",
    "a\u0300\u00a0b\u3000c\u200bd",
]


#: Other rules are compared with published tokenizers in test_word_rules.py. llama.cpp rewrites some of them.
RULES = ("gpt-2", "default", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "gpt-4o")


@pytest.mark.parametrize("pre", RULES)
def test_ids_of_texts(pre: str, tmp_path: Path) -> None:
    model, texts = llama()
    gguf_files.write_model(tmp_path / "model.gguf", model, texts=texts | {"pre": pre})
    theirs = server(tmp_path / "model.gguf")
    ours = Tokenizer.load(resolve_model_path(str(tmp_path / "model.gguf")))
    for text in TEXTS:
        if pre in NORMALIZED:  # by the published tokenizers, and not by llama.cpp
            text = unicodedata.normalize("NFC", text)
        asked = {"content": text, "add_special": False}
        answer = httpx.post(f"{theirs.listening_address}/tokenize", json=asked, timeout=60, trust_env=False)
        assert ours.encode(text, add_special_tokens=False) == answer.json()["tokens"], text
