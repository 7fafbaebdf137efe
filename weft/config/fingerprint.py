"""Fingerprints: short strings that are equal if caches can move between two groups.

A fingerprint covers the model spec, the weights, the types and the layout of cache entries. A fingerprint
does not cover the division over ranks: tensor parallel size, block size, slots and lengths may differ. A
tower fingerprint covers the vision tower alone, independent of the files that hold the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.config.cache_layout import pool_tensors
from weft.config.parts.first_fields import FIRST_FIELDS
from weft.config.resolved import EngineConfig
from weft.config.spec import CacheSpec, ModelSpec, VisionSpec
from weft.types import transfer

_PLANNED = {"DeltaSpec": frozenset({"matrices"})}
"""Fields of a spec that only the plan of memory reads. No content of a cache depends on these fields."""
_FORMER_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architecture -> family in an earlier release, where the family was no row."""
_SAMPLE = 64
"""Bytes per sample."""
_EACH = 3
"""Samples per tensor: at the beginning, in the middle and at the end."""
_OF_FILE = 1024
"""Samples of a file with unknown tensors."""
_HEADER = 100 << 20
"""Maximum size of a safetensors header in bytes."""


def fingerprint(config: EngineConfig) -> str:
    """Return 32 hex digits, equal for groups with caches of the same model. Read only samples of the weights.

    Raise ConfigError if the weights cannot be read.
    """
    facts = {
        "messages": transfer.VERSION,
        # The text caches do not depend on a loaded tower.
        "spec": spec_facts(msgspec.structs.replace(config.spec, vision=None)),
        "dtype": config.dtype,
        "quantization": config.model.quantization,
        "tensors": [_form(cache, config.dtype) for cache in config.spec.caches],
    }
    made = hashlib.blake2b(digest_size=16)
    made.update(json.dumps(facts, sort_keys=True, default=str).encode())
    made.update(_weights(config))
    return made.hexdigest()


