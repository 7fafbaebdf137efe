"""Weight files of a checkpoint folder, and the check of their headers.

A header is read without the weights. So an incomplete download, a file outside the folder and a Git LFS
pointer are refused before anything starts.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.common.lfs import refuse_pointer
from weft.config.families.facts import read_json
from weft.gguf.checkpoint_folder import gguf_files

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
#: Files of trainers that match the patterns but hold no weights.
_NOT_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)[\w-]*\.(bin|pt|pth)"
)
#: Files with the same weights in the form of Mistral's own tools.
_CONSOLIDATED = "consolidated*"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_WRAPPER = re.compile(r"^module\.|(?:^|(?<=\.))_(?:orig_mod|(?:fsdp|checkpoint)_wrapped_module)\.")
"""Parts of names by modules that training wraps around others: DDP, torch.compile, FSDP, checkpointing."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model*"
_MAX_HEADER = 100 << 20
_MOST_DIMS = 64
#: Bits per element, by the type names of safetensors.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}


def weight_files(folder: Path, load_format: str, prefixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Return the weight files to read, in order. ``auto`` and ``safetensors`` never touch a pickle.

    With ``partial``, shards named by an index may be missing. ``prefixes``: if an index maps tensors to
    files, only files with matching tensor names are needed.

    Raise ConfigError if there are no weights, if an index names a file that is missing or outside the folder,
    or if there are only pickles without ``--load-format pickle``.
    """
    if load_format == "pickle":
        result = _listed(folder, "pytorch_model.bin.index.json", prefixes) or pickles(folder)
        if not result:
            raise ConfigError(
                "no pickled weights in the model folder; try --load-format auto", param="--load-format"
            )
        return result
    if result := gguf_files(folder):
        return result
    partial = load_format == "partial"
    if not _left_over(folder) and (result := _listed(folder, _INDEX, prefixes, partial)):
        return result
    if result := safetensors_files(folder):
        if not partial:
            _check_shards(result)
        return result
    if pickles(folder):
        raise ConfigError(
            "the model folder has pickled weights only, and a pickle from an untrusted source can run code. "
            "Convert them to safetensors, or pass --load-format pickle to load them",
            param="--load-format",
        )
    raise ConfigError("no safetensors files in the model folder", param="--model")


def safetensors_files(folder: Path) -> list[Path]:
    """Return ``model.safetensors`` if present, else all safetensors files except adapters and copies."""
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    found = sorted(path for path in folder.glob("*.safetensors") if not path.match(_ADAPTER_WEIGHTS))
    return [path for path in found if not path.match(_CONSOLIDATED)] or found


def _left_over(folder: Path) -> bool:
    """Return True for an index that does not name ``model.safetensors`` beside this file.

    The index belongs to another save. transformers reads the file, too. Raise ConfigError.
    """
    if not (folder / _SINGLE).is_file():
        return False
    names = (read_json(folder, _INDEX) or {}).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return False  # a damaged index, or none
    return _SINGLE not in names.values()


def _check_shards(files: list[Path]) -> None:
    """Raise ConfigError for shards without an index, whose names tell that a shard is missing."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in files:
        if match := _SHARD.fullmatch(path.name):
            numbers.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), found in numbers.items():
        missing = next((n for n in range(1, min(count, len(found) + 1) + 1) if n not in found), None)
        if missing is not None and len(found) < count:
            raise ConfigError(
                f"{stem}-{missing:05d}-of-{count:05d}.safetensors is missing: download the model again",
                param="--model",
            )


def pickles(folder: Path) -> list[Path]:
    """Return the files that may hold pickled weights."""
    return sorted(
        {
            path
            for pattern in _PICKLE_PATTERNS
            for path in folder.glob(pattern)
            if not _NOT_WEIGHTS.fullmatch(path.name) and not path.match(_ADAPTER_WEIGHTS)
        }
    )


def _listed(folder: Path, index_name: str, prefixes: tuple[str, ...], partial: bool = False) -> list[Path]:
    """Return the shards named by an index, for tensors with a prefix in ``prefixes``; [] without an index.

    ``partial``: True if shards may be missing. Raise ConfigError.
    """
    index = read_json(folder, index_name)
    if index is None:
        return []
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise ConfigError(f"{index_name} has no weight_map", param="--model")
    shards = sorted({shard for name, shard in names.items() if str(name).startswith(prefixes)})
    for shard in shards:
        # The index comes from the checkpoint: never follow a path out of the folder.
        if Path(shard).name != shard or shard in ("", "..") or "\0" in shard:
            raise ConfigError(
                f"{index_name} names {shard[:100]!r}, a file outside the model folder", param="--model"
            )
        if not partial and not (folder / shard).is_file():
            raise ConfigError(
                f"{index_name} names {shard}, which is missing: download the model again", param="--model"
            )
    return [folder / shard for shard in shards if (folder / shard).is_file()]


