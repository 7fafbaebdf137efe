"""Adapters of matrices that are published joined (``qkv_proj``) or apart (``q_proj``, ``k_proj``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e0.rig import CPU, spec_of
from tests.support.checkpoints import make_checkpoint
from tests.support.loras import EXPERTS, make_adapter
from weft.common.errors import ConfigError
from weft.config.adapters import read_adapter
from weft.layers.build import AdapterOptions
from weft.models.adapters import Adapters
from weft.models.loader import load_model

APART = {
    "self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}
OUT = r"(self_attn\.(q|k|v)_proj|mlp\.(gate|up)_proj)$"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama")


def adapters_of(base: Path, *, experts: bool = False) -> Adapters:
    options = AdapterOptions(places=2, rank=4, experts=experts)
    model = load_model(str(base), spec_of(base), torch.float32, CPU, progress=False, adapters=options)
    assert model.adapters is not None
    return model.adapters


def joined_adapter(folder: Path, apart: Path) -> Path:
    """Give the matrices of ``apart`` one A, and save the same adapter with joined names in ``folder``."""
    tensors = load_file(apart / "adapter_model.safetensors")
    joined = {}
    for whole, names in APART.items():
        first = f".{names[0]}.lora_A.weight"
        for layer in [name.removesuffix(first) for name in tensors if name.endswith(first)]:
            parts = [f"{layer}.{name}" for name in names]
            for part in parts:
                tensors[f"{part}.lora_A.weight"] = tensors[layer + first].clone()
            joined[f"{layer}.{whole}.lora_A.weight"] = tensors[layer + first].clone()
            for end in ("lora_B.weight", "lora_magnitude_vector"):
                joined[f"{layer}.{whole}.{end}"] = torch.cat([tensors[f"{part}.{end}"] for part in parts])
    save_file(tensors, apart / "adapter_model.safetensors")
    folder.mkdir()
    save_file(joined, folder / "adapter_model.safetensors")
    config = json.loads((apart / "adapter_config.json").read_text())
    config["target_modules"] = ["qkv_proj", "gate_up_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_each_output_reads_the_a_of_its_own_matrix(base: Path) -> None:
    for name, target in adapters_of(base)._targets.items():
        assert target.low.pool is not None
        rows = [target.low.pool.owners[window.target[:1]] for window in target.taken]
        assert set(torch.cat(rows).tolist()) == set(target.parts), name


def test_joined_names_place_the_same_matrices(base: Path, tmp_path: Path) -> None:
    apart = make_adapter(tmp_path / "apart", base, OUT, use_dora=True)
    joined = joined_adapter(tmp_path / "joined", apart)
    adapters = adapters_of(base)
    for place, folder in enumerate((apart, joined)):
        digest = read_adapter(folder).digest
        adapters.hold(digest, str(folder))
        adapters.place(digest, place)
    changed = [low.pool for low in adapters._layers if low.pool is not None and low.pool.ranks[0]]
    assert changed
    for pool in changed:
        assert pool.ranks == [3, 3]
        assert torch.equal(pool.a[0], pool.a[1])
        assert torch.equal(pool.b[0], pool.b[1])
        assert torch.equal(pool.factors[0], pool.factors[1])


def test_joined_and_single_names_of_one_matrix_are_refused(base: Path, tmp_path: Path) -> None:
    apart = make_adapter(tmp_path / "apart", base, OUT, use_dora=True)
    joined = joined_adapter(tmp_path / "joined", apart)
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in (apart, joined)]
    kept = {name: one for name, one in tensors[0].items() if "k_proj" in name}
    save_file(tensors[1] | kept, joined / "adapter_model.safetensors")
    adapters = adapters_of(base)
    with pytest.raises(ConfigError, match=r"changed twice: .*qkv_proj"):
        adapters.check(read_adapter(joined))


def test_two_names_of_one_matrix_of_an_expert_are_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "qwen3_moe")
    folder = make_adapter(tmp_path / "adapter", base, EXPERTS)
    adapters = adapters_of(base, experts=True)
    adapters.check(read_adapter(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    again = {
        name.replace(".model.layers.0.", ".layers.0.", 1): one.clone()
        for name, one in tensors.items()
        if ".model.layers.0.mlp.experts.1.gate_proj." in name
    }
    assert len(again) == 2
    save_file(tensors | again, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"changed twice: .*experts\.1\.gate_proj$"):
        adapters.check(read_adapter(folder))
