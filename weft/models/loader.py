"""Loading: from a checkpoint folder to a model with weights.

Parameters are allocated once, on their device and in their dtype. Each published tensor is copied into its
parameter and dropped, together with its pages of the file. So loading needs the size of the model plus the
largest tensor (with quantized weights: the largest matrix in float32).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from weft.common.allocator import trim_heap
from weft.common.errors import ConfigError
from weft.common.progress import progress_bar
from weft.config.families.facts import Facts, read_json
from weft.config.families.weight_files import weight_files
from weft.config.sharding import rank_counts
from weft.config.spec import ModelSpec
from weft.gguf.checkpoint_folder import gguf_files
from weft.layers.build import AdapterOptions, Build, ExpertOptions
from weft.layers.pending_codes import Notes, Weight, has_pending_codes
from weft.layers.shard import cut
from weft.models.adapters import Adapters
from weft.models.decoder import Decoder, Model
from weft.models.files import WeightFile
from weft.models.gguf_tensor import CodedType, types_to_keep
from weft.models.quantized.filling import FillTarget, hold_rounded, is_zero_bias
from weft.models.quantized.sources import Part, TensorSource, part_of, without_effect
from weft.models.refill import owners_of, pack_changed
from weft.models.registry import BLOCKS, FRAMES, LOADERS, WEIGHTS
from weft.models.slices import note_largest, part_shape, windows
from weft.models.weights import Placement, WeightMap, add_score
from weft.moe.block import RoutedMLP
from weft.moe.placement import Placement as ExpertPlacement
from weft.ops import torch_ops, triton
from weft.parallel.mesh import Mesh

__all__ = ["Model", "assemble", "build_model", "load_model", "load_plain"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SHOWN = 8
#: Entries read between two calls of ``trim_heap``, which returns memory of temporary tensors to the system.
#: The C library would keep the memory, because the memory lies between live allocations.
_TRIM_ENTRIES = 4 << 20


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh | None = None,
    *,
    quantization: str = "none",
    invariant: bool = False,
    experts: ExpertOptions | None = None,
    adapters: AdapterOptions | None = None,
    staged: bool = False,
) -> Model:
    """Build the model with unset weights. Call ``pack`` after setting the weights. ``staged``: see ``Build``.

    Raises ConfigError for an unknown family, or for an op without a suitable implementation.
    """
    build = Build(
        dtype=dtype,
        device=device,
        mesh=mesh or Mesh(),
        quantization=quantization,
        staged=staged,
        invariant=invariant,
        rank_counts=rank_counts(spec),
        experts=experts or ExpertOptions(),
        adapters=adapters or AdapterOptions(),
    )
    return assemble(spec, build)


def assemble(spec: ModelSpec, build: Build) -> Model:
    """Build the model with unset weights by the settings of ``build``. Errors: see ``build_model``."""
    frame = FRAMES.get(spec.family) if spec.family in FRAMES else Decoder
    return frame(spec, build, BLOCKS.get(spec.family))


def load_plain(
    folder: str, spec: ModelSpec, build: Build, load_format: str = "auto", progress: bool = True
) -> tuple[Model, WeightMap, list[Path]]:
    """Return (model with plain weights, not packed; map of the published names; files with weights).

    Raises the errors of ``load_model``, and ConfigError for quantized weights.
    """
    if spec.quantized is not None or spec.family in LOADERS:
        raise ConfigError(
            "this model has no plain weights of a known family: use a checkpoint without quantization, "
            "and without --model-impl transformers",
            param="--model",
        )
    model = assemble(spec, build)
    files = weight_files(Path(folder), load_format)
    filled = _filled(model, spec, folder, files, load_format, progress, held=False, changed=None)
    return model, filled.weights, files


def load_model(
    folder: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    mesh: Mesh | None = None,
    *,
    quantization: str = "none",
    invariant: bool = False,
    experts: ExpertOptions | None = None,
    adapters: AdapterOptions | None = None,
    placements: Sequence[ExpertPlacement] | None = None,
    pack: bool = True,
    packed: bool = True,
    files: Sequence[Path] | None = None,
    changed: set[str] | None = None,
) -> Model:
    """Load the model of ``folder``, convert the weights to ``dtype``, and pack the weights.

    ``load_format``: "auto" and "safetensors" read safetensors; "pickle" reads torch files (tensors only);
    "dummy" reads nothing and makes random weights from ``seed``; "partial" makes random weights only for
    layers without any tensor in the checkpoint. ``progress``: show a bar on stderr. ``placements``: places of
    experts divided over ranks, one per layer with such experts; default: in order. ``pack``: False leaves
    plain parameters, for inspection. ``packed``: keep quantized matrices in codes if ``keeps_codes`` and no
    further rounding is required; False: dequantize. ``files``: read in place of those in ``folder``.
    ``changed``: ``files`` may lack whole modules; gets the names of the others, which alone are packed.

    Logs one line about quantized weights. With experts divided over ranks, sets ``model.experts.reload``.
    Raises ConfigError that lists all missing and unexpected weights, or names the first misshaped weight.
    """
    if spec.family in LOADERS:
        return LOADERS.get(spec.family)(**locals())  # the arguments of this call, and nothing else
    held = pack and packed and quantization == "none" and keeps_codes(spec, dtype, device)
    given: dict[str, Any] = {"quantization": quantization, "invariant": invariant, "experts": experts}
    staged = pack and load_format != "dummy" and (held or quantization != "none")
    model = build_model(spec, dtype, device, mesh, **given, adapters=adapters, staged=staged)
    if placements is not None:
        _place_experts(model, placements)
    filled: FillTarget | None = None
    if load_format in ("partial", "dummy"):
        fill_randomly(model, seed)
    if load_format != "dummy":
        filled = _filled(model, spec, folder, files, load_format, progress, held, changed)
    if adapters is not None and adapters.places:  # in the names of the checkpoint, before notes end
        named = WEIGHTS.get(spec.family)(spec) if filled is None else filled.weights
        model.adapters = Adapters(model, named, adapters)
    if pack:
        model.pack() if changed is None else pack_changed(model, changed)
    if filled is not None and files is None:
        filled.report(dtype)
    if model.experts is not None and mesh is not None:
        given["packed"] = packed  # and a temporary model must not add callbacks to the mesh:
        where = (folder, spec, dtype, device, load_format, seed, False, replace(mesh, formed=[]))
        model.experts.reload = lambda placements: load_model(*where, **given, placements=placements).experts
    return model


def _place_experts(model: Model, placements: Sequence[ExpertPlacement]) -> None:
    """Select the experts of each layer with divided experts."""
    routed = [module for module in model.modules() if isinstance(module, RoutedMLP)]
    for module, placement in zip(routed, placements, strict=True):
        module.place(placement)


def _filled(
    model: Model,
    spec: ModelSpec,
    folder: str,
    files: Sequence[Path] | None,
    load_format: str,
    progress: bool,
    held: bool,
    changed: set[str] | None,
) -> FillTarget:
    """Fill ``model`` with the weights in ``files`` (default: of ``folder``), named as the family says.

    ``spec``: of the whole model; ``model.spec`` may be one rank's part. ``held``: keep codes. For the other
    parameters see ``load_model``.
    """
    partial = load_format == "partial"
    weights = add_score(WEIGHTS.get(spec.family)(spec), spec)
    types = types_to_keep(folder, files)
    files = weight_files(Path(folder), load_format) if files is None else files
    if types:
        types = _types_by_name(types, weights, gguf_files(Path(folder)), files)
    layers = _saved_layers(Path(folder), spec)
    blocks = model.device.type == "cpu"
    return fill(
        model,
        weights,
        files,
        layers,
        progress,
        partial,
        packed=held,
        blocks=blocks,
        changed=changed,
        types=types,
    )


def _types_by_name(
    types: Mapping[str, CodedType], weights: WeightMap, own: Sequence[Path], files: Sequence[Path]
) -> dict[str, CodedType]:
    """Return ``types`` by the names in ``files``, which may have another prefix or spelling. ``own``: the
    files of the names in ``types``."""
    theirs, ours = (
        weights.published_as({name for names in _names_of(each).values() for name in names}).placements
        for each in (files, own)
    )
    # Both maps have the placements of ``weights``, under other names.
    names = {id(placed): name for name, placed in theirs.items()}
    return {names[id(ours[name])]: coded for name, coded in types.items() if name in ours}


def keeps_codes(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the device computes with quantized matrices directly, so that codes stay in memory.

    On a CPU always. On a GPU only if kernels exist for the dtype (torch would dequantize a matrix in every
    step), and never for GGML blocks.
    """
    if device.type == "cpu" or spec.quantized is None:
        return device.type == "cpu"
    return spec.quantized.method != "gguf" and triton.takes_codes(dtype, device)


