"""Checkpoints with another prefix of names, or without an output head."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.compared import same_parameters
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.families.weight_files import tensor_names
from weft.models.files import WeightFile
from weft.models.loader import load_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def _read(folder: Path, **more: Any) -> Any:
    spec = load_spec(str(folder), trust_remote_code=True, **more)
    return load_model(str(folder), spec, torch.float32, CPU, progress=False, pack=False)


def _copy(source: Path, target: Path, rename: Callable[[str], str | None], **changes: Any) -> Path:
    """Copy a checkpoint with renamed tensors; a tensor is dropped where ``rename`` returns None."""
    target.mkdir()
    for path in source.glob("*.json"):
        (target / path.name).write_text(path.read_text())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if (other := rename(name)) is not None:
            tensors[other] = tensor.contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _below(prefix: str, head: str = "lm_head.") -> Callable[[str], str]:
    """Names below ``model.`` go below ``prefix``."""
    return lambda name: (
        prefix + name.removeprefix("model.") if name.startswith("model.") else name.replace("lm_head.", head)
    )


PREFIXES = {
    "none": _below(""),
    "as a part of a model that sees": _below("model.language_model."),
    "as such models were saved before": _below("language_model.model.", "language_model.lm_head."),
    "below a module of a library": _below("0.auto_model."),
    "head below the model": _below("model.", "model.lm_head."),
}


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "qwen3-moe", "deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("prefix", list(PREFIXES))
def test_the_prefix_is_found(name: str, prefix: str, checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints(name)
    folder = _copy(Path(checkpoint.folder), tmp_path / "renamed", PREFIXES[prefix])
    assert same_parameters(_read(folder), checkpoint.read())


def test_a_tied_head_that_is_saved_below_a_prefix(checkpoints: Any, tmp_path: Path) -> None:
    source = Path(checkpoints("llama-tied-mha").folder)
    folder = _copy(source, tmp_path / "renamed", PREFIXES["as such models were saved before"])
    tensors = load_file(folder / "model.safetensors")
    table = tensors["language_model.model.embed_tokens.weight"]
    save_file({**tensors, "language_model.lm_head.weight": table.clone()}, folder / "model.safetensors")
    assert same_parameters(_read(folder), checkpoints("llama-tied-mha").read())
    save_file({**tensors, "language_model.lm_head.weight": table + 1}, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"ties language_model\.lm_head\.weight to language_model\.model\.emb"
    ):
        _read(folder)


@pytest.mark.parametrize("generic", [False, True])
def test_a_tied_embedding_that_is_saved_as_the_head(generic: bool, checkpoints: Any, tmp_path: Path) -> None:
    """safetensors drops all but the first name of a shared tensor. transformers reads the head for both."""
    source = Path(checkpoints("llama-tied-mha").folder)
    folder = _copy(source, tmp_path / "renamed", lambda n: "lm_head.weight" if "embed_tokens" in n else n)
    more = {"model_impl": "transformers"} if generic else {}
    assert same_parameters(_read(folder, **more), _read(source, **more))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    table = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(theirs.get_input_embeddings().weight, table)


def _wrapped(layer: str, model: str = "") -> Callable[[str], str]:
    """Training wraps modules around each layer, or around the model."""
    return lambda name: model + re.sub(r"(layers\.\d+\.)", rf"\g<1>{layer}", name)


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize(
    "rename",
    [
        pytest.param(_wrapped("", "module._orig_mod."), id="compiled"),
        pytest.param(_wrapped("_fsdp_wrapped_module._checkpoint_wrapped_module."), id="layers"),
    ],
)
def test_names_of_modules_around_others(
    rename: Callable[[str], str], generic: bool, checkpoints: Any, tmp_path: Path
) -> None:
    """torch.compile, FSDP and others leave their names in checkpoints."""
    source = Path(checkpoints("llama").folder)
    folder = _copy(source, tmp_path / "renamed", rename)
    more = {"model_impl": "transformers"} if generic else {}
    assert same_parameters(_read(folder, **more), _read(source, **more))
    assert set(tensor_names(folder) or ()) == set(load_file(source / "model.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **load_file(source / "model.safetensors")}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"\S+ and \S+ are the same weight"):
        _read(folder, **more)


def test_what_is_missing_is_listed_by_the_names_of_the_checkpoint(checkpoints: Any, tmp_path: Path) -> None:
    below = _below("language_model.model.")

    def rename(name: str) -> str | None:
        return None if name == "model.layers.1.mlp.up_proj.weight" else below(name)

    folder = _copy(Path(checkpoints("llama").folder), tmp_path / "renamed", rename)
    with pytest.raises(ConfigError) as raised:
        _read(folder)
    assert raised.value.message.endswith("missing: language_model.model.layers.1.mlp.up_proj.weight")


def test_no_prefix_is_found_where_there_is_no_embedding(checkpoints: Any, tmp_path: Path) -> None:
    def rename(name: str) -> str | None:
        return None if "embed_tokens" in name else name.removeprefix("model.")

    folder = _copy(Path(checkpoints("llama").folder), tmp_path / "renamed", rename)
    with pytest.raises(ConfigError, match=r"missing: model\.embed_tokens\.weight.*unexpected: .*layers\.0"):
        _read(folder)


def test_a_checkpoint_without_a_head_has_no_parameter_for_it(checkpoints: Any, tmp_path: Path) -> None:
    def rename(name: str) -> str | None:
        return None if name == "lm_head.weight" else name.removeprefix("model.")

    folder = _copy(Path(checkpoints("llama").folder), tmp_path / "headless", rename)
    made, whole = dict(_read(folder).named_parameters()), dict(checkpoints("llama").read().named_parameters())
    assert whole.keys() - made.keys() == {"head.weight"}
    assert all(torch.equal(made[name], whole[name]) for name in made)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe", "qwen3-5-vision"])
@pytest.mark.parametrize("blind", [False, True])
def test_a_tower_s_prefix_is_found_too(name: str, blind: bool, seeing: Any, tmp_path: Path) -> None:
    """As transformers saved such models before version 4.52."""
    old = {"model.language_model.": "model.", "model.visual.": "visual.", "lm_head.": "lm_head."}
    source = Path(seeing(name).folder)

    def rename(published: str) -> str:
        return next(
            (o + published.removeprefix(n) for n, o in old.items() if published.startswith(n)), published
        )

    folder = _copy(source, tmp_path / "renamed", rename)
    only = {"language_model_only": blind}
    assert same_parameters(_read(folder, **only), _read(source, **only))


def test_names_in_pickles(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    one = torch.ones(2)
    torch.save({"_orig_mod.model.norm.weight": one}, file)
    with WeightFile(file) as opened:
        assert opened.names() == ["model.norm.weight"]
        assert torch.equal(opened.tensor("model.norm.weight"), one)
    torch.save({5: one}, file)
    with pytest.raises(ConfigError, match="is not a dict of tensors"), WeightFile(file):
        pass
