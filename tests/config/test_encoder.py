"""Encode groups, and groups that receive embeddings: settings, memory, fingerprints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from tests.config.test_resolve import checkpoint
from tests.support.seen import SeeingModels
from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.fingerprint import fingerprint, tower_fingerprint
from weft.config.flags import from_keywords
from weft.config.group_settings import compare, shared_settings
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.sizing.memory import tower_bytes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    return SeeingModels(tmp_path_factory.mktemp("towers"))


def config_of(folder: Path | str, **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {"model": str(folder), "tokenizer": "spool-text", "device": "cpu", **more}
    return resolve(from_keywords(settings))


@pytest.mark.requirement("D1")
def test_an_encoder_has_no_caches(models: SeeingModels) -> None:
    config = config_of(models.folder("qwen3-vl"), role="encode", max_encode_items=3, mm_host_cache_bytes="4M")
    assert config.kv.pools == ()
    assert config.spec.caches == ()
    assert config.spec.vision is not None
    limits = config.kv.media
    assert limits is not None
    assert (limits.tower, limits.takes, limits.encode_items, limits.host_bytes) == (True, False, 3, 4 << 20)


@pytest.mark.requirement("D1")
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"language_model_only": True}, ("--role encode", "--language-model-only")),
        ({"take_embeddings": True}, ("--role encode", "--take-embeddings")),
        ({"encode": 2}, ("--role encode", "--encode 2")),
        ({"enable_expert_parallel": True}, ("--role encode", "--enable-expert-parallel")),
    ],
)
def test_settings_that_contradict_the_role(
    models: SeeingModels, settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(models.folder("qwen3-vl"), role="encode", **settings)
    assert all(name in caught.value.message for name in names), caught.value.message


def test_a_group_that_decodes_takes_no_embeddings(models: SeeingModels) -> None:
    with pytest.raises(ConfigError, match="--role decode and --take-embeddings"):
        config_of(models.folder("qwen3-vl"), role="decode", take_embeddings=True)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"role": "encode"}, ("--role encode", "LlamaForCausalLM has no vision tower")),
        ({"take_embeddings": True}, ("--take-embeddings", "LlamaForCausalLM has no image input")),
    ],
)
def test_a_model_that_reads_text_alone(
    tmp_path: Path, settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(checkpoint(tmp_path), load_format="dummy", **settings)
    assert all(name in caught.value.message for name in names), caught.value.message


def test_a_tensor_parallel_size_that_divides_no_heads(models: SeeingModels) -> None:
    """Every rank has the whole tower."""
    folder = models.folder("qwen3-vl")
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        config_of(folder, tensor_parallel_size=3)
    assert config_of(folder, role="encode", tensor_parallel_size=3).parallel.tensor_parallel_size == 3


@pytest.mark.requirement("D1")
def test_memory_is_that_of_the_tower(models: SeeingModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text model's weights and caches do not count: with the same memory no other role fits."""
    folder = models.folder("qwen3-vl")
    sizes = {"mm_cache_bytes": "1M", "max_encode_patches": 256, "dtype": "float32"}
    config = config_of(folder, role="encode", **sizes)
    assert config.spec.vision is not None
    monkeypatch.setattr(
        devices, "available_memory", lambda: (2 << 20) + tower_bytes(config.spec.vision, "float32")
    )
    assert config_of(folder, role="encode", **sizes).kv == config.kv
    with pytest.raises(ConfigError, match=r"the embedding cache 41\d\dK; a rank has .*--mm-cache-bytes"):
        config_of(folder, role="encode", **{**sizes, "mm_cache_bytes": "4M"})
    with pytest.raises(ConfigError, match=r"a step .*--max-encode-patches"):
        config_of(folder, role="encode", **{**sizes, "max_encode_patches": 8192})


def test_a_text_model_that_takes_embeddings_knows_images(models: SeeingModels) -> None:
    folder = models.folder("qwen3-vl")
    config = config_of(folder, language_model_only=True, take_embeddings=True)
    assert config.spec.vision is not None
    assert config.loaded.vision is None
    limits = config.kv.media
    assert limits is not None
    assert (limits.tower, limits.takes, limits.sections) == (False, True, True)
    both = config_of(folder, take_embeddings=True)
    assert both.kv.media is not None
    assert (both.kv.media.tower, both.kv.media.takes) == (True, True)
    assert both.loaded == both.spec
    assert config_of(folder, language_model_only=True).spec.vision is None


def test_who_decodes_counts_positions_of_images_without_a_tower(models: SeeingModels, tmp_path: Path) -> None:
    folder = models.folder("qwen3-vl")
    config = config_of(folder, language_model_only=True, role="decode")
    assert config.kv.media is not None
    assert (config.kv.media.tower, config.kv.media.takes) == (False, False)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "preprocessor_config.json").unlink()
    assert config_of(bare, language_model_only=True, role="decode").spec.vision is None


