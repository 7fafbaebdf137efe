"""Open weight files of a checkpoint, read tensor by tensor."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.common.errors import ConfigError
from weft.config.families.weight_files import bare_name
from weft.gguf.checkpoint_folder import weights_of
from weft.models.gguf_tensor import CodedType, GGUFTensor, Maps, RoundedTensor, rounded_tensors
from weft.ops.mapped import Mapped, mapped_around

#: Plain number types, in the naming of safetensors.
_PLAIN = ("F64", "F32", "BF16", "F16")


class WeightFile:
    """One open file with its names and tensors. Tensors are on the CPU and are read on request.

    Names have no parts of modules that training wraps around others (``bare_name``).

    A context manager. Raises ConfigError if the file is damaged or not a weight file.
    """

    def __init__(self, path: Path, types: Mapping[str, CodedType] = MappingProxyType({})) -> None:
        """The file is opened by ``__enter__``. The suffix decides the format. ``types``: plain weights of
        these names in a safetensors file are rounded."""
        self._path, self._types = path, types
        self._safe: Any = None
        self._loaded: Mapping[str, torch.Tensor | GGUFTensor | RoundedTensor] = {}
        """All weights, or the rounded weights of a safetensors file."""
        self._mapped: Mapped | None = None
        self._looked = False

    def __enter__(self) -> WeightFile:
        """Open the file. Raises ConfigError if the file is damaged or not a weight file."""
        try:
            if self._path.suffix == ".safetensors":
                self._safe = _BareNames(safe_open(str(self._path), framework="pt", device="cpu").__enter__())
                if self._types:
                    self._loaded = self._rounded(self._safe)
            elif self._path.suffix == ".gguf":
                maps = Maps()
                published = weights_of(self._path)
                self._loaded = {name: GGUFTensor(one, maps) for name, one in published.items()}
            else:
                found = _unpickle(self._path)
                self._loaded = {bare: found[name] for bare, name in _by_bare_name(found).items()}
        except ConfigError:
            raise
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{self._path.name} is damaged or not a weight file: {error}", param="--model"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file. Tensors that are mapped memory stay valid."""
        if self._safe is not None:
            self._safe.__exit__(None, None, None)
        self._safe = None
        self._loaded = {}
        self._mapped = None

    def names(self) -> list[str]:
        """Return the names of all tensors in the file."""
        return list(self._safe.keys()) if self._safe is not None else list(self._loaded)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``; may be mapped memory of the file."""
        if self._saved(name):
            result: torch.Tensor = self._safe.get_tensor(name)
            return result
        found = self._loaded[name]
        return found if isinstance(found, torch.Tensor) else found[()]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name`` without reading the tensor."""
        if self._saved(name):
            return tuple(self._safe.get_slice(name).get_shape())
        return tuple(self._loaded[name].shape)

    def floating(self, name: str) -> bool:
        """Return True for plain floating-point numbers of at least 16 bits, without reading the tensor."""
        if self._saved(name):
            return self._safe.get_slice(name).get_dtype() in _PLAIN
        found = self._loaded[name]
        if not isinstance(found, torch.Tensor):
            return found.floating
        return found.is_floating_point() and found.element_size() > 1

    def gguf(self, name: str) -> GGUFTensor | RoundedTensor | None:
        """Return the weight ``name`` of a GGUF file, or a rounded weight; None for other weights."""
        found = self._loaded.get(name)
        return None if isinstance(found, torch.Tensor) else found

    def part(self, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        """Return ``tensor(name)[place]``, reading only this part where the format allows.

        () returns the whole tensor.
        """
        if not place:
            return self.tensor(name)
        held = self._safe.get_slice(name) if self._saved(name) else self._loaded[name]
        result: torch.Tensor = held[place]
        return result

    @property
    def mapped(self) -> Mapped | None:
        """Mapped memory of the file; None if tensors are not mapped from the file. Looked up once."""
        if not self._looked:
            self._looked = True
            name = next((name for name in self.names() if 0 not in self.shape(name)), None)
            found = None if name is None else self._loaded.get(name)
            if name is not None and (self._safe is not None or isinstance(found, torch.Tensor)):
                self._mapped = mapped_around(self._view(name))
        return self._mapped

    def drop_pages(self, names: Iterable[str]) -> None:
        """Release the memory pages of tensors that will hardly be read again. The tensors stay valid."""
        if self.mapped is not None:
            for name in names:
                self.mapped.drop(self._view(name))

    def _view(self, name: str) -> torch.Tensor:
        """Return a tensor without reading the values. Not for GGUF files."""
        found = self._safe.get_tensor(name) if self._safe is not None else self._loaded[name]
        assert isinstance(found, torch.Tensor)
        return found

    def _saved(self, name: str) -> bool:
        """Return True if the numbers of ``name`` are used as a safetensors file has them."""
        return self._safe is not None and name not in self._loaded

    def _rounded(self, safe: Any) -> dict[str, RoundedTensor]:
        """Return the weights of the open file ``safe`` to round."""
        slices = ((name, safe.get_slice(name)) for name in self._types.keys() & set(safe.keys()))
        shapes = {name: tuple(one.get_shape()) for name, one in slices if one.get_dtype() in _PLAIN}

        def read(name: str, place: tuple[slice, ...]) -> torch.Tensor:
            made: torch.Tensor = safe.get_slice(name)[place] if place else safe.get_tensor(name)
            return made

        return rounded_tensors(self._types, shapes, read)

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in order. A tensor is valid until the next tensor is taken."""
        for name in names:
            yield name, self.tensor(name)


class _BareNames:
    """An open safetensors file, with the names of ``bare_name``."""

    def __init__(self, safe: Any) -> None:
        """Raises ValueError for two tensors of one name."""
        self._safe = safe
        self._saved = _by_bare_name(safe.keys())

    def __exit__(self, *exception: object) -> None:
        self._safe.__exit__(*exception)

    def keys(self) -> list[str]:
        return list(self._saved)

    def get_tensor(self, name: str) -> Any:
        return self._safe.get_tensor(self._saved[name])

    def get_slice(self, name: str) -> Any:
        return self._safe.get_slice(self._saved[name])


def _by_bare_name(names: Iterable[str]) -> dict[str, str]:
    """Return the name of each tensor without wrappers -> the name in the file.

    Raises ValueError for two tensors of one name.
    """
    made: dict[str, str] = {}
    for name in names:
        if (other := made.setdefault(bare_name(name), name)) != name:
            raise ValueError(f"{other} and {name} are the same weight")
    return made


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of a torch file, mapped instead of read. Unpickles tensors only, never code.

    Raises ConfigError for a file with other contents.
    """
    try:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        result = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise ConfigError(
            f"{path.name} contains objects other than tensors, and is not loaded", param="--load-format"
        ) from error
    if not isinstance(result, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in result.items()
    ):
        raise ConfigError(f"{path.name} is not a dict of tensors", param="--load-format")
    return result
