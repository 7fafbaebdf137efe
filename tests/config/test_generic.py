"""Specs of the generic backend, without torch: choice of the implementation, versions, the stored probe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.common.folder import cache_folder
from weft.config.families import FAMILIES, load_spec
from weft.config.families.generic import probing as generic
from weft.config.families.generic.probing import Probed, check_settings
from weft.config.families.load import refuse_unserved
from weft.config.spec import CacheSpec, ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="transformers",
    architecture="PersimmonForCausalLM",
    vocab_size=100,
    hidden=8,
    layers=1,
    heads=2,
    kv_heads=2,
    head_dim=4,
    intermediate=16,
    rope=RopeSpec(dim=4),
    caches=(CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=4),),
    max_position=64,
    eos_ids=(2,),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a config.json of an architecture without a family."""
    fields = {"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 200]}))
    return tmp_path


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Replace the process of the probe. Return the list of probes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    made = list[Any]()

    def probe(folder: Path, architecture: str, layers: int | None) -> Probed:
        made.append((architecture, layers))
        return Probed(spec=SPEC) if architecture == "PersimmonForCausalLM" else Probed(refused="no attention")

    monkeypatch.setattr(generic, "run_probe", probe)
    return made


def test_spec_comes_from_the_probe_and_the_files(folder: Path, probes: list[Any]) -> None:
    spec = load_spec(str(folder))
    assert spec.implementation == "transformers"
    assert (spec.dtype, spec.eos_ids, spec.vision, spec.mtp_layers) == ("bfloat16", (2, 5), None, 0)


def test_probe_runs_once_for_each_config(folder: Path, probes: list[Any]) -> None:
    for _ in range(2):
        load_spec(str(folder))
    load_spec(str(folder), 1)
    assert probes == [("PersimmonForCausalLM", None), ("PersimmonForCausalLM", 1)]
    config = folder / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float16"))
    load_spec(str(folder))
    assert len(probes) == 3


def test_a_damaged_result_is_not_read(folder: Path, probes: list[Any]) -> None:
    load_spec(str(folder))
    (stored,) = cache_folder("probes").iterdir()
    for content in (b"", b"{}", b"\xff", stored.read_bytes()[:-9]):
        stored.write_bytes(content)
        assert load_spec(str(folder)).family == "transformers"
    assert len(probes) == 5


@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification"])
def test_names_without_a_head_run_with_the_causal_class(ending: str, folder: Path, probes: list[Any]) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("ForCausalLM", ending))
    spec = load_spec(str(folder))
    assert probes == [("PersimmonForCausalLM", None)]
    assert (spec.classify is None) == (ending == "Model")
    assert spec.head == (ending == "Model")  # without files, a head may be there


def test_a_refusal_is_an_error_and_is_not_stored(folder: Path, probes: list[Any]) -> None:
    """A refusal may come from a missing package."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace("PersimmonForCausalLM", "RwkvForCausalLM"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no attention"):
            load_spec(str(folder))
    assert len(probes) == 2


def test_choice_of_the_implementation(folder: Path) -> None:
    assert not generic.serves("LlamaForCausalLM", "auto", FAMILIES)
    assert generic.serves("LlamaForCausalLM", "transformers", FAMILIES)
    assert generic.serves("PersimmonForCausalLM", "auto", FAMILIES)
    assert not generic.serves("PersimmonForCausalLM", "weft", FAMILIES)
    assert not generic.serves("NobodysForCausalLM", "auto", FAMILIES)
    with pytest.raises(ConfigError, match="no architecture called 'PersimmonForCausalLM'"):
        load_spec(str(folder), model_impl="weft")


def test_a_download_is_refused_by_the_chosen_code(folder: Path, probes: list[Any]) -> None:
    refuse_unserved(folder)
    assert len(probes) == 1
    with pytest.raises(ConfigError, match="no architecture called 'PersimmonForCausalLM'"):
        refuse_unserved(folder, "weft")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("PersimmonForCausalLM", "LlamaForCausalLM"))
    refuse_unserved(folder)
    with pytest.raises(ConfigError, match="no attention"):
        refuse_unserved(folder, "transformers")


def test_without_transformers_only_causal_models_ask_for_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generic, "transformers_version", lambda: None)
    monkeypatch.setattr(generic.importlib.util, "find_spec", lambda name: None)
    assert generic.serves("NobodysForCausalLM", "auto", FAMILIES)
    assert not generic.serves("LlavaForConditionalGeneration", "auto", FAMILIES)


@pytest.mark.parametrize(
    ("version", "said"), [(None, "pip install"), ("4.57.1", "not 4.57.1"), ("6.0", "not 6.0")]
)
def test_another_transformers_is_refused_with_the_command(
    version: str | None, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generic, "transformers_version", lambda: version)
    with pytest.raises(ConfigError, match=said) as raised:
        load_spec(str(folder))
    assert "pip install 'weft[models]'" in raised.value.message


def test_mtp_and_deterministic_are_refused(folder: Path, probes: list[Any]) -> None:
    with pytest.raises(ConfigError, match="--speculative-method mtp"):
        load_spec(str(folder), mtp=1)
    check_settings(SPEC, False)
    with pytest.raises(ConfigError, match="--deterministic"):
        check_settings(SPEC, True)


def test_classes_by_tokens_are_kept(folder: Path, probes: list[Any]) -> None:
    vocab = {"no": 3, "yes": 4}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    classify = load_spec(str(folder), overrides={"classifier_from_token": ["no", "yes"]}).classify
    assert classify is not None
    assert classify.tokens == (3, 4)


def test_bad_limits_of_the_probe_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_PROBE_MEMORY", "WEFT_PROBE_SECONDS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "much")
            with pytest.raises(ConfigError, match=f"{name}='much' must be positive"):
                generic.run_probe(folder, "PersimmonForCausalLM", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WEFT_PROBE_MEMORY", "1MiB", "needs more than 1 MiB of memory; set WEFT_PROBE_MEMORY"),
        ("WEFT_PROBE_SECONDS", "1", "did not end within 1 s; set WEFT_PROBE_SECONDS"),
    ],
)
def test_the_probe_has_limits(
    name: str, value: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        generic.run_probe(folder, "PersimmonForCausalLM", None)


@pytest.mark.slow
def test_the_probe_runs_in_a_process_without_torch_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({**fields, **sizes, "head_dim": 16, "vocab_size": 300}))
    code = (
        "import sys; from weft.config.families import load_spec;"
        f"spec = load_spec({str(folder)!r}); assert 'torch' not in sys.modules;"
        "print(spec.layers, spec.caches[0].kv_heads, spec.caches[0].head_dim)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "4", "16"]  # the class has no KV heads of its own
