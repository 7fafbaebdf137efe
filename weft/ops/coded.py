"""Matrices of few bits, as loading leaves them: neutral between what was published and an op's own layout.

    w[n, k] = (number(code[n, k]) - zero[n, group of k]) * scale[n, group of k] * factor[n]

Blocks of GGML (``weft.ops.ggml``) are kept whole, as the file has them: what they mean is said there.
On a CPU the C++ extension packs these and multiplies by them (csrc/coded.h); on a GPU kernels read them as
they are (``weft.ops.triton.coded``). Elsewhere torch dequantizes one matrix each time that it is read.
Importing registers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from weft.ops import ggml
from weft.ops.mapped import Mapped

Tensor = torch.Tensor

#: By code: sign in the highest bit, then two of exponent and one of mantissa. (E2M1 of the OCP MX formats.)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: The zero point of integers that come without.
MIDDLE = {"int4": 8, "int8": 128}
#: As csrc/coded.h numbers them.
NUMBERS = ("none", "int4", "int8", "e2m1", "e4m3")
NIBBLES = 7
"""Likewise: int4 against rows of 8 bits."""
SCALES = (torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu)
LARGEST_GROUP = 256
"""Inputs. Scales of more are repeated."""
LEAST_GROUP = 8
"""Inputs of groups that are made smaller because ranks cut them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A matrix [N, K], or a stack of E: then every tensor but ``order`` has E as its first dim."""

    numbers: str
    """``int4``, ``int8`` (both unsigned, less a zero point), ``e2m1``, ``e4m3``; or of ``ggml.BLOCKS``."""
    values: Tensor
    """uint8 [N, K]; of 4 bits [N, ceil(K / 2)], a pair's first in the low half; of blocks the bytes."""
    inputs: int
    """K."""
    group: int
    """Inputs that have a scale in common, or are a block; the last group may have fewer. Even, or at least K.
    """
    scales: Tensor
    """[N, G] in one of ``SCALES``; of blocks [N, 0]."""
    zeros: Tensor | None = None
    """uint8 [N, G], of integers; None: ``MIDDLE``."""
    factors: Tensor | None = None
    """float64 [N]; float32 as a GPU's kernels read them."""
    order: Tensor | None = None
    """int64 [K]: column i here is input ``order[i]``; None: in order."""
    rounds_rows: bool = False
    """Whether rows that are multiplied are rounded to 8 bits, ``group`` inputs at a time; of ``to_int4``."""
    mapped: Mapped | None = None
    """The mapped file that ``values``, and perhaps scales, lie in: who has read them drops its pages."""

    @property
    def four(self) -> bool:
        """Whether a code has 4 bits."""
        return self.numbers in ("int4", "e2m1")

    @property
    def block(self) -> ggml.Block | None:
        """Of what size blocks are, where they are blocks."""
        return ggml.BLOCKS.get(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, or of the stack."""
        return (*self.values.shape[:-1], self.inputs)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def coding(self) -> list[int]:
        """What csrc/coded.h wants to know."""
        if self.block is not None:
            return list(self.block.coding)
        if self.rounds_rows:
            return [NIBBLES, 0, 1, self.group]
        numbers = NUMBERS.index(self.numbers)
        return [numbers, SCALES.index(self.scales.dtype), int(self.zeros is not None), self.group]

    def tensors(self) -> list[Tensor]:
        """All but ``order``."""
        each = (self.values, self.scales, self.zeros, self.factors)
        return [tensor for tensor in each if tensor is not None]

    def drop_pages(self) -> None:
        """They were read, and will hardly be again: pages of a mapped file go, other memory stays."""
        if self.mapped is not None:
            for tensor in self.tensors():
                self.mapped.drop(tensor)

    def to(self, device: torch.device) -> Codes:
        """The same in the memory of ``device``."""
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
        """One matrix of a stack, or some rows of a matrix."""
        return replace(
            self,
            values=self.values[place],
            mapped=None if isinstance(place, Tensor) else self.mapped,
            scales=as_bytes(self.scales)[place].view(self.scales.dtype),
            zeros=None if self.zeros is None else self.zeros[place],
            factors=None if self.factors is None else self.factors[place],
        )

    def columns(self, begin: int, end: int, least: int | None = None) -> Codes | None:
        """Inputs begin .. end of a matrix; None where they are in another order, or no groups of ``least``
        (by default ``LEAST_GROUP``) inputs fit. Groups that are cut become smaller ones, and rows are not
        rounded then.
        """
        if (begin, end) == (0, self.inputs):
            return self
        if self.block is not None:
            return self._blocks(begin, end, self.block)
        whole = self.group >= self.inputs
        if self.order is not None or begin % 2:
            return None
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
            rounds_rows=self.rounds_rows and not whole,
            scales=as_bytes(self.scales)[:, groups].view(self.scales.dtype),
            zeros=None if self.zeros is None else self.zeros[:, groups],
        )

    def _blocks(self, begin: int, end: int, block: ggml.Block) -> Codes | None:
        if begin % block.numbers or end % block.numbers:
            return None
        first = begin // block.numbers * block.bytes
        values = self.values[:, first : end // block.numbers * block.bytes]
        return replace(self, values=values, inputs=end - begin)

    def regrouped(self, group: int) -> Codes:
        """The same with scales for fewer inputs each: ``group`` divides that of before, or there is one."""
        if group == self.group:
            return self
        index = torch.arange(-(-self.inputs // group), device=self.scales.device) * group // self.group
        return replace(
            self,
            group=group,
            rounds_rows=False,
            scales=as_bytes(self.scales)[..., index].view(self.scales.dtype),
            zeros=None if self.zeros is None else self.zeros[..., index],
        )


@dataclass(frozen=True, slots=True)
class MixedCodes:
    """Rows of one matrix in several forms, one after another."""

    parts: tuple[Codes, ...]
    """Without an order of inputs."""

    def to(self, device: torch.device) -> MixedCodes:
        """The same in the memory of ``device``."""
        return MixedCodes(tuple(part.to(device) for part in self.parts))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


def of_blocks(kind: str, values: Tensor, *, mapped: Mapped | None = None) -> Codes:
    """uint8 [N, bytes of a row] (or a stack) of blocks of GGML's type ``kind``. mapped: as of ``Codes``."""
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
    """uint8 [..., ceil(K / 2)] of codes 0 to 15, uint8 [..., K]."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def common_group(parts: Sequence[Codes]) -> int | None:
    """Inputs that have a scale in common in all of ``parts``, where these can be rows of one matrix; else
    None.
    """
    first = parts[0]
    group = min(part.group for part in parts)
    if group % 2 or any(_kind(part) != _kind(first) for part in parts):
        return None
    if any(not _same_order(part.order, first.order) for part in parts):
        return None
    if any(part.group % group and part.group < part.inputs for part in parts):
        return None
    return group


def joined(parts: Sequence[Codes]) -> Codes | None:
    """The rows of all ``parts``, one after another; None where they are of different kinds."""
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
    for part in parts:
        part.drop_pages()
    return made


def mixed(parts: Sequence[Codes]) -> MixedCodes | None:
    """Likewise, neighbours of one kind joined; None where inputs are in different orders."""
    if any(part.order is not None for part in parts):
        return None
    made: list[Codes] = []
    for part in parts:
        both = joined([made[-1], part]) if made else None
        made[-1 if both is not None else len(made) :] = [part if both is None else both]
    return MixedCodes(tuple(made))


def dequantize(codes: Codes | MixedCodes, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] (or the stack) in ``dtype``, a wide one."""
    if isinstance(codes, MixedCodes):
        return torch.cat([dequantize(part, dtype) for part in codes.parts])
    values = codes.values
    if codes.block is not None:
        return ggml.dequantize(codes.numbers, values, dtype)
    if codes.four:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)[..., : codes.inputs]
    if codes.numbers == "e2m1":
        made = _e2m1(values).to(dtype) * 2.0**14
    elif codes.numbers == "e4m3":
        made = values.contiguous().view(torch.float8_e4m3fn).to(dtype)
    else:
        made = values.to(dtype)
    groups = torch.arange(codes.inputs, device=values.device) // codes.group
    if codes.numbers in MIDDLE:
        zeros = codes.zeros
        made = made - (MIDDLE[codes.numbers] if zeros is None else zeros.to(dtype)[..., groups])
    made = made * codes.scales.to(dtype)[..., groups]
    if codes.factors is not None:
        made = made * codes.factors.to(dtype).unsqueeze(-1)
    if codes.order is not None:
        back = torch.empty_like(codes.order)
        back[codes.order] = torch.arange(codes.inputs, device=values.device)
        made = made[..., back]
    return made


