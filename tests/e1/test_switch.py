"""The choices, refusals and messages of --deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e1.rig import CPU, make_checkpoint
from weft.attention import registry as attention
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.models.loader import build_model
from weft.ops import cpu
from weft.ops.registry import choose

MATRICES = tuple(
    f"{op}{form}"
    for op in ("linear", "gated_linear", "moe")
    for form in ("", "_int8", "_w8a8", "_int4", "_w4a8", "_fp8")
)
OTHERS = (
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "qkv_rope_cache",
    "qkv_rope_cache_fp8",
    "latent_rope_cache",
    "latent_rope_cache_fp8",
    "latent_forms",
    "write_lines",
    "gated",
    "sigmoid_gate",
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", MATRICES + OTHERS)
def test_every_op_has_an_invariant_form_on_the_cpu(op: str, dtype: torch.dtype) -> None:
    assert choose(op, dtype, CPU, invariant=True).invariant


def test_a_missing_form_is_refused_naming_flag_and_op() -> None:
    with pytest.raises(ConfigError, match=r"--deterministic: .*moe for float64 on cuda") as raised:
        choose("moe", torch.float64, torch.device("cuda"), invariant=True)
    assert raised.value.param == "--deterministic"


def test_attention_without_the_form_is_refused(tmp_path: Path) -> None:
    spec = load_spec(str(make_checkpoint(tmp_path, "llama")), None)
    with pytest.raises(ConfigError, match=r"--deterministic: attention backend 'torch'"):
        attention.choose("torch", spec, torch.float64, CPU, 16, invariant=True)
    assert attention.choose("auto", spec, torch.float64, CPU, 16, invariant=True).invariant


@pytest.mark.parametrize("shape", ["deepseek_v32", "deepseek_v4", "glm_dsa"])
def test_sparse_attention_has_invariant_forms(shape: str, tmp_path: Path) -> None:
    """Ops that only GPUs run are not asked of a CPU."""
    if not cpu.load():
        pytest.skip("needs the C++ operations (weft build-ops)")
    spec = load_spec(str(make_checkpoint(tmp_path, shape)), None)
    for invariant in (True, False):
        assert build_model(spec, torch.bfloat16, CPU, invariant=invariant).varying == ()


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe"])
def test_models_say_what_varies(shape: str, tmp_path: Path) -> None:
    spec = load_spec(str(make_checkpoint(tmp_path, shape)), None)
    assert build_model(spec, torch.float64, CPU, invariant=True).varying == ()
    varying = build_model(spec, torch.float64, CPU).varying
    assert "linear (torch)" in varying
    assert ("moe (torch)" in varying) == (shape == "qwen3_moe")
