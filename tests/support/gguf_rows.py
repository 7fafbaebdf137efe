"""Write GGUF files of saved checkpoints in llama.cpp's form, with tensor names of the ``gguf`` package.

Tensors are those of the saved files, so names and shapes are the published ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support.gguf_files import _add, _finish, add_tensor, some_texts

Arrays = dict[str, np.ndarray]
Change = Callable[[str, np.ndarray], Iterable[tuple[str, np.ndarray]]]
DENSE = tuple(f".block_sparse_moe.{part}_proj.weight" for part in ("gate", "up", "down"))
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)\.weight")


def as_it_is(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensor without a change."""
    yield name, values


def plus_one(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensor, norms with 1 added."""
    yield name, values + 1 if name.endswith("norm.weight") else values


def flat_gate(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensor, the gate of the shared expert in one dimension."""
    yield name, values[0] if name.endswith("shared_expert_gate.weight") else values


def two_dims(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensor, the taps of convolutions without their middle dimension."""
    yield name, values[:, 0] if ".conv.conv." in name else values


def in_pairs(heads: int, kv_heads: int) -> Change:
    """Return the change of rows of queries and keys from halves to pairs of neighbours."""

    def change(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        for end, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if f".{end}." in name:
                size = len(values) // count
                order = [
                    h * size + half * (size // 2) + i
                    for h in range(count)
                    for i in range(size // 2)
                    for half in (0, 1)
                ]
                values = values[order]
        yield name, values

    return change


def llama4_stacks(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensor; stacks of experts with outputs before inputs, gate and up apart."""
    block = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(values.transpose(0, 2, 1), 2, axis=1), strict=True):
            yield f"blk.{block}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
    elif name.endswith("experts.down_proj"):
        yield f"blk.{block}.ffn_down_exps.weight", np.ascontiguousarray(values.transpose(0, 2, 1))
    else:
        yield name, values


def one_stack(change: Change) -> Change:
    """Return ``change``, with gate and up matrices of all experts in one stack, gate first."""
    gates: dict[str, np.ndarray] = {}

    def joined(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        block = name.split(".")[2] if ".layers." in name else ""
        if name.endswith(".experts.gate_proj.weight"):
            gates[block] = values
        elif name.endswith(".experts.up_proj.weight"):
            yield f"blk.{block}.ffn_gate_up_exps.weight", np.concatenate((gates[block], values), axis=1)
        else:
            yield from change(name, values)

    return joined


def mamba2(groups: int, change: Change) -> Change:
    """Return ``change``, with the tensors of Mamba2 in llama.cpp's shapes."""

    def shaped(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        block = name.split(".")[2] if ".layers." in name else ""
        if name.endswith(".A_log"):
            yield f"blk.{block}.ssm_a", -np.exp(values).reshape(-1, 1)
        elif name.endswith(".D"):
            yield f"blk.{block}.ssm_d", values.reshape(-1, 1)
        elif name.endswith(".dt_bias"):
            yield f"blk.{block}.ssm_dt.bias", values
        elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            yield f"blk.{block}.ssm_norm.weight", values.reshape(groups, -1)
        elif name.endswith(".conv1d.weight"):
            yield f"blk.{block}.ssm_conv1d.weight", values[:, 0]
        elif ".mixer.experts." in name:
            part = name.rpartition(".experts.")[2].partition("_")[0]
            yield f"blk.{block}.ffn_{part}_exps.weight", values
        else:
            yield from change(name, values)

    return shaped


def mamba1(change: Change) -> Change:
    """Return ``change``, with the tensors of Mamba 1 in llama.cpp's shapes."""

    def shaped(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        block = name.split(".")[2] if ".layers." in name else ""
        if name.endswith(".A_log"):
            yield f"blk.{block}.ssm_a", -np.exp(values)
        elif name.endswith(".D"):
            yield f"blk.{block}.ssm_d", values
        elif name.endswith(".conv1d.weight"):
            yield f"blk.{block}.ssm_conv1d.weight", values[:, 0]
        else:
            yield from change(name, values)

    return shaped


def kimi_linear(heads: int, width: int, taps: int) -> Change:
    """Return the change to llama.cpp's shapes of Kimi Linear.

    ``heads``: query heads. ``width``: dims of a head's keys without the shared key. ``taps``: dimensions of
    the taps: 4, or 3 for a file of an older converter, which leaves the latent up-projection whole.
    """

    def shaped(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        block = name.split(".")[2] if ".layers." in name else ""
        if name.endswith(".A_log"):
            yield f"blk.{block}.ssm_a", -np.exp(values).reshape(1, 1, -1, 1)
        elif name.endswith(".dt_bias"):
            yield f"blk.{block}.ssm_dt.bias", values
        elif name.endswith("_conv1d.weight"):
            yield name, values.reshape((1,) * (taps - 3) + (-1, 1, values.shape[-1]))
        elif name.endswith(".kv_b_proj.weight") and taps == 4:
            keys, rest = np.split(values.reshape(heads, -1, values.shape[1]), [width], axis=1)
            yield f"blk.{block}.attn_k_b.weight", keys.swapaxes(1, 2)
            yield f"blk.{block}.attn_v_b.weight", rest
        else:
            # transformers saves dense blocks with the name of the experts' block.
            dense = name.replace(".block_sparse_moe.", ".mlp.")
            yield (dense if name.endswith(DENSE) else name), values

    return shaped


def times(values: Mapping[str, Any]) -> Change:
    """Return the change of the weights of Falcon-H1 by the factors of its configuration ``values``."""
    inner = values["mamba_d_ssm"]
    wide = values["mamba_n_groups"] * values["mamba_d_state"]
    rows = [inner, inner, wide, wide, values["mamba_n_heads"]]
    mixed = np.repeat(values["ssm_multipliers"], rows).astype(np.float32) * values["ssm_in_multiplier"]
    into = values["attention_in_multiplier"]
    factors = {
        ".down_proj.": values["mlp_multipliers"][1],
        ".gate_proj.": values["mlp_multipliers"][0],
        ".k_proj.": values["key_multiplier"] * into,
        ".q_proj.": into,
        ".v_proj.": into,
        ".o_proj.": values["attention_out_multiplier"],
        ".out_proj.": values["ssm_out_multiplier"],
        "lm_head.": values["lm_head_multiplier"],
        "embed_tokens.": values["embedding_multiplier"],
    }

    def scaled(name: str, weight: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        if name.endswith("pre_ff_layernorm.weight"):  # llama.cpp has this name without an ending
            name = f"blk.{name.split('.')[2]}.ffn_norm"
        if ".in_proj." in name:
            weight = weight * mixed[:, None]
        for part, factor in factors.items():
            if part in name:
                weight = weight * np.float32(factor)
        yield name, weight

    return scaled


def cut_in_two(change: Change, shared_name: str = "_shexp") -> Change:
    """Return ``change`` of the halves of merged matrices of Granite's experts.

    ``shared_name``: ending of the names of the shared expert.
    """

    def cut(name: str, values: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
        block = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("shared_mlp.output_linear.weight"):
            yield f"blk.{block}.ffn_down{shared_name}.weight", values
            return
        if not name.endswith("input_linear.weight"):
            yield from change(name, values)
            return
        shared = shared_name if ".shared_mlp." in name else "_exps"
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"blk.{block}.ffn_{part}{shared}.weight", half

    return cut


def stacked(tensors: Mapping[str, np.ndarray]) -> Arrays:
    """Return the tensors with the matrices of experts as stacks."""
    found: Arrays = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if (parts := _EXPERT.fullmatch(name)) is None:
            found[name] = values
        else:
            stacks.setdefault(f"{parts[1]}.{parts[3]}.weight", {})[int(parts[2])] = values
    for name, each in stacks.items():
        found[name] = np.stack([each[i] for i in range(len(each))])
    return found


def write_saved(
    path: Path,
    saved: Path,
    architecture: gguf.MODEL_ARCH,
    facts: Mapping[str, Any],
    change: Change = as_it_is,
    *,
    more: Mapping[str, np.ndarray] | None = None,
    kind: str = "F32",
    layers: int,
) -> None:
    """Write the checkpoint in ``saved`` with matrices in the GGML type ``kind``.

    ``change`` yields the tensors of a published tensor; a name with blk. is the name in the file. ``more``
    are further tensors.
    """
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(str(path), name)
    _add(writer, {f"{name}.{key}": value for key, value in facts.items()})
    _add(writer, {f"tokenizer.ggml.{key}": value for key, value in some_texts().items()})
    names = gguf.get_tensor_name_map(architecture, layers)
    arrays: Arrays = {}
    for file in sorted(saved.glob("*.safetensors")):
        arrays |= load_file(file)
    for published, values in stacked(arrays).items():
        for one, changed in change(published, values):
            theirs = one if one.startswith("blk.") else names.get_name(one, (".weight", ".bias"))
            if theirs is None:  # stacks of experts have names without the prefix
                theirs = names.get_name(one.removeprefix("model."), (".weight", ".bias"))
            block = one.split(".")[2] if ".layers." in one else ""
            if one.endswith(".router.scale"):
                theirs = f"blk.{block}.ffn_gate_inp.scale"
            if one.endswith(".per_expert_scale"):
                theirs = f"blk.{block}.ffn_down_exps.scale"
            endings = (".weight", ".bias", ".scale", ".ssm_a", ".ssm_d")
            if theirs is not None and one != theirs and not theirs.endswith(endings):
                theirs += ".bias" if one.endswith("expert_bias") else ".weight"
            if theirs is None and one.endswith("e_score_correction_bias"):
                theirs = names.get_name(one.removesuffix("_bias") + ".bias", (".weight", ".bias"))
            assert theirs is not None, one
            small = any(part in theirs for part in ("gate_inp", "ssm_a", "ssm_d", "norm", "conv1d", ".conv."))
            plain = changed.ndim < 2 or theirs.endswith(".bias") or small
            add_tensor(writer, theirs, np.ascontiguousarray(changed), "F32" if plain else kind)
    for one, values in (more or {}).items():
        add_tensor(writer, one, values, "F32")
    _finish(writer)
