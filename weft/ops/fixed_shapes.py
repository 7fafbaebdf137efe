"""Matrix products in which a row does not depend on the rows beside it: few shapes, tested to agree.

A library selects kernel, blocking and threads by the shape of a product, so the last bits of a row can change
with the number of rows. This module uses only a few fixed shapes. Before the first use of a shape a trial
runs: one row, at every place of every shape, must give the same bits. Shapes that disagree are not used. The
last resort is a product of one row (one matrix), which always agrees with itself.

    rows    256 256 .. 64 .. 16 .. 16        the last 16 filled up with zeros
                                             [T, K] x [N, K]     `linear`
    matrices 64 64 .. 8 .. 1 1               [B, M, K] x [B, K, N], M and K and N given    `products`

Rows always begin at multiples of 64 bytes, because libraries may depend on alignment as well. Results of
trials last for the life of the process, by shape, dtype and number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

LADDER = (256, 64, 16)
"""Row counts of ``linear``, descending. Prefill runs at nearly full speed; decode wastes up to 15 rows."""
LAST_RESORTS = (8, 4, 1)
BATCHES = (64, 8, 1)
"""Numbers of matrices per call of ``products``, descending."""
ALIGNMENT = 64

_row_tiles: dict[tuple[object, ...], tuple[int, ...]] = {}
_product_shapes: dict[tuple[object, ...], ProductShapes] = {}


# --- rows ---


def aligned(matrix: Tensor) -> Tensor:
    """Return ``matrix`` [R, K], contiguous, with zero columns added until each row begins at a multiple of 64
    bytes. Copies, unless the matrix is so already.
    """
    unit = ALIGNMENT // matrix.element_size()
    missing = -matrix.shape[1] % unit
    if missing:
        return F.pad(matrix, (0, missing))
    if not matrix.is_contiguous() or matrix.data_ptr() % ALIGNMENT:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K], weight [N, K or K of ``aligned``]; [T, N] in x's dtype.

    The bits of each row depend only on the row, the weight and the bias.
    """
    x = aligned(x)
    weight = aligned(weight)
    rows = x.shape[0]
    tiles = row_tiles(weight, bias)
    if rows in tiles:
        return F.linear(x, weight, bias)
    # Cover the rows greedily with the largest tiles. The rest is padded to the smallest tile.
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
    """Return the allowed row counts for ``linear`` with the aligned ``weight`` [N, K], descending.

    The first call for a shape and number of threads runs the trial, with this weight, which takes time. A
    trial with mostly zero products is not cached.
    """
    key = (weight.shape, weight.dtype, weight.device, bias is None, torch.get_num_threads())
    known = _row_tiles.get(key)
    if known is None:
        known, telling = _try_rows(weight, bias)
        if telling:
            _row_tiles[key] = known
    return known


def _try_rows(weight: Tensor, bias: Tensor | None) -> tuple[tuple[int, ...], bool]:
    """Return (row counts, True if the trial also holds for other weights of this shape)."""
    outputs, inputs = weight.shape
    # few outputs reveal less about each row, so more rows are tried
    samples = min(16, max(1, 4096 // outputs))
    trial = _noise(samples, inputs, dtype=weight.dtype)

    def at_every_place(rows: int) -> Tensor:
        """Return the products of each sample at every place of ``rows`` rows, [samples, rows, N]."""
        return torch.stack([F.linear(row.expand(rows, inputs).contiguous(), weight, bias) for row in trial])

    # The smallest count that agrees with itself is the base. Larger counts must agree with the base.
    for base in (LADDER[-1], *LAST_RESORTS):
        made = at_every_place(base)
        first = made[:, :1]
        if base == 1 or _same(made, first):
            break
    larger = [rows for rows in LADDER if rows > base and _same(at_every_place(rows), first)]
    # Zero outputs agree in any kernel, so a mostly zero weight does not settle the shape.
    telling = bool((first != 0).double().mean() > 0.5)
    return (*larger, base), telling


# --- batches of matrices ---


class ProductShapes(NamedTuple):
    """Shapes of ``products`` that agree with each other."""

    rows: tuple[int, ...]
    """Row counts of the left matrices, descending."""
    batches: tuple[int, ...]
    """Numbers of matrices per call, descending; ends with 1."""


def product_shapes(
    inputs: int, outputs: int, rows: tuple[int, ...], dtype: torch.dtype, *, transposed: bool
) -> ProductShapes:
    """Return the allowed shapes for ``products`` of [., inputs] x [inputs, outputs].

    Tries three choices in order: all ``rows`` (descending) with all ``BATCHES``; the fewest rows with one
    matrix at a time; single rows. ``transposed``: the right matrix is stored as [outputs, inputs].
    """
    key = (inputs, outputs, rows, dtype, transposed, torch.get_num_threads())
    known = _product_shapes.get(key)
    if known is None:
        known = _product_shapes[key] = _try_products(inputs, outputs, rows, dtype, transposed)
    return known


def _try_products(
    inputs: int, outputs: int, rows: tuple[int, ...], dtype: torch.dtype, transposed: bool
) -> ProductShapes:
    """Return the largest allowed shapes for which each row has the same bits at every place."""
    left = _noise(8, inputs, dtype=dtype)
    right = _noise(outputs, inputs, dtype=dtype) if transposed else _noise(inputs, outputs, dtype=dtype)

    def at_every_place(count: int, batch: int) -> Tensor:
        """Return the products of each row at every place of every matrix, [8, batch, count, outputs]."""
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
    """Return ``a @ b`` for a [B, M, K], b [B, K, N]: [B, M, N], in calls of ``batches`` matrices."""
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
