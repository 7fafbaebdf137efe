"""Loading for the generic backend: skeleton, probe, substitution, weights, self check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.families.weight_files import weight_files
from weft.config.spec import ModelSpec
from weft.layers.build import AdapterOptions, Build, ExpertOptions
from weft.layers.pending_codes import Notes
from weft.models import loader
from weft.models.adapters import Adapters
from weft.models.files import WeightFile
from weft.models.generic.experts import RoutedExperts
from weft.models.generic.model import TransformersModel
from weft.models.generic.modules import Sums
from weft.models.generic.probe import LayerFacts, run_probe
from weft.models.generic.self_check import check_loaded
from weft.models.generic.skeleton import drop_head, make_skeleton, read_config
from weft.models.generic.swap import Substitution, Swapper
from weft.models.generic.weights import module_map, published_map
from weft.models.gguf_tensor import types_to_keep
from weft.models.refill import pack_changed
from weft.models.weights import add_score
from weft.moe.placement import Placement
from weft.parallel.mesh import Mesh

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    load_format: str
    seed: int
    progress: bool
    pack: bool
    codes: bool
    placements: Sequence[Placement] | None
    """Places of experts divided over ranks, one per layer with such experts; None for the order."""
    files: Sequence[Path] | None
    """New weights of a model in use, in place of the files in the folder; None for a start."""
    changed: set[str] | None
    """Gets the names of the modules in ``files``, which may lack modules; None for all modules."""


def load(
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
    placements: Sequence[Placement] | None = None,
    pack: bool = True,
    packed: bool = True,
    files: Sequence[Path] | None = None,
    changed: set[str] | None = None,
) -> TransformersModel:
    """Load the model of ``folder`` with the modeling code of transformers. Raises ConfigError.

    The arguments are those of ``weft.models.loader.load_model``. Modules are replaced by Weft's ops where
    recognized. If the model then fails in the self check with another error than ConfigError, the model is
    loaded again without replacements, and the error is logged.
    """
    _check(invariant)
    given = dict(locals())  # the arguments of this call, and nothing else
    codes = pack and packed and quantization == "none" and loader.keeps_codes(spec, dtype, device)
    staged = pack and load_format != "dummy" and (codes or quantization != "none")
    build = Build(
        dtype=dtype,
        device=device,
        mesh=mesh or Mesh(),
        quantization=quantization,
        staged=staged,
        experts=experts or ExpertOptions(),
        adapters=adapters or AdapterOptions(),
    )
    options = _Options(
        load_format=load_format,
        seed=seed,
        progress=progress,
        pack=pack,
        codes=codes,
        placements=placements,
        files=files,
        changed=changed,
    )
    try:
        model = _load(folder, spec, build, options, ops=True)
        if model.experts is not None:
            _set_reload(model, given)
        return model
    except ConfigError:
        raise
    except Exception as error:  # modeling code may read attributes that Weft's modules lack
        log.warning("%s is loaded without Weft's ops: %s", spec.architecture, error)
    return _load_plain(folder, spec, build, options)


def _load_plain(folder: str, spec: ModelSpec, build: Build, options: _Options) -> TransformersModel:
    """Load the model without replacements. Raises ConfigError for settings that need Weft's modules."""
    if build.divides_experts or build.adapters.places:
        raise ConfigError(
            f"{spec.architecture}: its code reads modules that Weft replaces; load it without "
            "--enable-expert-parallel and --max-loras",
            param="--max-loras" if build.adapters.places else "--enable-expert-parallel",
        )
    # A new build: the old build has notes of the dropped parameters.
    build = dataclasses.replace(build, ops={}, notes=Notes())
    try:
        return _load(folder, spec, build, options, ops=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{spec.architecture} cannot be served with the implementation of transformers: {error}",
            param="--model",
        ) from error


def _set_reload(model: TransformersModel, given: dict[str, Any]) -> None:
    """Let the experts of ``model`` read the experts of another placement.

    ``given``: arguments of ``load``.
    """
    assert model.experts is not None
    # A temporary model must not add callbacks to the mesh.
    mesh = dataclasses.replace(given["mesh"], formed=[])
    again = {**given, "mesh": mesh, "progress": False, "adapters": None}
    model.experts.reload = lambda placements: load(**{**again, "placements": placements}).experts


def _check(invariant: bool) -> None:
    """Raise ConfigError for options that modules of transformers cannot keep."""
    if invariant:
        raise ConfigError(
            "--deterministic: the modules of transformers are not batch-invariant: other rows of a step may "
            "change the bits of a row; remove --deterministic, or use --model-impl weft",
            param="--deterministic",
        )


def _load(folder: str, spec: ModelSpec, build: Build, options: _Options, *, ops: bool) -> TransformersModel:
    config = read_config(folder, _layers(folder, spec))
    published = make_skeleton(config, spec.architecture, build.dtype)
    sums = Sums(build.comm)
    inputs = list[tuple[str, Any]]()
    with _inputs_of(published, inputs):
        calls = run_probe(published)
    _check_fp8(spec, calls)
    if not spec.head:
        drop_head(published)
    _fill_buffers(published, build)  # before modules with buffers are replaced
    swapped = Swapper(published, calls, inputs, build, sums).swap(ops=ops)
    inputs.clear()
    model = TransformersModel(spec, build, published, sums, swapped)
    _check_draft(model)
    if options.placements is not None:
        routed = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        for module, placement in zip(routed, options.placements, strict=True):
            module.place(placement)
    filled = None
    if options.load_format == "dummy":
        loader.fill_randomly(model, options.seed)
    else:
        filled = _fill(model, folder, config, swapped, options)
    if build.adapters.places:
        parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        model.adapters = Adapters(model, module_map(swapped.targets, parameters), build.adapters)
    if options.pack:
        model.pack() if options.changed is None else pack_changed(model, options.changed)
    # An update of weights brings no new code, and a check would delay steps of the model in use.
    if options.pack and options.files is None:
        if filled is not None:
            filled.report(build.dtype)
        found = ", ".join(f"{what} ({count})" for what, count in sorted(swapped.counts.items()))
        log.info("%s: code of transformers, with Weft's ops for %s", spec.architecture, found or "attention")
        check_loaded(model)
    return model


