"""Reasons against a model, in plain words: the mechanism that the generic backend lacks.

The probe runs without values. When the pass fails, a second pass answers every read of a value. The result of
that pass never serves: it only finds the layers without attention, for the error.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

#: Argument of attention -> meaning.
_ARGUMENTS = {
    "indices": "attention to tokens that an indexer chooses",
    "is_causal": "attention to later tokens, as in an encoder",
    "position_bias": "a bias of scores by position, computed by the model",
    "sinks": "attention sinks in the form of an argument",
}
#: Kind of a mask -> meaning.
_MASKS = {
    "bidirectional": "attention to later tokens, as in an encoder",
    "other": "a mask that is neither causal nor a window",
    "computed by the model": "a mask that the model computes",
}
_STATE = re.compile(
    r"update_recurrent_state|recurrent_states?\b|ssm_states?\b|\bstate\[|linear_cache|mlstm|rnn_state"
)
_CONVOLUTION = re.compile(r"update_conv_state|\bconv_states?\b|nn\.Conv1d")
_ATTENTION = re.compile(r"Attention|Attn")
_CROSS = ("encoder_attn", "cross_attn", "crossattention")
"""Names of modules that attend to an encoder."""
_SHOWN = 4


def argument(name: str) -> str:
    """Return the meaning of an argument of attention that may change the result."""
    return _ARGUMENTS.get(name, f"the argument {name} of attention")


def mask(kind: str) -> str:
    """Return the meaning of a kind of mask without a KV cache group."""
    if kind.startswith("chunk:"):
        return f"attention in chunks of {kind.removeprefix('chunk:')} positions"
    return _MASKS.get(kind, f"mask {kind}")


def without_attention(model: Any, missing: list[int], layers: int) -> str:
    """Return the reason against ``missing``, the layers of ``layers`` that call no attention."""
    shown = ", ".join(map(str, missing[:_SHOWN])) + (", .." if len(missing) > _SHOWN else "")
    found = dict[str, str]()
    for part in _parts(model, missing, layers):
        name = type(part).__name__
        what = found.get(name) or _mechanism(part)
        if what:
            found[name] = what
    names, what = ", ".join(found) or "unknown modules", " and ".join(dict.fromkeys(found.values()))
    return (
        f"layers without the attention interface: {shown} ({names}: "
        f"{what or 'no attention that Weft can move to its caches'})"
    )


def cross_attention(model: Any) -> list[str]:
    """Return the reason against a model with attention to the outputs of an encoder, if there is one."""
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()} & {*_CROSS}
    return ["attention to the outputs of an encoder (cross-attention)"] if found else []


def _parts(model: Any, numbers: Iterable[int], layers: int) -> Iterator[nn.Module]:
    """Yield the direct parts of the layers ``numbers``."""
    for found in model.modules():
        if isinstance(found, nn.ModuleList) and len(found) == layers:
            for number in numbers:
                for part in found[number].children():
                    yield from part if isinstance(part, nn.ModuleList) else (part,)
            return


def _mechanism(part: nn.Module) -> str:
    """Return how ``part`` reads other tokens, from the source of its classes; "" if nothing shows that."""
    kinds = {type(inner) for inner in part.modules() if type(inner).__module__.startswith("transformers")}
    try:
        source = "".join(inspect.getsource(kind) for kind in kinds)
    except (OSError, TypeError):
        return f"code of {type(part).__name__}"
    found = [
        what
        for pattern, what in ((_STATE, "a recurrent state"), (_CONVOLUTION, "a convolution over tokens"))
        if pattern.search(source)
    ]
    if not found and _ATTENTION.search(type(part).__name__):
        found = ["attention in code of the class"]
    return " and ".join(found)


class Answered(TorchFunctionMode):
    """Answers reads of values of tensors without memory: True, 1, or a list of ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return answer(args[0])
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.__bool__: lambda _: True,
    torch.Tensor.__int__: lambda _: 1,
    torch.Tensor.__index__: lambda _: 1,
    torch.Tensor.item: lambda _: 1,
    torch.Tensor.tolist: lambda x: torch.ones(x.shape, dtype=torch.int64, device="cpu").tolist(),
}


def unprobed(model: Any, error: Exception) -> str:
    """Return the reason against ``model``, whose pass failed with ``error``."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    states = dict[str, str]()
    for part in model.modules():
        # The innermost part with a state. Attention in code of the class is no state.
        inner = {_mechanism(child) for child in part.children()}
        what = _mechanism(part)
        if what and "attention" not in what and not inner & {what}:
            states[type(part).__name__] = what
    if states:
        what = " and ".join(dict.fromkeys(states.values()))
        return f"the layers have {what} ({', '.join(states)}), and the pass failed: {line}"
    place = _place(error)
    if "meta" in line:  # torch's words for a tensor without memory
        return f"{place or 'the forward pass'} reads values of tensors, and the probe has none ({line})"
    return f"the forward pass fails in the probe{place and f', in {place}'}: {line}"


def _place(error: Exception) -> str:
    """Return the module of transformers in which ``error`` was raised, and the line; "" if unknown."""
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and type(module).__module__.startswith("transformers.models."):
            code = linecache.getline(frame.f_code.co_filename, number).strip()
            shown = f" (`{code}`)" if code and not code.startswith("raise") else ""
            found = type(module).__name__ + shown
    return found
