"""The loader: every form of file, strictness, refusals, memory."""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.compared import same_parameters
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.families.weight_files import weight_files
from weft.models import loader
from weft.models.loader import build_model, load_model
from weft.models.quantized import filling
from weft.models.registry import WEIGHTS

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def _folder(checkpoint: Any, target: Path, change: Callable[[Tensors], None] | None = None) -> Path:
    """Copy a checkpoint's folder with its tensors changed by ``change``. Return the copy."""
    source = Path(checkpoint.folder)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def _load(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    spec = load_spec(str(folder), more.pop("override", None))
    return load_model(str(folder), spec, dtype, CPU, progress=False, pack=False, **more)


def _message(folder: Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        _load(folder, **more)
    return raised.value.message


@pytest.mark.parametrize("name", ["qwen3-moe", "llama-biases-head-dim"])
def test_shards(name: str, checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints(name)
    checkpoint.reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert same_parameters(_load(tmp_path), checkpoint.read())


def test_broken_shards(checkpoints: Any, tmp_path: Path) -> None:
    checkpoints("llama").reference.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert re.search(r"model-00002.*damaged", _message(tmp_path))
    shard.unlink()
    assert re.search(r"names model-00002.*, which is missing", _message(tmp_path))
    names = json.loads(index.read_text())
    names["weight_map"]["lm_head.weight"] = "../model.safetensors"
    index.write_text(json.dumps(names))
    assert "outside the model folder" in _message(tmp_path)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_fused_experts(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """The form with one tensor for all experts, which some checkpoints have."""
    checkpoint = checkpoints(name)
    first, second, third = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")

    def fuse(tensors: Tensors) -> None:
        experts = {n.split("experts.")[0] for n in tensors if ".experts." in n}
        for prefix in sorted(experts):
            count = checkpoint.reference.config.num_local_experts
            parts = [
                [tensors.pop(f"{prefix}experts.{e}.{m}.weight") for e in range(count)]
                for m in (first, second, third)
            ]
            gate_up = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
            tensors[f"{prefix}experts.gate_up_proj"] = torch.stack(gate_up)
            tensors[f"{prefix}experts.down_proj"] = torch.stack(parts[2])

    assert same_parameters(_load(_folder(checkpoint, tmp_path, fuse)), checkpoint.read())


def test_missing_and_unexpected_are_listed_together(checkpoints: Any, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
        del tensors["model.layers.2.self_attn.q_norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(48)

    message = _message(_folder(checkpoints("qwen3-moe"), tmp_path, change))
    missing, unexpected = message.split("unexpected: ")
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in missing
    assert "model.layers.2.self_attn.q_norm.weight" in missing
    assert "model.layers.0.self_attn.q_proj.bias" in unexpected
    assert "model.layers.3.input_layernorm.weight" in unexpected


def test_long_lists_are_cut(checkpoints: Any, tmp_path: Path) -> None:
    message = _message(_folder(checkpoints("llama"), tmp_path, lambda t: [t.pop(n) for n in sorted(t)[1:21]]))
    assert "and 12 more" in message


def test_harmless_names_are_ignored(checkpoints: Any, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    checkpoint = checkpoints("llama-tied-mha")
    assert same_parameters(_load(_folder(checkpoint, tmp_path, change)), checkpoint.read())


def test_a_tied_head_that_differs_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    assert "tie_word_embeddings" in _message(_folder(checkpoints("llama-tied-mha"), tmp_path, change))


def test_tied_embeddings_share_memory(checkpoints: Any) -> None:
    model = checkpoints("llama-tied-mha").read()
    assert model.head.weight is None
    model.pack()
    assert model.head._packed is model.embedding.table
    model = checkpoints("llama").read()
    assert model.head.weight.data_ptr() != model.embedding.weight.data_ptr()


def test_shapes_and_types_are_checked(checkpoints: Any, tmp_path: Path) -> None:
    def wrong_shape(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.zeros(49)

    def quantized(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)

    def transposed(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].T.contiguous()

    checkpoint = checkpoints("llama")
    message = _message(_folder(checkpoint, tmp_path, wrong_shape))
    assert "model.norm.weight has shape [49], config.json says [48]" in message
    assert "quantized weights" in _message(_folder(checkpoint, tmp_path, quantized))
    assert "down_proj.weight has shape [80, 48]" in _message(_folder(checkpoint, tmp_path, transposed))


def test_misshaped_weights_are_told_as_the_page_says(checkpoints: Any, tmp_path: Path) -> None:
    """The page promises a list of names, and for shapes one name with both shapes."""

    def change(tensors: Tensors) -> None:
        for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            tensors[name] = torch.zeros(49)

    message = _message(_folder(checkpoints("llama"), tmp_path, change))
    assert message.count("has shape [49], config.json says [48]") == 1
    page = " ".join((Path(__file__).parents[2] / "docs/adding-a-model.md").read_text().split())
    assert "names stop the loader with a list of all of them" in page
    assert "shape stops the loader with the tensor's name and both shapes, at the first such tensor" in page


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted(saved: torch.dtype, checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen3-moe")

    def change(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(saved)

    folder = _folder(checkpoint, tmp_path, change)
    model, exact = _load(folder), checkpoint.read()
    for (name, a), (_, b) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert a.dtype == torch.float32, name
        assert torch.equal(a, b.to(saved).float()), name
    narrow = _load(folder, torch.bfloat16)
    kinds = {n: p.dtype for n, p in narrow.named_parameters()}
    assert {n for n, d in kinds.items() if d != torch.bfloat16} == {n for n in kinds if "router" in n}


@pytest.mark.requirement("F34")
def test_pickles_are_refused_unless_asked_for(checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen2")
    (tmp_path / "config.json").write_text(Path(checkpoint.folder, "config.json").read_text())
    state = load_file(Path(checkpoint.folder) / "model.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    for asked in ("auto", "safetensors"):
        assert "--load-format pickle" in _message(tmp_path, load_format=asked)
    assert same_parameters(_load(tmp_path, load_format="pickle"), checkpoint.read())
    names = {n: f"pytorch_model-{i % 2}.bin" for i, n in enumerate(sorted(state))}
    (tmp_path / "pytorch_model.bin").unlink()
    for shard in set(names.values()):
        torch.save({n: state[n] for n in names if names[n] == shard}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert same_parameters(_load(tmp_path, load_format="pickle"), checkpoint.read())
    assert "--load-format auto" in _message(Path(checkpoint.folder), load_format="pickle")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("executed"), "yes"))


@pytest.mark.requirement("F34")
def test_a_pickle_never_runs_code(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(Path(checkpoints("qwen2").folder, "config.json").read_text())
    torch.save({"model.norm.weight": _Evil()}, tmp_path / "pytorch_model.bin")
    assert "contains objects other than tensors" in _message(tmp_path, load_format="pickle")
    assert not (tmp_path / "executed").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert "pytorch_model.bin" in _message(tmp_path, load_format="pickle")


def test_safetensors_beside_pickles_win(checkpoints: Any, tmp_path: Path) -> None:
    folder = _folder(checkpoints("qwen2"), tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert [path.name for path in weight_files(folder, "auto")] == ["model.safetensors"]
    assert same_parameters(_load(folder), checkpoints("qwen2").read())


def test_no_weights_at_all(checkpoints: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(checkpoints("qwen2").folder, "config.json").read_text())
    assert "no safetensors files" in _message(tmp_path)


def test_parameters_are_filled_in_place(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is allocated once, and at most one published tensor is alive at a time."""
    checkpoint = checkpoints("qwen3-moe")
    spec = load_spec(checkpoint.folder, None)
    model = build_model(spec, torch.float32, CPU)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    alive: list[Any] = []
    copy = filling.copy

    def watched(name: str, tensor: torch.Tensor, *more: Any) -> int:
        assert sum(ref() is not None for ref in alive) <= 1, "earlier tensors are still held"
        alive.append(weakref.ref(tensor))
        return copy(name, tensor, *more)

    monkeypatch.setattr(filling, "copy", watched)
    files = weight_files(Path(checkpoint.folder), "auto")
    loader.fill(model, WEIGHTS.get(spec.family)(spec), files, spec.layers, False)
    assert len(alive) > 50
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert same_parameters(model, checkpoint.read())


def test_only_the_first_layers(checkpoints: Any, paged: Any) -> None:
    """Weights of cut layers raise no error, and the remaining layers form a model."""
    folder = Path(checkpoints("qwen2-mixed-window").folder)
    whole, cut = _load(folder), _load(folder, override=2)
    assert len(cut.blocks) == 2
    kept = dict(whole.named_parameters())
    assert all(torch.equal(p, kept[name]) for name, p in cut.named_parameters())
    cut.pack()
    harness = paged(cut)
    sequence = harness.sequence([1, 2, 3])
    harness.step([(sequence, 3)])
    assert torch.isfinite(torch.stack(sequence.logits)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3-moe", "llama-biases-head-dim", "llama-tied-mha"])
def test_dummy_weights(name: str, dtype: torch.dtype, checkpoints: Any, paged: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints(name)
    (tmp_path / "config.json").write_text(Path(checkpoint.folder, "config.json").read_text())
    model = _load(tmp_path, dtype, load_format="dummy", seed=5)
    assert same_parameters(model, _load(tmp_path, dtype, load_format="dummy", seed=5))
    assert not same_parameters(model, _load(tmp_path, dtype, load_format="dummy", seed=6))
    model.pack()
    harness = paged(model)
    sequence = harness.sequence(list(range(40)))
    harness.step([(sequence, 40)])
    logits = torch.stack(sequence.logits)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.requirement("D30")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_checkpoint_of_fewer_layers(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """The checkpoint is refused by default; with load format "partial" the missing layers get random
    weights.
    """
    checkpoint = checkpoints(name)

    def fewer(tensors: Tensors) -> None:
        for key in [key for key in tensors if ".layers.2." in key]:
            del tensors[key]

    folder = _folder(checkpoint, tmp_path, fewer)
    assert "missing: model.layers.2." in _message(folder)
    made = dict(_load(folder, load_format="partial", seed=3).named_parameters())
    random = dict(_load(folder, load_format="dummy", seed=3).named_parameters())
    whole = dict(checkpoint.read().named_parameters())
    for parameter, held in made.items():
        like = random if parameter.startswith("blocks.2.") else whole
        assert torch.equal(held, like[parameter]), parameter

    def torn(tensors: Tensors) -> None:
        fewer(tensors)
        del tensors["model.layers.1.input_layernorm.weight"]

    torn_folder = _folder(checkpoint, tmp_path / "torn", torn)
    message = _message(torn_folder, load_format="partial")
    assert message.endswith("missing: model.layers.1.input_layernorm.weight")


@pytest.mark.requirement("D30")
def test_a_checkpoint_of_fewer_shards(checkpoints: Any, tmp_path: Path) -> None:
    """The file with the last layer is missing, as after a partial download."""
    source = Path(checkpoints("llama").folder)
    tensors = load_file(source / "model.safetensors")
    files = {name: "last.safetensors" if ".layers.2." in name else "first.safetensors" for name in tensors}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    first = {name: tensor for name, tensor in tensors.items() if files[name] == "first.safetensors"}
    save_file(first, tmp_path / "first.safetensors")
    assert "last.safetensors, which is missing" in _message(tmp_path)
    made = dict(_load(tmp_path, load_format="partial").named_parameters())
    whole = dict(checkpoints("llama").read().named_parameters())
    assert torch.equal(made["blocks.1.attention_norm.weight"], whole["blocks.1.attention_norm.weight"])
    assert not torch.equal(made["blocks.2.attention.qkv.weight"], whole["blocks.2.attention.qkv.weight"])


def test_progress_goes_to_a_terminal_and_can_be_off(
    checkpoints: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("llama").folder
    spec = load_spec(folder, None)
    capsys.readouterr()  # of making the checkpoint
    load_model(folder, spec, torch.float32, CPU, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_model(folder, spec, torch.float32, CPU, progress=True)
    shown = capsys.readouterr()
    assert "Loading weights: 100%" in shown.err
    assert shown.out == ""
    load_model(folder, spec, torch.float32, CPU, progress=False)
    assert capsys.readouterr().err == ""


def test_every_parameter_is_named_by_its_family(checkpoint: Any) -> None:
    """No weight could be left uninitialized: placements cover every element of every parameter once."""
    model = checkpoint.read()
    weights = WEIGHTS.get(model.spec.family)(model.spec)
    first = {name for forms in weights.choices for name in forms[0]}
    optional = {name for forms in weights.choices for form in forms[1:] for name in form} - first
    counts = {name: torch.zeros(p.shape, dtype=torch.int8) for name, p in model.named_parameters()}
    for name, placement in weights.placements.items():
        if name not in optional:
            counts[placement.parameter][placement.index] += 1
    assert all((count == 1).all() for count in counts.values())
