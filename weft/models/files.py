"""The weight files of a checkpoint folder: which there are, and their tensors one at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.common.errors import ConfigError
from weft.config.families.facts import read_json
from weft.gguf.folder import gguf_files, weights_of
from weft.models.gguf_tensor import GGUFTensor, Maps
from weft.ops.mapped import Mapped, mapped_around

#: Types of plain numbers, as safetensors names them.
_PLAIN = ("F64", "F32", "BF16", "F16")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
#: Not weights, though they match the patterns.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")


def weight_files(folder: Path, load_format: str, prefixes: tuple[str, ...] = ("",)) -> list[Path]:
    """The files to read, in order. ``auto`` and ``safetensors`` never touch a pickle.

    With ``partial`` shards that an index names may be missing. ``prefixes``: where an index says what is in
    which file, those with tensors whose names begin so; others need not be there.

    Raises ConfigError when there are none, when an index names a file that is missing or outside the
    folder, and when the weights are pickles that were not asked for (naming ``--load-format pickle``).
    """
    if load_format == "pickle":
        result = _listed(folder, "pytorch_model.bin.index.json", prefixes) or _pickles(folder)
        if not result:
            raise ConfigError(
                "no pickled weights in the model folder; try --load-format auto", param="--load-format"
            )
        return result
    if result := gguf_files(folder):
        return result
    result = _listed(folder, "model.safetensors.index.json", prefixes, load_format == "partial")
    if result:
        return result
    single = folder / "model.safetensors"
    result = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if result:
        return result
    if _pickles(folder):
        raise ConfigError(
            "the model folder has pickled weights only, and a pickle from an untrusted source can run code. "
            "Convert them to safetensors, or pass --load-format pickle to load them",
            param="--load-format",
        )
    raise ConfigError("no safetensors files in the model folder", param="--model")


def _pickles(folder: Path) -> list[Path]:
    return sorted(
        {p for pattern in _PICKLE_PATTERNS for p in folder.glob(pattern) if p.name not in _NOT_WEIGHTS}
    )


def _listed(folder: Path, index_name: str, prefixes: tuple[str, ...], partial: bool = False) -> list[Path]:
    """The shards that an index names, of tensors whose names begin with one of ``prefixes``; empty where
    there is no index. ``partial``: some may be missing."""
    index = read_json(folder, index_name)
    if index is None:
        return []
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise ConfigError(f"{index_name} has no weight_map", param="--model")
    shards = sorted({shard for name, shard in names.items() if str(name).startswith(prefixes)})
    for shard in shards:
        if Path(shard).name != shard:
            raise ConfigError(f"{index_name} names a file outside the model folder", param="--model")
        if not partial and not (folder / shard).is_file():
            raise ConfigError(f"{index_name} names {shard}, which is missing", param="--model")
    return [folder / shard for shard in shards if (folder / shard).is_file()]


class WeightFile:
    """One open file: its names, and its tensors on the CPU, each made when it is asked for.

    A context manager. Raises ConfigError for a file that is not what its name says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._safe: Any = None
        self._loaded: Mapping[str, torch.Tensor | GGUFTensor] = {}
        self._mapped: Mapped | None = None
        self._looked = False

    def __enter__(self) -> WeightFile:
        try:
            if self._path.suffix == ".safetensors":
                self._safe = safe_open(str(self._path), framework="pt", device="cpu").__enter__()
            elif self._path.suffix == ".gguf":
                maps = Maps()
                found = weights_of(self._path)
                self._loaded = {name: GGUFTensor(one, maps) for name, one in found.items()}
            else:
                self._loaded = _unpickle(self._path)
        except ConfigError:
            raise
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{self._path.name} is damaged or not a weight file: {error}", param="--model"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._safe is not None:
            self._safe.__exit__(None, None, None)
        self._safe = None
        self._loaded = {}
        self._mapped = None

    def names(self) -> list[str]:
        """Names of all tensors in the file."""
        return list(self._safe.keys()) if self._safe is not None else list(self._loaded)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called ``name``, which may be mapped memory of the file."""
        if self._safe is not None:
            result: torch.Tensor = self._safe.get_tensor(name)
            return result
        found = self._loaded[name]
        return found[()] if isinstance(found, GGUFTensor) else found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor called ``name``, which is not read."""
        found = self._safe.get_slice(name).get_shape() if self._safe is not None else self._loaded[name].shape
        return tuple(found)

    def floating(self, name: str) -> bool:
        """Whether it is plain floating-point numbers of at least 16 bits; it is not read."""
        if self._safe is not None:
            return self._safe.get_slice(name).get_dtype() in _PLAIN
        found = self._loaded[name]
        if isinstance(found, GGUFTensor):
            return found.floating
        return found.is_floating_point() and found.element_size() > 1

    def gguf(self, name: str) -> GGUFTensor | None:
        """The weight called ``name``, of a GGUF file."""
        found = self._loaded.get(name)
        return found if isinstance(found, GGUFTensor) else None

    def part(self, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        """``tensor(name)[place]``, and nothing else of it is read."""
        if not place:
            return self.tensor(name)
        result: torch.Tensor = (self._safe.get_slice(name) if self._safe is not None else self._loaded[name])[
            place
        ]
        return result

    @property
    def mapped(self) -> Mapped | None:
        """Where tensors of it lie in memory; None where they do not lie in the file itself."""
        if not self._looked:
            self._looked = True
            name = next((name for name in self.names() if 0 not in self.shape(name)), None)
            found = None if name is None else self._loaded.get(name)
            if name is not None and not isinstance(found, GGUFTensor):
                self._mapped = mapped_around(self._view(name))
        return self._mapped

    def drop_pages(self, names: Iterable[str]) -> None:
        """These tensors will hardly be read again: their pages are no memory of this process any more.

        Nothing else becomes of the tensors.
        """
        if self.mapped is not None:
            for name in names:
                self.mapped.drop(self._view(name))

    def _view(self, name: str) -> torch.Tensor:
        """Where a tensor of no GGUF file lies; it is not read."""
        found = self._safe.get_tensor(name) if self._safe is not None else self._loaded[name]
        assert isinstance(found, torch.Tensor)
        return found

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), in order. A tensor is the caller's until the next one is taken."""
        for name in names:
            yield name, self.tensor(name)


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    """The state dict in a torch file, mapped rather than read; only tensors are unpickled, never code."""
    try:
        # Files from before torch 1.6 are no zip archives and can't be mapped.
        result = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise ConfigError(
            f"{path.name} holds more than tensors and is not loaded", param="--load-format"
        ) from error
    if not isinstance(result, dict) or not all(isinstance(t, torch.Tensor) for t in result.values()):
        raise ConfigError(f"{path.name} is not a dict of tensors", param="--load-format")
    return result
