"""New weights in the memory of a model in use: every tensor of a second model is copied into the first.

The second model is loaded and packed like the model of a fresh start, so the first has the same bits
afterwards. Addresses do not change: captured decode steps stay valid.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from weft.common.errors import InvalidRequest
from weft.layers.build import Packs
from weft.layers.dense import LMHead

Tensor = torch.Tensor

_SAMPLES = 4096
"""Bytes of a tensor that ``held_digest`` reads at each of three places."""


def weights_of(model: nn.Module, changed: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return every tensor that a model computes with, by place: parameters, and tensors in packed layouts.

    Tensors that share memory are listed once. ``changed``: only tensors of these modules. Raises
    InvalidRequest for a layout without access to its tensors.
    """
    found: dict[str, Tensor] = {}
    seen = set[tuple[int, tuple[int, ...], tuple[int, ...]]]()
    for name, module in model.named_modules():
        if changed is not None and not any(name == one or name.startswith(f"{one}.") for one in changed):
            continue
        if "low" in name.split("."):  # memory of adapters
            continue
        attributes = {**module._parameters, **module._buffers, **vars(module)}
        for key, value in attributes.items():
            if key in _INTERNAL:
                continue
            for place, tensor in _tensors(value, f"{name}.{key}"):
                # Two views of one memory: the first copy fills both.
                identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
                if tensor.numel() and identity not in seen:
                    seen.add(identity)
                    found[place] = tensor
    return found


def owners_of(model: nn.Module) -> dict[str, str]:
    """Return the module of each parameter that is packed as a whole: the outermost module with a packed
    layout, else the module itself."""
    packs = [name for name, module in model.named_modules() if isinstance(module, Packs)]
    found: dict[str, str] = {}
    for name, _ in model.named_parameters():
        own = name.rpartition(".")[0]
        # Names come in order of definition, so the outermost module comes first.
        found[name] = next((one for one in packs if own == one or own.startswith(f"{one}.")), own)
    return found


def pack_changed(model: nn.Module, changed: set[str]) -> None:
    """Pack the modules ``changed``, with the modules inside. Adds a head that shares a changed embedding."""
    tied = [
        name
        for name, module in model.named_modules()
        if isinstance(module, LMHead) and module.tied and "embedding" in changed
    ]
    changed.update(tied)
    for name, module in model.named_modules():
        inside = any(name == one or name.startswith(f"{one}.") for one in changed)
        if inside and isinstance(module, Packs):
            module.pack()


def check_refill(into: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequest, which names the first place, unless all of ``new`` fits into ``into``."""
    for place, tensor in new.items():
        own = into.get(place)
        if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
            raise InvalidRequest(
                f"the new weights need another layout at {place} than the weights in use; restart the server "
                "with the new weights",
                param="update_info",
            )


@torch.no_grad()
def refill(into: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Copy ``new`` into the memory of ``into``. No step may run meanwhile. See ``check_refill``."""
    for place, tensor in new.items():
        into[place].copy_(tensor)


def check_finite(new: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequest, which names the first place, for a number that is not finite."""
    for place, tensor in new.items():
        if tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.isfinite().all():
            raise InvalidRequest(f"the new weights are not finite at {place}", param="update_info")


def held_digest(held: Mapping[str, Tensor]) -> str:
    """Return 8 hex digits over samples of all tensors: the first, middle and last bytes of each."""
    made = 0
    for place, tensor in held.items():
        made = zlib.crc32(place.encode(), made)
        flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach().reshape(-1)
        count = max(1, _SAMPLES // flat.element_size())
        for begin in (0, len(flat) // 2, max(0, len(flat) - count)):
            sample = flat[begin : begin + count].cpu().contiguous().view(torch.uint8)
            made = zlib.crc32(sample.numpy().data, made)
    return f"{made:08x}"


#: Attributes of modules that hold no weights of the model itself.
_INTERNAL = frozenset(
    {"_parameters", "_buffers", "_modules", "_build", "_notes", "notes", "low", "adapters", "mesh", "experts"}
)


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (place, tensor) for the tensors in containers and records. Modules are skipped."""
    if isinstance(value, Tensor):
        yield place, value.data
    elif isinstance(value, torch.ScriptObject):
        raise InvalidRequest(
            f"the layout at {place} cannot be filled again; restart the server with the new weights",
            param="update_info",
        )
    elif isinstance(value, nn.Module | type):
        return
    elif is_dataclass(value):
        # A record with an object of the extension lists the object's tensors.
        names = ["tensors"] if isinstance(getattr(value, "tensors", None), tuple) else None
        for name in names or [field.name for field in fields(value)]:
            yield from _tensors(getattr(value, name, None), f"{place}.{name}")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{place}.{key}")
    elif isinstance(value, tuple | list):
        for number, one in enumerate(value):
            yield from _tensors(one, f"{place}.{number}")
