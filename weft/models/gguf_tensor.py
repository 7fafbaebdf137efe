"""Weight of a GGUF file as torch data: values, dequantized and in published form, read part by part; or
codes.

Codes are the mapped file itself if the file has the row order of the published weight. New weights of a model
from a GGUF file are rounded to the types of this file: ``RoundedTensor``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.common.errors import ConfigError
from weft.gguf.checkpoint_folder import checkpoint_folder, differing_facts, gguf_files, weights_of
from weft.gguf.container import PLAIN, StoredTensor, dequantized
from weft.gguf.gguf_names import MXFP4_BYTES, Published, TensorForm
from weft.models.quantized.coding import CodedPiece
from weft.models.quantized.ggml_rounding import rounded
from weft.ops import ggml
from weft.ops.coded import of_blocks
from weft.ops.mapped import all_mapped

Tensor = torch.Tensor
Place = tuple[slice, ...]


class Maps:
    """Mapped tensors of one file, each mapped once, because experts are parts of one tensor. A mapping lives
    as long as any reference."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """Return uint8 [.., bytes of a row] of a tensor in blocks: mapped memory, made at the first call.

        Writes do not reach the file.
        """
        if stored.name not in self._found:
            # Private mapping: torch warns about memory that cannot be written.
            mapped: Any = np.memmap(stored.path, np.uint8, "c", stored.offset, stored.dims)
            self._found[stored.name] = torch.from_numpy(mapped)
        return self._found[stored.name]


_ROW_ORDERS = (TensorForm.GROUPED, TensorForm.BY_KEY_HEAD)
"""Forms that only reorder rows, so that blocks of codes can be reordered."""
_HALVES = (TensorForm.GATE, TensorForm.UP)


class GGUFTensor:
    """One weight. Indexing reads a part of the weight."""

    def __init__(self, weight: Published, maps: Maps) -> None:
        self._weight = weight
        self._maps = maps
        self.shape = weight.shape
        self.floating = weight.form not in (TensorForm.BLOCKS, TensorForm.SCALES)
        """True for numbers, False for 8-bit codes."""

    @property
    def quantized(self) -> tuple[str, int] | None:
        """(type, bytes in the file) of a weight that is dequantized when read; None for other weights."""
        parts = self._weight.parts
        if not self.floating or parts[0].kind in PLAIN:
            return None
        form = self._weight.form
        matrices = parts[0].shape[0] if form in (TensorForm.EXPERT, *_HALVES) else 1
        matrices *= 2 if form in _HALVES else 1
        return parts[0].kind, sum(math.prod(part.dims) for part in parts) // matrices

    def codes(self, wanted: Callable[[int], bool]) -> tuple[str, Iterator[CodedPiece]] | None:
        """Return (type, pieces of codes) of the weight; None for a type or form without codes.

        Of a stack, only ``wanted`` matrices are returned. Nothing is read, except rows that must be
        reordered.
        """
        weight = self._weight
        if (coded := coded_type(weight)) is None:
            return None
        kind = coded.kind
        parts = [self._maps.bytes_of(part) for part in weight.parts]
        # [experts, rows, bytes of a row] or [rows, bytes of a row]; rows can be reordered without decoding
        # blocks.
        if weight.form in _ROW_ORDERS and (order := weight.row_order) is not None:
            return kind, iter([CodedPiece((), of_blocks(kind, torch.cat(parts)[torch.from_numpy(order)]))])
        match weight.form:
            case TensorForm.STORED if parts[0].dim() == 2:
                return kind, iter([CodedPiece((), of_blocks(kind, parts[0], mapped=all_mapped(parts[0])))])
            case TensorForm.EXPERT:
                one = of_blocks(kind, parts[0][weight.number], mapped=all_mapped(parts[0]))
                return kind, iter([CodedPiece((), one)])
            case TensorForm.GATE | TensorForm.UP:
                half = parts[0][weight.number][_half(weight)]
                return kind, iter([CodedPiece((), of_blocks(kind, half, mapped=all_mapped(parts[0])))])
            case TensorForm.HALVES if parts[0].dim() == 2:
                pairs = parts[0].unflatten(0, (weight.number, -1, 2))
                return kind, iter([CodedPiece((), of_blocks(kind, pairs.transpose(1, 2).flatten(0, 2)))])
            case TensorForm.INTERLEAVED | TensorForm.TRANSPOSED if parts[0].dim() == 3:
                return kind, (
                    CodedPiece(
                        (i,),
                        of_blocks(kind, torch.stack([part[i] for part in parts], dim=1).flatten(0, 1)),
                        turned=True,
                    )
                    for i in filter(wanted, range(len(parts[0])))
                )
        return None

    def __getitem__(self, place: Place) -> Tensor:
        """Return ``place`` of the weight: float32 if quantized, else in the stored type; codes as uint8.

        Reads only the rows of ``place`` if rows are stored in published order.
        """
        weight = self._weight
        stored = weight.parts[0]
        match weight.form:
            case TensorForm.STORED:
                return _rows(stored, place)
            case TensorForm.EXPERT:
                return _rows(stored, place, weight.number)
            case TensorForm.GATE | TensorForm.UP:
                return _rows(stored, (), weight.number)[_half(weight)][place]
            case TensorForm.HALVES:
                # From pairs of neighbours: [heads, pair, half] -> [heads, half, pair].
                pairs = _rows(stored).unflatten(0, (weight.number, -1, 2))
                return pairs.transpose(1, 2).flatten(0, 2)[place]
            case TensorForm.LATENT:
                keys, values = map(_rows, weight.parts)
                return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)[place]
            case TensorForm.INTERLEAVED:
                both = torch.stack([_rows(part) for part in weight.parts], dim=2).flatten(1, 2)
                return (both.transpose(1, 2) if both.dim() == 3 else both)[place]
            case TensorForm.TRANSPOSED:
                return _rows(stored).transpose(1, 2)[place]
            case TensorForm.BLOCKS | TensorForm.SCALES:
                return self._codes()[place]
        return self._of_delta_net()[place]

    def _of_delta_net(self) -> Tensor:
        """Return a weight of a model with delta nets, in published order."""
        weight = self._weight
        values = torch.cat([_rows(part) for part in weight.parts])
        if (order := weight.row_order) is not None:
            values = values[torch.from_numpy(order)]
        match weight.form:
            case TensorForm.CENTRED:
                return values.float() - 1
            case TensorForm.RATES:
                return torch.log(-values.double()).float().flatten()
            case TensorForm.LOGARITHMS:
                return torch.log(-values.double()).float()
            case TensorForm.FLAT:
                return values.flatten()
            case TensorForm.TAPS:
                return values.reshape(-1, 1, values.shape[-1])
            case TensorForm.ROW:
                return values.reshape(1, -1)
            case TensorForm.GROUPED_COLUMNS:
                assert weight.heads is not None
                return values[:, torch.from_numpy(weight.heads.grouped(values.shape[1]))]
        assert weight.form in _ROW_ORDERS
        return values

    def _codes(self) -> Tensor:
        """Return the MXFP4 blocks or scales in published order.

        A stored block is a scale and 16 bytes; byte i contains numbers i and 16 + i. Published bytes contain
        numbers 2 i and 2 i + 1.
        """
        size = 1 + MXFP4_BYTES
        parts = [part.data.reshape(*part.data.shape[:-1], -1, size) for part in self._weight.parts]
        experts, _, width, _ = parts[0].shape
        blocks = np.stack(parts, axis=2).reshape(experts, -1, width, size)
        if self._weight.form is TensorForm.SCALES:
            return torch.from_numpy(blocks[..., 0].copy())
        codes = blocks[..., 1:]
        numbers = np.concatenate((codes & 15, codes >> 4), axis=-1)
        return torch.from_numpy(numbers[..., ::2] | (numbers[..., 1::2] << 4))


class CodedType(NamedTuple):
    """The GGML type of a weight that stays in codes."""

    kind: str
    shape: tuple[int, ...]
    """Shape of the published weight."""
    turned: bool
    """True if rows of codes are columns of the published weight."""


def coded_type(weight: Published) -> CodedType | None:
    """Return the type of a weight that ``GGUFTensor.codes`` can return; None for another weight."""
    kinds, form = {part.kind for part in weight.parts}, weight.form
    if len(kinds) > 1 or (kind := kinds.pop()) not in ggml.BLOCKS:
        return None
    dims = len(weight.parts[0].dims)
    turned = form in (TensorForm.INTERLEAVED, TensorForm.TRANSPOSED) and dims == 3
    whole = form in (TensorForm.STORED, TensorForm.HALVES) and dims == 2
    ordered = form in _ROW_ORDERS and weight.row_order is not None
    if turned or whole or ordered or form is TensorForm.EXPERT or form in _HALVES:
        return CodedType(kind, weight.shape, turned)
    return None


def coded_types(files: Sequence[Path]) -> dict[str, CodedType]:
    """Return the types of all weights in codes, by published name. ``files``: of a folder from a GGUF file.
    Raises ConfigError for a folder without a readable layout."""
    each = (weight for file in files for weight in weights_of(file).values())
    return {weight.name: coded for weight in each if (coded := coded_type(weight)) is not None}


def readable(files: Sequence[Path], start: Path) -> list[Path]:
    """Return the files to read for new weights in ``files``: of a GGUF file, the files of its checkpoint
    folder, which is made here. ``start``: checkpoint folder of the model in use.

    Raises ConfigError for a GGUF file with another configuration or other types than the model in use, with
    scales that are not finite, or beside other files.
    """
    if not any(file.suffix == ".gguf" for file in files):
        return list(files)
    folder = Path(checkpoint_folder(files[0]))
    found, own = gguf_files(folder), gguf_files(start)
    if len(found) != len(files) or any(file.suffix != ".gguf" for file in files):
        raise ConfigError("name one GGUF file, with all of its parts, and no other files", param="--model")
    if not own:
        raise ConfigError(
            f"{files[0].name}: only a model from a GGUF file takes the weights of a GGUF file; use "
            "safetensors",
            param="--model",
        )
    if differing := differing_facts(folder, start):
        raise ConfigError(
            f"{files[0].name} has another {differing} than the model in use; restart the server "
            "with the file",
            param="--model",
        )
    if folder != start:
        _check_types(coded_types(found), coded_types(own), files[0].name)
    _check_scales(found)
    return found


def _check_types(new: Mapping[str, CodedType], own: Mapping[str, CodedType], file: str) -> None:
    """Raise ConfigError, which names a weight, unless both models have the same types: codes of other types
    may fit into the same memory."""
    for name in sorted(new.keys() | own.keys()):
        here, there = (types[name].kind if name in types else "plain numbers" for types in (new, own))
        if here != there:
            raise ConfigError(
                f"{file} stores {name} as {here}, and the model in use has {there}: convert the file with "
                "the same types, or restart the server with the file",
                param="--model",
            )


def _check_scales(files: Sequence[Path]) -> None:
    """Raise ConfigError, which names a tensor, for a scale of codes that is not finite. Reads the tensors."""
    maps, seen = Maps(), set[str]()
    for weight in (weight for file in files for weight in weights_of(file).values()):
        for part in weight.parts:
            if part.kind in ggml.BLOCKS and part.name not in seen:
                seen.add(part.name)
                if not ggml.finite(part.kind, maps.bytes_of(part)):
                    raise ConfigError(f"a scale of {part.name} is not finite", param="--model")


def types_to_keep(folder: str | Path, files: object) -> dict[str, CodedType]:
    """Return the types to which new weights in ``files`` are rounded: of the model in ``folder``, if it was
    loaded from a GGUF file. {} if ``files`` is None: the weights of the start have their types."""
    return {} if files is None else coded_types(gguf_files(Path(folder)))


class RoundedTensor:
    """A plain weight of another file, rounded as if a GGUF file had stored the weight. Indexing reads a part
    of the weight."""

    floating = True

    def __init__(self, name: str, coded: CodedType, read: Callable[[Place], Tensor]) -> None:
        """``read``: returns a part of the weight, in floating point."""
        self._name, self._coded, self._read = name, coded, read
        self.shape = coded.shape

    @property
    def quantized(self) -> tuple[str, int]:
        """(type, bytes of the blocks)."""
        block = ggml.BLOCKS[self._coded.kind]
        return self._coded.kind, math.prod(self.shape) // block.numbers * block.bytes

    def codes(self, wanted: Callable[[int], bool]) -> tuple[str, Iterator[CodedPiece]]:
        """Return (type, pieces of codes) of the weight. Of a stack, only ``wanted`` matrices are returned."""
        kind = self._coded.kind
        if not self._coded.turned:
            return kind, iter([CodedPiece((), of_blocks(kind, self._blocks(())))])
        return kind, (
            CodedPiece((i,), of_blocks(kind, self._blocks((slice(i, i + 1),))[0]), turned=True)
            for i in filter(wanted, range(self.shape[0]))
        )

    def __getitem__(self, place: Place) -> Tensor:
        """Return ``place`` of the rounded weight, float32."""
        made = ggml.dequantize(self._coded.kind, self._blocks(place[:1]), torch.float32)
        made = made.transpose(-1, -2) if self._coded.turned else made
        return made[(slice(None), *place[1:])] if len(place) > 1 else made

    def _blocks(self, place: Place) -> Tensor:
        """Return the blocks of some rows, or of some matrices of a stack. Raises ConfigError for numbers that
        are not finite: blocks would hide them."""
        values = self._read(place).float()
        if not values.isfinite().all():
            raise ConfigError(f"weight {self._name} is not finite", param="--model")
        return rounded(self._coded.kind, values.transpose(-1, -2) if self._coded.turned else values)


def rounded_tensors(
    types: Mapping[str, CodedType],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str, Place], Tensor],
) -> dict[str, RoundedTensor]:
    """Return the weights of a file that are rounded. ``shapes``: of the plain weights in floating point. A
    weight of another shape is left out, and then refused by its shape."""
    return {
        name: RoundedTensor(name, coded, functools.partial(read, name))
        for name, coded in types.items()
        if shapes.get(name) == coded.shape
    }


def _half(weight: Published) -> slice:
    """Return the rows of the gate matrix, or of the up matrix, in the matrix of both."""
    rows = weight.shape[0]
    return slice(0, rows) if weight.form is TensorForm.GATE else slice(rows, 2 * rows)


def _rows(stored: StoredTensor, place: Place = (), number: int | None = None) -> Tensor:
    """Return ``place`` of a stored tensor, or of matrix ``number`` of the tensor, as a copy.

    Quantized blocks become float32.
    """
    data = stored.data if number is None else stored.data[number]
    data = data[place[:1]] if place else data
    if stored.kind == "BF16":
        found = torch.from_numpy(data.copy()).view(torch.bfloat16)
    elif stored.kind in PLAIN:
        found = torch.from_numpy(data.copy())
    else:
        found = torch.from_numpy(dequantized(stored.kind, data))
    return found[(slice(None), *place[1:])] if len(place) > 1 else found
