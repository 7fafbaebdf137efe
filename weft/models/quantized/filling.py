"""Filling of parameters from published tensors, plain or quantized, one weight at a time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import torch

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.spec import QuantizedSpec
from weft.layers.pending_codes import PendingCodes, Weight, put_codes
from weft.models.files import WeightFile
from weft.models.quantized.coding import CodedPiece, arranged, read_codes
from weft.models.quantized.cuts import cut
from weft.models.quantized.readers import LacksTensors, read
from weft.models.quantized.scales import Misfit
from weft.models.quantized.sources import PLAIN, Part, TensorSource, names_of
from weft.models.slices import Window, inside, note_largest, part_shape, whole_groups, windows
from weft.models.weights import Placement, WeightMap
from weft.ops.coded import Codes
from weft.ops.mapped import Mapped

Tensor = torch.Tensor
R = TypeVar("R")

_log = get_logger(__name__)


def is_zero_bias(part: Part, sources: Mapping[str, TensorSource]) -> bool:
    """Return True if ``part``, unknown to the model, is a zero bias as written by quantization tools.

    Raises ConfigError if ``part`` is such a bias and not zero.
    """
    weight = sources.get(f"{part.name.removesuffix('.bias')}.weight")
    if not part.name.endswith(".bias") or weight is None or "qweight" not in weight.parts:
        return False
    with WeightFile(part.path) as file:
        if file.tensor(part.name).count_nonzero():
            raise ConfigError(
                f"weight {part.name} is not zero, but config.json declares no such bias",
                param="--model",
            )
    return True


@dataclass(slots=True)
class FillTarget:
    """Parameters of a model, the sources of their values, and statistics of quantized weights."""

    weights: WeightMap
    parameters: Mapping[str, Weight]
    quantized: QuantizedSpec | None
    wide: torch.dtype
    """Dtype in which scales are applied."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of quantized weights by format."""
    published: int = 0
    """Bytes of the quantized weights in the files."""
    held: int = 0
    """Bytes of the quantized weights in memory."""
    packed: bool = False
    """True to keep matrices in codes where their layers can compute with codes."""
    blocks: bool = False
    """True to keep GGML blocks as well."""
    wide_held: int = 0
    """Bytes of dequantized weights, as a part of ``held``."""
    cut_groups: int = 0
    """Number of weights dequantized because ranks cut their groups."""
    waiting: list[PendingCodes] = field(default_factory=list)
    """Parameters with codes, stored by ``settle`` for ``report``."""

    def settle(self) -> None:
        """End the filling: keep parameters with codes for ``report``, and release all parameters."""
        found = (weight.note.held for weight in self.parameters.values())
        self.waiting = [held for held in found if held is not None and held.pieces]
        self.parameters = {}

    def fill(self, source: TensorSource, file: WeightFile) -> None:
        """Copy this rank's part of ``source`` into the parameter, or attach the part as codes.

        ``file``: the open file at ``source.path``.

        Reads no more than the part of this rank, where the part can be read alone. Updates the statistics.
        Raises ConfigError that names the weight and a missing or misfitting part.
        """
        placement = self.weights.placements[source.name]
        weight = self.parameters[placement.parameter]
        taken = windows(weight, placement.index)
        divided = bool(taken) and bool(taken[0].source) and _sliceable(placement, weight)
        # Three ways, in order: keep codes; read only the slices of this rank; read the whole weight and cut.
        if not taken or self._hold_blocks(source, file, weight):
            return
        if divided and self._fill_slices(source, file, taken):
            return self._count_widened(
                source, file, sum(weight.parameter.data[w.target].nbytes for w in taken)
            )
        try:
            cut_parts = self._cut(source, file, taken) if divided else None
            if cut_parts is not None:
                parts, spec = cut_parts
                if self._hold(parts, spec, source, file, weight, taken):
                    return
                form, (piece,) = read(parts, spec, self.wide)
                target = weight.parameter.data[taken[0].target]
                if piece.values.shape != target.shape:
                    raise Misfit(
                        f"the result has shape {list(piece.values.shape)}, a rank needs {list(target.shape)}"
                    )
                target.copy_(piece.values)
                size = target.nbytes
            else:
                parts = {role: _read(part, source, file) for role, part in source.parts.items()}
                if self._hold(parts, self.quantized, source, file, weight):
                    return
                form, pieces = read(parts, self.quantized, self.wide, _wanted(placement, weight))
                size = sum(copy(source.name, p.values, placement, weight, p.index) for p in pieces)
            # A weight that fills more or less than its place would leave wrong values without an error.
            expected = sum(weight.parameter.data[window.target].nbytes for window in taken)
            if size != expected:
                raise Misfit(f"the result has {size} bytes, config.json requires {expected}")
        except LacksTensors as error:
            names = " or ".join(names_of(source.name, error.role))
            raise ConfigError(
                f"quantized weight {source.name} lacks {names}; the other parts are in {source.path.name}",
                param="--model",
            ) from error
        except Misfit as error:
            raise ConfigError(
                f"the parts of weight {source.name} in {source.path.name} do not fit: {error}",
                param="--model",
            ) from error
        if form:
            self._count(form, sum(part.nbytes for part in parts.values()), size, size)
        else:
            self._count_widened(source, file, size)

    def _count(self, form: str, published: int, held: int, widened: int = 0) -> None:
        self.counts[form] += 1
        self.published += published
        self.held += held
        self.wide_held += widened

    def _count_widened(self, source: TensorSource, file: WeightFile, size: int) -> None:
        """Count a weight of a GGUF file that was dequantized to ``size`` bytes while reading."""
        stored = file.gguf(source.name)
        if stored is not None and stored.quantized is not None:
            kind, published = stored.quantized
            self._count(kind, published, size, size)

    def _hold_blocks(self, source: TensorSource, file: WeightFile, weight: Weight) -> bool:
        """Attach a weight of a GGUF file to ``weight`` as codes.

        Return False, without effect, if the weight must be dequantized.
        """
        stored = file.gguf(source.name)
        if not self.blocks or stored is None or stored.quantized is None or weight.note.held is None:
            return False
        placement = self.weights.placements[source.name]
        found = stored.codes(_wanted(placement, weight))
        return found is not None and self._hold_pieces(*found, stored.quantized[1], placement, weight)

    def _hold(
        self,
        parts: dict[str, Tensor],
        spec: QuantizedSpec | None,
        source: TensorSource,
        file: WeightFile,
        weight: Weight,
        cut_to: list[Window] | None = None,
    ) -> bool:
        """Attach ``parts`` to ``weight`` as codes. Return False if the parts must be dequantized.

        cut_to: the single window to which ``parts`` are already cut. Raises Misfit.
        """
        if not self.packed or spec is None or weight.note.held is None:
            return False
        placement = self.weights.placements[source.name]
        found = read_codes(parts, spec, _wanted(placement, weight))
        if found is None:
            return False
        published = sum(part.nbytes for part in parts.values())
        form, pieces = found
        pieces = (_in_file(piece, file.mapped) for piece in pieces)
        return self._hold_pieces(form, pieces, published, placement, weight, cut_to)

    def _hold_pieces(
        self,
        form: str,
        pieces: Iterator[CodedPiece],
        published: int,
        placement: Placement,
        weight: Weight,
        cut_to: list[Window] | None = None,
    ) -> bool:
        """Attach the codes of all ``pieces``. Return False, without effect, if codes cannot represent one
        piece."""
        places = list[tuple[int, int, Codes]]()
        for piece in pieces:
            found = self._places_of(piece, placement, weight, cut_to)
            if found is None:
                return False
            places += found
        # Attach only after every piece fits: codes of a weight that is dequantized would occupy memory twice.
        for matrix, row, part in places:
            put_codes(weight, matrix, row, part)
        self._count(form, published, sum(part.nbytes for _, _, part in places))
        return True

    def _places_of(
        self, piece: CodedPiece, placement: Placement, weight: Weight, cut_to: list[Window] | None
    ) -> list[tuple[int, int, Codes]] | None:
        """Return (matrix, first row, codes) for each window of a piece; None if codes cannot represent the
        piece. A cut inside a group is counted."""
        codes = piece.codes if cut_to else piece.codes and arranged(piece.codes, placement, piece)
        if codes is None:
            return None
        where = inside(placement.index, *piece.index) if piece.index else placement.index
        if not cut_to and codes.shape != part_shape(weight, where):
            return None  # dequantizing raises the error
        places = list[tuple[int, int, Codes]]()
        for window in cut_to or windows(weight, where):
            part: Codes | None = codes
            if not cut_to:
                part = _part_of(codes, window)
                self.cut_groups += part is None
            place = _place(weight, window)
            if part is None or place is None:
                return None
            places.append((*place, part))
        return places

    def _cut(
        self, source: TensorSource, file: WeightFile, taken: list[Window]
    ) -> tuple[dict[str, Tensor], QuantizedSpec] | None:
        """Return (parts cut to the single window ``taken``, their format).

        Return None, with nothing read, if the weight cannot be cut.
        """
        placement = self.weights.placements[source.name]
        shape = part_shape(self.parameters[placement.parameter], placement.index)
        if self.quantized is None or placement.parts or len(taken) > 1 or len(source.parts) == 1:
            return None
        shapes = {role: _of_part(part, source, file, WeightFile.shape) for role, part in source.parts.items()}
        dim = len(taken[0].source) - 1
        span = taken[0].source[dim].start, taken[0].source[dim].stop
        found = cut(shape, shapes, dim, span, self.quantized.block)
        if found is None:
            return None
        places, block = found
        parts = {role: _read(source.parts[role], source, file, place) for role, place in places.items()}
        if "shape" in parts:
            local = list(shape)
            local[dim] = span[1] - span[0]
            parts["shape"] = torch.tensor(local)
        return parts, msgspec.structs.replace(self.quantized, block=block)

    def _fill_slices(self, source: TensorSource, file: WeightFile, taken: list[Window]) -> bool:
        """Read only the windows ``taken`` into the parameter.

        Return False, without effect, for other weights. Raises ConfigError for another shape.
        """
        placement = self.weights.placements[source.name]
        weight = self.parameters[placement.parameter]
        if set(source.parts) != {PLAIN} or not weight.parameter.is_floating_point():
            return False
        if not file.floating(source.name):
            return False
        _check_shape(source.name, file.shape(source.name), part_shape(weight, placement.index))
        if placement.parts:
            return _fill_groups(source.name, file, placement, weight, taken)
        for window in taken:
            target = weight.parameter.data[window.target]
            target.copy_(placement.arranged(file.part(source.name, window.source), target.dtype))
        return True

    def report(self, dtype: torch.dtype) -> None:
        """Log one line about quantized weights, if any, and warn of matrices dequantized by ``--tp``.

        Adds the waiting weights to the statistics. Call once, after ``pack``, when layers have taken their
        codes.
        """
        if not self.counts:
            return
        for held in self.waiting:
            self.held += held.widened - held.coded
            self.wide_held += held.widened
        formats = ", ".join(f"{count} {form}" for form, count in self.counts.items())
        _log.info(
            "quantized weights: %s; %.1f MB in the files, %.1f MB in memory, of which %.1f MB are "
            "dequantized to %s; activation schemes have no effect",
            formats,
            self.published / 1e6,
            self.held / 1e6,
            self.wide_held / 1e6,
            str(dtype).removeprefix("torch."),
        )
        if self.cut_groups:
            _log.warning(
                "%d matrices are dequantized, because --tp cuts groups of inputs that share a scale; a "
                "smaller --tp keeps the matrices packed",
                self.cut_groups,
            )


