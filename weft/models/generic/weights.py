"""Weight map of a model of transformers: from the names in the files to parts of parameters.

The names follow the conversions of transformers: renamed tensors, experts stored one by one, and prefixes
that come and go with the head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    rename_source_key,
)

from weft.common.errors import ConfigError
from weft.models.generic.swap import Target
from weft.models.quantized.sources import weights_named
from weft.models.weights import WeightMap, in_order

Tensor = torch.Tensor
Index = tuple[int | slice, ...]


class FoundMap(WeightMap):
    """A weight map made for the names of one checkpoint."""

    def published_as(self, names: Collection[str]) -> WeightMap:
        return self


def published_map(
    model: Any, targets: Mapping[str, Target], parameters: Mapping[int, str], files: Collection[str]
) -> WeightMap:
    """Return the weight map of a checkpoint with tensors ``files``.

    model: the skeleton, before any substitution. targets: parts of parameters by tensor name of the model.
    parameters: names of parameters by id. Raises ConfigError for a conversion without support.
    """
    return _Reader(model, targets, parameters).read(files)


def module_map(targets: Mapping[str, Target], parameters: Mapping[int, str]) -> WeightMap:
    """Return the weight map of adapters, which name modules of the model instead of tensors in files.

    The arguments are those of ``published_map``.
    """
    made = FoundMap()
    for name, target in targets.items():
        parameter = parameters[id(target.parameter)]
        made.add(name, parameter, *target.index, offset=target.offset, read=target.read)
    return made


class _Reader:
    def __init__(self, model: Any, targets: Mapping[str, Target], parameters: Mapping[int, str]) -> None:
        self._targets = targets
        self._parameters = parameters
        transforms = get_model_conversion_mapping(model)
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._renamings: Any = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._prefix = model.base_model_prefix
        self._tied = dict(model.all_tied_weights_keys)
        self._ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
        self._optional = [*(model._keys_to_ignore_on_load_missing or ())]
        self._class = type(model).__name__
        self._sources = dict[str, set[str]]()
        """Source patterns without a published tensor so far, by name of a tensor of the model."""

    def read(self, files: Collection[str]) -> WeightMap:
        made = FoundMap(ignored=[re.compile(p) for p in (*self._ignored, r"rotary_emb\.inv_freq$")])
        found = set[str]()
        copies = dict[str, str]()
        for published in dict.fromkeys(weight for name in files for weight in weights_named(name)):
            renamed, pattern = rename_source_key(
                published, self._renamings, self._converters, self._prefix, self._shapes
            )
            # A tied tensor that was saved anyway is compared with its original, not loaded.
            if renamed in self._tied and renamed not in self._targets:
                copies[published] = self._tied[renamed]
            elif pattern is None:
                if renamed in self._targets and renamed not in found:
                    self._add(made, published, self._targets[renamed])
                    found.add(renamed)
            elif renamed in self._shapes:
                found.update(self._convert(made, published, renamed, pattern))
        for name, lacking in self._sources.items():
            if lacking:
                raise ConfigError(
                    f"{self._class}: the weight files have a part of {name}; missing: "
                    f"{', '.join(sorted(lacking))}; use the complete checkpoint",
                    param="--model",
                )
        self._expect(made, found)
        by_target = {self._name_of(placed): name for name, placed in made.placements.items()}
        for published, original in copies.items():
            target = self._targets.get(original)
            if target is not None:
                made.same_as[published] = by_target[self._parameters[id(target.parameter)]]
        return made

    def _name_of(self, placed: Any) -> str:
        name: str = placed.parameter
        return name

    def _add(
        self, made: WeightMap, published: str, target: Target, more: Index = (), read: Any = None
    ) -> None:
        """Map ``published`` to part ``more`` of ``target``."""
        if target.read is not None and more:
            raise ConfigError(
                f"{self._class}: {published} is a part of a tensor that Weft stores in another order; save "
                "the checkpoint with save_pretrained of transformers 5",
                param="--model",
            )
        index = _inside(target.index, more)
        read = in_order(read, target.read)
        made.add(published, self._parameters[id(target.parameter)], *index, offset=target.offset, read=read)

    def _convert(self, made: WeightMap, published: str, renamed: str, pattern: str) -> set[str]:
        """Map a tensor that transformers converts. Return the names of the model's tensors."""
        # Each supported list of operations puts the tensor into one range of one parameter.
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        operations: list[Any] = list(converter.operations)
        kinds = [type(one) for one in operations]
        number = converter.source_patterns.index(pattern)
        count = len(converter.source_patterns)
        if kinds == [Chunk] and count == 1:
            return self._split(made, published, renamed, converter)
        target = self._targets.get(renamed)
        if target is None or len(converter.target_patterns) > 1:
            raise self._refused(published, converter)
        if count > 1:
            self._sources.setdefault(renamed, {*converter.source_patterns}).discard(pattern)
        shape = self._shapes[renamed]
        if kinds == [MergeModulelist] and count == 1:
            more: Index = (_number(published, pattern),)
        elif kinds == [MergeModulelist, Concatenate] and operations[1].dim == 1:
            rows = shape[1] // count
            more = (_number(published, pattern), slice(number * rows, (number + 1) * rows))
        elif kinds == [Concatenate] and operations[0].dim == 0 and count > 1:
            rows = shape[0] // count
            more = (slice(number * rows, (number + 1) * rows),)
        elif kinds and set(kinds) <= {Interleave, Transpose} and count == 1:
            self._add(made, published, target, read=_reader(operations))
            return {renamed}
        else:
            raise self._refused(published, converter)
        self._add(made, published, target, more)
        return {renamed}

    def _split(self, made: WeightMap, published: str, renamed: str, converter: Any) -> set[str]:
        """Map a tensor that transformers splits into neighbouring rows of one parameter."""
        first = converter.target_patterns[0]
        names = [renamed.replace(first, other) for other in converter.target_patterns]
        targets = [self._targets.get(name) for name in names]
        if converter.operations[0].dim != 0 or any(target is None for target in targets):
            raise self._refused(published, converter)
        # The targets must be neighbours in one joined matrix, in the order of the rows.
        begin: int | None = None
        end = 0
        for name, target in zip(names, targets, strict=True):
            assert target is not None
            assert targets[0] is not None
            rows = target.index[0] if target.index else slice(0, self._shapes[name][0])
            if target.parameter is not targets[0].parameter or not isinstance(rows, slice):
                raise self._refused(published, converter)
            if begin is not None and rows.start != end:
                raise self._refused(published, converter)
            begin, end = (rows.start if begin is None else begin), rows.stop
        assert targets[0] is not None
        made.add(published, self._parameters[id(targets[0].parameter)], slice(begin, end))
        return set(names)

    def _refused(self, published: str, converter: Any) -> ConfigError:
        names = ", ".join(type(one).__name__ for one in converter.operations)
        return ConfigError(
            f"{self._class}: the tensor {published} needs the conversion {names}, which the generic backend "
            "does not support; save the checkpoint with save_pretrained of transformers 5",
            param="--model",
        )

    def _expect(self, made: WeightMap, found: set[str]) -> None:
        """Add every tensor without a published name, so that the loader reports missing weights."""
        for name, target in self._targets.items():
            if name in found or any(re.search(pattern, name) for pattern in self._optional):
                continue
            parameter = self._parameters[id(target.parameter)]
            made.add(name, parameter, *target.index, offset=target.offset, read=target.read)
        # Of stacked experts the files must have every expert.
        for placed_name, placed in list(made.placements.items()):
            if placed.index and isinstance(placed.index[0], int):
                self._expect_experts(made, placed_name, placed)

    def _expect_experts(self, made: WeightMap, published: str, placed: Any) -> None:
        """Add the names of all experts beside the expert ``published``."""
        number = placed.index[0]
        parts = re.match(rf"^(.*experts\.){number}(\..*)$", published)
        count = next(
            self._shapes[name][0]
            for name, target in self._targets.items()
            if self._parameters[id(target.parameter)] == placed.parameter
        )
        for expert in range(count if parts and number == min_number(made, parts) else 0):
            assert parts is not None
            name = f"{parts[1]}{expert}{parts[2]}"
            if name not in made.placements:
                made.add(name, placed.parameter, expert, *placed.index[1:])


def min_number(made: WeightMap, parts: re.Match[str]) -> int:
    """Return the smallest expert number of the published names ``parts[1] N parts[2]``."""
    return next(n for n in range(1 << 20) if f"{parts[1]}{n}{parts[2]}" in made.placements)


def _number(published: str, pattern: str) -> int:
    """Return the number at ``*`` of a source pattern in ``published``."""
    found = re.search(pattern.replace("*.", r"(\d+)\."), published)
    if found is None:
        raise ConfigError(f"the tensor {published} has no expert number", param="--model")
    return int(found[1])


def _inside(index: Index, more: Index) -> Index:
    """Return ``more`` inside the part ``index`` of a parameter. ``index`` has at most one range of rows."""
    if not index or not more:
        return index or more
    raise ConfigError(f"a converted tensor fills a part of a joined matrix: {index}, {more}", param="--model")


def _reader(operations: Sequence[Any]) -> Any:
    """Return a transform of a published tensor by operations that keep its number of elements."""

    def read(values: Tensor) -> Tensor:
        for one in operations:
            if isinstance(one, Transpose):
                values = values.transpose(one.dim0, one.dim1)
            else:
                made = one.convert({"x": values}, ["x"], ["x"])
                values = next(iter(made.values()))
        return values

    return read
