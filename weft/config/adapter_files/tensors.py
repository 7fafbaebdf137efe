"""Tensors of a LoRA adapter, as the package peft names them. Only headers are read.

    X.lora_A.weight, X.lora_B.weight             a linear layer, or the stacked experts of one parameter
    X.lora_magnitude_vector                      DoRA: lengths of the rows of the adapted matrix
    X.lora_embedding_A, X.lora_embedding_B       an embedding
    X.weight                                     a whole matrix (modules_to_save)

Sources: peft 0.21; DoRA, Liu et al. 2024, arXiv 2402.09353.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.adapter_files.patterns import PatternError, Patterns

_SHOWN = 8
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_PREFIX = r"^(?:base_model\.model\.)?(?P<module>.+?)"
_SIDE = re.compile(_PREFIX + r"\.lora_(?P<table>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?$")
_MAGNITUDE = re.compile(_PREFIX + r"\.lora_magnitude_vector(?:\.default)?(?:\.weight)?$")
_WHOLE = re.compile(_PREFIX + r"(?:\.modules_to_save(?:\.default)?)?\.weight$")
_DOUBLE = re.compile(r"\.modules_to_save(?:\.default)?\.weight$")
_ORIGINAL = re.compile(_PREFIX + r"\.original_module\.weight$")
_BASE = ".base_layer"
_COPIES = (f"{_BASE}.weight", ".original_module.weight")
"""Endings of copies of base matrices."""
_TABLES = ("embed_tokens", "lm_head")
"""Modules that peft saves whole, without a setting, if the vocabulary was resized."""
_MOST_NAMES = 4096
"""Maximum names in a list of the settings: every tensor is compared with every name."""
_MOST = 1e30
"""Bound of ranks and alphas: beyond it no scale is a finite number."""


class UnreadTensors(ValueError):
    """A tensor or a setting is not supported. The message names the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A parameter with the same matrix of all experts."""

    parameter: str
    """Name inside the module."""
    rank: int
    """Rank of one expert."""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """The matrices of one adapted module of the base model."""

    module: str
    """Name of the module in the base model, as ``model.layers.0.self_attn.q_proj``. Of stacked experts: the
    name of the module with the stacks, perhaps with ``.base_layer`` behind."""
    rank: int
    inputs: int
    outputs: int
    rows: int
    """Rows of ``a``: the rank, or of stacked experts the ranks of all experts."""
    scale: float
    """Factor of the product: alpha / rank, or alpha / sqrt(rank) for rank-stabilized adapters."""
    a: str
    b: str
    """Names of the tensors in the file: ``a`` [rank, inputs], ``b`` [outputs, rank]. Of stacked experts:
    ``a`` [experts * rank, inputs], expert by expert, and ``b`` [outputs, rank * experts], rank by rank."""
    stacks: tuple[Stack, ...] = ()
    """Parameters with stacked experts to which the tensors may belong; () for a single matrix. The shapes
    tell which. ``rank`` is the largest rank of these, and ``scale`` has no meaning."""
    table: bool = False
    """True for an embedding: inputs are token ids."""
    magnitude: str = ""
    """DoRA: name of the tensor [outputs] with the lengths of the rows; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMatrix:
    """A whole matrix that replaces a matrix of the base model."""

    module: str
    tensor: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Found:
    """Tensors of one module."""

    sides: dict[str, str]
    table: bool
    magnitude: str = ""