def _in_file(piece: CodedPiece, mapped: Mapped | None) -> CodedPiece:
    """Mark codes in the mapped file as mapped."""
    codes = piece.codes
    if codes is None or mapped is None or not any(map(mapped.has, codes.tensors())):
        return piece
    return replace(piece, codes=replace(codes, mapped=mapped))


def _part_of(codes: Codes, window: Window, least: int | None = None) -> Codes | None:
    """Return the part of a published matrix in ``window``; None if columns cannot be cut
    (``Codes.columns``)."""
    rows, columns = (*window.source, slice(None), slice(None))[:2]
    return codes[rows].columns(*columns.indices(codes.inputs)[:2], least=least)


def _place(weight: Weight, window: Window) -> tuple[int, int] | None:
    """Return (matrix, first row) of ``window`` in the local parameter; None if the window has only some
    columns."""
    entries = (*window.target, *(slice(None),) * (weight.parameter.dim() - len(window.target)))
    *stack, rows, columns = entries
    if not isinstance(rows, slice) or not isinstance(columns, slice):
        return None
    if columns.indices(weight.parameter.shape[-1])[:2] != (0, weight.parameter.shape[-1]):
        return None
    matrix = stack[0] if stack else 0
    if not isinstance(matrix, int):
        return None
    return matrix, rows.indices(weight.parameter.shape[-2])[0]