def _check_fp8(spec: ModelSpec, calls: Sequence[LayerFacts]) -> None:
    """Raise ConfigError for keys with positions in 8 bits."""
    if any(cache.fp8 for cache in spec.caches) and any(call.biased for call in calls):
        raise ConfigError(
            f"--kv-cache-dtype fp8: the keys of {spec.architecture} contain positions (ALiBi), which 8 bits "
            "round; use --kv-cache-dtype auto",
            param="--kv-cache-dtype",
        )


def _check_draft(model: TransformersModel) -> None:
    """Raise ConfigError if a draft head cannot read the hidden states between the layers of ``model``."""
    draft = model.spec.draft
    if draft is not None and draft.eagle is not None and model.last_rows is None:
        raise ConfigError(
            f"--speculative-method eagle3: the layers of {model.spec.architecture} are not in one list, so "
            "the head cannot read the hidden states between layers; use --speculative-method draft or ngram",
            param="--speculative-method",
        )


def _layers(folder: str, spec: ModelSpec) -> int | None:
    """Return the number of layers to keep; None if the spec has all layers."""
    whole = read_config(folder).get_text_config().num_hidden_layers
    return None if whole == spec.layers else spec.layers


class _inputs_of:
    """Context in which the inputs of linear layers are appended to a list, in the order of the calls."""

    def __init__(self, model: Any, found: list[tuple[str, Any]]) -> None:
        self._model = model
        self._found = found
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if type(module) is nn.Linear:
                self._hooks.append(module.register_forward_pre_hook(self._hook(name)))

    def _hook(self, name: str) -> Any:
        def note(_: Any, given: tuple[Any, ...]) -> None:
            if given:
                self._found.append((name, given[0]))

        return note

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


_FILLS = (0, 1)
"""Values of integer buffers before the class computes them; a buffer that depends on the value is not
computed."""


@torch.no_grad()
def _fill_buffers(model: Any, build: Build) -> None:
    """Compute the buffers that checkpoints do not contain, rotation frequencies for example.

    Transformers computes such buffers in ``_init_weights``. The same method draws random weights, without
    effect on parameters without memory. Raises ConfigError for a buffer that is not computed.
    """
    for name, module in model.named_modules():
        buffers = {key: one for key, one in module._buffers.items() if one is not None}
        ours = {key: one for key, one in buffers.items() if key in module._non_persistent_buffers_set}
        if not ours:
            continue
        made = [_computed(_owner(model, name), module, ours, fill) for fill in _FILLS]
        for key in ours:
            one, other = (found[key] for found in made)
            if not torch.equal(one, other):  # NaN equals nothing
                raise ConfigError(
                    f"{type(model).__name__}: transformers does not compute the buffer {name}.{key}, and "
                    "checkpoints do not have the buffer",
                    param="--model",
                )
            module._buffers[key] = one.to(build.device)


def _owner(model: Any, name: str) -> Any:
    """Return the innermost model of transformers around module ``name``: its class makes the buffers."""
    found = model
    for end in [place for place, letter in enumerate(name) if letter == "."] + [len(name)]:
        inner = model.get_submodule(name[:end])
        found = inner if isinstance(inner, PreTrainedModel) else found
    return found


def _computed(
    model: Any, module: nn.Module, buffers: dict[str, torch.Tensor], fill: int
) -> dict[str, torch.Tensor]:
    """Return the buffers of ``module`` as the class computes them, from NaN or ``fill`` (integers)."""
    for key, buffer in buffers.items():
        before = torch.nan if buffer.is_floating_point() else fill
        module._buffers[key] = torch.full_like(buffer, before, device="cpu")
    model._init_weights(module)
    return {key: module._buffers[key] for key in buffers}  # type: ignore[misc]


def _fill(
    model: TransformersModel, folder: str, config: Any, swapped: Substitution, options: _Options
) -> Any:
    """Fill the parameters from the files. Return the target of the load, which can report."""
    path = Path(folder)
    files = weight_files(path, options.load_format) if options.files is None else options.files
    partial = options.load_format == "partial"
    if partial:
        loader.fill_randomly(model, options.seed)
    names = list[str]()
    for one in files:
        with WeightFile(one) as file:
            names += file.names()
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    twin = make_skeleton(config, model.spec.architecture, model.dtype)
    weights = add_score(published_map(twin, swapped.targets, parameters, names), model.spec)
    saved = read_config(folder).get_text_config().num_hidden_layers
    blocks = options.codes and model.device.type == "cpu"
    return loader.fill(
        model,
        weights,
        files,
        saved,
        options.progress,
        partial,
        packed=options.codes,
        blocks=blocks,
        changed=options.changed,
        types=types_to_keep(folder, options.files),
    )
