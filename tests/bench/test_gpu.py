"""The arithmetic of bench.gpu, and the parts that run without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench import gpu, gpu_products, gpu_steps
from tests.e0.rig import make_engine
from tests.support.checkpoints import make_checkpoint
from weft.config.families import load_spec
from weft.config.spec import ModelSpec


@pytest.fixture
def llama(tmp_path: Path) -> ModelSpec:
    return load_spec(str(gpu.write_llama(tmp_path)), None)


def test_bytes_of_a_decode_step(llama: ModelSpec) -> None:
    """8.03e9 parameters without the input embedding, and 128 KiB of keys and values a token."""
    weights = gpu.decode_bytes(llama, "bfloat16", 0, 1024)
    assert weights == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.001)
    assert gpu.decode_bytes(llama, "bfloat16", 3, 1000) - weights == 3 * 1000 * (128 << 10)


def test_operations_of_prompts(llama: ModelSpec) -> None:
    """Twice the layers' parameters a token; attention as scores and values over all earlier positions."""
    layers = 8.03e9 - 2 * 128256 * 4096
    one = gpu.prefill_flops(llama, 1, 2048)
    attention = 2 * 2 * 32 * 4096 * 2048 * 2049 / 2
    assert one == pytest.approx(2 * layers * 2048 + attention + 2 * 128256 * 4096, rel=0.001)
    assert gpu.prefill_flops(llama, 8, 2048) == 8 * one


def test_the_driver_makes_as_many_tokens_as_asked(tmp_path: Path) -> None:
    core, _ = make_engine(make_checkpoint(tmp_path, "llama"), caching=False)
    driver = gpu.Driver(core)
    made = driver.generate([[3, 4, 5], [6, 7]], 5)
    assert [len(one) for one in made] == [5, 5]
    assert driver.generate([[6, 7]], 5) == made[1:]
    assert gpu.decode_seconds(driver, 2, 4, 3, 1) != 0
    core.close()


@pytest.mark.parametrize(
    ("module", "flag"), [(gpu, "--transformers"), (gpu_products, "--column"), (gpu_steps, "--kind")]
)
def test_help(
    module: ModuleType, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    assert flag in capsys.readouterr().out


def test_settings() -> None:
    args = gpu.parser().parse_args(["--set", "decode-graphs=false", "--model", "llama-3-8b"])
    assert dict(args.set) == {"decode_graphs": "false"}
    with pytest.raises(SystemExit):
        gpu.parser().parse_args(["--set", "nothing"])


def test_a_result_is_a_page() -> None:
    measured = {"ms_per_token": 2.5, "prompt_tokens_per_second": 4000.0, "output_tokens_per_second": 300.0}
    step = {"ms_per_step": 1.25, "share_of_bandwidth": 0.5}
    weft = {
        "workloads": {one.name: measured for one in gpu.OFFLINE},
        "decode": {"1": step, "64": step},
        "prefill_flops_per_second": 4e14,
        "prefill_share_of_product": 0.75,
    }
    times = {str(rows): 10.0 for rows in gpu_products.ROWS}
    found = {
        "ceilings": {"copy_bytes_per_second": 4e12, "product_flops_per_second": 8e14},
        "products": {"bfloat16": times, "int4": dict.fromkeys(times, 5.0)},
        "models": {"m": {"weft": weft, "transformers": weft["workloads"]}},
    }
    lines = gpu.page(found).splitlines()
    assert "| m | weft | 300 | 2.50 | 4,000 | 1.25 (50%), 1.25 (50%) | 400 (75%) |" in lines
    assert "| m | transformers | 300 | 2.50 | 4,000 | - | - |" in lines
    assert "| 64 | 10 (1.00) | 5 (2.00) |" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_a_missing_gpu_is_reported() -> None:
    made = subprocess.run([sys.executable, "-m", "bench.gpu"], capture_output=True, text=True)
    assert made.returncode == 1
    assert "needs a CUDA GPU" in made.stderr


def test_copies_of_a_matrix_do_not_fit_into_the_cache() -> None:
    """The copies hold more than 60 MB, the L2 of an H200, also in 4 bits."""
    for n, k in gpu_products.LAYER:
        assert gpu_products.copies(n, k) * n * k / 2 >= 150_000_000


def test_a_column_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that fails costs its own column only; a column of Weft ends the run."""

    def column(_: object, counts: list[int]) -> dict[str, float]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_products, "column", column)
    ticks: list[str] = []
    found, failed = gpu_products.measure(["DeepGEMM"], [1], 60.0, lambda what, _: ticks.append(what))
    assert (found, failed) == ({}, {"DeepGEMM": "RuntimeError: no such kernel"})
    assert gpu_products.measure(["DeepGEMM"], [1], -1.0, lambda *_: None)[1] == {
        "DeepGEMM": "no time was left"
    }
    with pytest.raises(RuntimeError, match="no such kernel"):
        gpu_products.measure(["int4"], [1], 60.0, lambda *_: None)


def test_steps_are_a_table() -> None:
    figures = {"ms_per_step": 4.9, "gpu_ms": 4.71, "host_calls": 25.0, "kernels": 434.0}
    assert gpu_steps.table({"1 greedy": figures}).splitlines()[-1] == "| 1 greedy | 4.90 | 4.71 | 25 | 434 |"
