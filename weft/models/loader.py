"""From a checkpoint folder to a model with weights.

Parameters are allocated once, on their device and in their dtype; each published tensor is then copied
into its part and dropped. So loading takes the model's size plus the largest tensor.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts, read_json
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.models.base import Model
from weft.models.decoder import Decoder
from weft.models.files import WeightFile, weight_files
from weft.models.registry import BLOCKS, FRAMES, WEIGHTS
from weft.models.weights import WeightMap
from weft.parallel.comm import Comm, LocalComm

__all__ = ["Model", "build_model", "load_model"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SHOWN = 8


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    comm: Comm | None = None,
    *,
    quantization: str = "none",
    invariant: bool = False,
) -> Model:
    """The model with its weights unset. ``pack`` it when they are set.

    Raises ConfigError for a family that does not exist, or an op that nothing here can compute as asked.
    """
    build = Build(
        dtype=dtype,
        device=device,
        comm=comm or LocalComm(),
        quantization=quantization,
        invariant=invariant,
    )
    frame = FRAMES.get(spec.family) if spec.family in FRAMES else Decoder
    return frame(spec, build, BLOCKS.get(spec.family))


def load_model(
    folder: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    comm: Comm | None = None,
    *,
    quantization: str = "none",
    invariant: bool = False,
    pack: bool = True,
) -> Model:
    """The model of ``folder`` with its weights, converted to ``dtype`` and packed: ready to compute.

    load_format: "auto" and "safetensors" read safetensors; "pickle" reads torch files (tensors only);
    "dummy" reads nothing and makes random weights from ``seed``. ``progress`` shows a bar on stderr.
    Without ``pack`` the weights stay plain parameters, to be looked at.
    Raises ConfigError that lists missing, unexpected and misshaped weights.
    """
    model = build_model(spec, dtype, device, comm, quantization=quantization, invariant=invariant)
    if load_format == "dummy":
        fill_randomly(model, seed)
    else:
        path = Path(folder)
        files = weight_files(path, load_format)
        fill(model, WEIGHTS.get(spec.family)(spec), files, _saved_layers(path, spec), progress)
    if pack:
        model.pack()
    return model


def _saved_layers(folder: Path, spec: ModelSpec) -> int:
    """Layers in the checkpoint; more than ``spec.layers`` when only the first are served."""
    config = read_json(folder, "config.json")
    return Facts(config).integer("num_hidden_layers", spec.layers) if config else spec.layers


@torch.no_grad()
def fill(model: Model, weights: WeightMap, files: Sequence[Path], saved_layers: int, progress: bool) -> None:
    """Copies every published tensor into its part of a parameter. Checks all names before it copies any."""
    wanted = _check_names(weights, files, range(model.spec.layers, saved_layers))
    parameters = dict(model.named_parameters())
    with tqdm(
        total=sum(map(len, wanted)), desc="Loading weights", unit="tensor", disable=not progress
    ) as bar:
        for path, names in zip(files, wanted, strict=True):
            with WeightFile(path) as file:
                for name, tensor in file.tensors(names):
                    _copy(name, tensor, weights, parameters)
                    bar.update()
    _check_repeated(model, weights, files)


def _check_names(weights: WeightMap, files: Sequence[Path], cut_layers: range) -> list[list[str]]:
    """For each file the names to load. Raises ConfigError for missing, unexpected or doubled names."""
    wanted: list[list[str]] = []
    present: dict[str, Path] = {}
    unexpected, doubled = [], []
    for path in files:
        with WeightFile(path) as file:
            names = file.names()
        chosen = []
        for name in names:
            if name in weights.placements:
                if name in present:
                    doubled.append(name)
                present[name] = path
                chosen.append(name)
            elif not _without_effect(name, weights, cut_layers):
                unexpected.append(name)
        wanted.append(chosen)
    problems = []
    for what, found in (
        ("missing", _missing(weights, present)),
        ("unexpected", unexpected),
        ("present twice", doubled + _both_forms(weights, present)),
    ):
        if found:
            problems.append(f"{what}: {_list(found)}")
    if problems:
        raise ConfigError(
            f"the checkpoint's weights do not fit its config.json; {'; '.join(problems)}", param="--model"
        )
    return wanted


def _without_effect(name: str, weights: WeightMap, cut_layers: range) -> bool:
    layer = _LAYER.search(name)
    if layer and int(layer.group(1)) in cut_layers:
        return True
    return name in weights.same_as or any(pattern.search(name) for pattern in weights.ignored)


def _missing(weights: WeightMap, present: Iterable[str]) -> list[str]:
    have = set(present)
    optional = {name for forms in weights.choices for form in forms for name in form}
    missing = [name for name in weights.placements if name not in have and name not in optional]
    for forms in weights.choices:
        # The form that most of is there is the one that was meant.
        best = max(forms, key=lambda form: sum(name in have for name in form) / len(form))
        missing += [name for name in best if name not in have]
    return missing


def _both_forms(weights: WeightMap, present: Iterable[str]) -> list[str]:
    have = set(present)
    doubled: list[str] = []
    for forms in weights.choices:
        begun = [form for form in forms if any(name in have for name in form)]
        if len(begun) > 1:
            doubled += [name for form in begun[1:] for name in form if name in have]
    return doubled


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _copy(name: str, tensor: torch.Tensor, weights: WeightMap, parameters: dict[str, nn.Parameter]) -> None:
    placement = weights.placements[name]
    target = parameters[placement.parameter].data[placement.index]
    if tensor.shape != target.shape:
        raise ConfigError(
            f"weight {name} has shape {list(tensor.shape)}, config.json says {list(target.shape)}",
            param="--model",
        )
    whole = not target.is_floating_point() and not tensor.is_floating_point()  # a table of ids
    if not whole and (not tensor.is_floating_point() or tensor.element_size() < 2):
        raise ConfigError(
            f"weight {name} has type {tensor.dtype}; quantized weights are not supported", param="--model"
        )
    target.copy_(tensor)


def _check_repeated(model: Model, weights: WeightMap, files: Sequence[Path]) -> None:
    """A name that repeats another's values must do so: a head that differs from its tie is not tied."""
    parameters = dict(model.named_parameters())
    for path in files:
        with WeightFile(path) as file:
            for name, tensor in file.tensors([name for name in file.names() if name in weights.same_as]):
                placement = weights.placements[weights.same_as[name]]
                target = parameters[placement.parameter].data[placement.index]
                if tensor.shape != target.shape or not torch.equal(tensor.to(target), target):
                    raise ConfigError(
                        f"config.json ties {name} to {weights.same_as[name]}, but the checkpoint "
                        "holds different values for them; set tie_word_embeddings to false",
                        param="--model",
                    )


@torch.no_grad()
def fill_randomly(model: Model, seed: int) -> None:
    """Random weights, a function of ``seed``, parameter name and shape on one kind of device.

    Matrices keep the scale of what passes through them, norms are 1, biases small: outputs are finite in
    every dtype.
    """
    for name, parameter in model.named_parameters():
        # The CPU generator looks at the low 32 bits of its seed only.
        mixed = zlib.crc32(f"{seed} {name}".encode())
        generator = torch.Generator(parameter.device).manual_seed(mixed)
        if not parameter.is_floating_point():
            continue  # a table of ids: as the model was built
        if parameter.dim() >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith(".bias"):
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