def check_weight_files(folder: Path, load_format: str, prefixes: tuple[str, ...] = ("",)) -> None:
    """Raise ConfigError, with the file's name, for files that cannot be loaded. Read no weights.

    See ``weight_files`` and ``read_header`` for the checks.
    """
    if load_format == "dummy":
        return
    for path in weight_files(folder, load_format, prefixes):
        refuse_pointer(path, "--model")
        if path.suffix == ".safetensors":
            read_header(path)


def refuse_adapter(folder: Path) -> None:
    """Raise ConfigError for a folder with an adapter (for example LoRA) and without a whole model."""
    if not (folder / _ADAPTER).is_file():
        return
    if (folder / "config.json").is_file() and (safetensors_files(folder) or pickles(folder)):
        return
    said = read_json(folder, _ADAPTER) or {}
    base = said.get("base_model_name_or_path")
    of = f" for {base}" if isinstance(base, str) and base else ""
    raise ConfigError(
        f"{folder.name!r} is an adapter{of} ({_ADAPTER}), not a model: "
        "serve the base model with --max-loras and --lora-modules, or merge the adapter into the base model "
        "(merge_and_unload of the package peft)",
        param="--model",
    )


def read_header(path: Path) -> dict[str, Any]:
    """Return name -> entry (``dtype``, ``shape``, ``data_offsets``) of each tensor in a safetensors file.

    Raise ConfigError, with the file's name, unless the tensors fill the file after the header without gaps.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if length > min(size - 8, _MAX_HEADER) or not length:
                raise _damaged(
                    path, f"the header claims {length} bytes, and the file has {max(size - 8, 0)} more bytes"
                )
            found = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}", param="--model") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _damaged(path, "the header is not a JSON object")
    # The safetensors library runs the same checks, but in a process that starts much later.
    entries = {name: entry for name, entry in found.items() if name != "__metadata__"}
    spans = sorted(_span(path, name, entry) for name, entry in entries.items())
    end = 0
    for begin, stop, name in spans:
        if begin != end:
            raise _damaged(
                path, f"tensor {name!r} begins at byte {begin}, but the previous tensor ends at byte {end}"
            )
        end = stop
    if end != size - 8 - length:
        raise _damaged(
            path,
            f"the tensors take {end} bytes, and the file has {size - 8 - length}: is the download complete?",
        )
    return entries


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """Return (begin, end, name) of a tensor, in bytes after the header. Raise ConfigError."""
    entry = entry if isinstance(entry, dict) else {}
    shape, place = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    # Limit the number of dims: the product over very many dims would take too long.
    if shape is None or place is None or len(shape) > _MOST_DIMS or len(place) != 2 or place[0] > place[1]:
        raise _damaged(
            path, f"the header entry of tensor {name!r} has no shape or no offsets: {str(entry)[:100]}"
        )
    begin, end = place
    bits = _BITS.get(str(entry.get("dtype")))
    if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
        raise _damaged(path, f"tensor {name!r} of {entry['dtype']} {shape} has {end - begin} bytes")
    return begin, end, name


def _counts(value: Any) -> list[int] | None:
    """Return ``value`` if it is a list of integers of at least 0, else None."""
    right = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    return value if right else None


def _damaged(path: Path, why: str) -> ConfigError:
    """Return the error for a damaged file."""
    return ConfigError(f"{path.name} is damaged or not a weight file: {why}", param="--model")


def bare_name(name: str) -> str:
    """Return the name of a tensor without the modules that training wraps around others."""
    return _WRAPPER.sub("", name)


def tensor_names(folder: Path) -> list[str] | None:
    """Return the tensor names of a safetensors checkpoint (see ``bare_name``); None without tensors or with
    unreadable files.

    Raise ConfigError only for a broken index file.
    """
    index = None if _left_over(folder) else read_json(folder, _INDEX)
    if index is not None and isinstance(index.get("weight_map"), dict):
        return [bare_name(name) for name in index["weight_map"]]
    try:
        names = [bare_name(name) for path in safetensors_files(folder) for name in read_header(path)]
    # ``check_weight_files`` reports the error.
    except ConfigError:
        return None
    return names or None


_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Type in a safetensors header -> name in torch."""


def saved_dtype(folder: Path) -> str | None:
    """Return the type of the first floating-point tensor that is no scale, as torch names types, or None."""
    for path in safetensors_files(folder):
        try:
            header = read_header(path)
        # ``check_weight_files`` reports the error.
        except ConfigError:
            return None
        for name, entry in header.items():
            if "scale" not in name and (kind := _FLOATS.get(str(entry.get("dtype")))):
                return kind
    return None