@pytest.mark.requirement("D29")
def test_ranks_agree_on_what_they_take(models: SeeingModels) -> None:
    folder = models.folder("qwen3-vl")
    for settings, flag in (
        ({"take_embeddings": True}, "--take-embeddings"),
        ({"shard_embeddings": "off"}, "--shard-embeddings"),
        ({"max_encode_items": 3}, "--max-encode-items"),
        ({"mm_host_cache_bytes": "1M"}, "--mm-host-cache-bytes"),
    ):
        ours, theirs = shared_settings(config_of(folder)), shared_settings(config_of(folder, **settings))
        with pytest.raises(ConfigError, match="rank 1 differ in ") as caught:
            compare(ours, theirs, "the head", "rank 1")
        del caught
        different = {name for name in ours if ours[name] != theirs[name]}
        assert any(name.endswith(flag[2:].replace("-", "_")) for name in different), flag


class TestTowerFingerprint:
    def test_who_moves_none_has_none(self, models: SeeingModels) -> None:
        folder = models.folder("qwen3-vl")
        assert tower_fingerprint(config_of(folder)) == ""
        assert tower_fingerprint(config_of(folder, role="prefill")) == ""

    def test_ends_of_one_tower_are_alike(self, models: SeeingModels) -> None:
        folder = models.folder("qwen3-vl")
        one = tower_fingerprint(config_of(folder, role="encode"))
        assert len(one) == 32
        for settings in (
            {"take_embeddings": True},
            {"take_embeddings": True, "language_model_only": True, "role": "prefill"},
            {"take_embeddings": True, "tensor_parallel_size": 2, "block_size": 32},
            {"role": "encode", "max_encode_patches": 5, "mm_cache_bytes": "1M"},
            {"take_embeddings": True, "num_hidden_layers_override": 2},
            {"take_embeddings": True, "quantization": "int8"},
        ):
            assert tower_fingerprint(config_of(folder, **settings)) == one, settings

    def test_other_towers_are_not(self, models: SeeingModels) -> None:
        folder = models.folder("qwen3-vl")
        seen = {tower_fingerprint(config_of(folder, role="encode"))}
        for settings in (
            {"dtype": "float64"},
            {"load_format": "dummy"},
            {"load_format": "dummy", "seed": 3},
        ):
            seen.add(tower_fingerprint(config_of(folder, role="encode", **settings)))
        seen.add(tower_fingerprint(config_of(models.folder("kimi-k25"), role="encode")))
        assert len(seen) == 5

    def test_of_a_checkpoint_the_tower_counts(self, models: SeeingModels, tmp_path: Path) -> None:
        """The fingerprint ignores the text weights and the division into files."""
        folder = models.folder("qwen3-vl")
        one = tower_fingerprint(config_of(folder, role="encode"))
        tensors = load_file(folder / "model.safetensors")
        tower = {name: tensor for name, tensor in tensors.items() if name.startswith("model.visual.")}

        def written(name: str, *files: dict[str, Any]) -> str:
            copy = tmp_path / name
            copy.mkdir()
            for file in ("config.json", "preprocessor_config.json"):
                shutil.copy(folder / file, copy / file)
            for number, part in enumerate(files):
                save_file(part, copy / f"part{number}.safetensors", metadata={"format": "pt"})
            return tower_fingerprint(config_of(copy, role="encode"))

        names = sorted(tower)
        halves = [{n: tower[n] for n in names[begin::2]} for begin in (0, 1)]
        assert written("alone", tower) == written("halves", *halves) == one
        assert written("other", {**tower, names[0]: tower[names[0]] + 1}) != one
        assert written("fewer", {n: tower[n] for n in names[1:]}) != one

    def test_what_images_become_counts(self, models: SeeingModels) -> None:
        config = config_of(models.folder("qwen3-vl"), role="encode")
        assert config.spec.vision is not None
        media = msgspec.structs.replace(config.spec.vision.media, rescale=1.0)
        vision = msgspec.structs.replace(config.spec.vision, media=media)
        other = msgspec.structs.replace(config, spec=msgspec.structs.replace(config.spec, vision=vision))
        assert tower_fingerprint(other) != tower_fingerprint(config)

    def test_a_file_that_is_none(self, models: SeeingModels, tmp_path: Path) -> None:
        copy = tmp_path / "broken"
        shutil.copytree(models.folder("qwen3-vl"), copy)
        config = config_of(copy, role="encode", dtype="float32")
        text = json.dumps({"model.visual.x": {"dtype": "F32"}}).encode()
        (copy / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ConfigError, match="tower's weights can't be read"):
            tower_fingerprint(config)

    def test_caches_of_sequences_do_not_mind_the_tower(self, models: SeeingModels) -> None:
        folder = models.folder("qwen3-vl")
        blind = config_of(folder, role="decode", language_model_only=True)
        assert fingerprint(config_of(folder, role="prefill", take_embeddings=True)) == fingerprint(blind)
