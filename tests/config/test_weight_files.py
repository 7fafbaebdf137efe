"""Headers of weight files are checked before the start, and each error names the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.families import load_spec
from weft.config.families.weight_files import check_weight_files, pickles, read_header, weight_files
from weft.config.flags import from_keywords
from weft.config.resolve import resolve

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_memory", lambda: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.zeros(4, 2), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


def told(folder: Path, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve(from_keywords({"model": str(folder), **keywords}))
    return raised.value.message


def written(header: Any, data: int = 0, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the header claims 0 bytes"),
    "shorter than a length": (b"\x05", "the header claims 0 bytes"),
    "a header longer than the file": (written({}, length=1 << 40), "the header claims 1099511627776 bytes"),
    "a header of 2^64 - 1 bytes": (written({}, length=(1 << 64) - 1), "the header claims"),
    "a header that is no JSON": (written(b"{..."), "the header is not JSON"),
    "a deep header": (written(b"[" * 100_000), "the header is not JSON"),
    "a header that is a list": (written([]), "the header is not a JSON object"),
    "an entry without a place": (written({"a": {"dtype": "F32", "shape": [1]}}), "tensor 'a' has no shape"),
    "a negative place": (written({"a": entry(-8, -4, [1])}), "tensor 'a' has no shape or no offsets"),
    "a place that ends before it begins": (written({"a": entry(8, 4, [1])}, 8), "tensor 'a' has no shape"),
    "a shape of another size": (written({"a": entry(0, 8, [3])}, 8), "tensor 'a' of F32 [3] has 8 bytes"),
    "a shape that overflows": (written({"a": entry(0, 8, [1 << 62, 1 << 62])}, 8), "has 8 bytes"),
    "a shape of a million dims": (written({"a": entry(0, 8, [1 << 60] * 1_000_000)}, 8), "has no shape"),
    "a shape of texts": (written({"a": entry(0, 8, ["2"])}, 8), "tensor 'a' has no shape"),
    "tensors that overlap": (
        written({"a": entry(0, 8), "b": entry(4, 12)}, 12),
        "tensor 'b' begins at byte 4, but the previous tensor ends at byte 8",
    ),
    "a hole": (written({"a": entry(0, 8), "b": entry(12, 16)}, 16), "tensor 'b' begins at byte 12"),
    "a tensor behind the file": (
        written({"a": entry(0, 1 << 40)}, 8),
        "the tensors take 1099511627776 bytes, and the file has 8: is the download complete?",
    ),
    "bytes behind the tensors": (written({"a": entry(0, 8)}, 9), "the tensors take 8 bytes"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_a_header_that_lies_is_refused(name: str, folder: Path) -> None:
    content, why = LIES[name]
    (folder / "model.safetensors").write_bytes(content)
    message = told(folder)
    assert message.startswith("model.safetensors is damaged or not a weight file: ")
    assert why in message
    resolve(from_keywords({"model": str(folder), "load_format": "dummy"}))  # reads no weights


def test_right_headers_are_read(folder: Path) -> None:
    assert read_header(folder / "model.safetensors").keys() == {"a", "b"}
    resolve(from_keywords({"model": str(folder)}))
    wide = {"a": torch.zeros(0, 3), "b": torch.zeros((), dtype=torch.int64)}
    wide["c"] = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_header(folder / "model.safetensors").keys() == {"a", "b", "c"}
    unknown = {"a": entry(0, 3, [8], "F3_LATER")}  # a type of fewer bits, of a later version of the format
    (folder / "model.safetensors").write_bytes(written(unknown, 3))
    assert read_header(folder / "model.safetensors").keys() == {"a"}


@pytest.mark.parametrize("length", [3, 20, -1])
def test_a_download_that_was_cut(length: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert told(folder).startswith("model.safetensors is damaged")


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        ("../model.safetensors", "names '../model.safetensors', a file outside the model folder"),
        ("/etc/passwd", "names '/etc/passwd', a file outside the model folder"),
        ("a/b.safetensors", "a file outside the model folder"),
        ("..", "a file outside the model folder"),
        ("", "a file outside the model folder"),
        ("a\0b", "a file outside the model folder"),
        ("other.safetensors", "names other.safetensors, which is missing: download the model again"),
    ],
)
def test_indexes_name_files_of_the_folder(shard: str, why: str, folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = told(folder)
    assert message.startswith("model.safetensors.index.json names")
    assert why in message


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}])
def test_indexes_without_a_map(index: Any, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert told(folder) == "model.safetensors.index.json has no weight_map"


def test_every_shard_is_checked(folder: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weight_files(folder, "auto")  # the index belongs to another save
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(2)}, folder / "one.safetensors")
    (folder / "two.safetensors").write_bytes(b"torn")
    assert told(folder).startswith("two.safetensors is damaged")
    check_weight_files(folder, "auto", ("a",))  # the group reads no tensor of the other file


def test_shards_without_an_index(folder: Path) -> None:
    """The names tell which shard is missing. Mistral's own form lies beside the shards."""
    weights = (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    message = "model-00002-of-00003.safetensors is missing: download the model again"
    assert told(folder) == message
    (folder / "model-00003-of-00003.safetensors").write_bytes(weights.read_bytes())
    assert told(folder) == message
    check_weight_files(folder, "partial")
    (folder / "model-00002-of-00003.safetensors").write_bytes(weights.read_bytes())
    (folder / "consolidated.safetensors").write_bytes(weights.read_bytes())
    assert [path.name[:9] for path in weight_files(folder, "auto")] == ["model-000"] * 3


def test_files_of_trainers_are_no_weights(folder: Path) -> None:
    for name in ("rng_state.pth", "rng_state_7.pth", "scaler.pt", "training_args.bin", "optimizer.pt"):
        (folder / name).touch()
    assert pickles(folder) == []
    (folder / "pytorch_model.bin").touch()
    assert [path.name for path in pickles(folder)] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer_config.json",
        "hf_quant_config.json",
    ],
)
def test_git_lfs_pointers_are_told(name: str, folder: Path) -> None:
    (folder / name).write_bytes(POINTER)
    message = told(folder)
    assert message.startswith(f"{name} is a Git LFS pointer")
    assert f"`git lfs pull` in {folder}" in message


def _lora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B", "r": 16}')
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")


def _alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()


def _beside_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [_alone, _beside_config])
def test_an_adapter_is_no_model(change: Callable[[Path], None], folder: Path) -> None:
    _lora(folder)
    change(folder)
    message = told(folder)
    assert "is an adapter for Qwen/Qwen3-8B (adapter_config.json), not a model" in message
    assert "--lora-modules" in message
    with pytest.raises(ConfigError, match="is an adapter"):
        load_spec(str(folder))


def test_a_link_to_a_missing_file_is_no_missing_file(folder: Path) -> None:
    (folder / "generation_config.json").symlink_to("../../blobs/0a")
    assert "generation_config.json of the model is a link to ../../blobs/0a, which does not" in told(folder)


def test_a_model_that_keeps_its_adapter_is_one(folder: Path) -> None:
    _lora(folder)
    assert load_spec(str(folder)).family == "declared"
    resolve(from_keywords({"model": str(folder)}))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    resolve(from_keywords({"model": str(folder)}))