def modules_of(
    header: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[AdapterModule, ...], tuple[SavedMatrix, ...]]:
    """Return (adapted modules, whole matrices) of a file with ``header``, in order of their names.

    Raise UnreadTensors for tensors that are not supported, and for shapes that do not fit.
    """
    for field in ("modules_to_save", "target_parameters"):
        names = config.get(field) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UnreadTensors(f"{field} must be a list of names, not {str(names)[:80]!r}")
        if len(names) > _MOST_NAMES:
            raise UnreadTensors(f"{field} has {len(names)} names, and at most {_MOST_NAMES} are read")
    # A pair of tensors per module, and perhaps lengths; everything else is refused together.
    found = dict[str, _Found]()
    saved, lengths, copies, other = [], dict[str, str](), list[str](), []
    for tensor in header:
        if match := _SIDE.match(tensor):
            one = found.setdefault(match["module"], _Found({}, bool(match["table"])))
            if match["side"] in one.sides or one.table != bool(match["table"]):
                other.append(f"{tensor} (twice)")
            one.sides[match["side"]] = tensor
        elif match := _MAGNITUDE.match(tensor):
            lengths[match["module"]] = tensor
        elif (match := _WHOLE.match(tensor)) and _is_saved(match["module"], config):
            saved.append(SavedMatrix(module=match["module"], tensor=tensor, shape=_shape(header, tensor)))
        else:
            (copies if tensor.endswith(_COPIES) else other).append(tensor)
    saved, strangers = _without_copies(saved, copies, found)
    other += strangers
    other += [one.sides["A" if "A" in one.sides else "B"] for one in found.values() if len(one.sides) == 1]
    other += [tensor for module, tensor in lengths.items() if module not in found]
    if other:
        raise UnreadTensors(f"tensors that are not supported, or without a partner: {listed(other)}")
    if not found and not saved:
        raise UnreadTensors("the file with the weights has no tensors of an adapter")
    kept = config.get("modules_to_save") or ()
    if not all(any(_ends_in(one.module, name) for one in saved) for name in kept):
        raise UnreadTensors(f"the file has not all matrices of modules_to_save {kept!r}")
    for module, tensor in lengths.items():
        found[module].magnitude = tensor
    if bool(config.get("use_dora")) != bool(lengths):
        raise UnreadTensors("use_dora and the tensors lora_magnitude_vector do not fit each other")
    numbers = _Numbers(config)
    try:
        modules = tuple(_module(name, one, header, config, numbers) for name, one in sorted(found.items()))
    except PatternError as error:
        raise UnreadTensors(f"rank_pattern or alpha_pattern: {error}") from error
    _check_dtypes(header, [*_tensors(found), *(one.tensor for one in saved)])
    return modules, tuple(sorted(saved, key=lambda one: one.module))


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _tensors(found: Mapping[str, _Found]) -> list[str]:
    return [t for one in found.values() for t in (*one.sides.values(), one.magnitude) if t]


def _check_dtypes(header: Mapping[str, Any], tensors: Sequence[str]) -> None:
    kinds = {tensor: str(header[tensor].get("dtype")) for tensor in tensors}
    wrong = [f"{tensor} ({kind[:16]})" for tensor, kind in kinds.items() if kind not in _DTYPES]
    if wrong:
        raise UnreadTensors(f"tensors with a dtype that is not supported: {listed(wrong)}; save as bfloat16")


def _shape(header: Mapping[str, Any], tensor: str) -> tuple[int, ...]:
    return tuple(header[tensor]["shape"])


def _without_copies(
    saved: Sequence[SavedMatrix], copies: Sequence[str], found: Mapping[str, _Found]
) -> tuple[list[SavedMatrix], list[str]]:
    """Return (whole matrices, each once; tensors of ``copies`` that are no copies of base matrices)."""
    # With ``modules_to_save`` of an embedding, peft saves the trained matrix under two names.
    plain = {one.module for one in saved if not _DOUBLE.search(one.tensor)}
    kept = [one for one in saved if one.module not in plain or not _DOUBLE.search(one.tensor)]
    whole = {one.module for one in kept}
    strangers = []
    for tensor in copies:
        # peft saves the base matrix beside an adapter of an embedding, and beside a whole matrix.
        beside, original = _WHOLE.match(tensor), _ORIGINAL.match(tensor)
        of_adapter = beside is not None and _bare(beside["module"]) in found
        if not of_adapter and (original is None or original["module"] not in whole):
            strangers.append(tensor)
    return kept, strangers


