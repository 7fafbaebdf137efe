"""A checkpoint's weight files, open: their tensors one at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.common.errors import ConfigError
from weft.gguf.folder import weights_of
from weft.models.gguf_tensor import GGUFTensor, Maps
from weft.ops.mapped import Mapped, mapped_around

#: Types of plain numbers, as safetensors names them.
_PLAIN = ("F64", "F32", "BF16", "F16")


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