def hold_rounded(weight: Weight, index: tuple[int | slice, ...], values: Tensor) -> bool:
    """Attach this rank's part of ``values`` [.., N, K] as codes, if ``weight`` wants whole rows rounded.

    Return False if ``weight`` takes plain values, or (logged) if ranks cut the rows inside quantization
    groups.
    """
    rounds = weight.note.rounds
    if rounds is None:
        return False
    if values.dim() == 3:
        made = [hold_rounded(weight, inside(index, i), matrix) for i, matrix in enumerate(values)]
        return all(made)
    taken = windows(weight, index)
    if not taken:
        return True
    # Whole rows are rounded before the cut, so that every rank has the same codes as a single rank.
    codes = rounds(values.to(weight.parameter.dtype))
    places = list[tuple[int, int, Codes]]()
    for window in taken:
        part = _part_of(codes, window, least=2)
        place = _place(weight, window)
        if part is None or place is None:
            _log.warning(
                "--tp cuts rows of %d inputs inside quantization groups: each rank quantizes its part "
                "alone, and tokens may differ from those of one rank",
                codes.inputs,
            )
            return False
        places.append((*place, part))
    for matrix, row, part in places:
        put_codes(weight, matrix, row, part)
    return True


def _read(part: Part, source: TensorSource, file: WeightFile, place: tuple[slice, ...] = ()) -> Tensor:
    return _of_part(part, source, file, lambda of, name: of.part(name, place))


