"""``weft verify`` passes on a correct engine, and distinguishes a defect from a tie on a wrong engine."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from weft.cli.main import main
from weft.cli.verify import verify_run, verify_tier
from weft.common.errors import ConfigError
from weft.config.flags import from_keywords

FEW = ["--prompts", "4", "--tokens", "8", "--block-size", "4"]


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int), err
    return ended.value.code, out if ended.value.code < 2 else err


def test_it_passes_against_the_reference(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs the transformers package")
    status, out = verified(capsys, "--reference", checkpoint, *FEW)
    assert status == 0
    assert "greedy tokens in float64: 4 of 4 prompts equal to transformers over 8 tokens" in out
    assert "within 0.0001" in out
    assert out.endswith("verify: passed\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    ["qwen3_next", "kimi_linear", "mamba2", "olmo_hybrid", "bailing_hybrid", "falcon_mamba", "jamba"],
)
def test_models_with_states_pass_against_the_reference(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a state's KV cache group are snapshots: the forward pass needs none."""
    pytest.importorskip("transformers", reason="needs the transformers package")
    folder = make_checkpoint(tmp_path, shape)
    status, out = verified(capsys, "--reference", str(folder), *FEW, "--tokenizer", "spool-text")
    assert status == 0, out
    assert "greedy tokens in float64: 4 of 4 prompts equal to transformers over 8 tokens" in out
    assert "within 0.0001" in out


@pytest.mark.slow
def test_a_model_without_attention_passes_against_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a model is never preempted, which is no failure."""
    pytest.importorskip("transformers", reason="needs the transformers package")
    folder = make_checkpoint(tmp_path, "mamba2")
    flags = ["--prompts", "6", "--tokens", "24", "--block-size", "4", "--tokenizer", "spool-text"]
    tier = ["--kv-disk", "64M", "--kv-disk-dir", str(tmp_path / "disk")]
    status, out = verified(capsys, str(folder), "--self", *flags, *tier)
    assert status == 0, out
    for name in ("chunks of 7", "two steps in flight", "damaged on disk"):
        assert f"{name}: 6 of 6" in out
    assert "preempted: not compared" in out
    assert "NOT ENGAGED" not in out


def test_it_finds_a_defect(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs the transformers package")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    weights = load_file(other / "model.safetensors")
    name = "model.layers.1.self_attn.q_norm.weight"
    weights[name] = weights[name] * 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    status, out = verified(capsys, str(other), "--reference", checkpoint, *FEW)
    assert status == 1
    assert "DEFECT: over 0.0001" in out
    assert "with margin" in out
    assert out.endswith("verify: FAILED\n")


def test_it_passes_against_itself_and_says_what_it_did(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = verified(
        capsys, checkpoint, "--self", "--prompts", "6", "--tokens", "24", "--block-size", "4"
    )
    assert status == 0, out
    for name in ("batched", "chunks of 7", "two steps in flight", "preempted"):
        assert f"{name}: 6 of 6 prompts equal" in out
    assert " 0 preemptions" not in out.split("preempted: ")[1]


def test_variants_that_did_not_engage_fail(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = verified(capsys, checkpoint, "--self", "--prompts", "1", "--tokens", "2")
    assert status == 1
    assert "preempted: NOT ENGAGED" in out


@pytest.mark.slow
def test_a_disk_tier_is_compared(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks are stored, loaded, and found to be damaged; the folder is empty again at the end."""
    flags = ["--prompts", "6", "--tokens", "24", "--block-size", "4", "--kv-disk", "64M"]
    status, out = verified(capsys, checkpoint, "--self", *flags, "--kv-disk-dir", str(tmp_path))
    assert status == 0, out
    for name in ("stored", "loaded", "damaged"):
        assert f"{name} on disk: 6 of 6" in out or f"{name} from disk: 6 of 6" in out
    assert " corrupt" in out
    assert not list(tmp_path.iterdir())


def test_an_error_of_an_engine_is_not_an_error_of_the_folder(tmp_path: Path) -> None:
    config = from_keywords({"kv_disk": "64M", "kv_disk_dir": str(tmp_path)})
    with pytest.raises(OSError, match="no space"), verify_tier.new_folder(config):
        raise OSError("no space")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    config = from_keywords({"kv_disk": "64M", "kv_disk_dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="no folder can be made"), verify_tier.new_folder(config):
        pass


def test_a_tie_is_not_a_defect() -> None:
    said: list[str] = []
    near = torch.tensor([1.0, 1.0 + 1e-9, 0.0], dtype=torch.float64)
    clear = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    assert verify_run.report(said.append, "here", (0, 1), (near, near), ("a", "b"))
    assert not verify_run.report(said.append, "here", (0, 1), (near, clear), ("a", "b"))
    assert said[0].endswith(": tie")
    assert said[1] == "here differs: a 0 with margin 1.000e-09; b 1 with margin 1.000e+00: DEFECT"


def test_missing_transformers_is_an_error_with_advice(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    status, err = verified(capsys, "--reference", checkpoint, *FEW)
    assert status == 2
    assert "pip install 'weft[reference]'" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--load-format", "dummy"], "--load-format dummy"),
        (["--tokens", "512"], "--tokens 512 leaves no room"),
        (["--kv-cache-memory", "1M", "--max-model-len", "9", "--tokens", "9"], "--max-model-len 9"),
    ],
)
def test_impossible_comparisons_are_refused(
    checkpoint: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = verified(capsys, "--reference", checkpoint, *arguments)
    assert status == 2
    assert told in err