def _saved_layers(folder: Path, spec: ModelSpec) -> int:
    """Return the number of layers in the checkpoint, which may exceed ``spec.layers``.

    MTP modules are saved as layers behind the last layer.
    """
    config = read_json(folder, "config.json")
    if config is None:
        return spec.layers
    nested = config.get("text_config")
    facts = Facts(nested if isinstance(nested, dict) else config)
    predicting = facts.integer("num_nextn_predict_layers", 0, low=0)
    return facts.integer("num_hidden_layers", spec.layers) + predicting


class Loadable(Protocol):
    """Target of a load: a model, or a tower alone."""

    spec: ModelSpec
    dtype: torch.dtype
    notes: Notes

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@torch.no_grad()
def fill(
    model: Loadable,
    weights: WeightMap,
    files: Sequence[Path],
    saved_layers: int,
    progress: bool,
    partial: bool = False,
    *,
    packed: bool = False,
    blocks: bool = False,
    changed: set[str] | None = None,
    types: Mapping[str, CodedType] = MappingProxyType({}),
) -> FillTarget:
    """Copy every published tensor into its part of a parameter. Return the target, which can report the load.

    All names are checked before the first copy. ``partial``: layers may be missing completely, and keep their
    values. ``changed``: modules may be missing completely; filled with the names of the others. Quantized
    weights are dequantized one by one (``weft.models.quantized``). ``packed``: leave codes for layers that
    can compute with codes; ``blocks``: GGML blocks as well. ``types``: see ``WeightFile``. Raises ConfigError
    for weights that do not fit the model.
    """
    quantized = model.spec.quantized
    cut = range(model.spec.layers, saved_layers)
    found = _names_of(files)
    published = {name for names in found.values() for name in names}
    named = weights.published_as(published)
    weights = named if quantized else named.saved_as(published)
    # A repeated weight is compared with the weight, so both are rounded.
    types = {**types, **{name: types[one] for name, one in weights.same_as.items() if one in types}}
    owners = owners_of(model) if changed is not None and isinstance(model, nn.Module) else None
    sources = _check_names(weights, found, cut, quantized is not None, partial, owners)
    _check_forms(weights, sources, types)
    if changed is not None and owners is not None:
        changed |= {owners[weights.placements[source.name].parameter] for source in sources}
    parameters = model.notes.weights(model.named_parameters())
    wide = torch_ops.wide(model.dtype)
    target = FillTarget(weights, parameters, quantized, wide, packed=packed, blocks=packed and blocks)
    read = 0
    with progress_bar(total=len(sources), title="Loading weights", unit="tensor", shown=progress) as bar:
        for path in files:
            with WeightFile(path, types) as file:
                # Sources are read file by file, so that one file is open at a time.
                for source in sources:
                    if source.path == path:
                        target.fill(source, file)
                        here = [part.name for part in source.parts.values() if part.path == path]
                        file.drop_pages(here)
                        read += sum(math.prod(file.shape(name)) for name in here)
                        if read > _TRIM_ENTRIES:
                            trim_heap()
                            read = 0
                        bar.update()
    trim_heap()
    _check_repeated(parameters, weights, files, types)
    target.weights = named  # adapters find their modules by the usual names
    target.settle()
    return target