def _of_part(part: Part, source: TensorSource, file: WeightFile, ask: Callable[[WeightFile, str], R]) -> R:
    if part.path == source.path:
        return ask(file, part.name)
    with WeightFile(part.path) as other:
        return ask(other, part.name)


def _fill_groups(
    name: str, file: WeightFile, placement: Placement, weight: Weight, taken: list[Window]
) -> bool:
    """Read the groups of rows behind the windows ``taken`` into the parameter.

    Return False, without effect, if the windows do not cover whole groups.
    """
    found = whole_groups(taken, placement.groups, placement.parts)
    if found is None:
        return False
    (begin, end), inner = found
    size = sum(last - first for first, last in placement.parts)
    rows = file.part(name, (slice(begin * size, end * size),))
    arranged = replace(placement, groups=end - begin).arranged(rows, weight.parameter.dtype)
    for window in inner:
        weight.parameter.data[window.target].copy_(arranged[window.source])
    return True


def _wanted(placement: Placement, weight: Weight) -> Callable[[int], bool]:
    """Return a predicate: True if this rank stores a part of matrix i of a stack, or if the stack has no
    matrix i."""
    count = part_shape(weight, placement.index)[:1]
    return lambda i: (i,) >= count or bool(windows(weight, inside(placement.index, i)))


def _sliceable(placement: Placement, weight: Weight) -> bool:
    """Return True if a slice of the parameter needs only a slice of the published tensor."""
    return placement.read is None and weight.note.largest is None and weight.note.rounds is None


def copy(name: str, values: Tensor, placement: Placement, weight: Weight, index: tuple[int, ...] = ()) -> int:
    """Copy this rank's part of ``values`` into the parameter, or attach the part as rounded codes.

    ``values`` fill the placement or matrix ``index`` of the placement. The largest magnitudes of rows are
    noted where the parameter wants them. Return the bytes of the part. Raises ConfigError for another shape,
    and for numbers of less than 16 bits.
    """
    whole = part_shape(weight, placement.index)
    fits = not index or index[0] < whole[0]
    if fits:
        with contextlib.suppress(ValueError, IndexError, RuntimeError):  # ``_check_shape`` reports below
            # A matrix of a stack is arranged as a stack of one.
            values = placement.arranged(values[None] if index else values, weight.parameter.dtype)
            values = values[0] if index else values
    shape = tuple(values.shape) if not index else (index[0] + 1 if not fits else whole[0], *values.shape)
    _check_shape(name, shape, whole, more=not fits)
    is_table = not weight.parameter.is_floating_point() and not values.is_floating_point()  # a table of ids
    if not is_table and (not values.is_floating_point() or values.element_size() < 2):
        raise ConfigError(
            f"weight {name} has type {values.dtype}; quantized weights need a quantization_config in "
            "config.json",
            param="--model",
        )
    size = 0
    where = inside(placement.index, *index) if index else placement.index
    note_largest(weight, where, values)
    held = hold_rounded(weight, where, values)
    for window in windows(weight, where):
        target = weight.parameter.data[window.target]
        if not held:
            target.copy_(values[window.source])
        size += target.nbytes
    return size


def _check_shape(name: str, shape: Sequence[int], expected: Sequence[int], *, more: bool = False) -> None:
    """Raise ConfigError if ``shape`` differs. ``more``: the first entry of ``shape`` is a lower bound."""
    if tuple(shape) != tuple(expected):
        found = [f"{shape[0]} or more", *shape[1:]] if more else list(shape)
        raise ConfigError(
            f"weight {name} has shape {found}, config.json says {list(expected)}", param="--model"
        )
