"""Quantized checkpoints as folders: each loads to the exact values of its parts."""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support import quantized as make
from tests.support.compared import same_parameters
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_parts, weights_of
from tests.support.slow import mostly_slow
from tests.support.sparse_models import CASES as SPARSE_CASES
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.layers.pending_codes import Weight
from weft.models.files import WeightFile
from weft.models.loader import load_model
from weft.models.quantized import filling
from weft.parallel.mesh import Mesh, make_mesh
from weft.types.layout import Layout

CPU = torch.device("cpu")
F64 = torch.float64
Tensors = dict[str, torch.Tensor]
#: (name, matrix) -> (parts by suffix of the name, their values), or None to keep the matrix plain.
Quantize = Callable[[str, torch.Tensor], "tuple[Tensors, torch.Tensor] | None"]

_LINEAR = re.compile(r"(.*(?:_proj|experts\.\d+\.\w+))\.weight$")
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 64], "modules_to_not_convert": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random MoE checkpoint with sizes that every format can pack."""
    folder = tmp_path_factory.mktemp("plain")
    save_moe(
        folder,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_experts=3,
        moe_intermediate_size=32,
    )
    return folder


def save_moe(folder: Path, **sizes: int) -> None:
    """Save a random MoE checkpoint of two layers, one of them dense."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(  # type: ignore[call-arg]
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        **sizes,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def _folders(
    plain: Path, target: Path, quantize: Quantize, config: dict[str, Any] | None, shards: int = 1
) -> tuple[Path, Path]:
    """(the quantized checkpoint, a plain one in float64 with the same meaning)."""
    found = json.loads((plain / "config.json").read_text())
    meant, saved = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        linear = _LINEAR.match(name)
        parts = quantize(linear[1], tensor) if linear else None
        if parts is None:
            meant[name], saved[name] = tensor.double(), tensor.bfloat16().float()
            meant[name] = saved[name].double()
        else:
            meant[name] = parts[1].contiguous()
            saved.update({f"{linear[1]}.{end}": part.contiguous() for end, part in parts[0].items()})
    exact, packed = target / "exact", target / "packed"
    for folder, more in ((exact, {}), (packed, {"quantization_config": config} if config else {})):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**found, **more}))
    save_file(meant, exact / "model.safetensors")
    if shards == 1:
        save_file(saved, packed / "model.safetensors")
    else:
        names = sorted(saved, key=lambda name: (name.rsplit(".", 1)[1], name))
        where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
        for shard in sorted(set(where.values())):
            save_file({n: saved[n] for n in names if where[n] == shard}, packed / shard)
        index = packed / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": where}))
    return packed, exact


def _load(folder: Path, dtype: torch.dtype = F64, mesh: Mesh | None = None) -> Any:
    return load_model(str(folder), load_spec(str(folder)), dtype, CPU, progress=False, pack=False, mesh=mesh)


