"""Recognition of modules by what the modules compute, never by their names.

A module is copied with small random weights, or with random weights of its size, and its result is compared
with Weft's op. A module that differs, or raises, stays as published.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.ops import torch_ops
from weft.ops.moe import Gate, activate

Tensor = torch.Tensor
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_HIDDEN, _INNER = 8, 12
#: Norms of transformers compute in float32, also for float64 inputs.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5
SIZES = (1.0, 100.0)
"""Factors of the random inputs: large inputs show a block that cuts off its values (``swiglu_limit``)."""


def random(*shape: int) -> Tensor:
    """Return random numbers in float64, a function of ``shape``."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def equal(one: Any, other: Tensor) -> bool:
    """Return True if ``one`` is a tensor with the values of ``other``."""
    return (
        isinstance(one, Tensor)
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE)
    )


def norm_of(module: nn.Module) -> tuple[float, bool] | None:
    """Return (epsilon, centred) of an RMS norm; None for any other module.

    centred: the published weight is the difference from 1.
    """
    weights = list(module.named_parameters(recurse=False))
    if [name for name, _ in weights] != ["weight"] or weights[0][1].dim() != 1 or list(module.children()):
        return None
    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    if not isinstance(eps, float):
        return None
    size = len(weights[0][1])
    twin = copy.deepcopy(module).to_empty(device="cpu").double()
    weight = random(size)
    x = 3 * random(2, size)
    try:
        with torch.no_grad():
            twin.weight.copy_(weight)  # type: ignore[operator]
            made = twin(x)
    except Exception:  # a norm with further inputs, for example
        return None
    for centred in (False, True):
        if equal(made, torch_ops.rms_norm(x, weight + float(centred), eps)):
            return eps, centred
    return None


def _twin(module: nn.Module, parts: dict[str, tuple[int, int]], bias: bool) -> nn.Module:
    """Return a shallow copy of ``module`` with small random linear layers ``parts`` (inputs, outputs)."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, (inputs, outputs) in parts.items():
        layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
        layer.weight.data = random(outputs, inputs)
        if bias:
            layer.bias.data = random(outputs)
        twin._modules[name] = layer
    return twin


def _activation(
    x: Tensor, module: Callable[[Tensor], Any], products: Callable[[Tensor, str], Tensor]
) -> str | None:
    """Return the name of the activation with which ``products`` computes ``module``; None if there is none.

    x: random input of ``module``, compared in every size of ``SIZES``.
    """
    try:
        results = [(x * size, module(x * size)) for size in SIZES]
    except Exception:  # the module has weights, or needs other sizes: no plain activation
        return None
    for name in torch_ops.ACTIVATIONS:
        if all(equal(made, products(given, name)) for given, made in results):
            return name
    return None


@torch.no_grad()
def mlp_of(module: nn.Module) -> tuple[str, bool] | None:
    """Return (activation, bias) of a gated feed-forward block; None for any other module.

    The block has linear layers ``gate_proj``, ``up_proj``, ``down_proj``, or ``gate_up_proj``, ``down_proj``
    with gate rows first, and no further parameters.
    """
    layers = {name: part for name, part in module.named_children() if type(part) is nn.Linear}
    single = set(layers) == {"gate_proj", "up_proj", "down_proj"}
    if not single and set(layers) != {"gate_up_proj", "down_proj"}:
        return None
    others = [part for name, part in module.named_children() if name not in layers]
    if list(module.parameters(recurse=False)) or any(list(part.parameters()) for part in others):
        return None
    biases = {part.bias is not None for part in layers.values()}
    if len(biases) > 1:
        return None
    bias = biases.pop()
    first = {"gate_proj": _INNER, "up_proj": _INNER} if single else {"gate_up_proj": 2 * _INNER}
    sizes = {name: (_HIDDEN, rows) for name, rows in first.items()} | {"down_proj": (_INNER, _HIDDEN)}
    twin = _twin(module, sizes, bias)
    parts: dict[str, Any] = twin._modules

    def computed(x: Tensor, activation: str) -> Tensor:
        gate_up = torch.cat([parts[name](x) for name in first], dim=-1)
        made: Tensor = parts["down_proj"](torch_ops.gated(gate_up, activation))
        return made

    found = _activation(random(1, 3, _HIDDEN), twin, computed)
    return None if found is None else (found, bias)


def is_experts(module: Any) -> bool:
    """Return True for a module with the interface of transformers for experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_concatenated")


def expert_sizes(module: Any) -> tuple[int, int, int]:
    """Return (experts, hidden, inner size) of a module for which ``is_experts`` is True."""
    experts, first, second = module.down_proj.shape
    return (experts, second, first) if module.is_transposed else (experts, first, second)


@torch.no_grad()
def gate_of(module: Any) -> Gate | None:
    """Return the function between the two matrices of an experts module; None if Weft has no such experts.

    The module must follow the interface of transformers, with stacks [experts, 2 n, hidden] and [experts,
    hidden, n]. ``is_transposed`` swaps the last two dims. ``has_bias`` adds a bias per expert. Rows of gate
    stand first if ``is_concatenated``, otherwise rows of gate and up alternate.
    """
    stacks = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    names = {"gate_up_proj", "down_proj"}
    if not names <= set(stacks) or len(stacks["down_proj"]) != 3 or not module.has_gate:
        return None
    experts, hidden, inner = expert_sizes(module)
    up, down = (2 * inner, hidden), (hidden, inner)
    if module.is_transposed:
        up, down = up[::-1], down[::-1]
    due: dict[str, tuple[int, ...]] = {"gate_up_proj": (experts, *up), "down_proj": (experts, *down)}
    if module.has_bias:
        due |= {"gate_up_proj_bias": (experts, 2 * inner), "down_proj_bias": (experts, hidden)}
    normed = getattr(module, "has_post_expert_norm", False)  # older versions of transformers lack the flag
    if stacks != due or normed:
        return None

    def published(x: Tensor) -> Any:
        halves = x.clone() if module.is_concatenated else torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
        return module._apply_gate(halves)

    for limit, alpha in itertools.product(_numbers(module, "limit"), _numbers(module, "alpha")):
        gate = Gate(limit=limit, alpha=alpha)
        name = _activation(random(4, 2 * _INNER), published, functools.partial(_gated, gate=gate))
        if name is not None:
            return gate._replace(activation=name)
    return None


def _gated(x: Tensor, activation: str, gate: Gate) -> Tensor:
    return activate(x, gate._replace(activation=activation))


def _numbers(module: Any, name: str) -> list[float]:
    """Return 0 and the positive numbers in attributes of ``module`` whose names contain ``name``."""
    found = [value for key, value in vars(module).items() if name in key and isinstance(value, int | float)]
    return [0.0, *dict.fromkeys(float(value) for value in found if value > 0)]


@torch.no_grad()
def scale_of(module: nn.Module) -> str | None:
    """Return how an embedding scales its rows: ``one`` or ``embed_scale`` (a buffer); None: unknown."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    if type(module) is nn.Embedding:
        return "one"
    if {name for name, _ in module.named_buffers()} != {"embed_scale"}:
        return None
    twin = copy.copy(module)
    table = random(5, 2)
    twin._parameters = {"weight": nn.Parameter(table, requires_grad=False)}
    twin._buffers = {"embed_scale": torch.tensor(3.5, dtype=torch.float64)}
    twin.padding_idx = None
    ids = torch.tensor([[0, 2, 1]])
    try:
        return "embed_scale" if equal(twin(ids), table[ids] * 3.5) else None
    except Exception:  # an embedding with further inputs
        return None