def _names_of(files: Sequence[Path]) -> dict[Path, list[str]]:
    """Return path -> tensor names. Opens every file. Raises ConfigError for a damaged file."""
    found = {}
    for path in files:
        with WeightFile(path) as file:
            found[path] = file.names()
    return found


def _check_names(
    weights: WeightMap,
    files: Mapping[Path, Sequence[str]],
    cut_layers: range,
    quantized: bool,
    partial: bool,
    owners: Mapping[str, str] | None = None,
) -> list[TensorSource]:
    """Return the weights to load. ``files``: tensor names of each file. ``owners``: module of each parameter,
    if modules may be missing completely.

    Raises ConfigError for missing, unexpected or duplicate names.
    """
    sources: dict[str, TensorSource] = {}
    unexpected = []
    doubled = []
    for path, names in files.items():
        for name in names:
            # A tensor is a part of a known weight, or without effect, or unexpected.
            found = part_of(name, weights.placements, quantized)
            if found is not None:
                weight, role = found
                parts = sources.setdefault(weight, TensorSource(weight)).parts
                if role in parts:
                    doubled.append(name)
                parts[role] = Part(name, path)
            elif not _without_effect(name, weights, cut_layers, quantized):
                unexpected.append(Part(name, path))
    problems = []
    missing = _missing(weights, sources)
    if owners is not None:
        begun = {owners[weights.placements[name].parameter] for name in sources}
        missing = [name for name in missing if owners[weights.placements[name].parameter] in begun]
    for what, listed in (
        ("missing", _of_saved_layers(missing, sources) if partial else missing),
        ("unexpected", [part.name for part in unexpected if not is_zero_bias(part, sources)]),
        ("present twice", doubled + _both_forms(weights, sources)),
    ):
        if listed:
            problems.append(f"{what}: {_list(listed)}")
    if any(part_of(part.name, weights.same_as, quantized) for part in unexpected):
        problems.append("the output head has weights of its own: set tie_word_embeddings to false")
    if problems:
        raise ConfigError(
            f"the checkpoint's weights do not fit its config.json; {'; '.join(problems)}", param="--model"
        )
    return list(sources.values())