def _e2m1(values: Tensor) -> Tensor:
    """float16 whose bits are those of codes 0 to 15 of ``E2M1``: 2 ** 14 times too small."""
    wide = values.to(torch.int16)
    return ((wide & 7) << 9 | (wide & 8) << 12).view(torch.float16)


def storable(codes: Codes) -> Codes:
    """The same in groups that csrc/coded.h takes: even, and of at most ``LARGEST_GROUP`` inputs."""
    if codes.group <= LARGEST_GROUP and codes.group % 2 == 0:
        return codes
    if codes.group >= codes.inputs:
        return codes.regrouped(min(LARGEST_GROUP, codes.inputs + codes.inputs % 2))
    fitting = [g for g in range(2, LARGEST_GROUP + 1, 2) if codes.group % g == 0]
    whole_tiles = [g for g in fitting if g % 32 == 0]  # with AMX, others are rounded
    return codes.regrouped((whole_tiles or fitting)[-1])


def broken(codes: Codes) -> bool:
    """Whether a code or a scale is no number."""
    values = codes.values
    if codes.numbers == "e4m3" and bool(((values & 127) == 127).any()):
        return True
    return not bool(codes.scales.float().isfinite().all())


def as_bytes(scales: Tensor) -> Tensor:
    """Torch's indexing does not know types of 8 bits."""
    return scales if scales.dtype.itemsize > 1 else scales.view(torch.uint8)


