"""Adapter folders: digest, scales and ranks per module, and refusals by name."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weft.common.errors import ConfigError
from weft.config.adapter_files.reading import MOST_SETTINGS
from weft.config.adapters import AdapterFile, parse_modules, read_adapter

PREFIX = "base_model.model.model.layers.0"
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"]}


def write(folder: Path, tensors: dict[str, tuple[int, ...]] | None = None, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    shapes = tensors or {
        f"{PREFIX}.self_attn.q_proj.lora_A.weight": (2, 8),
        f"{PREFIX}.self_attn.q_proj.lora_B.weight": (4, 2),
    }
    save_file({n: torch.ones(s) for n, s in shapes.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | settings))
    return folder


def only(adapter: AdapterFile) -> tuple[str, int, int, int, float]:
    (found,) = adapter.modules
    return found.module, found.rank, found.inputs, found.outputs, found.scale


def test_modules_have_names_of_the_base_and_scales(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    assert only(read_adapter(write(tmp_path / "a"))) == (name, 2, 8, 4, 3.0)
    stable = read_adapter(write(tmp_path / "b", use_rslora=True))
    assert only(stable)[-1] == pytest.approx(6 / math.sqrt(2))
    other = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 5}, "r": 64}
    assert only(read_adapter(write(tmp_path / "c", **other)))[-1] == 2.5
    default = {f"x.q.lora_{side}.default.weight": (2, 2) for side in "AB"}
    assert only(read_adapter(write(tmp_path / "d", default)))[0] == "x.q"


def test_the_digest_is_content_and_nothing_else(tmp_path: Path) -> None:
    one, same = read_adapter(write(tmp_path / "one")), read_adapter(write(tmp_path / "two"))
    assert one.digest == same.digest
    assert len(one.digest) == 32
    assert read_adapter(write(tmp_path / "three", lora_alpha=7)).digest != one.digest
    path = tmp_path / "two" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert read_adapter(tmp_path / "two").digest != one.digest


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"some_new_thing": 3}, "some_new_thing"),
        ({"r": 3}, "rank 3"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": 10**400, "use_rslora": True}, "lora_alpha"),
        ({"modules_to_save": 5}, "modules_to_save must be a list"),
        ({"target_parameters": [5]}, "target_parameters must be a list"),
        ({"target_parameters": ["x"] * 4097}, "at most 4096 are read"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern"),
        ({"alpha_pattern": {r"(a)\1": 2}}, "alpha_pattern"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_settings_that_change_results_are_refused(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_adapter(write(tmp_path / "a", **settings))


def test_files_and_tensors_that_are_no_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config.json can't be read"):
        read_adapter(tmp_path)
    alone = {"x.q.lora_A.weight": (2, 2)}
    with pytest.raises(ConfigError, match=r"x.q.lora_A.weight"):
        read_adapter(write(tmp_path / "a", alone))
    with pytest.raises(ConfigError, match="lora_magnitude_vector"):
        read_adapter(write(tmp_path / "b", {"x.q.lora_magnitude_vector": (2,)}))
    with pytest.raises(ConfigError, match="--max-lora-rank is 1"):
        read_adapter(write(tmp_path / "c"), max_rank=1)
    (tmp_path / "c" / "adapter_model.safetensors").unlink()
    (tmp_path / "c" / "adapter_model.bin").touch()
    with pytest.raises(ConfigError, match="safetensors"):
        read_adapter(tmp_path / "c")


def test_dora_of_stacked_experts_is_refused(tmp_path: Path) -> None:
    """Also beside a linear layer that has lengths of rows."""
    stack = "base_model.model.model.layers.0.mlp.experts"
    tensors = {f"{stack}.lora_A.weight": (8, 4), f"{stack}.lora_B.weight": (6, 8)}
    settings = {"target_parameters": ["mlp.experts.down_proj"]}
    assert read_adapter(write(tmp_path / "plain", tensors, **settings)).modules[0].stacks
    linear = {
        f"{PREFIX}.self_attn.q_proj.lora_A.weight": (2, 8),
        f"{PREFIX}.self_attn.q_proj.lora_B.weight": (4, 2),
        f"{PREFIX}.self_attn.q_proj.lora_magnitude_vector": (4,),
    }
    for more in ({f"{stack}.lora_magnitude_vector": (6,)}, linear):
        with pytest.raises(ConfigError, match=r"mlp\.experts has stacked experts .* without use_dora"):
            read_adapter(write(tmp_path / "dora", tensors | more, use_dora=True, **settings))


def test_files_that_never_end_are_refused(tmp_path: Path) -> None:
    """Nobody writes to the pipe, and the device has no end."""
    before = len(os.listdir("/proc/self/fd"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        for kind in ("pipe", "device", "folder"):
            path = write(tmp_path / f"{name} {kind}") / name
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/zero")
            else:
                path.mkdir()
            with pytest.raises(ConfigError, match=r"no regular file|is missing|can't be read"):
                read_adapter(path.parent)
    assert len(os.listdir("/proc/self/fd")) == before
    path = write(tmp_path / "large") / "adapter_config.json"
    os.truncate(path, MOST_SETTINGS + 1)
    with pytest.raises(ConfigError, match=f"at most {MOST_SETTINGS} are read"):
        read_adapter(path.parent)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    """Model hubs store the files of a folder as links."""
    folder = write(tmp_path / "a")
    linked = tmp_path / "b"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert read_adapter(linked).digest == read_adapter(folder).digest


def test_stacks_of_experts(tmp_path: Path) -> None:
    """A stack has the rank of its parameter's pattern, and both tensors may belong to either stack."""
    shapes = {
        f"{PREFIX}.mlp.experts.base_layer.lora_A.weight": (12, 8),
        f"{PREFIX}.mlp.experts.base_layer.lora_B.weight": (10, 12),
        f"{PREFIX}.mlp.experts.lora_A.weight": (6, 5),
        f"{PREFIX}.mlp.experts.lora_B.weight": (8, 6),
    }
    settings = {
        "target_parameters": ["gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 4},
        "alpha_pattern": {r".*\.gate_up_proj": 12},
    }
    plain, wrapper = read_adapter(write(tmp_path / "a", shapes, **settings)).modules
    assert [(one.parameter, one.rank, one.scale) for one in plain.stacks] == [("down_proj", 2, 3.0)]
    wide = [(one.parameter, one.rank, one.scale) for one in wrapper.stacks]
    assert wide == [("gate_up_proj", 4, 3.0), ("down_proj", 2, 3.0)]
    with pytest.raises(ConfigError, match="experts has shapes"):
        read_adapter(write(tmp_path / "b", shapes))


def test_matrices_of_modules_to_save(tmp_path: Path) -> None:
    shapes = {"base_model.model.lm_head.weight": (7, 8)}
    made = read_adapter(write(tmp_path / "a", shapes, modules_to_save=["lm_head"]))
    assert [(one.module, one.shape) for one in made.saved] == [("lm_head", (7, 8))]
    with pytest.raises(ConfigError, match=r"the file has not all matrices of modules_to_save"):
        read_adapter(write(tmp_path / "b", shapes, modules_to_save=["embed_tokens"]))
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        read_adapter(write(tmp_path / "c", {"base_model.model.model.norm.weight": (8,)}))


def test_tables_of_a_resized_vocabulary(tmp_path: Path) -> None:
    """peft saves both tables without a setting, and each table three times with ``modules_to_save``."""
    names = ("base_model.model.lm_head", "base_model.model.model.embed_tokens")
    shapes = {f"{name}.weight": (9, 8) for name in names}
    thrice = shapes | {
        f"{name}.{copy}.weight": (9, 8) for name in names for copy in ("modules_to_save", "original_module")
    }
    for number, (made, more) in enumerate(((shapes, {}), (thrice, {"modules_to_save": ["lm_head"]}))):
        found = read_adapter(write(tmp_path / str(number), made, **more))
        assert [(one.module, one.tensor) for one in found.saved] == [
            ("lm_head", f"{names[0]}.weight"),
            ("model.embed_tokens", f"{names[1]}.weight"),
        ]
    alone = {"base_model.model.model.norm.original_module.weight": (8,)}
    with pytest.raises(ConfigError, match=r"norm\.original_module\.weight"):
        read_adapter(write(tmp_path / "alone", shapes | alone))


def test_modules_of_the_flag() -> None:
    assert parse_modules(["a=/x=y", '{"name": "b", "path": "/z"}']) == {"a": "/x=y", "b": "/z"}
    for wrong in (["a"], ["=x"], ['{"name": "b"}'], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--lora-modules"):
            parse_modules(wrong)


def test_tensors_of_integers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    names = [f"{PREFIX}.self_attn.q_proj.lora_{side}.weight" for side in "AB"]
    made = {
        name: torch.ones(shape, dtype=torch.int32)
        for name, shape in zip(names, ((2, 8), (4, 2)), strict=True)
    }
    save_file(made, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"lora_A.weight \(I32\)"):
        read_adapter(tmp_path / "a")
