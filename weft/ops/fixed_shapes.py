"""Matrix products whose rows don't depend on what is computed beside them: few shapes, shown to agree.

A library picks its kernel, its blocking and its threads by a product's shape, so that a row's last bits can
change with the number of rows. Here only products of a few fixed shapes are ever asked for, and before a
shape is used it is tried: one row at every place of every shape must give the same bits. What does not agree
is not used; a product of one row (one matrix) is the last resort and agrees with itself.

    rows    256 256 .. 64 .. 16 .. 16        the last 16 filled up with zeros
                                             [T, K] x [N, K]     `linear`
    matrices 64 64 .. 8 .. 1 1               [B, M, K] x [B, K, N], M and K and N given    `products`

Rows begin at multiples of 64 bytes, always: libraries may look at that too. Answers of trials are kept for
the life of the process, by shape, dtype and number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

LADDER = (256, 64, 16)
"""Rows of the products of ``linear``, descending: prefill runs at nearly its full speed, decode wastes 15."""
LAST_RESORTS = (8, 4, 1)
BATCHES = (64, 8, 1)
"""Matrices of one call of ``products``, descending."""
ALIGNMENT = 64

_row_tiles: dict[tuple[object, ...], tuple[int, ...]] = {}
_product_shapes: dict[tuple[object, ...], ProductShapes] = {}


# --- rows ---


def aligned(matrix: Tensor) -> Tensor:
    """``matrix`` [R, K] with zeros appended to its rows until each begins at a multiple of 64 bytes.

    The matrix itself where that is so already.
    """
    unit = ALIGNMENT // matrix.element_size()
    missing = -matrix.shape[1] % unit
    if missing:
        return F.pad(matrix, (0, missing))
    if not matrix.is_contiguous() or matrix.data_ptr() % ALIGNMENT:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K] and weight [N, K or K of ``aligned``]; [T, N] in x's dtype.

    Each row's bits are a function of that row, the weight and the bias.
    """
    x = aligned(x)
    weight = aligned(weight)
    rows = x.shape[0]
    tiles = row_tiles(weight, bias)
    if rows in tiles:
        return F.linear(x, weight, bias)
    result = x.new_empty(rows, weight.shape[0])
    begin = 0
    for tile in tiles:
        while rows - begin >= tile:
            result[begin : begin + tile] = F.linear(x[begin : begin + tile], weight, bias)
            begin += tile
    if begin < rows:
        last = x.new_zeros(tiles[-1], x.shape[1])
        last[: rows - begin] = x[begin:]
        result[begin:] = F.linear(last, weight, bias)[: rows - begin]
    return result


def row_tiles(weight: Tensor, bias: Tensor | None = None) -> tuple[int, ...]:
    """Numbers of rows that ``linear`` may multiply by (aligned) ``weight`` [N, K] at once, descending.

    Tried on the first call for a shape, with this weight.
    """
    key = (weight.shape, weight.dtype, weight.device, bias is None, torch.get_num_threads())
    known = _row_tiles.get(key)
    if known is None:
        known, telling = _try_rows(weight, bias)
        if telling:
            _row_tiles[key] = known
    return known


def _try_rows(weight: Tensor, bias: Tensor | None) -> tuple[tuple[int, ...], bool]:
    """(the tiles, whether the trial says anything about other weights of this shape)."""
    outputs, inputs = weight.shape
    samples = min(16, max(1, 4096 // outputs))  # few outputs tell less of each row
    trial = _noise(samples, inputs, dtype=weight.dtype)

    def at_every_place(rows: int) -> Tensor:
        """[samples, rows, N]."""
        return torch.stack([F.linear(row.expand(rows, inputs).contiguous(), weight, bias) for row in trial])

    for base in (LADDER[-1], *LAST_RESORTS):
        made = at_every_place(base)
        first = made[:, :1]
        if base == 1 or _same(made, first):
            break
    larger = [rows for rows in LADDER if rows > base and _same(at_every_place(rows), first)]
    telling = bool((first != 0).double().mean() > 0.5)
    return (*larger, base), telling


# --- batches of matrices ---


class ProductShapes(NamedTuple):
    """Shapes of ``products`` that agree with each other."""

    rows: tuple[int, ...]
    """Rows of each left matrix, descending."""
    batches: tuple[int, ...]
    """Matrices of one call, descending; ends with 1."""


def product_shapes(
    inputs: int, outputs: int, rows: tuple[int, ...], dtype: torch.dtype, *, transposed: bool
) -> ProductShapes:
    """What may be asked of ``products`` for [., inputs] x [inputs, outputs].

    All of ``rows`` (descending) with all of ``BATCHES``, or else the fewest rows one matrix at a time, or
    else single rows.

    ``transposed``: the right matrix lies in memory as [outputs, inputs].
    """
    key = (inputs, outputs, rows, dtype, transposed, torch.get_num_threads())
    known = _product_shapes.get(key)
    if known is None:
        known = _product_shapes[key] = _try_products(inputs, outputs, rows, dtype, transposed)
    return known


def _try_products(
    inputs: int, outputs: int, rows: tuple[int, ...], dtype: torch.dtype, transposed: bool
) -> ProductShapes:
    left = _noise(8, inputs, dtype=dtype)
    right = _noise(outputs, inputs, dtype=dtype) if transposed else _noise(inputs, outputs, dtype=dtype)

    def at_every_place(count: int, batch: int) -> Tensor:
        """[8, batch, count, outputs]."""
        many = right.expand(batch, *right.shape).contiguous()
        many = many.transpose(1, 2) if transposed else many
        return torch.stack([torch.bmm(row.expand(batch, count, inputs).contiguous(), many) for row in left])

    fewest = rows[-1]
    first = at_every_place(fewest, 1)[:, :, :1]
    if not _same(at_every_place(fewest, 1), first):
        return ProductShapes((1,), (1,))
    if all(_same(at_every_place(count, batch), first) for count in rows for batch in BATCHES):
        return ProductShapes(rows, BATCHES)
    return ProductShapes((fewest,), (1,))


def products(a: Tensor, b: Tensor, batches: tuple[int, ...]) -> Tensor:
    """``a @ b``, matrix by matrix: a [B, M, K], b [B, K, N]; [B, M, N], in calls of ``batches`` matrices."""
    result = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    begin = 0
    for batch in batches:
        while a.shape[0] - begin >= batch:
            part = slice(begin, begin + batch)
            torch.bmm(a[part], b[part], out=result[part])
            begin += batch
    return result


def _same(many: Tensor, one: Tensor) -> bool:
    return torch.equal(many, one.expand_as(many))


def _noise(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
