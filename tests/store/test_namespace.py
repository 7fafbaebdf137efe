"""Namespaces of the disk tier: each part counts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config.flags import from_keywords
from weft.config.hub import bundled_models
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.gguf import delta_heads
from weft.kv import hashing
from weft.ops import numerics
from weft.store import layout, weights_digest
from weft.store.namespace import facts_of, kv_namespace
from weft.store.weights_digest import WeightsDigest, weight_files

NUMERICS = {"torch": "2.13", "code": "abc"}
MIB = 1 << 20


def resolved(model: str | Path, **settings: Any) -> EngineConfig:
    return resolve(from_keywords({"model": str(model), "kv_cache_memory": "64M", **settings}))


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return resolved(bundled_models()["spool-text"])


def test_each_part_changes_the_namespace(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(section: str, **values: Any) -> EngineConfig:
        part = msgspec.structs.replace(getattr(config, section), **values)
        return msgspec.structs.replace(config, **{section: part})

    configs = {
        "spec": changed("spec", hidden=config.spec.hidden + 1),
        "dtype": msgspec.structs.replace(config, dtype="float64"),
        "kv_cache_dtype": changed("cache", kv_cache_dtype="fp8"),
        "quantization": changed("model", quantization="int8"),
        "implementation": changed("model", model_impl="transformers"),
        "block_size": changed("kv", block_size=32),
        "blocks": changed(
            "kv", pools=tuple(msgspec.structs.replace(p, block_size=32) for p in config.kv.pools)
        ),
        "speculation": changed("speculation", speculative_method="mtp"),
        "device": msgspec.structs.replace(config, device="cuda"),
        "deterministic": changed("runner", deterministic=True),
    }
    found = {name: kv_namespace(one, "w", NUMERICS) for name, one in configs.items()}
    found[""] = kv_namespace(config, "w", NUMERICS)
    found["weights"] = kv_namespace(config, "x", NUMERICS)
    found |= {name: kv_namespace(config, "w", {**NUMERICS, name: "other"}) for name in NUMERICS}
    two = msgspec.structs.replace(configs["deterministic"].parallel, tensor_parallel_size=2)
    found["ranks"] = kv_namespace(
        msgspec.structs.replace(configs["deterministic"], parallel=two), "w", NUMERICS
    )
    monkeypatch.setattr(layout, "VERSION", layout.VERSION + 1)
    found["layout"] = kv_namespace(config, "w", NUMERICS)
    assert len(set(found.values())) == len(found)
    assert all(len(one) == 32 for one in found.values())
    # Every part of the facts has a change above.
    assert facts_of(config, "w", NUMERICS).keys() <= found.keys() | {"numerics"}


def test_settings_without_effect_on_bits_keep_the_namespace(config: EngineConfig) -> None:
    one = kv_namespace(config, "w", NUMERICS)
    for settings in ({"max_num_seqs": 3}, {"kv_cache_memory": "32M"}, {"served_model_name": ("other",)}):
        assert kv_namespace(resolved(config.model_path, **settings), "w", NUMERICS) == one, settings


def test_numerics_name_code_libraries_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numerics.numerics(torch.device("cpu"), ["torch"])
    assert {"attention", "code", "torch", "library", "instructions", "cpu"} <= found.keys()
    assert found["torch"] == torch.__version__
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert numerics.numerics(torch.device("cpu"), ["torch"]) != found
    assert len(numerics.code_digest()) == 16


def test_the_code_that_reads_weights_and_names_blocks_counts() -> None:
    for module in (delta_heads, hashing, layout):
        assert module.__name__.split(".")[1] in numerics._PACKAGES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of two files of weights, and set an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    for number in (1, 2):
        (made / f"model-{number}.safetensors").write_bytes(bytes([number]) * 5 * MIB)
    return made


def of(config: EngineConfig, folder: Path) -> EngineConfig:
    return msgspec.structs.replace(config, model_path=str(folder))


def test_every_byte_of_the_weights_counts(config: EngineConfig, folder: Path) -> None:
    here = of(config, folder)
    seen = [weights_digest.weights_digest(here)]
    file = folder / "model-2.safetensors"
    for at in (0, 4 * MIB + 17, 5 * MIB - 1):
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(b"\xff")
        seen.append(weights_digest.weights_digest(here))
    (folder / "config.json").write_text(json.dumps({"rope_theta": 2}))
    seen.append(weights_digest.weights_digest(here))
    assert len(set(seen)) == 5
    # Adapters beside the model, and the tokenizer, do not count.
    (folder / "adapter_model.safetensors").write_bytes(b"a")
    (folder / "tokenizer.json").write_text("{}")
    assert weights_digest.weights_digest(here) == seen[-1]


def test_a_copy_has_the_same_digest_and_links_are_followed(
    config: EngineConfig, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "links"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).symlink_to(file)
    assert weights_digest.weights_digest(of(config, other)) == weights_digest.weights_digest(
        of(config, folder)
    )


def test_unchanged_files_are_read_once(
    config: EngineConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, read = of(config, folder), []
    plain = weights_digest.read_digest
    monkeypatch.setattr(
        weights_digest, "read_digest", lambda file, stopping: read.append(file.name) or plain(file, stopping)
    )
    one = weights_digest.weights_digest(here)
    assert weights_digest.weights_digest(here) == one
    assert read == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    (folder / "model-1.safetensors").touch()
    assert weights_digest.weights_digest(here) == one
    assert read[3:] == ["model-1.safetensors"]
    for remembered in (tmp_path / "cache" / "weft" / "weights").iterdir():
        remembered.write_bytes(b"damaged")
    assert weights_digest.weights_digest(here) == one
    assert len(read) == 7


def test_weights_that_change_after_the_start_have_no_digest(config: EngineConfig, folder: Path) -> None:
    made = WeightsDigest(of(config, folder))
    file = folder / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    data[100] = 7
    file.write_bytes(data)
    os.utime(file, (1, 1))
    made.start()
    assert made.wait(deadline(20)) is None
    assert "model-1.safetensors has changed since the start" in made.error
    again = WeightsDigest(of(config, folder))
    again.start()
    assert again.wait(deadline(20)) == weights_digest.weights_digest(of(config, folder))


def test_a_digest_can_be_stopped_and_missing_files_are_errors(config: EngineConfig, folder: Path) -> None:
    made, gone = WeightsDigest(of(config, folder)), WeightsDigest(of(config, folder))
    made.stop()
    made.start()
    assert made.wait(deadline(20)) is None
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match="the weights can't be read"):
        gone.compute()


def test_which_files_count(config: EngineConfig, folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"p")
    (folder / "weights-00000.gguf").write_bytes(b"g")

    def names(**model: Any) -> list[str]:
        section = msgspec.structs.replace(config.model, **model)
        return [
            file.name for file in weight_files(msgspec.structs.replace(of(config, folder), model=section))
        ]

    safe = ["config.json", "model-1.safetensors", "model-2.safetensors"]
    assert names() == [*safe, "weights-00000.gguf"]
    assert names(load_format="pickle") == ["config.json", "model.bin", "weights-00000.gguf"]
    assert names(load_format="dummy") == ["config.json"]
    draft = msgspec.structs.replace(config.speculation, speculative_model=str(folder))
    assert len(weight_files(msgspec.structs.replace(config, speculation=draft))) > 3
    random = [msgspec.structs.replace(config.model, load_format="dummy", seed=seed) for seed in (1, 2)]
    digests = [weights_digest.weights_digest(msgspec.structs.replace(config, model=one)) for one in random]
    assert digests[0] != digests[1]