def _message(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        _load(folder)
    return raised.value.message


def _fp8(scale: str, **more: Any) -> Quantize:
    return lambda name, weight: make.fp8(weight, scale, block=(32, 64), **more)


def _int8(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.double() * scale.double()


def _int8_asymmetric(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize like compressed-tensors with ``symmetric`` false: a zero point per row, or per 32 inputs."""
    rows = weight if "down" in name else weight.unflatten(1, (-1, 32))
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    values = (rows / scale + zero).round().clamp(-128, 127)
    exact = ((values.double() - zero) * scale.double()).reshape(weight.shape)
    grid = (len(weight), -1)
    parts = {"weight": values.reshape(weight.shape).to(torch.int8), "weight_scale": scale.reshape(grid)}
    return {**parts, "weight_zero_point": zero.reshape(grid).to(torch.int8)}, exact


def _packed_whole(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize like compressed-tensors with one scale per matrix: the zero point is not packed."""
    values = torch.randint(-128, 128, weight.shape, generator=torch.Generator().manual_seed(len(name)))
    scale, zero = torch.tensor([0.003]), torch.tensor([-7], dtype=torch.int8)
    parts = {"weight_packed": make._words((values + 128).tolist(), 8), "weight_scale": scale}
    shape = torch.tensor(weight.shape)
    exact = (values.double() + 7) * scale.double()
    return {**parts, "weight_zero_point": zero, "weight_shape": shape}, exact


def _mixed(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    if "k_proj" in name or "experts.1" in name:
        return None
    if "self_attn" in name:
        return make.fp8(weight, "tensor", name="weight_scale")
    return make.fp8(weight, "block", block=(32, 64), exponents="down" in name)


def _like(made: Callable[..., tuple[Tensors, torch.Tensor]], *more: Any, **named: Any) -> Quantize:
    """Return a quantizer for formats made of random integers instead of the weight."""
    return lambda name, weight: made(tuple(weight.shape), *more, **named, seed=len(name) + weight.shape[0])


def _widths(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Quantize like AutoRound: layers with other bits, and plain layers."""
    if "k_proj" in name:
        return None
    bits = 8 if "up_proj" in name else 4
    return make.gptq(tuple(weight.shape), bits, 32, seed=len(name))  # type: ignore[arg-type]


_CT = {"quant_method": "compressed-tensors"}
_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}
FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8 per tensor": (_fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 per channel": (_fp8("channel", name="weight_scale"), {**_CT, "format": "float-quantized"}),
    "fp8 blocks": (_fp8("block"), FP8),
    "fp8 blocks of exponents": (_fp8("block", exponents=True, name="scale"), {**FP8, "scale_fmt": "ue8m0"}),
    "fp8 mixed": (_mixed, FP8),
    "int8": (_int8, {**_CT, "format": "int-quantized"}),
    "int8 asymmetric": (_int8_asymmetric, {**_CT, "format": "int-quantized"}),
    "nvfp4": (lambda _, w: make.nvfp4(w), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 packed": (
        lambda _, w: make.nvfp4(w, divides=True),
        {**_CT, "format": "nvfp4-pack-quantized"},
    ),
    "packed 4 bits": (_like(make.packed, 4, 32), {**_CT, "format": "pack-quantized"}),
    "packed 8 bits": (_like(make.packed, 8, 32, zeros=True), {**_CT, "format": "pack-quantized"}),
    "packed 8 bits, whole": (_packed_whole, {**_CT, "format": "pack-quantized"}),
    "awq": (_like(make.awq, 32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (_like(make.gptq, 4, 32, desc_act=True), GPTQ),
    "autoround as gptq": (_widths, {**_ROUND, "packing_format": "auto_round:auto_gptq", "sym": True}),
    "autoround without offsets": (
        _like(make.gptq, 4, 32, v2=True),
        {**_ROUND, "packing_format": "auto_round", "sym": False},
    ),
    "autoround as awq": (
        _like(make.awq, 32),
        {**_ROUND, "packing_format": "auto_round:auto_awq", "sym": False},
    ),
    "modelopt without a method": (
        _fp8("tensor", name="weight_scale"),
        {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}, "ignore": []},
    ),
    "gptq 8 bits v2": (
        _like(make.gptq, 8, 32, v2=True),
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_formats(name: str, plain: Path, tmp_path: Path) -> None:
    """Bit for bit in float64, and rounded once to the model's dtype otherwise."""
    packed, exact = _folders(plain, tmp_path, *FORMATS[name])
    assert same_parameters(_load(packed), _load(exact))
    narrow, wanted = _load(packed, torch.bfloat16), _load(exact, torch.bfloat16)
    for (name, ours), (_, theirs) in zip(narrow.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=2**-8, atol=0), name


def test_quantized_weights_below_another_prefix(plain: Path, tmp_path: Path) -> None:
    packed, exact = _folders(plain, tmp_path, *FORMATS["gptq"])
    weights = packed / "model.safetensors"
    renamed = {name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    save_file(renamed, weights)
    assert same_parameters(_load(packed), _load(exact))


@mostly_slow("name", list(FORMATS), ["awq", "gptq", "fp8 blocks", "nvfp4"])
def test_ranks_have_their_cut(name: str, plain: Path, tmp_path: Path) -> None:
    """A rank's part is cut from the dequantized whole, whatever the places of groups and blocks."""
    packed, exact = _folders(plain, tmp_path, *FORMATS[name])

    def load(mesh: Mesh) -> dict[str, Weight]:
        return weights_of(_load(packed, mesh=mesh))

    for ranks in (2, 4):
        assert_parts(weights_of(_load(exact)), on_ranks(Layout(tensor=ranks), load))


#: (q with 4 heads of 32, k with 2, o, the dense block's second matrix with 96 inputs) -> entries that a rank
#: reads.
READS = {
    "fp8 per tensor": (0.5, 0.5, 0.5, 0.5),
    "fp8 per channel": (0.5, 0.5, 0.5, 0.5),
    "fp8 blocks": (0.5, 0.5, 0.5, 1.0),  # 48 of 96 columns in blocks of 64
    "nvfp4": (0.5, 0.5, 0.5, 0.5),
    "packed 8 bits": (0.5, 0.5, 0.5, 1.0),  # in groups of 32
    "awq": (0.5, 0.5, 0.5, 1.0),
    "gptq": (0.5, 0.5, 0.5, 0.5),  # in any order
}


@pytest.mark.parametrize("name", list(READS))
def test_ranks_read_their_cut(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = _folders(plain, tmp_path, *FORMATS[name])
    whole = load_file(packed / "model.safetensors")
    values = [n for n in whole if n.endswith((".weight", ".qweight", ".weight_packed"))]
    read: dict[str, int] = {}
    part = WeightFile.part

    def noted(self: WeightFile, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        found = part(self, name, place)
        read[name] = read.get(name, 0) + found.nbytes
        return found

    monkeypatch.setattr(WeightFile, "part", noted)
    mesh = make_mesh(Layout(tensor=2), 1)  # not connected: loading needs no other rank
    _load(packed, mesh=mesh)
    where = ("0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.o_proj", "1.mlp.down_proj")
    names = [next(n for n in values if one in n) for one in where]
    assert tuple(read[n] / whole[n].nbytes for n in names) == READS[name]


@pytest.mark.parametrize("name", ["fp8 mixed", "nvfp4", "gptq"])
def test_parts_in_different_files(name: str, plain: Path, tmp_path: Path) -> None:
    packed, exact = _folders(plain, tmp_path, *FORMATS[name], shards=3)
    assert len(list(packed.glob("model-*.safetensors"))) == 3
    assert same_parameters(_load(packed), _load(exact))


def test_what_modelopt_writes(plain: Path, tmp_path: Path) -> None:
    """ModelOpt writes a file of its own, scales of inputs and of the cache, and a float32 scale as first
    tensor.
    """

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, meant = make.nvfp4(weight)
        parts["input_scale"] = torch.tensor(0.5)
        if "k_proj" in name or "v_proj" in name:
            parts[f"{name[-6]}_scale"] = torch.tensor(1.0)
        return parts, meant

    packed, exact = _folders(plain, tmp_path, quantize, None)
    (packed / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert same_parameters(_load(packed), _load(exact))


def test_stacked_experts(plain: Path, tmp_path: Path) -> None:
    """All experts in one tensor: MXFP4 blocks in GPT-OSS's form, and FP8 with a grid per expert."""
    packed, exact = _folders(plain, tmp_path, lambda *_: None, {"quant_method": "mxfp4"})
    tensors = load_file(packed / "model.safetensors")
    meant = load_file(exact / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    stacked = {}
    for number, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        whole = torch.stack(
            [torch.cat([tensors.pop(f"{prefix}{e}.{kind}.weight") for kind in kinds]) for e in range(3)]
        )
        stacked[f"{prefix}{number}"] = whole
    meant = {name: tensor for name, tensor in meant.items() if not name.startswith(prefix)}
    config = json.loads((packed / "config.json").read_text())
    for form in ("mxfp4", "fp8"):
        saved, wanted = dict(tensors), dict(meant)
        for name, whole in stacked.items():
            if form == "mxfp4":
                values, scales, made = make.mxfp4(whole.transpose(1, 2))
                saved[f"{name}_blocks"] = values.unflatten(-1, (-1, 16)).contiguous()
                saved[f"{name}_scales"] = scales
                wanted[name] = made.transpose(1, 2).contiguous()
            else:
                each = [make.fp8(one, "block", block=(32, 64)) for one in whole]
                saved[name] = torch.stack([parts["weight"] for parts, _ in each])
                saved[f"{name}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in each])
                wanted[name] = torch.stack([made for _, made in each])
        save_file(saved, packed / "model.safetensors")
        save_file(wanted, exact / "model.safetensors")
        said = {"quant_method": "mxfp4"} if form == "mxfp4" else FP8
        (packed / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
        assert same_parameters(_load(packed), _load(exact))
    short = {n: t[:2].contiguous() if n.startswith(prefix) else t for n, t in saved.items()}
    save_file(short, packed / "model.safetensors")
    assert re.search(r"experts\.(gate_up|down)_proj .* the result has \d+ bytes", _message(packed))


def gpt_oss_folders(tmp_path: Path) -> None:
    """``packed`` and ``exact``, the experts of the first as published."""
    config = transformers.GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    for _, weight in sorted(model.named_parameters()):
        torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(tmp_path / "plain")
    found = json.loads((tmp_path / "plain" / "config.json").read_text())
    saved, meant = {}, {}
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            values, scales, made = make.mxfp4(tensor.transpose(1, 2))
            saved[f"{name}_blocks"] = values.unflatten(-1, (-1, 16)).contiguous()
            saved[f"{name}_scales"] = scales
            meant[name] = made.transpose(1, 2).contiguous()
            theirs = convert_moe_packed_tensors(saved[f"{name}_blocks"], scales, dtype=torch.float32)
            assert torch.equal(theirs.double(), meant[name])
        else:
            saved[name], meant[name] = tensor, tensor.double()
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    for folder, tensors, more in (
        ("packed", saved, {"quantization_config": quantized}),
        ("exact", meant, {}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**found, **more}))
        save_file(tensors, tmp_path / folder / "model.safetensors")


def test_gpt_oss(tmp_path: Path) -> None:
    """Experts in published form: MXFP4 blocks of [experts, outputs, inputs], with alternating gate and up
    rows.
    """
    gpt_oss_folders(tmp_path)
    ours, exact = _load(tmp_path / "packed"), _load(tmp_path / "exact")
    assert same_parameters(ours, exact)
    for expert in (False, True):
        layout = Layout(tensor=2, expert=expert)
        ranks = on_ranks(layout, lambda mesh: _load(tmp_path / "packed", mesh=mesh))
        assert_parts(weights_of(exact), [weights_of(rank) for rank in ranks])
    names = dict(ours.named_parameters())
    experts = load_file(tmp_path / "exact" / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    gate = names["blocks.1.feed_forward.experts.gate_up"][2, :32]
    assert torch.equal(gate, experts[2, :, ::2].T)


def deepseek_v4_folders(tmp_path: Path) -> None:
    """``packed`` and ``exact``, the first as published."""
    family, facts = SPARSE_CASES["deepseek-v4"]
    sizes = {"vocab_size": 131, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    config = getattr(transformers, f"{family}Config")(**{**facts, **sizes, "intermediate_size": 32})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for _, weight in sorted(model.named_parameters()):
        torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(tmp_path / "plain")
    found = json.loads((tmp_path / "plain" / "config.json").read_text())
    saved, meant, kinds = {}, {}, {"fp8": 0, "fp4": 0}
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if re.search(r"ffn\.experts\.\d+\.w\d\.weight$", name):
            values, scales, meant[name] = make.mxfp4(tensor)
            saved[name], saved[f"{base}.scale"] = values.view(torch.int8), scales.view(torch.float8_e8m0fnu)
            kinds["fp4"] += 1
        elif re.search(r"attn\.w(q_a|q_b|kv|o_b)\.weight$|shared_experts\.w\d\.weight$", name):
            parts, meant[name] = make.fp8(tensor, "block", exponents=True, name="scale")
            saved |= {f"{base}.{end}": part for end, part in parts.items()}
            kinds["fp8"] += 1
        else:
            saved[name] = tensor
            meant[name] = tensor.double() if tensor.is_floating_point() else tensor
    assert min(kinds.values()) > 10
    quantized = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "weight_block_size": [128, 128],
    }
    for folder, tensors, more in (
        ("packed", saved, {"quantization_config": quantized}),
        ("exact", meant, {}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**found, **more}))
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, tmp_path / folder / "model.safetensors"
        )


def test_deepseek_v4(tmp_path: Path) -> None:
    """FP8 blocks with a ``scale`` of exponents, experts of two E2M1 values a byte, the rest plain."""
    deepseek_v4_folders(tmp_path)
    exact = _load(tmp_path / "exact")
    assert same_parameters(_load(tmp_path / "packed"), exact)
    ranks = on_ranks(Layout(tensor=2), lambda mesh: _load(tmp_path / "packed", mesh=mesh))
    assert_parts(weights_of(exact), [weights_of(rank) for rank in ranks])


def _change(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "removed", "lacking"),
    [
        ("fp8 blocks", "model.layers.0.self_attn.q_proj.weight_scale_inv", "weight_scale_inv"),
        ("nvfp4", "model.layers.0.self_attn.q_proj.weight_scale_2", "weight_scale_2"),
        ("nvfp4", "model.layers.0.self_attn.q_proj.weight", "q_proj.weight"),
        ("awq", "model.layers.0.self_attn.q_proj.qzeros", "qzeros"),
        ("gptq", "model.layers.0.self_attn.q_proj.qweight", "qweight"),
        ("packed 4 bits", "model.layers.0.self_attn.q_proj.weight_shape", "weight_shape"),
    ],
)
def test_missing_parts_are_named(name: str, removed: str, lacking: str, plain: Path, tmp_path: Path) -> None:
    packed, _ = _folders(plain, tmp_path, *FORMATS[name])
    message = _message(_change(packed, lambda tensors: tensors.pop(removed)))
    assert "model.layers.0.self_attn.q_proj.weight" in message
    assert re.search(rf"lacks .*{lacking}.*; the other parts are in model.safetensors", message)


def test_all_parts_of_a_weight_missing(plain: Path, tmp_path: Path) -> None:
    packed, _ = _folders(plain, tmp_path, *FORMATS["fp8 blocks"])
    prefix = "model.layers.0.self_attn.q_proj"

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(prefix)]:
            del tensors[name]
        tensors["model.layers.0.self_attn.z_proj.weight_scale_inv"] = torch.ones(1)

    missing, unexpected = _message(_change(packed, change)).split("unexpected: ")
    assert f"missing: {prefix}.weight" in missing
    assert "z_proj.weight_scale_inv" in unexpected


def test_parts_that_do_not_fit(plain: Path, tmp_path: Path) -> None:
    packed, _ = _folders(plain, tmp_path, *FORMATS["fp8 blocks"])
    name = "model.layers.0.self_attn.q_proj"

    def change(tensors: Tensors) -> None:
        tensors[f"{name}.weight_scale_inv"] = torch.ones(3, 7)

    message = _message(_change(packed, change))
    assert re.search(rf"{name}.weight in model.safetensors do not fit: a grid of \[3, 7\]", message)

    def plain_values(tensors: Tensors) -> None:
        tensors[f"{name}.weight"] = torch.zeros(128, 64)

    assert "the values have type torch.float32" in _message(_change(packed, plain_values))


def test_quantized_weights_without_a_configuration(plain: Path, tmp_path: Path) -> None:
    packed, _ = _folders(plain, tmp_path, _fp8("tensor"), None)
    assert "weight_scale_inv" in _message(packed)  # unexpected
    _change(packed, lambda t: [t.pop(n) for n in list(t) if n.endswith("_inv")])
    assert "need a quantization_config" in _message(packed)


def test_zero_points_beside_fp8(plain: Path, tmp_path: Path) -> None:
    """Older compressed-tensors writes zero points, all 0, for symmetric formats and static activations."""
    packed, exact = _folders(plain, tmp_path, *FORMATS["fp8 per channel"])
    name = "model.layers.0.self_attn.q_proj"
    zeros = {
        f"{name}.weight_zero_point": torch.zeros(128, 1).to(torch.float8_e4m3fn),
        f"{name}.input_zero_point": torch.zeros(1),
        f"{name}.input_scale_ub": torch.ones(1),
        "model.layers.0.self_attn.k_bmm_quantizer._amax": torch.ones(()),
    }
    _change(packed, lambda tensors: tensors.update(zeros))
    assert same_parameters(_load(packed), _load(exact))
    ones = {f"{name}.weight_zero_point": torch.ones(128, 1)}
    _change(packed, lambda tensors: tensors.update(ones))
    assert f"{name}.weight in model.safetensors do not fit: zero points of" in _message(packed)


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_configurations_of_older_tools(file: str, name: str, plain: Path, tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ wrote a file beside config.json, with other names of the fields."""
    packed, exact = _folders(plain, tmp_path, FORMATS[name][0], None)
    older = {
        "gptq": {"bits": 4, "group_size": 32, "desc_act": True, "model_file_base_name": "model"},
        "awq": {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
    }
    (packed / file).write_text(json.dumps(older[name]))
    assert same_parameters(_load(packed), _load(exact))
    (exact / file).write_text('{"bits": 3}')  # left over beside plain weights
    assert load_spec(str(exact)).quantized is None


def test_a_configuration_that_is_left_over(plain: Path, tmp_path: Path) -> None:
    """Merged models keep the configuration of a training in 4 bits. The weights are plain."""
    left = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    packed, exact = _folders(plain, tmp_path, lambda name, weight: None, left)
    assert load_spec(str(packed)).quantized is None
    assert same_parameters(_load(packed), _load(exact))
    state = {"model.layers.0.self_attn.q_proj.weight.absmax": torch.ones(4)}
    _change(packed, lambda tensors: tensors.update(state))
    assert "quant_method = 'bitsandbytes' is not supported" in _message(packed)


def test_a_quantized_head_of_a_tied_model(plain: Path, tmp_path: Path) -> None:
    """GPTQ with ``lm_head`` true leaves tie_word_embeddings as the model had the field."""
    packed, exact = _folders(plain, tmp_path, FORMATS["gptq"][0], {**GPTQ, "lm_head": True})
    parts, values = make.gptq((128, 64), 4, 32)
    _change(packed, lambda tensors: tensors.update({f"lm_head.{end}": part for end, part in parts.items()}))
    _change(packed, lambda tensors: tensors.pop("lm_head.weight"))
    _change(exact, lambda tensors: tensors.update({"lm_head.weight": values.contiguous()}))
    assert same_parameters(_load(packed), _load(exact))
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "weights of its own: set tie_word_embeddings to false" in _message(packed)


def test_biases_of_zeros_beside_gptq(plain: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every linear layer."""
    packed, exact = _folders(plain, tmp_path, *FORMATS["gptq"])
    name = "model.layers.0.self_attn.q_proj.bias"
    _change(packed, lambda tensors: tensors.update({name: torch.zeros(128)}))
    assert same_parameters(_load(packed), _load(exact))
    _change(packed, lambda tensors: tensors.update({name: torch.ones(128)}))
    assert f"weight {name} is not zero" in _message(packed)
    _change(packed, lambda tensors: tensors.pop(name))
    _change(packed, lambda tensors: tensors.update({"model.norm.bias": torch.zeros(64)}))
    assert "unexpected: model.norm.bias" in _message(packed)


def test_one_weight_at_a_time(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the model's memory at most one dequantized matrix, or one expert of a stack, is alive."""
    packed, _ = _folders(plain, tmp_path, *FORMATS["fp8 mixed"])
    alive: list[Any] = []
    copy = filling.copy

    def watched(name: str, values: torch.Tensor, *more: Any) -> int:
        assert sum(ref() is not None for ref in alive) == 0, "earlier values are still held"
        alive.append(weakref.ref(values))
        return copy(name, values, *more)

    monkeypatch.setattr(filling, "copy", watched)
    _load(packed)
    assert len(alive) > 20


def test_the_log_says_what_was_read(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single block is one scale for the tensor."""
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    packed, exact = _folders(plain, tmp_path, *FORMATS["fp8 mixed"])
    with caplog.at_level(logging.INFO, "weft"):
        _load(exact, torch.bfloat16)
        assert "quantized weights" not in caplog.text
        _load(packed, torch.bfloat16)
    line = next(record.getMessage() for record in caplog.records if "quantized weights" in record.message)
    assert "10 FP8 per tensor" in line
    assert "5 FP8 blocks of 32 x 64" in line
    assert re.search(
        r"[\d.]+ MB in the files, [\d.]+ MB in memory, of which [\d.]+ MB are dequantized to bf", line
    )
    assert "activation schemes have no effect" in line