def _kind(codes: Codes) -> tuple[object, ...]:
    return codes.numbers, codes.inputs, codes.scales.dtype, codes.rounds_rows


def _same_order(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def all_zeros(parts: Sequence[Codes]) -> Tensor:
    """Zero points of the rows of all ``parts``, of integers, also of those that come without."""
    middle = MIDDLE[parts[0].numbers]
    full = [
        torch.full(p.scales.shape, middle, dtype=torch.uint8, device=p.scales.device)
        if p.zeros is None
        else p.zeros
        for p in parts
    ]
    return torch.cat(full) if len(full) > 1 else full[0]


def all_factors(parts: Sequence[Codes]) -> Tensor:
    """Factors of the rows of all ``parts``, likewise."""
    full = [
        torch.ones(len(p), dtype=torch.float64, device=p.scales.device) if p.factors is None else p.factors
        for p in parts
    ]
    return torch.cat(full) if len(full) > 1 else full[0]


# --- rounding plain weights ---


def to_int4(weight: Tensor) -> Codes:
    """weight [N, K] (or a stack) in groups of 64 inputs, each with a scale and a zero point.

    The scale spans a group's smallest and largest weight, and 0.
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
    )


def to_w4a8(weight: Tensor) -> Codes:
    """``to_int4``, for rows that are rounded to 8 bits as well, 64 inputs at a time."""
    return replace(to_int4(weight), rounds_rows=True)


def to_fp8(weight: Tensor) -> Codes:
    """weight [N, K] (or a stack) in E4M3, in groups of 128 inputs: a group's largest magnitude is 448."""
    if (rows := rows_at_once(weight)) < len(weight):
        return _all_rows([to_fp8(some) for some in weight.split(rows)])
    exact, inputs = _grouped(weight.float(), FP8_GROUP)
    scales = quotient(exact.abs().amax(-1), 448).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (exact / scales.unsqueeze(-1)).clamp_(-448, 448).to(torch.float8_e4m3fn)
    values = codes.view(torch.uint8).flatten(-2)[..., :inputs].contiguous()
    return Codes(numbers="e4m3", values=values, inputs=inputs, group=FP8_GROUP, scales=scales)


def quotient(x: Tensor, by: float) -> Tensor:
    """``x / by``, correctly rounded on every device. CUDA would multiply by the reciprocal of a number of
    Python's: another last bit of a scale, and so other codes than on a CPU.
    """
    return x / x.new_full((), by)


def rows_at_once(weight: Tensor) -> int:
    """How many rows of weight [N, K], or matrices of a stack, are rounded at a time: in float32 there is no
    more.
    """
    return max(1, ROUNDED_NUMBERS // max(1, weight[:1].numel()))


def _all_rows(parts: list[Codes]) -> Codes:
    """Rows, or matrices of stacks, that were rounded in one way."""
    whole = joined(parts)
    assert whole is not None, "all were made in one way"
    return whole


GROUPED: dict[str, Callable[[Tensor], Codes]] = {"int4": to_int4, "w4a8": to_w4a8, "fp8": to_fp8}
"""By name of ``--quantization``: those whose scales are of some inputs."""
ROUNDED_NUMBERS = 1 << 20
DEQUANTIZED = 1 << 26
"""Numbers that a GPU dequantizes at a time, so that cuBLAS can multiply many rows."""
INT4_GROUP = 64
UNCUT = 4 * INT4_GROUP
"""Of so many inputs, or a multiple, two and four ranks have whole groups."""
FP8_GROUP = 128


def _grouped(weight: Tensor, group: int) -> tuple[Tensor, int]:
    """([..., N, G, group], filled up with zeros; K)."""
    inputs = weight.shape[-1]
    return torch.nn.functional.pad(weight, (0, -inputs % group)).unflatten(-1, (-1, group)), inputs
