"""Two linear layers over the same inputs that compute one product where the formats permit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from weft.layers.build import Build
from weft.layers.dense import Linear
from weft.layers.pending_codes import in_place, take_mixed
from weft.layers.shard import Shard
from weft.ops import coded
from weft.ops.coded import Codes, MixedCodes
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor


class PairedLinear(Linear):
    """A linear layer that may share its product with another layer over the same inputs.

    The layer that contains both calls ``pack_with`` in its own ``pack``. Without such a call, this is a
    ``Linear``.
    """

    joined = False
    """True if the product of this layer contains the outputs of the other layer, behind its own."""
    _ready = False

    def __init__(self, inputs: int, outputs: int | Shard, build: Build, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, build, bias=bias)
        self._outputs = len(self.weight)
        self._apart = build.adapters.apart

    def pack(self) -> None:
        if not self._ready:
            super().pack()

    def pack_with(self, other: PairedLinear) -> None:
        """Pack both layers: as one matrix if both are plain, or if both are codes of one format.

        With places for adapters each matrix keeps its own product, because the low-rank products are added to
        the outputs of one layer. Only this layer may have a bias.
        """
        assert other.bias is None, "the outputs of the other layer have no bias"
        weights = [one._notes.weight(one.weight) for one in (self, other)]
        takes = self._op.pack_codes is not None
        # No codes: the parameter is complete.
        codes = [take_mixed(one, takes, mixes=self._op.mixes) for one in weights]
        self._ready = other._ready = True
        alone = self._apart or self._op is not other._op
        whole = None if alone else _one_matrix(codes)
        self.joined = whole is not None or (not alone and all(one is None for one in codes))
        if not self.joined:
            self._pack_codes(codes[0])
            other._pack_codes(codes[1])
            return
        rows = len(other.weight)
        if whole is None:
            both = torch.cat([in_place(one).data for one in weights])
            self.weight = nn.Parameter(both, requires_grad=False)
        self._pack_codes(whole)
        other.weight = None  # type: ignore[assignment]
        if self.bias is not None:
            self.bias = nn.Parameter(F.pad(self.bias.data, (0, rows)), requires_grad=False)

    def _pack_codes(self, codes: Codes | MixedCodes | None) -> None:
        """Pack ``codes``, or the complete parameter."""
        if codes is None or self._op.pack_codes is None:
            self._packed = self._give("weight", self._op)
            return
        self.weight = None  # type: ignore[assignment]
        self._packed = self._op.pack_codes(codes)

    def both(self, other: PairedLinear, x: Tensor, adapters: AdapterRows | None) -> tuple[Tensor, Tensor]:
        """Return (``self(x, adapters)``, ``other(x, adapters)``). Rows of either may lie apart."""
        if not self.joined:
            return self.forward(x, adapters), other.forward(x, adapters)
        made: Tensor = self._op.run(x, self._packed, self.bias)
        return made[:, : self._outputs], made[:, self._outputs :]


def _one_matrix(codes: list[Codes | MixedCodes | None]) -> Codes | None:
    """Return the rows of both matrices as one matrix; None if the formats differ."""
    of_one_format = [one for one in codes if isinstance(one, Codes)]
    return coded.joined(of_one_format) if len(of_one_format) == len(codes) else None
