"""Quantized weights on a simulated GPU: weights stay packed, and the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0 import rig as e0
from tests.models.test_quantized_loading import FORMATS, _folders, gpt_oss_folders, plain
from tests.ops.test_coded import FORMS as CODES
from tests.ops.test_coded import codes_of
from tests.rehearsal import kernels, rig
from tests.rehearsal.device import running
from tests.rehearsal.rig import rehearse
from tests.rehearsal.test_engines import EP
from tests.rehearsal.test_families import FORMS
from tests.support.slow import mostly_slow
from weft.engine.core import EngineCore
from weft.ops import words
from weft.ops.coded import Codes, MixedCodes
from weft.ops.moe import Routed
from weft.ops.registry import choose
from weft.ops.triton import interpreting

__all__ = ["plain"]

KERNELS = {"_coded", "_grouped_codes"}


def matrices_of(value: Any) -> Iterator[Any]:
    """Yield the matrices (or stacks of matrices) that a layer computes with."""
    if isinstance(value, Routed):
        for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
            yield from matrices_of(getattr(value, name))
    elif isinstance(value, MixedCodes):
        yield from value.parts
    elif value is not None:
        yield value


def held_by(core: EngineCore) -> list[Any]:
    """Return the matrices of all layers except embedding and head. Check that the model is on the device."""
    model = core.runner._runner._model
    found = list[Any]()
    for module in model.modules():
        if module is not model.head:
            found += matrices_of(getattr(module, "_packed", None))
    for matrix in found:
        for tensor in matrix.tensors() if isinstance(matrix, Codes | words.Words) else [matrix]:
            assert tensor.device.type == "cuda"
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())
    return found


@mostly_slow("name", ["awq", "gptq", "fp8 blocks", "nvfp4"], ["nvfp4"])
def test_published_formats_stay_packed(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers and experts use the kernels."""
    folder, _ = _folders(plain, tmp_path, *FORMATS[name])
    made, _, core = rehearse(monkeypatch, folder, rig.short())
    assert made.operators >= KERNELS
    assert not made.waited
    found = held_by(core)
    packed = sum(isinstance(matrix, Codes) for matrix in found)
    # Inputs of queries, keys, values and experts in different orders ("desc_act") are dequantized.
    assert packed == len(found) - (4 if name == "gptq" else 0)
    assert core.runner.graphs is not None
    assert core.runner.graphs.replayed > 0
    assert all(len(forms) <= FORMS for forms in made.variants.values()), made.variants


@mostly_slow(
    ("name", "settings"),
    [
        ("qwen3_moe", {"quantization": "int4", "deterministic": True}),
        ("llama", {"quantization": "fp8"}),
        ("qwen3_moe", {"quantization": "int8"}),
        ("qwen3_moe", {"quantization": "w8a8"}),
        ("qwen3_moe", {"quantization": "w4a8"}),
    ],
    1,
    ids=["int4", "fp8", "int8", "w8a8", "w4a8"],
)
def test_checkpoints_of_16_bits_are_rounded(
    name: str, settings: dict[str, Any], folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, core = rehearse(monkeypatch, folder_of(name), rig.short(), **settings)
    assert made.operators >= (KERNELS if name == "qwen3_moe" else {"_coded"})
    assert not made.waited
    assert all(isinstance(matrix, Codes) for matrix in held_by(core))


def test_linear_layers_in_words(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper: in captured steps and in prompts with more rows than the kernel takes, without waiting."""
    from weft.ops.triton import words_linear as kernel

    monkeypatch.setattr(words, "PADDING", 1e9)
    monkeypatch.setattr(kernel, "MOST", 8)
    monkeypatch.setattr(kernel, "checked_words", lambda matrix: kernel.Verdict(right=True, alike=True))
    install = kernels.install

    def with_words(patch: pytest.MonkeyPatch) -> None:
        install(patch)
        patch.setattr("weft.ops.triton.takes_words", lambda: True)

    monkeypatch.setattr(kernels, "install", with_words)
    made, _, core = rehearse(monkeypatch, folder_of("llama"), rig.short(), quantization="int4")
    assert made.operators >= {"_words", "_dequantize_words"}
    assert not made.waited
    assert all(isinstance(matrix, words.Words) for matrix in held_by(core))
    assert core.runner.graphs is not None
    assert core.runner.graphs.replayed > 0


@pytest.mark.slow
def test_divided_experts_stay_packed(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has some of the experts, and rows are sent between ranks."""
    folder, _ = _folders(plain, tmp_path, *FORMATS["nvfp4"])
    settings = {**EP, "moe_dispatch": "low-latency"}
    made, _, core = rehearse(monkeypatch, folder, rig.short(), ranked=True, **settings)
    assert "_grouped_codes" in made.operators
    assert made.operators & {"all_to_all", "_meet"}, "no rows were sent"
    assert all(isinstance(matrix, Codes) for matrix in held_by(core))


@pytest.mark.slow
def test_stacked_experts_of_a_family_that_publishes_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP4 experts beside plain matrices, which also wait on the host for their layers."""
    gpt_oss_folders(tmp_path)
    made, _, core = rehearse(monkeypatch, tmp_path / "packed", rig.short())
    assert "_grouped_codes" in made.operators
    found = held_by(core)
    assert {isinstance(matrix, Codes) for matrix in found} == {True, False}


@pytest.mark.parametrize("form", list(CODES))
def test_rows_of_a_packed_table_are_read_without_waiting(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    with rig.rehearsed(monkeypatch) as made:
        table = codes_of(form, (20, 96)).to(cuda)
        ids = torch.zeros(3, dtype=torch.int64, device=cuda)
        with running(made):
            rows = choose("coded_embedding", torch.bfloat16, cuda).run(ids, table, torch.bfloat16)
        assert (rows.shape, rows.dtype, rows.device.type) == ((3, 96), torch.bfloat16, "cuda")


@pytest.mark.slow
def test_packed_weights_give_the_tokens_of_a_cpu(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 with Triton's interpreter."""
    if not interpreting():
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    folder, _ = _folders(plain, tmp_path, *FORMATS["nvfp4"])
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "1M"}
    with monkeypatch.context() as patch:
        made, there, _ = rehearse(patch, folder, rig.short(), values=True, **settings)
    assert made.operators >= KERNELS
    here = EngineCore(rig.config_of(folder, **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, rig.short())
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}