def spec_facts(spec: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a spec that count in a fingerprint, as an earlier release returns the fields.

    A field of a later release counts only where the field differs from its default. So groups of two releases
    exchange caches of a model that needs no later field.
    """
    first = FIRST_FIELDS.get(type(spec).__name__, frozenset())
    made: dict[str, Any] = {}
    for field in msgspec.structs.fields(spec):
        if field.name in _PLANNED.get(type(spec).__name__, ()):
            continue
        value = getattr(spec, field.name)
        if field.name in first or field.required or value != field.default:
            made[field.name] = _facts(value)
    if isinstance(spec, ModelSpec):
        made["family"] = _FORMER_FAMILIES.get(spec.architecture, spec.family)
    return made


def _facts(value: Any) -> Any:
    """Return a value of a spec with ``spec_facts`` in place of structs."""
    if isinstance(value, msgspec.Struct):
        return spec_facts(value)
    if isinstance(value, tuple | list):
        return [_facts(each) for each in value]
    return msgspec.to_builtins(value)


def tower_fingerprint(config: EngineConfig) -> str:
    """Return 32 hex digits, equal for groups with the same tower; "" if the group moves no embeddings.

    Only the tower's tensors count, because checkpoints may hold other tensors or use other files. Raise
    ConfigError if the weights cannot be read.
    """
    vision, media = config.spec.vision, config.kv.media
    if vision is None or media is None or not (media.takes or config.transfer.role == "encode"):
        return ""
    facts = {"messages": transfer.VERSION, "vision": spec_facts(vision), "dtype": config.dtype}
    made = hashlib.blake2b(digest_size=16)
    made.update(json.dumps(facts, sort_keys=True, default=str).encode())
    named = config.model.load_format not in ("dummy", "pickle")
    made.update(_tower(config, vision) if named else _weights(config))
    return made.hexdigest()


def _tower(config: EngineConfig, vision: VisionSpec) -> bytes:
    """Return a digest over name, layout and samples of each tower tensor, in order of names.

    Raise ConfigError if a file cannot be read.
    """
    found: dict[str, bytes] = {}
    try:
        for file in _files(Path(config.model_path), pickles=False):
            found |= dict(_tensors_of(file, vision.published))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the vision tower's weights can't be read ({type(error).__name__}): download the model again",
            param="--model",
        ) from error
    made = hashlib.blake2b(digest_size=16)
    for name in sorted(found):
        made.update(found[name])
    return made.digest()


def _tensors_of(file: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, digest) for each tensor of a safetensors file with a name prefix in ``prefixes``.

    Yield nothing for an impossible header length. Raise OSError, and ValueError or KeyError for a damaged
    header.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(os.fstat(descriptor).st_size, _HEADER):
            # A damaged header: the loader reports the error later.
            return
        for name, fact in json.loads(os.pread(descriptor, length, 8)).items():
            if not name.startswith(prefixes):
                continue
            begin, end = (8 + length + int(at) for at in fact["data_offsets"])
            made = hashlib.blake2b(f"{name} {fact['dtype']} {fact['shape']}".encode(), digest_size=16)
            for piece in _spread(descriptor, begin, end, _EACH):
                made.update(piece)
            yield name, made.digest()
    finally:
        os.close(descriptor)


def _form(cache: CacheSpec, dtype: str) -> list[object]:
    """Return name, dims and type of the tensors of a KV cache group, without layer and block dims."""
    tensors = pool_tensors(cache, 64 * cache.ratio, 0, dtype)
    return [(tensor.name, tensor.dims[2:], tensor.dtype) for tensor in tensors]


def _weights(config: EngineConfig) -> bytes:
    """Return a digest of the weights: the seed for random weights, else headers and samples of all files.

    Raise ConfigError if a file cannot be read.
    """
    if config.model.load_format == "dummy":
        return f"dummy {config.model.seed or 0}".encode()
    # Headers hold names, places and types of all tensors. Samples tell versions of equal shape apart.
    made = hashlib.blake2b(digest_size=16)
    try:
        if config.model.load_format == "partial":
            made.update(f"partial {config.model.seed or 0}".encode())
        for file in _files(Path(config.model_path), config.model.load_format == "pickle"):
            made.update(f"{file.name} {file.stat().st_size}\n".encode())
            for piece in _samples(file):
                made.update(piece)
    except OSError as error:
        raise ConfigError(f"the weights can't be read ({error.strerror})", param="--model") from error
    return made.digest()


def _files(folder: Path, pickles: bool) -> list[Path]:
    """Return the weight files of ``folder``, sorted by name."""
    patterns = ("*.bin", "*.pt", "*.pth") if pickles else ("*.safetensors",)
    return sorted((file for pattern in patterns for file in folder.glob(pattern)), key=lambda file: file.name)


def _samples(file: Path) -> Iterator[bytes]:
    """Yield the header and samples of each tensor of a weight file."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if file.suffix != ".safetensors":
            yield from _spread(descriptor, 0, size, _OF_FILE)
            return
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(size, _HEADER):
            yield from _spread(descriptor, 0, size, _OF_FILE)  # damaged: the loader reports it later
            return
        header = os.pread(descriptor, length, 8)
        yield header
        for begin, end in _tensors(header):
            yield from _spread(descriptor, 8 + length + begin, 8 + length + end, _EACH)
    finally:
        os.close(descriptor)


def _tensors(header: bytes) -> Iterable[tuple[int, int]]:
    """Return [begin, end) of each tensor, counted from the end of the header; [] for a damaged header."""
    try:
        facts = json.loads(header)
        found = [tuple(fact["data_offsets"]) for name, fact in facts.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return sorted((int(begin), int(end)) for begin, end in found)


def _spread(descriptor: int, begin: int, end: int, count: int) -> Iterator[bytes]:
    """Yield ``count`` samples from [begin, end) at even distances, with the first and the last bytes."""
    last = max(end - _SAMPLE, begin)
    for number in range(count):
        at = begin + (last - begin) * number // max(count - 1, 1)
        yield os.pread(descriptor, min(_SAMPLE, end - at), at)
        if last == begin:
            return