def _check_forms(weights: WeightMap, sources: Sequence[TensorSource], types: Mapping[str, CodedType]) -> None:
    """Raise ConfigError, which names a weight, for weights in another form than the weights of ``types``:
    rounding needs the matrices of the GGUF file."""
    present = {source.name for source in sources}
    for forms in weights.choices:
        kept = next((form for form in forms if any(name in types for name in form)), None)
        if kept is None:
            continue
        others = [name for form in forms for name in form if name in present and name not in kept]
        if others:
            raise ConfigError(
                f"{others[0]} can't be rounded to the types of the GGUF file in use: send {kept[0]} and all "
                "weights of this form instead",
                param="--model",
            )


def _without_effect(name: str, weights: WeightMap, cut_layers: range, quantized: bool) -> bool:
    """Return True for a tensor to ignore: of a removed layer, a repeated or an ignored name, or a
    quantization tensor without effect.
    """
    if quantized and without_effect(name):
        return True
    layer = _LAYER.search(name)
    if layer and int(layer.group(1)) in cut_layers:
        return True
    return name in weights.same_as or any(pattern.search(name) for pattern in weights.ignored)


def _missing(weights: WeightMap, present: Iterable[str]) -> list[str]:
    """Return the names without a source.

    Of alternative forms, only the form with the most names present counts.
    """
    have = set(present)
    optional = {name for forms in weights.choices for form in forms for name in form}
    missing = [name for name in weights.placements if name not in have and name not in optional]
    for forms in weights.choices:
        # The form with the largest share of present names is the intended form.
        best = max(forms, key=lambda form: sum(name in have for name in form) / len(form))
        missing += [name for name in best if name not in have]
    return missing


def _of_saved_layers(missing: Iterable[str], present: Iterable[str]) -> list[str]:
    """Return the ``missing`` names, without names of layers that are missing completely."""
    saved = {layer.group(1) for name in present if (layer := _LAYER.search(name))}
    return [n for n in missing if not (layer := _LAYER.search(n)) or layer.group(1) in saved]


def _both_forms(weights: WeightMap, present: Iterable[str]) -> list[str]:
    """Return the present names of further forms, where a checkpoint has several alternative forms of a
    weight.
    """
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


def _check_repeated(
    parameters: Mapping[str, Weight],
    weights: WeightMap,
    files: Sequence[Path],
    types: Mapping[str, CodedType],
) -> None:
    """Raise ConfigError if a repeated weight has other values: a saved head must equal its tied embedding.

    Reads the repeated weights.
    """
    for path in files:
        with WeightFile(path, types) as file:
            for name in file.names():
                if name not in weights.same_as:
                    continue
                placement = weights.placements[weights.same_as[name]]
                if has_pending_codes(parameters[placement.parameter]):
                    continue  # both are quantized: the values cannot be compared
                if not _repeats(file, name, parameters[placement.parameter], placement):
                    raise ConfigError(
                        f"config.json ties {name} to {weights.same_as[name]}, but the checkpoint "
                        "holds different values for them; set tie_word_embeddings to false",
                        param="--model",
                    )


def _repeats(file: WeightFile, name: str, weight: Weight, placement: Placement) -> bool:
    """Return True if the tensor ``name`` equals the values at ``placement``, as far as this rank stores the
    values."""
    if file.shape(name) != part_shape(weight, placement.index):
        return False
    for window in windows(weight, placement.index):
        target = weight.parameter.data[window.target]
        if not torch.equal(file.part(name, window.source).to(target), target):
            return False
    return True


@torch.no_grad()
def fill_randomly(model: Loadable, seed: int) -> None:
    """Fill the model, in place, with random weights: a function of ``seed``, parameter name, global shape and
    device type.

    Every rank generates each whole parameter, one by one, and keeps its part. Matrices preserve the scale of
    their inputs, norms are 1, biases small, so outputs are finite in every dtype. Tables of ids do not
    change.
    """
    for name, parameter in model.named_parameters():
        # The CPU generator reads only the low 32 bits of its seed.
        mixed = zlib.crc32(f"{seed} {name}".encode())
        generator = torch.Generator(parameter.device).manual_seed(mixed)
        if not parameter.is_floating_point():
            continue  # a table of ids keeps the values from construction
        weight = model.notes.weight(parameter)
        shard = weight.note.shard
        whole = parameter if shard is None else parameter.new_empty(weight.global_shape)
        if whole.dim() >= 2:
            whole.normal_(0.0, whole.shape[-1] ** -0.5, generator=generator)
        elif name.endswith(".bias"):
            whole.normal_(0.0, 0.02, generator=generator)
        else:
            whole.fill_(1.0)
        if shard is not None:
            note_largest(weight, (), whole)
            if not hold_rounded(weight, (), whole):
                parameter.narrow(shard.dim, 0, shard.count).copy_(cut(whole, shard))