def _is_saved(module: str, config: Mapping[str, Any]) -> bool:
    """Return True if ``modules_to_save`` names the module, and for an embedding and a head."""
    if module.rpartition(".")[2] in _TABLES:
        return True
    names = config.get("modules_to_save") or ()
    if names and config.get("ensure_weight_tying") and "layers." not in module:
        return True  # peft also saves the module that is tied to a named module
    return any(_ends_in(module, name) for name in names)


def _ends_in(module: str, name: str) -> bool:
    """Return True if ``name`` is the name of the module, or its last parts."""
    return module == name or module.endswith(f".{name}")


class _Numbers:
    """Ranks and scales of the modules, by the settings."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._patterns = {}
        for field in ("rank_pattern", "alpha_pattern"):
            patterns = config.get(field) or {}
            if not isinstance(patterns, dict):
                raise UnreadTensors(f"{field} is not an object with patterns as keys")
            try:
                self._patterns[field] = Patterns(patterns.items())
            except PatternError as error:
                raise UnreadTensors(f"{field} is not understood: {error}") from error

    def of(self, field: str, default: str, module: str) -> float:
        """Return the number for ``module``: of the first fitting pattern, else of the setting ``default``."""
        value = self._patterns[field].find(module, self._config.get(default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            shown = field if self._config.get(field) else "r or lora_alpha"
            raise UnreadTensors(f"{shown} must be positive, not {str(value)[:80]}")
        return value


def _module(
    module: str, found: _Found, header: Mapping[str, Any], config: Mapping[str, Any], numbers: _Numbers
) -> AdapterModule:
    """Return one module. Raise UnreadTensors if the shapes do not fit each other or the configured rank."""
    a, b = found.sides["A"], found.sides["B"]
    first, second = _shape(header, a), _shape(header, b)
    plain = _bare(module)
    names = _parameters(plain, config)
    root = bool(config.get("use_rslora"))

    def numbers_of(name: str) -> tuple[int, float]:
        """Return (rank, scale) of a module or parameter."""
        rank = numbers.of("rank_pattern", "r", name)
        alpha = numbers.of("alpha_pattern", "lora_alpha", name)
        return int(rank), alpha / (math.sqrt(rank) if root else rank)

    stacks = []
    for name in names:
        rank, scale = numbers_of(f"{plain}.{name}")
        if len(first) == 2 and first[0] % max(rank, 1) == 0:
            stacks.append(Stack(parameter=name, rank=rank, scale=scale))
    rank, scale = numbers_of(plain)
    fits = len(first) == len(second) == 2 and first[0] == second[1]
    if not fits or not (stacks if names else first[0] == rank):
        raise UnreadTensors(
            f"{module} has shapes {list(first)} and {list(second)}, and the settings say rank {rank}"
        )
    if stacks and config.get("use_dora"):
        # peft refuses to make such an adapter, so no file says which lengths a stack has.
        raise UnreadTensors(
            f"{module} has stacked experts (target_parameters), and use_dora is not defined for stacked "
            "experts: train without use_dora, or name the matrices of the experts in target_modules"
        )
    if found.magnitude and (found.table or _shape(header, found.magnitude) != (second[0],)):
        raise UnreadTensors(f"{module} has lora_magnitude_vector {_shape(header, found.magnitude)}")
    return AdapterModule(
        module=module,
        rank=max(stack.rank for stack in stacks) if stacks else rank,
        inputs=first[1],
        outputs=second[0],
        rows=first[0],
        scale=scale,
        a=a,
        b=b,
        stacks=tuple(stacks),
        table=found.table,
        magnitude=found.magnitude,
    )


def _bare(module: str) -> str:
    """Return the name without the endings for nested layers of peft."""
    while module.endswith(_BASE):
        module = module.removesuffix(_BASE)
    return module


def _parameters(module: str, config: Mapping[str, Any]) -> list[str]:
    """Return the parameters of the module that ``target_parameters`` names.

    A name without a parent means the modules ``experts``.
    """
    made = []
    for target in config.get("target_parameters") or ():
        parent, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
        parent = parent or "experts"
        if name and (module == parent or module.endswith(f".{parent}")):
            made.append(name)
    return made
