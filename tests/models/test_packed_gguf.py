"""GGUF files with packed matrices: the logits of the dequantized model, in the memory of the file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.test_packed_weights import held, logits
from tests.support.gguf_files import write_model
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from weft.config.families import load_spec
from weft.config.hub import resolve_model_path
from weft.gguf.container import Container
from weft.models.loader import load_model
from weft.ops.coded import Codes, MixedCodes
from weft.types.layout import Layout

Tensor = torch.Tensor
KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_K", "IQ4_XS", "Q3_K", "IQ4_NL", "Q2_K")
#: Memory in relation to the file, by default 1.15. Q3_K and Q2_K have 4 bits in memory.
MEMORY = {"Q3_K": 1.45, "Q2_K": 2.1}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(name: str, **more: Any) -> Any:
    """Return a random model whose input sizes are whole blocks of 256."""
    torch.manual_seed(3)
    facts: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    match name:
        case "llama":  # queries and keys in another order
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts | more))
        case "qwen3 tied":
            config = transformers.Qwen3Config(**facts | {"tie_word_embeddings": True} | more)
            return transformers.Qwen3ForCausalLM(config)
        case "qwen3 moe":
            return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**facts | moe | more))
    facts |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**facts, sliding_window=8, rope_parameters=rope, **more)
    model = transformers.GptOssForCausalLM(config)
    for one in model.parameters():  # some are left as the memory was
        torch.nn.init.normal_(one, 0.0, 0.1)
    return model


def load(path: Path, dtype: torch.dtype, **more: Any) -> Any:
    folder = resolve_model_path(str(path))
    return load_model(folder, load_spec(folder), dtype, torch.device("cpu"), progress=False, **more)


MODELS = ("llama", "qwen3 tied", "qwen3 moe", "gpt-oss")


@mostly_slow(
    ("name", "kind"),
    [(name, kind) for name in MODELS for kind in KINDS],
    [*zip(MODELS, KINDS, strict=False), ("qwen3 moe", "Q5_K")],
)
def test_logits_are_those_of_the_dequantized(name: str, kind: str, tmp_path: Path, paged: Any) -> None:
    """The float64 difference on torch is the rounding of the package; in C++ it is the rounding of sums."""
    write_model(tmp_path / "model.gguf", made(name), kind=kind)
    for dtype, most in ((torch.float64, 1e-6), (torch.float32, 2e-5), (torch.bfloat16, 0.02)):
        wanted = logits(load(tmp_path / "model.gguf", dtype, packed=False), paged).double()
        found = logits(load(tmp_path / "model.gguf", dtype), paged).double()
        missed = (found - wanted).abs()  # in bf16 a router may choose another expert at a near tie
        worst = missed.mean() if dtype == torch.bfloat16 else missed.max()
        assert worst <= most * wanted.abs().max(), dtype


MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}


@pytest.mark.parametrize("name", ["llama", "qwen3 tied"])
def test_a_mixture_as_it_is_published(name: str, tmp_path: Path, paged: Any, extension: None) -> None:
    """Q4_K_M: values have another type than queries and keys. Nothing is dequantized, including embedding and
    head; a tied head shares the embedding's codes.
    """
    path = tmp_path / "model.gguf"
    write_model(path, made(name), kind="Q4_K", kinds=MIXED)
    wanted = logits(load(path, torch.float64, packed=False), paged)
    codes = load(path, torch.float64)
    assert (logits(codes, paged) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert isinstance(codes.blocks[0].attention.qkv._packed, MixedCodes)
    assert isinstance(codes.embedding.table, Codes)
    model = load(path, torch.float32)
    assert (logits(model, paged).double() - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert (model.head._packed is model.embedding.table) == (name == "qwen3 tied")
    assert all(parameter.numel() <= 1024 for parameter in model.parameters())  # norms


@mostly_slow("kind", KINDS, ["Q4_K"])
@mostly_slow("name", ["llama", "qwen3 moe"], ["qwen3 moe"])
def test_memory_is_that_of_the_file(name: str, kind: str, tmp_path: Path, extension: None) -> None:
    """At most ``MEMORY``; routers, which are float32 in the file and here, and norms apart."""
    path = tmp_path / "model.gguf"
    write_model(path, made(name, hidden_size=512, intermediate_size=1024, vocab_size=512), kind=kind)
    stored = sum(t.data.nbytes for t in Container(path).tensors() if t.kind == kind)
    plain = sum(t.data.nbytes for t in Container(path).tensors() if t.kind != kind)
    assert held(load(path, torch.bfloat16)) <= MEMORY.get(kind, 1.15) * stored + plain
    assert held(load(path, torch.bfloat16, packed=False)) > 1.8 * stored


@mostly_slow("kind", ["Q8_0", "Q4_K"], ["Q4_K"])
@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
@mostly_slow("layout", [Layout(tensor=2), Layout(tensor=2, expert=True)], [Layout(tensor=2, expert=True)])
def test_ranks(
    name: str, kind: str, layout: Layout, tmp_path: Path, paged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows, experts, and inputs of whole blocks stay packed."""
    if layout.expert and name == "llama":
        pytest.skip("no experts")
    path = tmp_path / "model.gguf"
    write_model(path, made(name, intermediate_size=512, hidden_size=512, head_dim=64), kind=kind)
    wanted = logits(load(path, torch.float64, packed=False), paged)
    found = on_ranks(layout, lambda mesh: logits(load(path, torch.float64, mesh=mesh), paged))
    for one in found:
        assert (one - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def said(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    """Return distinct log messages with ``word``: a logger enabled by another test may duplicate records."""
    return list(dict.fromkeys(m for m in (record.getMessage() for record in caplog.records) if word in m))


def test_what_is_dequantized_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, extension: None
) -> None:
    """The log names dequantized matrices: a type without codes, gate and up of different types, and cut
    blocks.
    """
    from weft.parallel.mesh import make_mesh

    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    path = tmp_path / "model.gguf"
    kinds = {"ffn_gate": "Q4_K", "attn_output": "Q5_1"}
    write_model(path, made("llama"), kind="Q6_K", kinds=kinds)
    with caplog.at_level(logging.INFO, "weft"):
        load(path, torch.bfloat16)
    (text,) = said(caplog, "quantized weights")
    for part in ("2 Q4_K", "2 Q5_1"):
        assert part in text
    # Two layers with gate and up [512, 256] each and out [256, 256], in bf16.
    wide = 2 * 2 * (2 * 512 * 256 + 256 * 256) / 1e6
    assert f"of which {wide:.1f} MB are dequantized to bfloat16" in text
    caplog.clear()
    write_model(path, made("llama"), kind="Q6_K")
    with caplog.at_level(logging.INFO, "weft"):
        load(path, torch.bfloat16, mesh=make_mesh(Layout(tensor=2), 1))
    assert said(caplog, "--tp cuts groups")


def test_rounding_reads_the_numbers(tmp_path: Path, paged: Any) -> None:
    """--quantization rounds the values of the file's blocks."""
    path = tmp_path / "model.gguf"
    write_model(path, made("llama"), kind="Q8_0")
    wanted = logits(load(path, torch.float32), paged)
    found = logits(load(path, torch.float32, quantization="int8"), paged)
    assert 0 < (found - wanted).abs().max() <= 0.1 * wanted.abs().max()
