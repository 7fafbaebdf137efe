"""The last layer for the rows with logits only.

    first pass    all rows, up to the end of attention: the caches of the layer are written
    second pass   the rows with logits: projections again, the results of attention from the first pass

Rows of a layer meet in attention only, which the self check proves. So the second pass needs no knowledge of
the layer. The self check compares the rows of both ways, and keeps all rows if the ways differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weft.models.generic.modules import Sums

Tensor = torch.Tensor
Path = tuple[Any, ...]
See = Callable[[int, Tensor, Tensor | None], None]


class Attended(Exception):
    """Raised by the first pass when the results of attention are there."""


class LastRows:
    """Computes a layer for some rows. Replaces ``layer.forward``."""

    def __init__(self, layer: nn.Module, sums: Sums) -> None:
        self._plain: Callable[..., Any] = layer.forward
        layer.forward = self._forward
        self._sums = sums
        self.on = False
        """True if the self check has proven the form."""
        self._wanted: Tensor | None = None
        self._tokens = 0
        self._arguments: set[Path] | None = None
        """Arguments with one entry per token. None before the first pass."""
        self._out: Tensor | None = None

    def begin(self, tokens: int, wanted: Tensor | None) -> None:
        """Start a pass over ``tokens`` rows. ``wanted``: int64 [L], the rows to return; None for all."""
        self._tokens, self._wanted, self._out = tokens, wanted, None

    def end(self) -> None:
        """Forget the pass, also after an error."""
        self._wanted = self._out = None

    def attended(self, out: Tensor) -> Tensor:
        """Return ``out`` [T, heads, dim] if all rows are wanted. Otherwise keep the wanted rows, and raise
        ``Attended``."""
        if self._wanted is None:
            return out
        self._out = out[self._wanted]
        raise Attended

    @property
    def kept(self) -> Tensor | None:
        """Results of attention [L, heads, dim] in the second pass; None in any other pass."""
        return self._out

    def _forward(self, *given: Any, **named: Any) -> Any:
        """Return what the layer returns: for the wanted rows, or for all rows."""
        wanted = self._wanted
        if wanted is None:
            # Passes of the self check have different numbers of tokens: a fixed size equals only one of them.
            if not self.on and self._tokens > 1:
                found = _paths((given, named), self._tokens)
                self._arguments = found if self._arguments is None else self._arguments & found
            return self._plain(*given, **named)
        before = self._sums.routed
        with contextlib.suppress(Attended):
            self._plain(*given, **named)
        if self._sums.routed != before:
            raise ValueError("experts before attention would exchange rows twice")
        adapters = self._sums.adapters
        if adapters is not None:
            self._sums.adapters = adapters.at(wanted)
        try:
            cut, cut_named = _cut((given, named), (), self._arguments or set(), wanted)
            return self._plain(*cut, **cut_named)
        finally:
            self._sums.adapters = adapters


def _is_of_rows(value: Tensor, tokens: int) -> bool:
    return value.shape[:2] == (1, tokens) or value.shape == (tokens,)


def _paths(value: Any, tokens: int, path: Path = ()) -> set[Path]:
    """Return the places in ``value`` of tensors with one entry per token: [1, T, ..] or [T]."""
    if isinstance(value, torch.Tensor):
        return {path} if _is_of_rows(value, tokens) else set()
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, tuple | list):
        pairs = enumerate(value)
    return {found for key, one in pairs for found in _paths(one, tokens, (*path, key))}


def _cut(value: Any, path: Path, paths: set[Path], wanted: Tensor) -> Any:
    """Return ``value`` with the rows ``wanted`` of the tensors at ``paths``."""
    if isinstance(value, torch.Tensor):
        if path not in paths:
            return value
        return value[wanted] if value.dim() == 1 else value[:, wanted]
    if isinstance(value, dict):
        return {key: _cut(one, (*path, key), paths, wanted) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(one, (*path, key), paths, wanted) for key, one in enumerate(value))
    return value


def layers_of(base: nn.Module, attention: str, layers: int) -> nn.ModuleList | None:
    """Return the list of ``layers`` layers that ends with the last attention module; None if unknown.

    ``attention``: name of the class of the attention module.
    """
    found = [
        part
        for part in base.modules()
        if isinstance(part, nn.ModuleList)
        and len(part) == layers
        and any(
            type(one).__name__ == attention and getattr(one, "layer_idx", None) == layers - 1
            for one in part[-1].modules()
        )
    ]
    return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def seen_layers(layers: nn.ModuleList | None, see: See | None, rows: int) -> Iterator[None]:
    """Call ``see(layer, stream [rows, hidden], None)`` before each layer of the passes inside.

    ``see``: None for no calls. A pass may have more rows: a filler.
    """

    def hook(number: int) -> Callable[..., None]:
        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = named["hidden_states"] if "hidden_states" in named else given[0]
            assert see is not None
            see(number, x[0, :rows], None)

        return before

    hooks = []
    if see is not None and layers is not None:
        hooks = [
            layer.register_forward_pre_hook(hook(number), with_kwargs=True)
            for number, layer in enumerate(layers)
        ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
