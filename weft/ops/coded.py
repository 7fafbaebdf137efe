"""Quantized matrices as loading leaves them: independent of the published format and of an op's own layout.

    w[n, k] = (number(code[n, k]) - zero[n, group of k]) * scale[n, group of k] * factor[n]

GGML blocks (``weft.ops.ggml``) keep the bytes of the file; ``ggml`` documents their meaning. On a CPU the C++
extension packs codes and multiplies by packed codes (csrc/coded.h). On a GPU kernels read the codes directly
(``weft.ops.triton.coded``). Elsewhere torch dequantizes a matrix on every use. Importing registers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from weft.ops import ggml
from weft.ops.ggml import Coding
from weft.ops.mapped import Mapped

Tensor = torch.Tensor

# Value of each code of E2M1 (OCP MX formats): 1 sign bit (highest), 2 exponent bits, 1 mantissa bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Zero point of integer codes without an explicit zero point.
MIDDLE = {"int4": 8, "int8": 128}
# Index = number in csrc/coded.h.
NUMBERS = ("none", "int4", "int8", "e2m1", "e4m3")
NIBBLES = 7
"""Number in csrc/coded.h of int4 codes that are multiplied by rows in 8 bits."""
WORD_ROWS = {"int8": 10, "int4": 11}
"""Numbers in csrc/coded.h of int8 and int4 codes that are multiplied by rows in 16 bits."""
WORD_GROUP = 128
"""Inputs of a row of x in 16 bits with a common step, for weights of 8 bits."""
SCALES = (torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu)
LARGEST_GROUP = 256
"""Maximum inputs of one group. The scale of a larger group is repeated."""
LEAST_GROUP = 8
"""Minimum inputs of a group that becomes smaller because ranks cut the matrix inside a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A quantized matrix [N, K], or a stack of E: then every tensor except ``order`` is [E, ...]."""

    numbers: str
    """Number format: ``int4``, ``int8`` (unsigned, with a zero point), ``e2m1``, ``e4m3``, or a GGML type."""
    values: Tensor
    """Codes, uint8 [N, K]. 4-bit codes: [N, ceil(K / 2)], first of a pair in the low half. Blocks: bytes."""
    inputs: int
    """Number of inputs, K."""
    group: int
    """Inputs that share a scale, or inputs of a block. The last group may be shorter. Even, or at least K."""
    scales: Tensor
    """Scales [N, G] in a dtype of ``SCALES``; [N, 0] for blocks."""
    zeros: Tensor | None = None
    """Zero points of integer codes, uint8 [N, G]; None stands for ``MIDDLE``."""
    factors: Tensor | None = None
    """Factor of each row, float64 [N] (float32 for GPU kernels); None for no factors."""
    order: Tensor | None = None
    """Permutation of inputs, int64 [K]: column i is input ``order[i]``. None for the natural order."""
    row_bits: int | None = None
    """8: rows of x are rounded to 8 bits as well, ``group`` inputs at a time. Only for ``to_w4a8``. 16: a CPU
    may round rows of x to 16 bits, for speed. None: rows of x stay as they are."""
    mapped: Mapped | None = None
    """Mapped file with the memory of ``values``, and possibly of the scales. Readers call ``drop_pages``."""

    @property
    def four(self) -> bool:
        """True if a code has 4 bits."""
        return self.numbers in ("int4", "e2m1")

    @property
    def block(self) -> ggml.GgmlBlock | None:
        """Layout of a block for a GGML type; None for other number formats."""
        return ggml.BLOCKS.get(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized matrix, or of the stack of matrices."""
        return (*self.values.shape[:-1], self.inputs)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def coding(self) -> Coding:
        """Format of the packed codes in csrc/coded.h."""
        if self.block is not None:
            return self.block.coding
        if self.row_bits == 16 and not self.four:
            return Coding(numbers=WORD_ROWS["int8"], scales=0, zeros=0, group=WORD_GROUP)
        if self.row_bits is not None:
            numbers = NIBBLES if self.row_bits == 8 else WORD_ROWS["int4"]
            return Coding(numbers=numbers, scales=0, zeros=1, group=self.group)
        return Coding(
            numbers=NUMBERS.index(self.numbers),
            scales=SCALES.index(self.scales.dtype),
            zeros=int(self.zeros is not None),
            group=self.group,
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors except ``order``; absent tensors are left out."""
        each = (self.values, self.scales, self.zeros, self.factors)
        return [tensor for tensor in each if tensor is not None]

    def drop_pages(self) -> None:
        """Release the pages of a mapped file after reading. Other memory stays."""
        if self.mapped is not None:
            for tensor in self.tensors():
                self.mapped.drop(tensor)

    def to(self, device: torch.device) -> Codes:
        """Return the same codes in the memory of ``device``; ``self`` if the device type is the same.

        After a copy the pages of a mapped file are released.
        """
        if self.values.device.type == device.type:
            return self

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        made = replace(
            self,
            values=self.values.to(device),
            scales=as_bytes(self.scales).to(device).view(self.scales.dtype),
            zeros=there(self.zeros),
            factors=there(self.factors),
            order=there(self.order),
            mapped=None,
        )
        self.drop_pages()
        return made

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int | slice | Tensor) -> Codes:
        """Return one matrix of a stack, or some rows of a matrix.

        An int or a slice shares memory, a tensor copies.
        """
        return replace(
            self,
            values=self.values[place],
            mapped=None if isinstance(place, Tensor) else self.mapped,
            scales=as_bytes(self.scales)[place].view(self.scales.dtype),
            zeros=None if self.zeros is None else self.zeros[place],
            factors=None if self.factors is None else self.factors[place],
        )

    def columns(self, begin: int, end: int, least: int | None = None) -> Codes | None:
        """Return inputs ``begin`` to ``end`` (exclusive) of a matrix; None if the codes cannot be cut there.

        A cut inside a group makes all groups smaller, down to ``least`` inputs (default ``LEAST_GROUP``).
        Rows are not rounded in such a result. Codes with an ``order`` and cuts inside a block or byte return
        None.
        """
        if (begin, end) == (0, self.inputs):
            return self
        if self.block is not None:
            return self._blocks(begin, end, self.block)
        whole = self.group >= self.inputs
        if self.order is not None or begin % 2:
            return None
        # A group size that divides both cut positions. The end of the matrix is no cut.
        fitting = math.gcd(self.group, begin, 0 if end == self.inputs else end)
        if not whole and fitting < self.group:
            if fitting < (least or LEAST_GROUP) or fitting % 2:
                return None
            return self.regrouped(fitting).columns(begin, end)
        per_byte = 2 if self.four else 1
        groups = slice(None) if whole else slice(begin // self.group, -(-end // self.group))
        return replace(
            self,
            values=self.values[:, begin // per_byte : -(-end // per_byte)],
            inputs=end - begin,
            group=max(end - begin, 2) if whole else self.group,
            row_bits=None if whole else self.row_bits,
            scales=as_bytes(self.scales)[:, groups].view(self.scales.dtype),
            zeros=None if self.zeros is None else self.zeros[:, groups],
        )

    def _blocks(self, begin: int, end: int, block: ggml.GgmlBlock) -> Codes | None:
        """Return inputs ``begin`` to ``end`` of GGML blocks; None for a cut inside a block."""
        if begin % block.numbers or end % block.numbers:
            return None
        first = begin // block.numbers * block.bytes
        values = self.values[:, first : end // block.numbers * block.bytes]
        return replace(self, values=values, inputs=end - begin)

    def regrouped(self, group: int) -> Codes:
        """Return the same codes with a scale for every ``group`` inputs.

        ``group`` must divide the present group size, unless one group spans all inputs. Any change clears
        ``row_bits``.
        """
        if group == self.group:
            return self
        # Index of the old group for each new group, [new G]
        index = torch.arange(-(-self.inputs // group), device=self.scales.device) * group // self.group
        return replace(
            self,
            group=group,
            row_bits=None,
            scales=as_bytes(self.scales)[..., index].view(self.scales.dtype),
            zeros=None if self.zeros is None else self.zeros[..., index],
        )


@dataclass(frozen=True, slots=True)
class MixedCodes:
    """Rows of one matrix in several number formats, one part after another."""

    parts: tuple[Codes, ...]
    """Consecutive rows. No part has an ``order``."""

    def to(self, device: torch.device) -> MixedCodes:
        """Return the same codes in the memory of ``device``."""
        return MixedCodes(tuple(part.to(device) for part in self.parts))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


def of_blocks(kind: str, values: Tensor, *, mapped: Mapped | None = None) -> Codes:
    """Return codes for GGML blocks of type ``kind``: ``values`` is uint8 [N, bytes of a row], or a stack.

    ``mapped`` is stored in the result.
    """
    block = ggml.BLOCKS[kind]
    return Codes(
        numbers=kind,
        values=values,
        inputs=values.shape[-1] // block.bytes * block.numbers,
        group=block.numbers,
        scales=torch.empty(*values.shape[:-1], 0),
        mapped=mapped,
    )


def nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0 to 15, uint8 [..., K], in pairs: uint8 [..., ceil(K / 2)]."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def common_group(parts: Sequence[Codes]) -> int | None:
    """Return a group size for all ``parts`` as rows of one matrix; None if there is none.

    The parts need the same number format, scales dtype, inputs and order.
    """
    first = parts[0]
    group = min(part.group for part in parts)
    if group % 2 or any(_kind(part) != _kind(first) for part in parts):
        return None
    if any(not _same_order(part.order, first.order) for part in parts):
        return None
    # The smallest group must divide every other group. A group that spans all inputs can be cut anywhere.
    if any(part.group % group and part.group < part.inputs for part in parts):
        return None
    return group


def joined(parts: Sequence[Codes]) -> Codes | None:
    """Return the rows of all ``parts`` as one matrix, in order; None if the number formats differ.

    The result is a copy, and mapped pages of the parts are released. A single part is returned unchanged.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    group = common_group(parts)
    if group is None:
        return None
    parts = [part.regrouped(group) for part in parts]
    made = replace(
        first,
        group=group,
        mapped=None,
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([as_bytes(part.scales) for part in parts]).view(first.scales.dtype),
        zeros=None if all(part.zeros is None for part in parts) else all_zeros(parts),
        factors=None if all(part.factors is None for part in parts) else all_factors(parts),
    )
    # The copy is complete, so mapped pages of the parts are not needed again.
    for part in parts:
        part.drop_pages()
    return made


def mixed(parts: Sequence[Codes]) -> MixedCodes | None:
    """Return the rows of all ``parts``, with neighbours of the same format joined (copied).

    Return None if any part has an ``order``.
    """
    if any(part.order is not None for part in parts):
        return None
    made: list[Codes] = []
    for part in parts:
        both = joined([made[-1], part]) if made else None
        made[-1 if both is not None else len(made) :] = [part if both is None else both]
    return MixedCodes(tuple(made))


def dequantize(codes: Codes | MixedCodes, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K], or the stack, in the wide dtype ``dtype``, with inputs in their natural
    order.

    The result is a new tensor.
    """
    if isinstance(codes, MixedCodes):
        return torch.cat([dequantize(part, dtype) for part in codes.parts])
    values = codes.values
    if codes.block is not None:
        return ggml.dequantize(codes.numbers, values, dtype)
    if codes.four:
        # [..., K / 2] bytes -> [..., K] codes
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)[..., : codes.inputs]
    if codes.numbers == "e2m1":
        made = _e2m1(values).to(dtype) * 2.0**14
    elif codes.numbers == "e4m3":
        made = values.contiguous().view(torch.float8_e4m3fn).to(dtype)
    else:
        made = values.to(dtype)
    # Group of each input, [K]
    groups = torch.arange(codes.inputs, device=values.device) // codes.group
    if codes.numbers in MIDDLE:
        zeros = codes.zeros
        made = made - (MIDDLE[codes.numbers] if zeros is None else zeros.to(dtype)[..., groups])
    made = made * codes.scales.to(dtype)[..., groups]
    if codes.factors is not None:
        made = made * codes.factors.to(dtype).unsqueeze(-1)
    if codes.order is not None:
        # Inverse permutation: column ``order[i]`` of the result is column i of the codes.
        back = torch.empty_like(codes.order)
        back[codes.order] = torch.arange(codes.inputs, device=values.device)
        made = made[..., back]
    return made


def _e2m1(values: Tensor) -> Tensor:
    """Return float16 numbers for codes 0 to 15 of ``E2M1``, smaller by a factor of 2 ** 14.

    The bits of a code move into the exponent and mantissa of float16, without a table.
    """
    wide = values.to(torch.int16)
    return ((wide & 7) << 9 | (wide & 8) << 12).view(torch.float16)


def storable(codes: Codes) -> Codes:
    """Return the same codes in groups that csrc/coded.h accepts: even, at most ``LARGEST_GROUP`` inputs."""
    if codes.group <= LARGEST_GROUP and codes.group % 2 == 0:
        return codes
    if codes.group >= codes.inputs:
        return codes.regrouped(min(LARGEST_GROUP, codes.inputs + codes.inputs % 2))
    fitting = [g for g in range(2, LARGEST_GROUP + 1, 2) if codes.group % g == 0]
    # With AMX other groups are scaled before the product and rounded to bf16.
    whole_tiles = [g for g in fitting if g % 32 == 0]
    return codes.regrouped((whole_tiles or fitting)[-1])


def broken(codes: Codes) -> bool:
    """Return True if an E4M3 code is NaN or a scale is not finite. Scales inside blocks are not checked."""
    values = codes.values
    if codes.numbers == "e4m3" and bool(((values & 127) == 127).any()):
        return True
    return not bool(codes.scales.float().isfinite().all())


def as_bytes(scales: Tensor) -> Tensor:
    """Return ``scales``, with 1-byte dtypes viewed as uint8, because torch cannot index float8 types."""
    return scales if scales.dtype.itemsize > 1 else scales.view(torch.uint8)


def _kind(codes: Codes) -> tuple[object, ...]:
    return codes.numbers, codes.inputs, codes.scales.dtype, codes.row_bits


def _same_order(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def all_zeros(parts: Sequence[Codes]) -> Tensor:
    """Return the zero points of the rows of all integer ``parts``, uint8 [rows, G]; default ``MIDDLE``."""
    middle = MIDDLE[parts[0].numbers]
    full = [
        torch.full(p.scales.shape, middle, dtype=torch.uint8, device=p.scales.device)
        if p.zeros is None
        else p.zeros
        for p in parts
    ]
    return torch.cat(full) if len(full) > 1 else full[0]


def all_factors(parts: Sequence[Codes]) -> Tensor:
    """Return the factors of the rows of all ``parts``, float64 [rows], with 1 as default."""
    full = [
        torch.ones(len(p), dtype=torch.float64, device=p.scales.device) if p.factors is None else p.factors
        for p in parts
    ]
    return torch.cat(full) if len(full) > 1 else full[0]


# --- rounding plain weights ---


def to_int4(weight: Tensor) -> Codes:
    """Round ``weight`` [N, K] (or a stack) to int4, with a scale and a zero point per 64 inputs.

    The scale covers the range of the group's weights and 0. Rows of x may be rounded to 16 bits if ``weight``
    is bf16.
    """
    if (rows := rows_at_once(weight)) < len(weight):
        return _all_rows([to_int4(some) for some in weight.split(rows)])
    exact, inputs = _grouped(weight.float(), INT4_GROUP)
    low = exact.amin(-1).clamp(max=0)
    scales = quotient(exact.amax(-1).clamp(min=0) - low, 15).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / scales).round()
    codes = (exact / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 15)
    values = codes.flatten(-2)[..., :inputs].to(torch.uint8)
    return Codes(
        numbers="int4",
        values=nibbles(values),
        inputs=inputs,
        group=INT4_GROUP,
        scales=scales,
        zeros=zeros.to(torch.uint8),
        row_bits=row_bits_of(weight.dtype),
    )


def row_bits_of(dtype: torch.dtype) -> int | None:
    """Return ``Codes.row_bits`` of a matrix in ``dtype`` that was rounded without rounding of rows.

    16 bits hold most numbers of bf16 exactly. Float16 and float32 have longer fractions.
    """
    return 16 if dtype == torch.bfloat16 else None


def to_exact_int4(weight: Tensor) -> Codes:
    """Round ``weight`` like ``to_int4``, for products that do not round rows of x."""
    return replace(to_int4(weight), row_bits=None)


def to_w4a8(weight: Tensor) -> Codes:
    """Round ``weight`` like ``to_int4``, for products with rows of x in 8 bits, 64 inputs at a time."""
    return replace(to_int4(weight), row_bits=8)


def to_fp8(weight: Tensor) -> Codes:
    """Round ``weight`` [N, K] (or a stack) to E4M3 in groups of 128 inputs.

    The scale maps the largest magnitude of a group to 448.
    """
    if (rows := rows_at_once(weight)) < len(weight):
        return _all_rows([to_fp8(some) for some in weight.split(rows)])
    exact, inputs = _grouped(weight.float(), FP8_GROUP)
    codes, scales = to_e4m3(exact, torch.finfo(torch.float32).tiny)
    values = codes.view(torch.uint8).flatten(-2)[..., :inputs].contiguous()
    return Codes(numbers="e4m3", values=values, inputs=inputs, group=FP8_GROUP, scales=scales.squeeze(-1))


def to_e4m3(exact: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return (E4M3 codes [.., K], scales float32 [.., 1]) of float32 [.., K]. The largest magnitude of
    the last dimension becomes 448. ``least``: minimum scale, for zeros."""
    scales = quotient(exact.abs().amax(-1, keepdim=True), LARGEST_E4M3).clamp(min=least)
    return (exact / scales).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scales


def quotient(x: Tensor, by: float) -> Tensor:
    """Return ``x / by``, correctly rounded on every device.

    CUDA multiplies by the reciprocal of a Python number. The last bit of a scale would differ from the CPU,
    and so would codes. A tensor divisor avoids this.
    """
    return x / x.new_full((), by)


def rows_at_once(weight: Tensor) -> int:
    """Return the number of rows (or matrices of a stack) to round at a time, which bounds float32 copies."""
    return max(1, ROUNDED_NUMBERS // max(1, weight[:1].numel()))


def _all_rows(parts: list[Codes]) -> Codes:
    """Join rows, or matrices of stacks, of the same number format."""
    whole = joined(parts)
    assert whole is not None, "all were made in one way"
    return whole


GROUPED: dict[str, Callable[[Tensor], Codes]] = {
    "int4": to_int4,
    "int4-exact": to_exact_int4,
    "w4a8": to_w4a8,
    "fp8": to_fp8,
}
"""Rounding functions with a scale for each group of inputs, by kind of a matrix (``layers.build.Build``)."""
ROUNDED_NUMBERS = 1 << 20
DEQUANTIZED = 1 << 26
"""Maximum numbers that a GPU dequantizes at a time before cuBLAS multiplies many rows."""
INT4_GROUP = 64
ROW_GROUPS = (128, 64)
"""Inputs of x that may have a common step of rounding, where ranks divide the inputs."""
INT8_DIVIDED = ("int8-exact", *(f"int8-{group}" for group in ROW_GROUPS))
"""Kinds of int8 matrices whose inputs ranks divide, by the rounding of rows of x on a CPU."""
UNCUT = 4 * INT4_GROUP
"""If K is a multiple of this number, two and four ranks have whole groups."""
LARGEST_E4M3 = 448.0
FP8_GROUP = 128


def row_group(quantization: str, divided: int, rank_counts: Sequence[int] = (2, 4, 8)) -> int:
    """Return the inputs of a row of x with a common step, where ranks divide ``divided`` inputs of all rows.

    0: such rows are not rounded. The number does not depend on the present number of ranks, so that all ranks
    round alike: w8a8 and w4a8 on two and four ranks, int8 and int4 on each number of ``rank_counts``.
    """
    # Small groups cost more.
    large, small = ROW_GROUPS
    if quantization in ("int8", "int4"):
        most = max(rank_counts, default=1)
        sizes = (large, small) if quantization == "int8" else (small,)
        return next((size for size in sizes if divided % (most * size) == 0), 0)
    if quantization not in ("w8a8", "w4a8") or divided % UNCUT:
        return 0
    # Eight ranks have whole groups of 128 if K is a multiple of 1024.
    return large if quantization == "w8a8" and divided % (8 * large) == 0 else small


def _grouped(weight: Tensor, group: int) -> tuple[Tensor, int]:
    """Return (``weight`` as [..., N, G, group], padded with zeros; K)."""
    inputs = weight.shape[-1]
    return torch.nn.functional.pad(weight, (0, -inputs % group)).unflatten(-1, (-1, group)), inputs
